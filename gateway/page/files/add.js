// Adds a model: one that is on this machine, or a repository of the hub, which is downloaded.

import { get, post, why } from "./api.js";
import { count, keep, make, size, write } from "./view.js";

const MOST_SHOWN = 50;

/** What a model needs at least, as a multiple of its weights. */
const BESIDE_WEIGHTS = 1.1;

/** What a short text may be: OWNER/NAME, an address, or a short name. */
const NAMED = /^(https?:\/\/)?[\w.:-]+(\/[\w.@-]+)*\/?$/;

export class Add {
  constructor() {
    this.begin = make("button", { type: "submit" }, "Try a small model");
    this.intro = make("div", { id: "empty" }, make("h3", {}, "No model yet"),
      make("p", {}, "Add one from this machine or from Hugging Face below. Or try SmolLM2: it has 135 million"
        + " parameters, is a download of 260 MiB, and runs on any machine."),
      make("p", {}, this.begin));
    this.intro.hidden = true;
    this.begin.addEventListener("click", () => this.add({ model: this.example }, this.example));
    this.text = make("input", { id: "wanted", type: "search", autocomplete: "off", spellcheck: "false",
      maxlength: "512", placeholder: "name, OWNER/NAME, or address" });
    this.list = make("ul", { id: "found", class: "requests", role: "list", "aria-label": "Models to add" });
    this.note = make("p", { class: "quiet" });
    this.answer = make("p", { id: "add-answer", role: "status" });
    this.ask = make("button", { type: "submit" }, "Search Hugging Face");
    const form = make("form", { role: "search" }, make("p", { class: "row" },
      make("label", { for: "wanted" }, "Models on this machine and on Hugging Face"), this.text, this.ask));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.search();
    });
    this.text.addEventListener("input", () => {
      this.hub = null;
      this.draw();
    });
    this.panel = make("details", { id: "add" }, make("summary", {}, "Add a model"), form, this.list, this.note);
    this.panel.addEventListener("toggle", () => {
      if (this.panel.open) this.look();
    });
    this.element = make("div", {}, this.intro, this.panel, this.answer);
    this.found = [];
    this.hub = null; // what the hub has found for the text in the box
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
    this.served = new Set(status.models.map(({ repo }) => repo));
    this.budget = status.memory.budget_bytes;
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

  /** Has the hub searched for what is in the box. */
  async search() {
    const words = this.text.value.trim();
    if (!words || this.ask.ariaBusy) return;
    this.ask.ariaBusy = "true";
    write(this.note, "Searching Hugging Face…");
    let trouble = "";
    try {
      const { models } = await get("/page/search", { words });
      if (words === this.text.value.trim()) this.hub = models;
    } catch (error) {
      trouble = `Hugging Face cannot be searched: ${why(error)}.`;
    }
    this.ask.ariaBusy = null;
    this.draw();
    if (trouble) write(this.note, trouble);
  }

  draw() {
    const text = this.text.value.trim();
    const words = text.toLowerCase().split(/\s+/);
    const fits = ({ title, origin }) => words.every((word) => `${title} ${origin}`.toLowerCase().includes(word));
    const fitting = this.found.filter(fits);
    const isHere = new Set([...this.served, ...this.found.map(({ title }) => title)]);
    const items = fitting.slice(0, MOST_SHOWN).map((one) => ({ ...one, body: { found: one.key } }));
    const onHub = (this.hub ?? []).filter(({ repo }) => !isHere.has(repo));
    items.push(...onHub.map((one) => ({ ...one, key: `hub ${one.repo}`, title: one.repo, body: { model: one.repo } })));
    const isThere = items.some(({ title }) => title.toLowerCase() === text.toLowerCase());
    if (NAMED.test(text) && !isThere && !this.hub) {
      const title = text;
      items.unshift({ key: `get ${text}`, title, origin: "if Hugging Face has a model with this name", body: { model: text } });
    }
    keep(this.list, items, ({ key }) => key, (one) => this.line(one), () => {});
    const left = fitting.length - MOST_SHOWN;
    if (this.hub) write(this.note, onHub.length ? "" : `Hugging Face has no other model for MLX called ${text}. Try fewer words.`);
    else if (left > 0) write(this.note, `${left} more: type a part of the name.`);
    else if (text) write(this.note, fitting.length ? "" : "No other model on this machine has this in its name.");
    else write(this.note, this.found.length
      ? `${count(this.found.length, "model")} on this machine can be added.`
      : "There is no other model on this machine. Search Hugging Face, for example for qwen3 4bit.");
  }

  line(one) {
    const parts = [];
    if (one.size_bytes) parts.push(size(one.size_bytes));
    if (one.size_bytes * BESIDE_WEIGHTS > this.budget) parts.push("too large for this machine");
    if (one.quantization) parts.push(one.quantization);
    if (one.licence) parts.push(`licence: ${one.licence}`);
    if (one.downloads) parts.push(`${one.downloads.toLocaleString("en")} downloads last month`);
    if (one.is_gated) parts.push("accept its terms on Hugging Face first");
    if (one.origin) parts.push(one.origin);
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
      const where = path ? "" : " mlxsup has no configuration file, so it forgets the model when it stops.";
      write(this.answer, added.length ? `Added ${model}. Its card above shows the progress.${where}`
        : `${model} was there already. It is loading.`);
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
