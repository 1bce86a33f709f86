// Vercel's SDK with a compatible provider; node gets the gateway's URL.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const url = process.argv[2];
const prompt = "[[say it works]]";
const model = createOpenAICompatible({ name: "mlxsup", baseURL: `${url}/v1` }).chatModel("m");

const whole = await generateText({ model, prompt });
assert.equal(whole.text, "it works");
assert.equal(whole.finishReason, "stop");

let streamed = "";
for await (const piece of streamText({ model, prompt }).textStream) streamed += piece;
assert.equal(streamed, "it works");

const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const weather = tool({
  description: "The weather of a city.",
  inputSchema: jsonSchema(city),
  execute: async (given) => `[[say it works in ${given.city}]]`,
});
const call = '{"name": "weather", "arguments": {"city": "Rome"}}';
const turn = await generateText({
  model,
  prompt: `[[say <tool_call>${call}</tool_call>]]`,
  tools: { weather },
  stopWhen: stepCountIs(3),
});
assert.equal(turn.text, "it works in Rome");
console.log("it works");
