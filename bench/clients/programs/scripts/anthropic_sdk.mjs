// Anthropic's SDK; node gets the gateway's URL.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none" });
const messages = [{ role: "user", content: "[[say it works]]" }];
const asked = { model: "m", max_tokens: 200, messages };

const whole = await client.messages.create(asked);
assert.equal(whole.content[0].text, "it works");
assert.equal(whole.stop_reason, "end_turn");

const streamed = await client.messages.stream(asked).finalMessage();
assert.equal(streamed.content[0].text, "it works");

const call = '{"name": "weather", "arguments": {"city": "Rome"}}';
const tools = [{ name: "weather", input_schema: { type: "object" } }];
const content = `[[say <tool_call>${call}</tool_call>]]`;
const called = await client.messages.create({
  ...asked,
  tools,
  messages: [{ role: "user", content }],
});
assert.equal(called.stop_reason, "tool_use");
assert.deepEqual(called.content.at(-1).input, { city: "Rome" });

const counted = await client.messages.countTokens({ model: "m", messages });
assert.ok(counted.input_tokens > 0);
await assert.rejects(client.messages.create({ ...asked, model: "n" }), Anthropic.NotFoundError);
console.log("it works");
