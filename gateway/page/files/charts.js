// Two charts of the last five minutes: tokens per second, and memory, of each model.

import { make, mark, size, write } from "./view.js";

const SPAN_S = 300;
const GAP_S = 5;
const WIDTH = 600;
const HEIGHT = 200;
const LEFT = 8;
const TOP = 28;
const BOTTOM = 28;
const COLOURS = 8;
const FAR = 5;
const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes = {}, text = "") {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

/** The smallest of 1, 2, 5, 10, 20, … that is not below. */
export function nice(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((digit) => digit * power).find((top) => top >= value * (1 - 1e-9));
}

/** The path of one model's line, broken where nothing is known. */
export function path(samples, now, top) {
  let text = "";
  let before = -Infinity;
  for (const { at, value } of samples) {
    const x = LEFT + (1 - (now - at) / SPAN_S) * (WIDTH - LEFT);
    const y = TOP + (1 - Math.min(value / top, 1)) * (HEIGHT - TOP - BOTTOM);
    text += `${at - before > GAP_S ? "M" : "L"}${x.toFixed(1)} ${y.toFixed(1)}`;
    before = at;
  }
  return text;
}

/** One chart. */
export class Chart {
  /**
   * @param figure its place.
   * @param title what it shows.
   * @param format writes a value.
   * @param tops the top of the scale from the largest value.
   */
  constructor(figure, title, format, tops) {
    this.format = format;
    this.tops = tops;
    this.samples = new Map();
    this.caption = make("figcaption", {}, title);
    this.title = title;
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", class: "chart" });
    this.top = svg("text", { x: LEFT, y: TOP - 6, class: "axis" });
    this.limit = svg("path", { class: "limit" });
    this.lines = svg("g");
    const floor = HEIGHT - BOTTOM;
    this.picture.append(
      svg("path", { class: "grid", d: `M${LEFT} ${TOP}H${WIDTH}M${LEFT} ${floor}H${WIDTH}` }),
      this.top, this.limit, this.lines,
      svg("text", { x: LEFT, y: HEIGHT - 6, class: "axis" }, "5 minutes ago"),
      svg("text", { x: WIDTH, y: HEIGHT - 6, class: "axis", "text-anchor": "end" }, "now"),
    );
    this.legend = make("ul", { class: "legend", role: "list" });
    figure.append(this.caption, this.picture, this.legend);
  }

  /**
   * Takes one sample of each model, and draws.
   *
   * @param now seconds.
   * @param values by model.
   * @param limit a line across; null for none.
   */
  add(now, values, limit = null) {
    for (const [name, value] of values) {
      if (!this.samples.has(name)) this.samples.set(name, []);
      this.samples.get(name).push({ at: now, value });
    }
    for (const [name, samples] of this.samples) {
      while (samples.length && now - samples[0].at > SPAN_S) samples.shift();
      if (!samples.length) this.samples.delete(name);
    }
    this.draw(now, values, limit);
  }

  draw(now, values, limit) {
    const all = [...this.samples.values()].flat().map(({ value }) => value);
    const most = Math.max(0, ...all);
    // A limit far above everything would press the lines to the floor.
    const isNear = limit !== null && limit <= FAR * most;
    const top = this.tops(isNear ? Math.max(most, limit) : most);
    write(this.top, this.format(top));
    const height = TOP + (1 - limit / top) * (HEIGHT - TOP - BOTTOM);
    mark(this.limit, "d", isNear ? `M${LEFT} ${height.toFixed(1)}H${WIDTH}` : "");
    const dashed = isNear ? ", the dashed line" : "";
    write(this.caption, this.title + (limit === null ? "" : `; budget ${this.format(limit)}${dashed}`));
    const names = [...this.samples.keys()];
    while (this.lines.childElementCount > names.length) this.lines.lastElementChild.remove();
    while (this.legend.childElementCount > names.length) this.legend.lastElementChild.remove();
    names.forEach((name, place) => {
      const line = this.lines.children[place] ?? this.lines.appendChild(svg("path"));
      mark(line, "class", `line colour${place % COLOURS}`);
      mark(line, "d", path(this.samples.get(name), now, top));
      const item = this.legend.children[place] ?? this.legend.appendChild(legendItem());
      mark(item.querySelector("path"), "class", `line colour${place % COLOURS}`);
      const value = values.has(name) ? this.format(values.get(name)) : "removed";
      write(item.querySelector("span"), `${name}: ${value}`);
    });
    const texts = [...this.legend.children].map((item) => item.textContent);
    mark(this.picture, "aria-label", `${this.title}, now ${texts.join(", ") || "no model"}`);
  }
}

function legendItem() {
  const key = svg("svg", { viewBox: "0 0 24 8", class: "key", "aria-hidden": "true" });
  key.append(svg("path", { d: "M0 4H24" }));
  return make("li", {}, key, make("span"));
}

/** The two charts of the page. */
export class Charts {
  constructor(speed, memory) {
    this.speed = new Chart(speed, "Tokens per second", (value) => String(+value.toFixed(1)), nice);
    const tops = (bytes) => nice(bytes / 2 ** 20) * 2 ** 20;
    this.memory = new Chart(memory, "Memory of each worker", size, tops);
  }

  /** Takes a status. */
  add(now, status) {
    const each = (read) => new Map(status.models.map((row) => [row.name, read(row)]));
    this.speed.add(now, each((row) => row.tokens_per_s ?? 0));
    const budget = status.memory.effective_budget_bytes ?? status.memory.budget_bytes;
    this.memory.add(now, each((row) => row.footprint_bytes ?? 0), budget);
  }
}
