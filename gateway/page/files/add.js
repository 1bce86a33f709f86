// Adds a model: one that is on this machine, or a repository of the hub, which is downloaded.

import { get, post, why } from "./api.js";
import { count, keep, make, size, write } from "./view.js";

const MOST_SHOWN = 50;

/** What a short text may be: OWNER/NAME, an address, or a short name. */
const NAMED = /^(https?:\/\/)?[\w.:-]+(\/[\w.@-]+)*\/?$/;

export class Add {
  constructor() {
    this.begin = make("button", { type: "submit" }, "Begin with a small model");
    this.intro = make("div", { id: "empty" }, make("h3", {}, "No model yet"),
      make("p", {}, "Add one that is on this machine or on Hugging Face, below. Or begin with SmolLM2: it has"
        + " 135 million parameters, is a download of 260 MiB, and runs on any machine."),
      make("p", {}, this.begin));
    this.intro.hidden = true;
    this.begin.addEventListener("click", () => this.add({ model: this.example }, this.example));
    this.text = make("input", { id: "wanted", type: "search", autocomplete: "off", spellcheck: "false",
      maxlength: "512", placeholder: "name, OWNER/NAME, or address" });
    this.list = make("ul", { id: "found", class: "requests", role: "list", "aria-label": "Models to add" });
    this.note = make("p", { class: "quiet" });
    this.answer = make("p", { id: "add-answer", role: "status" });
    const form = make("form", { role: "search" }, make("p", { class: "row" },
      make("label", { for: "wanted" }, "Search this machine, or name a repository of Hugging Face"), this.text));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.list.querySelector("button")?.focus();
    });
    this.text.addEventListener("input", () => this.draw());
    this.panel = make("details", { id: "add" }, make("summary", {}, "Add a model"), form, this.list, this.note);
    this.panel.addEventListener("toggle", () => {
      if (this.panel.open) this.look();
    });
    this.element = make("div", {}, this.intro, this.panel, this.answer);
    this.found = [];
    this.example = "";
    this.isBusy = false;
  }

  /** Takes a status: an empty daemon is told how to begin. */
  show(status) {
    const isEmpty = status.models.length === 0;
    if (this.intro.hidden === isEmpty) {
      this.intro.hidden = !isEmpty;
      if (isEmpty) this.panel.open = true;
    }
    const names = status.models.map(({ name }) => name).join("\n");
    if (names !== this.names && (this.panel.open || isEmpty)) this.look();
    this.names = names;
  }

  /** Looks which models are on this machine. */
  async look() {
    try {
      const { models, example } = await get("/page/found");
      this.found = models;
      this.example = example;
      this.draw();
    } catch (error) {
      write(this.note, `This machine cannot be searched: ${why(error)}.`);
    }
  }

  draw() {
    const text = this.text.value.trim();
    const words = text.toLowerCase().split(/\s+/);
    const fits = ({ title, origin }) => words.every((word) => `${title} ${origin}`.toLowerCase().includes(word));
    const fitting = this.found.filter(fits);
    const items = fitting.slice(0, MOST_SHOWN).map((one) => ({ ...one, body: { found: one.key } }));
    const isThere = fitting.some(({ title }) => title.toLowerCase() === text.toLowerCase());
    if (NAMED.test(text) && !isThere) {
      const title = text;
      items.unshift({ key: `get ${text}`, title, origin: "Hugging Face, if it has that", body: { model: text } });
    }
    keep(this.list, items, ({ key }) => key, (one) => this.line(one), () => {});
    const left = fitting.length - MOST_SHOWN;
    if (left > 0) write(this.note, `and ${left} more: type a part of the name`);
    else if (text) write(this.note, fitting.length ? "" : "No other model on this machine has that in its name.");
    else write(this.note, this.found.length
      ? `${count(this.found.length, "model")} on this machine ${this.found.length === 1 ? "is" : "are"} not served yet.`
      : "There is no other model on this machine. Name one of Hugging Face, such as " + this.example + ".");
  }

  line(one) {
    const parts = [];
    if (one.size_bytes) parts.push(size(one.size_bytes));
    if (one.quantization) parts.push(one.quantization);
    parts.push(one.origin);
    const line = make("li", {}, make("div", {}, make("strong", {}, one.title),
      make("div", { class: "quiet" }, parts.join(" · "))));
    if (one.problem) line.firstChild.append(make("div", {}, `It cannot be served: ${one.problem}.`));
    else {
      const button = make("button", { type: "button", "aria-label": `Add ${one.title}` }, "Add");
      button.addEventListener("click", () => this.add(one.body, one.title));
      line.append(button);
    }
    return line;
  }

  /** Adds a model, and loads it. */
  async add(body, title) {
    if (this.isBusy) return;
    this.isBusy = true;
    write(this.answer, `Adding ${title}…`);
    try {
      const { model, added, config_path: path } = await post("/page/models/add", body);
      const where = path ? `It is in ${path} now.` : "The daemon has no file, and forgets it at its end.";
      write(this.answer, added.length ? `${model} was added. It is loading. ${where}` : `${model} was there already. It loads.`);
      this.text.value = "";
      this.look();
      await post("/models/load", { model });
    } catch (error) {
      write(this.answer, `${title} was not added: ${why(error)}`);
    } finally {
      this.isBusy = false;
    }
  }
}
