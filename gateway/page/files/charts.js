// Charts of the last hour, whose samples come from the gateway: speed, memory and requests.

import { get } from "./api.js";
import { make, mark, size, write } from "./view.js";

const SPANS_S = [300, 900, 1800, 3600];
const INTERVAL_MS = 5000;
const WIDTH = 600;
const HEIGHT = 100;
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

/** A round number of bytes that is not below: 1, 2, 5, … in the unit that suits it. */
export function niceSize(bytes) {
  const unit = bytes > 2 ** 30 ? 2 ** 30 : 2 ** 20;
  return nice(bytes / unit) * unit;
}

/** The place of a value from above; the largest and the smallest lie within the frame. */
function heightOf(value, top) {
  return 1 + (1 - Math.min(value / top, 1)) * (HEIGHT - 2);
}

/** The path of one line, broken where nothing is known for longer than two samples. */
export function path(samples, { now, span, gap }, top) {
  let text = "";
  let before = -Infinity;
  for (const { at, value } of samples) {
    const x = Math.max(0, (1 - (now - at) / span) * WIDTH);
    text += `${at - before > gap ? "M" : "L"}${x.toFixed(1)} ${heightOf(value, top).toFixed(1)}`;
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
    this.title = title;
    this.caption = make("figcaption", {}, title);
    this.top = make("div", { class: "axis" });
    this.start = make("span");
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img",
      class: "chart" });
    this.limit = svg("path", { class: "limit" });
    this.lines = svg("g");
    this.picture.append(svg("path", { class: "grid", d: `M0 0H${WIDTH}M0 ${HEIGHT}H${WIDTH}` }), this.limit,
      this.lines);
    const times = make("div", { class: "axis" }, this.start, make("span", {}, "now"));
    this.legend = make("ul", { class: "legend", role: "list" });
    figure.append(this.caption, this.top, this.picture, times, this.legend);
  }

  /**
   * Draws.
   *
   * @param time `now`, `span` and `gap` in seconds.
   * @param series samples by name, each oldest first.
   * @param limit a line across; null for none.
   */
  draw(time, series, limit = null) {
    const most = Math.max(0, ...[...series.values()].flat().map(({ value }) => value));
    // A limit far above everything would press the lines to the floor.
    const isNear = limit !== null && limit <= FAR * most;
    const top = this.tops(isNear ? Math.max(most, limit) : most);
    write(this.top, this.format(top));
    write(this.start, `${time.span / 60} minutes ago`);
    mark(this.limit, "d", isNear ? `M0 ${heightOf(limit, top).toFixed(1)}H${WIDTH}` : "");
    const dashed = isNear ? ", the dashed line" : "";
    write(this.caption, this.title + (limit === null ? "" : ` of ${this.format(limit)} for models${dashed}`));
    const names = [...series.keys()];
    while (this.lines.childElementCount > names.length) this.lines.lastElementChild.remove();
    while (this.legend.childElementCount > names.length) this.legend.lastElementChild.remove();
    names.forEach((name, place) => {
      const line = this.lines.children[place] ?? this.lines.appendChild(svg("path"));
      const samples = series.get(name);
      mark(line, "class", `line colour${place % COLOURS}`);
      mark(line, "d", path(samples, time, top));
      const item = this.legend.children[place] ?? this.legend.appendChild(legendItem());
      mark(item.querySelector("path"), "class", `line colour${place % COLOURS}`);
      const last = samples.at(-1);
      const isNow = last && time.now - last.at <= time.gap;
      write(item.querySelector("span"), `${name}: ${isNow ? this.format(last.value) : "not loaded"}`);
    });
    const texts = [...this.legend.children].map((item) => item.textContent);
    mark(this.picture, "aria-label", `${this.title}, now ${texts.join(", ") || "no model loaded"}`);
  }
}

function legendItem() {
  const key = svg("svg", { viewBox: "0 0 24 8", class: "key", "aria-hidden": "true" });
  key.append(svg("path", { d: "M0 4H24" }));
  return make("li", {}, key, make("span"));
}

/** The charts of the page. */
export class Charts {
  constructor() {
    const figures = ["speed", "memory", "load"].map((id) => make("figure", { id }));
    this.element = make("div", { class: "charts" }, ...figures);
    const [speed, memory, load] = figures;
    this.speed = new Chart(speed, "Speed, in tokens per second", (value) => String(+value.toFixed(1)), nice);
    this.memory = new Chart(memory, "Memory used", size, niceSize);
    this.load = new Chart(load, "Requests", (value) => String(value), (most) => Math.max(2, nice(most)));
    this.samples = [];
    this.askedAt = -Infinity;
  }

  /** Asks for the samples that are new, every five seconds. */
  async show() {
    if (performance.now() - this.askedAt < INTERVAL_MS) return;
    this.askedAt = performance.now();
    const found = await get("/page/history", { after: String(this.samples.at(-1)?.at ?? 0) }).catch(() => null);
    if (!found) return;
    const from = found.now - found.span_s;
    this.samples = [...this.samples, ...found.samples].filter(({ at }) => at > from && at <= found.now + 1);
    this.draw(found.now, 2.5 * found.interval_s);
  }

  draw(now, gap) {
    const age = now - (this.samples[0]?.at ?? now);
    const time = { now, gap, span: SPANS_S.find((span) => span >= age - gap) ?? SPANS_S.at(-1) };
    const names = [...new Set(this.samples.flatMap(({ models }) => Object.keys(models)))].sort();
    const each = (read) => new Map(names.map((name) => [name, this.samples
      .filter(({ models }) => name in models).map(({ at, models }) => ({ at, value: read(models[name]) }))]));
    this.speed.draw(time, each(([speed]) => speed));
    this.memory.draw(time, each(([, bytes]) => bytes), this.samples.at(-1)?.budget ?? null);
    const all = (key) => this.samples.map((sample) => ({ at: sample.at, value: sample[key] }));
    this.load.draw(time, new Map([["running", all("running")], ["waiting", all("waiting")]]));
  }
}
