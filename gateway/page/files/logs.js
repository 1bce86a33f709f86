// The logs of the daemon, of the gateway and of each model: followed, filtered, and kept short.

import { get, getFile, why } from "./api.js";
import { keep, make, write } from "./view.js";

const MOST_LINES = 2000;
const OWN = { mlxsup: "Daemon", "mlxsup-gateway": "HTTP gateway" };

/** Lines shown for each choice; a line without a level has that of the line before it. */
const LEVELS = { all: "Everything", info: "Info and above", warning: "Warnings and errors", error: "Errors" };
const RANKS = { DEBUG: 0, INFO: 1, WARNING: 2, ERROR: 3, CRITICAL: 3 };
const LEAST = { all: -1, info: 1, warning: 2, error: 3 };

const LEVEL = /^(?:\S+Z|[\d-]+ [\d:,]+) (DEBUG|INFO|WARNING|ERROR|CRITICAL) |"level": ?"(debug|info|warning|error)"/;
const PROCESS = /^--- generation (\d+) pid (\d+) (\S+)$/;

/** The rank of a line by its level; null if it has none. */
export function rankOf(line) {
  const [, text, json] = LEVEL.exec(line) ?? [];
  return RANKS[(text ?? json)?.toUpperCase()] ?? null;
}

export class Logs {
  constructor(section) {
    this.section = section;
    this.name = make("select", { id: "log-name", "aria-label": "Log" });
    this.level = make("select", { id: "log-level", "aria-label": "Lines to show" },
      ...Object.entries(LEVELS).map(([value, word]) => make("option", { value }, word)));
    this.text = make("input", { id: "log-text", type: "search", autocomplete: "off", spellcheck: "false",
      placeholder: "only lines with this text", "aria-label": "Only lines with this text" });
    this.follow = make("input", { id: "log-follow", type: "checkbox", checked: "" });
    this.download = make("button", { type: "button" }, "Download");
    this.note = make("p", { id: "log-note", class: "quiet", role: "status" });
    this.lines = make("div", { id: "log", class: "log", tabindex: "0", role: "region", "aria-label": "Lines" });
    this.content = make("div", {}, make("p", { class: "row" }, this.name, this.level, this.text,
      make("label", { class: "row" }, this.follow, "Follow"), this.download), this.lines, this.note);
    section.append(this.content);
    this.wanted = "";
    this.reading = null;
    this.isReading = false;
    this.name.addEventListener("change", () => this.choose(this.name.value));
    this.level.addEventListener("change", () => this.filter());
    this.text.addEventListener("input", () => this.filter());
    this.follow.addEventListener("change", () => this.scroll());
    this.download.addEventListener("click", () => this.save());
    this.choose("mlxsup");
  }

  /** Shows the log that the address names: `#logs/NAME`. */
  open(rest) {
    let name = "";
    try {
      name = decodeURIComponent(rest);
    } catch {
      // It was typed by hand, and names no log.
    }
    if (name && name !== this.wanted) this.choose(name);
    this.read();
  }

  show({ status, missing }) {
    if (missing) return;
    const names = [...Object.keys(OWN), ...status.models.map(({ name }) => name)];
    keep(this.name, names, (name) => name, (value) => make("option", { value }), (option, name) => {
      write(option, OWN[name] ?? name);
    });
    this.name.value = names.includes(this.wanted) ? this.wanted : names[0];
    if (this.name.value !== this.reading.name) this.choose(this.name.value);
    if (!this.section.hidden) this.read();
  }

  choose(name) {
    this.wanted = name;
    this.reading = { name, cursor: "", rank: null };
    this.lines.replaceChildren();
    write(this.note, "");
    if (!this.section.hidden) this.read();
  }

  /** Reads what is new, one part at a time. */
  async read() {
    if (this.isReading) return;
    this.isReading = true;
    const reading = this.reading;
    try {
      const { lines, cursor, has_gap: hasGap, path } = await get("/page/log",
        { name: reading.name, cursor: reading.cursor });
      if (reading !== this.reading) return;
      reading.cursor = cursor;
      if (hasGap) this.add("--- some lines are missing here: they came too fast to be shown");
      lines.forEach((line) => this.add(line));
      while (this.lines.childElementCount > MOST_LINES) this.lines.firstElementChild.remove();
      if (lines.length) this.scroll();
      this.count(path);
    } catch (error) {
      if (reading === this.reading) write(this.note, `The log cannot be read: ${why(error)}.`);
    } finally {
      this.isReading = false;
    }
  }

  add(line) {
    const [, generation, pid, started] = PROCESS.exec(line) ?? [];
    const isRule = Boolean(generation) || line.startsWith("--- ");
    const rank = rankOf(line);
    if (rank !== null || isRule) this.reading.rank = rank;
    const shown = generation ? `process ${generation} (pid ${pid}), started at ${started}` : line;
    const element = make("div", isRule ? { class: "rule" } : {}, shown);
    element.rank = isRule ? null : this.reading.rank;
    element.hidden = !this.fits(element);
    if (element.rank >= 2) element.dataset.level = element.rank === 2 ? "warning" : "error";
    this.lines.append(element);
  }

  fits(element) {
    const text = this.text.value.trim().toLowerCase();
    const least = LEAST[this.level.value];
    const isHigh = least < 0 || (element.rank ?? 0) >= least;
    return isHigh && (!text || element.textContent.toLowerCase().includes(text));
  }

  filter() {
    for (const element of this.lines.children) element.hidden = !this.fits(element);
    this.scroll();
    this.count(this.path);
  }

  count(path) {
    this.path = path;
    const all = this.lines.childElementCount;
    const shown = [...this.lines.children].filter((one) => !one.hidden).length;
    const lines = all === shown ? `${all} lines` : `${shown} of ${all} lines`;
    write(this.note, all ? `The last ${lines} of ${path}` : `Nothing has been written to ${path} yet.`);
  }

  scroll() {
    if (this.follow.checked) this.lines.scrollTop = this.lines.scrollHeight;
  }

  /** Saves the end of the log as a file. */
  async save() {
    const { name } = this.reading;
    try {
      const address = URL.createObjectURL(await getFile("/page/log/file", { name }));
      make("a", { href: address, download: `${name}.log` }).click();
      setTimeout(() => URL.revokeObjectURL(address), 60000);
    } catch (error) {
      write(this.note, `The log cannot be saved: ${why(error)}.`);
    }
  }
}
