// The panel with the instructions for the model and the sampling; what is left empty is up to the model.

import { make } from "./view.js";

const HINT = "Empty: the model's own value.";

const MAIN = [
  { name: "temperature", label: "Creativity (temperature)", max: "2", step: "0.1",
    hint: `0 always takes the likeliest word, 1 is livelier. ${HINT}` },
  { name: "max_tokens", label: "Longest answer, in tokens", min: "1", step: "1",
    hint: "Four tokens are about three words. Empty: no limit." },
];
const MORE = [
  { name: "top_p", label: "Share of likely words (top-p)", max: "1", step: "0.05", hint: "1 takes all words." },
  { name: "top_k", label: "Number of likely words (top-k)", step: "1", hint: "0 takes all words." },
  { name: "min_p", label: "Least likelihood (min-p)", max: "1", step: "0.01", hint: "Compared with the likeliest word." },
  { name: "repetition_penalty", label: "Repetition penalty", max: "2", step: "0.05", hint: "1 is off, 1.1 is mild." },
  { name: "seed", label: "Seed", step: "1", hint: "The same number gives the same answer." },
];

export class Settings {
  /** @param onChange gets the settings whenever one has changed. */
  constructor(onChange) {
    this.system = make("textarea", { id: "system", rows: "3",
      placeholder: "For example: Answer briefly, and in German." });
    this.thinking = make("select", { id: "thinking" }, make("option", { value: "" }, "Up to the model"),
      make("option", { value: "none" }, "Off"));
    this.numbers = new Map();
    const reset = make("button", { type: "button" }, "Reset");
    reset.addEventListener("click", () => {
      this.show({});
      onChange(this.read());
    });
    const more = make("details", {}, make("summary", {}, "More"),
      make("div", { class: "fields" }, ...MORE.map((one) => this.number(one))));
    this.element = make("div", { id: "settings", class: "settings", role: "region", "aria-label": "Chat settings" },
      field("Instructions for the model", this.system, "Sent before your messages."),
      make("div", { class: "fields" }, ...MAIN.map((one) => this.number(one)),
        field("Thinking before the answer", this.thinking, "Not every model thinks first.")),
      more, make("p", {}, reset));
    this.element.addEventListener("input", () => onChange(this.read()));
  }

  number({ name, label, hint, ...limits }) {
    const input = make("input", { id: name, type: "number", min: "0", inputmode: "decimal", ...limits });
    this.numbers.set(name, input);
    return field(label, input, hint);
  }

  /** The settings; a number that is out of its limits is left out. */
  read() {
    const given = { system: this.system.value, thinking: this.thinking.value };
    for (const [name, input] of this.numbers) {
      if (input.value && input.validity.valid) given[name] = input.valueAsNumber;
    }
    return given;
  }

  show(settings) {
    this.system.value = settings.system ?? "";
    this.thinking.value = settings.thinking ?? "";
    for (const [name, input] of this.numbers) input.value = settings[name] ?? "";
  }
}

function field(label, input, hint) {
  const hintId = `${input.id}-hint`;
  input.setAttribute("aria-describedby", hintId);
  return make("p", { class: "field" }, make("label", { for: input.id }, label), input,
    make("span", { id: hintId, class: "quiet hint" }, hint));
}
