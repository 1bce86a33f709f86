// The last crashes: when, why, what helps, and what the process had printed.

import { get, why } from "./api.js";
import { count, duration, keep, make, write } from "./view.js";

export class Crashes {
  constructor() {
    this.none = make("p", { id: "no-crashes", class: "quiet" }, "No model has crashed.");
    this.list = make("ul", { id: "crashes", class: "crashes", role: "list" });
    this.element = make("div", {}, make("h3", {}, "Last crashes"), this.none, this.list);
    this.crashes = [];
    this.seen = "";
  }

  /** Asks for them again if a model has changed since. */
  async show(status) {
    const now = JSON.stringify(status.models.map((row) => [row.name, row.state, row.generation]));
    if (now !== this.seen) {
      const before = this.seen;
      this.seen = now;
      try {
        this.crashes = (await get("/page/crashes")).crashes;
      } catch (error) {
        this.seen = before;
        write(this.none, `The last crashes cannot be shown: ${why(error)}.`);
        this.none.hidden = false;
        return;
      }
      this.none.hidden = this.crashes.length > 0;
    }
    keep(this.list, this.crashes, (one) => `${one.model} ${one.generation} ${one.at}`, create, (line, one) => {
      write(line.querySelector("time"), ago(one.at));
    });
  }

  /** The last crash of a model: `what` in a sentence, and how long `ago_s`; null for none. */
  of(model) {
    const last = this.crashes.find((one) => one.model === model);
    return last ? { what: last.what, ago_s: Date.now() / 1000 - last.at } : null;
  }
}

function ago(at) {
  return `${duration(Date.now() / 1000 - at)} ago`;
}

/** A sentence with its commands, which stand between backticks, as code. */
function sentence(text) {
  return text.split("`").map((part, place) => (place % 2 ? make("code", {}, part) : part));
}

function create(one) {
  const time = make("time", { datetime: new Date(one.at * 1000).toISOString() });
  const parts = [];
  if (one.continue) parts.push(`${count(one.continue, "answer")} continued in the next process.`);
  if (one.lost) parts.push(`${count(one.lost, "answer")} did not.`);
  const lines = make("pre", { tabindex: "0", role: "region", "aria-label": `Last lines of ${one.model}` });
  const details = make("details", {}, make("summary", {}, "What helps, and the last log lines"),
    make("ul", {}, ...one.advice.map((text) => make("li", {}, ...sentence(text)))), lines);
  details.addEventListener("toggle", () => {
    if (details.open) read(one, lines);
  });
  return make("li", {}, make("p", {}, make("strong", {}, one.model), ": ", ...sentence(one.what), ". ",
    parts.join(" "), " ", time), details);
}

async function read(one, lines) {
  write(lines, "…");
  try {
    const found = await get("/page/log/process", { name: one.model, generation: one.generation });
    write(lines, found.lines.join("\n") || "It printed nothing, or the log no longer has it.");
  } catch (error) {
    write(lines, `The log cannot be read: ${why(error)}.`);
  }
}
