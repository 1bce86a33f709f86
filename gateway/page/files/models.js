// The models: one card each, with its state, its figures and its buttons; below them, the charts.

import { act, Refused } from "./api.js";
import { Charts } from "./charts.js";
import { cause, count, duration, keep, make, mark, size, write } from "./view.js";

// The sign says the same as the colour.
const SIGNS = {
  READY: "●", LOADING: "◐", PENDING: "◔", DRAINING: "◑", STOPPING: "◑", BACKOFF: "▲", FAILED: "✕",
  STOPPED: "○",
};

const BUTTONS = {
  load: { word: "Load", fits: (row) => ["STOPPED", "FAILED", "BACKOFF"].includes(row.state) },
  unload: { word: "Unload", fits: (row) => row.state !== "STOPPED" },
  restart: { word: "Restart", fits: (row) => row.generation > 0 },
};

const FIGURES = {
  generation: "Generation", restarts: "Restarts", speed: "Tokens/s", rows: "Running", queue: "Waiting",
  memory: "Memory", context: "Context", since: "In this state",
};

export class Models {
  constructor(section) {
    this.facts = make("p", { id: "daemon", class: "quiet" }, "connecting…");
    this.cards = make("ul", { id: "cards", class: "cards", role: "list" });
    const speed = make("figure", { id: "speed" });
    const memory = make("figure", { id: "memory" });
    section.append(this.facts, this.cards, make("h3", {}, "The last five minutes"),
      make("div", { class: "charts" }, speed, memory));
    this.charts = new Charts(speed, memory);
  }

  open() {}

  show({ status }) {
    write(this.facts, headline(status));
    keep(this.cards, status.models, (row) => row.name, card, update);
    this.charts.add(Date.now() / 1000, status);
  }
}

/** True if a model loses something because other programs need memory. */
function isShort({ memory, models }) {
  return memory.shortage && (memory.over_bytes || models.some((row) => row.memory_wait));
}

/** What is known of the daemon: version, age and memory. */
function headline(status) {
  const { reserved_bytes: reserved, budget_bytes: budget } = status.memory;
  const parts = [`version ${status.version}`, `up ${duration(status.uptime_s)}`];
  parts.push(budget ? `${size(reserved)} of ${size(budget)} reserved` : `${size(reserved)} reserved`);
  if (isShort(status)) parts.push(`memory is short: ${status.memory.shortage}`);
  if (status.gateway?.restarts) parts.push(`gateway restarted ${status.gateway.restarts} times`);
  return parts.join(" · ");
}

function card(row) {
  const name = make("h3", {}, row.name);
  const state = make("p", { class: "state" }, make("span", { class: "sign", "aria-hidden": "true" }),
    make("span", { class: "word" }));
  const figures = make("dl");
  for (const [key, word] of Object.entries(FIGURES)) {
    figures.append(make("div", {}, make("dt", {}, word), make("dd", { "data-figure": key })));
  }
  const bar = make("progress", { max: "1", "aria-label": `Load of ${row.name}` });
  bar.hidden = true;
  const buttons = make("p", { class: "row" });
  const answer = make("p", { class: "answer", role: "status" });
  for (const [action, { word }] of Object.entries(BUTTONS)) {
    const button = make("button", { type: "button", "data-action": action,
      "aria-label": `${word} ${row.name}` }, word);
    button.addEventListener("click", () => press(button, action, row.name, answer));
    buttons.append(button);
  }
  return make("li", { class: "card" }, make("div", { class: "head" }, name, state), bar,
    make("p", { class: "note" }), figures, buttons, answer);
}

function update(element, row) {
  mark(element, "data-state", row.state);
  write(element.querySelector(".sign"), SIGNS[row.state] ?? "?");
  write(element.querySelector(".word"), row.state);
  const bar = element.querySelector("progress");
  bar.hidden = !row.progress;
  if (row.progress) mark(bar, "value", String(row.progress.fraction ?? 0));
  write(element.querySelector(".note"), note(row));
  const figures = {
    generation: String(row.generation),
    restarts: String(row.restarts),
    speed: row.tokens_per_s ? row.tokens_per_s.toFixed(1) : "–",
    rows: row.row_limit ? `${row.running.length} of ${row.row_limit}` : String(row.running.length),
    queue: String(row.queued),
    memory: row.footprint_bytes ? size(row.footprint_bytes) : "–",
    context: row.context_length ? String(row.context_length) : "–",
    since: duration(row.since_s),
  };
  for (const [key, text] of Object.entries(figures)) {
    write(element.querySelector(`[data-figure="${key}"]`), text);
  }
  for (const [action, { fits }] of Object.entries(BUTTONS)) {
    // Not `disabled`: a button that has the focus would lose it.
    const button = element.querySelector(`[data-action="${action}"]`);
    mark(button, "aria-disabled", fits(row) ? null : "true");
  }
}

/** Progress, the next attempt or the last cause, and what is paused. */
function note(row) {
  const parts = [];
  if (row.progress) {
    const share = row.progress.fraction ? ` ${Math.round(row.progress.fraction * 100)}%` : "";
    parts.push(`${row.progress.phase}${share}`);
  }
  if (row.retry_in_s !== null) parts.push(`next attempt in ${duration(row.retry_in_s)}`);
  const last = row.last_exit && row.last_exit.reason !== "asked" ? cause(row.last_exit) : "";
  if (last) parts.push(`last crash: ${last}`);
  else if (row.state === "FAILED" && row.cause) parts.push(row.cause);
  if (row.paused.length) parts.push(`${row.paused.length} paused`);
  if (row.yielded.length) parts.push(`${row.yielded.length} gave way`);
  if (row.suspects.length) parts.push(count(row.suspects.length, "suspect"));
  return parts.join(" · ");
}

async function press(button, action, model, answer) {
  if (button.getAttribute("aria-disabled") === "true") return;
  if (button.getAttribute("aria-busy") === "true") return;
  mark(button, "aria-busy", "true");
  write(answer, `${BUTTONS[action].word}: asked for`);
  try {
    await act(action, model);
    write(answer, `${BUTTONS[action].word}: accepted`);
  } catch (error) {
    write(answer, error instanceof Refused ? error.message : "mlxsup does not answer");
  } finally {
    mark(button, "aria-busy", null);
  }
}
