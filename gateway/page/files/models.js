// The models: one card each, with its state, its figures and its buttons; below them, charts and crashes.

import { Add } from "./add.js";
import { get, post, why } from "./api.js";
import { Charts } from "./charts.js";
import { configured } from "./configure.js";
import { Crashes } from "./crashes.js";
import { confirmed, Locked } from "./dialog.js";
import { count, duration, keep, make, mark, size, write } from "./view.js";

// The sign says the same as the colour.
const STATES = {
  READY: ["●", "ready"], LOADING: ["◐", "loading"], PENDING: ["◔", "waiting to load"],
  DRAINING: ["◑", "finishing its answers"], STOPPING: ["◑", "stopping"], FAILED: ["✕", "failed"],
  BACKOFF: ["▲", "restarting after a crash"], AGAIN: ["▲", "waiting to try again"], STOPPED: ["○", "not loaded"],
};

const PHASES = {
  spawn: "starting its process", import: "starting MLX", weights: "reading the weights",
  materialise: "reading the weights", warmup: "warming up", download: "downloading",
  "waiting for turn": "waits until another model has loaded", "waiting for memory": "waits for memory",
};

const BUTTONS = {
  load: { word: "Load", fits: (row) => ["STOPPED", "FAILED", "BACKOFF"].includes(row.state) },
  unload: { word: "Unload", fits: (row) => !["STOPPED", "FAILED"].includes(row.state) },
  restart: { word: "Restart", fits: (row) => ["READY", "LOADING", "DRAINING"].includes(row.state) },
  keep: { word: "Keep loaded", fits: (row) => row.state === "READY" && unloadsSoon(row) },
  settings: { word: "Settings", fits: () => true },
  remove: { word: "Remove", fits: () => true },
};

const FIGURES = {
  used: "Memory used", needed: "Needs at least", grows: "May grow to", speed: "Tokens/s",
  rows: "Answering", queue: "Waiting", context: "Context", since: "In this state for",
};

/** For how long a card tells of a crash. */
const RECENT_S = 3600;

export class Models {
  constructor(section) {
    this.section = section;
    this.facts = make("p", { id: "daemon", class: "quiet" }, "connecting…");
    this.memory = make("progress", { max: "1", "aria-label": "Memory used by models" });
    this.cards = make("ul", { id: "cards", class: "cards", role: "list" });
    this.charts = new Charts();
    this.crashes = new Crashes();
    this.add = new Add();
    section.append(this.facts, this.memory, this.cards, this.add.element);
    this.locked = new Locked(section, "You can chat. To change models, use the key of an operator.");
    this.more = make("div", {}, make("h3", {}, "The last hour"), this.charts.element, this.crashes.element);
    section.append(this.more);
    this.described = new Map();
    this.downloads = new Map();
    this.describedAs = "";
  }

  open() {
    this.charts.askedAt = -Infinity;
    if (this.latest) this.show(this.latest);
  }

  show(snapshot) {
    this.latest = snapshot;
    const { status, missing } = snapshot;
    this.locked.show(missing);
    this.more.hidden = Boolean(missing) || !status.models.length;
    this.memory.hidden = this.add.element.hidden = Boolean(missing);
    this.isOperator = !missing;
    write(this.facts, missing ? `version ${status.version}` : headline(status));
    if (!missing) {
      const { used_bytes: used, budget_bytes: budget } = status.memory;
      this.memory.hidden = !budget;
      if (budget) mark(this.memory, "value", (used / budget).toFixed(3));
    }
    if (this.section.hidden) return;
    this.describe(status);
    if (!missing) {
      this.add.show(status);
      this.charts.show();
      this.crashes.show(status);
    }
    keep(this.cards, status.models, (row) => row.name, (row) => this.card(row),
      (card, row) => this.update(card, row));
  }

  /** Asks what the files of the models are, once for each list of models. */
  async describe(status) {
    const now = JSON.stringify(status.models.map((row) => [row.name, row.repo, row.folder]));
    if (now === this.describedAs) return;
    this.describedAs = now;
    const { models } = await get("/api/v1/models").catch(() => ({ models: [] }));
    this.described = new Map(models.map((model) => [model.key, model]));
  }

  card(row) {
    const state = make("p", { class: "state" }, make("span", { class: "sign", "aria-hidden": "true" }),
      make("span", { class: "word" }));
    const figures = make("dl");
    for (const [key, word] of Object.entries(FIGURES)) {
      figures.append(make("div", {}, make("dt", {}, word), make("dd", { "data-figure": key })));
    }
    const bar = make("progress", { max: "1", "aria-label": `Load of ${row.name}` });
    bar.hidden = true;
    const buttons = make("p", { class: "row" });
    const card = make("li", { class: "card" }, make("div", { class: "head" }, make("h3", {}, row.name), state),
      make("p", { class: "source quiet" }), bar, make("p", { class: "note" }), figures, buttons,
      make("p", { class: "answer", role: "status" }));
    for (const [action, { word }] of Object.entries(BUTTONS)) {
      const button = make("button", { type: "button", "data-action": action,
        "aria-label": `${word} ${row.name}` }, word);
      button.addEventListener("click", () => this.press(card, button, action));
      buttons.append(button);
    }
    buttons.append(make("a", { href: `#logs/${encodeURIComponent(row.name)}`, "aria-label": `Log of ${row.name}` },
      "Log"));
    return card;
  }

  update(card, row) {
    card.row = row;
    const [sign, word] = STATES[isAgain(row) ? "AGAIN" : row.state] ?? ["?", row.state.toLowerCase()];
    mark(card, "data-state", row.state);
    write(card.querySelector(".sign"), sign);
    write(card.querySelector(".word"), word);
    write(card.querySelector(".source"), source(row, this.described.get(row.name)));
    const bar = card.querySelector("progress");
    bar.hidden = !row.progress;
    if (row.progress) mark(bar, "value", String(row.progress.fraction ?? 0));
    write(card.querySelector(".note"), this.note(row));
    for (const [key, text] of Object.entries(figuresOf(row))) {
      const figure = card.querySelector(`[data-figure="${key}"]`);
      figure.parentElement.hidden = text === null;
      write(figure, text ?? "");
    }
    const buttons = card.querySelector(".row");
    buttons.hidden = !this.isOperator;
    const focused = document.activeElement;
    for (const [action, { fits }] of Object.entries(BUTTONS)) {
      card.querySelector(`[data-action="${action}"]`).hidden = !fits(row);
    }
    // A button that goes hands the focus on, so that it stays in the card.
    if (buttons.contains(focused) && focused.hidden) buttons.querySelector("button:not([hidden])").focus();
    const unload = card.querySelector('[data-action="unload"]');
    write(unload, isDownload(row) ? "Cancel download" : BUTTONS.unload.word);
    mark(unload, "aria-label", `${unload.textContent} ${isDownload(row) ? "of " : ""}${row.name}`);
    // What was asked for has happened once the state is another one.
    if (card.asked && card.asked !== `${row.state} ${row.generation}`) {
      card.asked = "";
      write(card.querySelector(".answer"), "");
    }
  }

  /** Progress, the next attempt or the last cause, and what is paused. */
  note(row) {
    const parts = [];
    if (row.progress) parts.push(progress(row.progress) + this.left(row));
    if (row.memory_wait?.reason) parts.push(row.memory_wait.reason);
    if (row.retry_in_s) parts.push(`next attempt in ${duration(row.retry_in_s)}`);
    const hasCrashed = this.isOperator && row.last_exit && row.last_exit.reason !== "asked";
    const crash = hasCrashed ? this.crashes.of(row.name) : null;
    if (row.state === "FAILED") parts.push(crash?.what ?? row.cause);
    else if (isAgain(row)) parts.push(row.cause);
    else if (crash && crash.ago_s < RECENT_S) parts.push(`crashed ${duration(crash.ago_s)} ago: ${crash.what}`);
    if (row.paused?.length) parts.push(`${count(row.paused.length, "answer")} paused`);
    if (row.pinned) parts.push("its memory is kept for it");
    if (unloadsSoon(row)) parts.push(`unloads in ${duration(row.unloads_in_s)} unless it is used`);
    const text = parts.filter(Boolean).join(" · ");
    return text.charAt(0).toUpperCase() + text.slice(1);
  }

  /** How long a download takes from here, by its pace since it was seen first. */
  left({ name, progress: { done_bytes: done, total_bytes: total } }) {
    if (!total) {
      this.downloads.delete(name);
      return "";
    }
    const now = performance.now() / 1000;
    const began = this.downloads.get(name) ?? { at: now, done };
    this.downloads.set(name, began);
    const pace = (done - began.done) / (now - began.at);
    return pace > 0 && done < total && now - began.at > 3 ? `, about ${duration((total - done) / pace)} left` : "";
  }

  async press(card, button, action) {
    if (button.getAttribute("aria-busy") === "true") return;
    const { row } = card;
    const word = button.textContent;
    const answer = card.querySelector(".answer");
    if (action === "settings") {
      write(answer, await configured(row.name).catch((error) => `The settings cannot be shown: ${why(error)}.`));
      button.focus();
      return;
    }
    const asks = ["unload", "restart", "remove"].includes(action) && !(action === "unload" && isDownload(row));
    if (asks && !(await confirmed(`${word} ${row.name}?`, follows(row, action), word))) return;
    mark(button, "aria-busy", "true");
    write(answer, `${word} requested.`);
    try {
      await post(["keep", "remove"].includes(action) ? `/page/models/${action}` : `/models/${action}`, { model: row.name });
      if (action === "keep") write(answer, "It now stays loaded until you unload it.");
      else card.asked = `${row.state} ${row.generation}`;
    } catch (error) {
      write(answer, why(error));
    } finally {
      mark(button, "aria-busy", null);
    }
  }
}

/** What is known of the daemon: version, age and memory. */
function headline(status) {
  const { used_bytes: used, may_grow_to_bytes: grown, budget_bytes: budget, ...memory } = status.memory;
  const grows = budget && grown ? `, may grow to ${size(grown)}` : "";
  const parts = [`Memory: ${grown ? size(used) : "none"} used${grows}` + (budget ? ` of ${size(budget)}` : "")];
  if (memory.shortage) parts.push(`other programs leave ${size(memory.effective_budget_bytes)}`);
  if (memory.is_short) parts.push(`memory is short: ${memory.shortage}`);
  parts.push(`running for ${duration(status.uptime_s)}`, `version ${status.version}`);
  const restarts = status.gateway?.restarts;
  if (restarts) parts.push(`HTTP restarted ${restarts === 1 ? "once" : `${restarts} times`}`);
  return parts.join(" · ");
}

/** Where a model is from, and its size. */
function source(row, described) {
  const folder = row.folder?.split("/").at(-1);
  const parts = [row.repo ?? (folder === row.name ? "" : folder)];
  if (described?.params_string) parts.push(`${described.params_string} parameters`);
  const special = row.capabilities.filter((one) => one !== "text");
  if (special.length) parts.push(special.join(", "));
  if (described?.quantization.name) parts.push(described.quantization.name);
  if (described?.size_bytes) parts.push(`${size(described.size_bytes)} on disk`);
  return parts.filter(Boolean).join(" · ");
}

function progress({ phase, fraction, done_bytes: done, total_bytes: total }) {
  const words = PHASES[phase] ?? phase;
  if (total && done >= total) return "checking what has arrived";
  if (total) return `${words}, ${size(done)} of ${size(total)}`;
  return fraction ? `${words}, ${Math.round(fraction * 100)}%` : words;
}

/** What the card says; null for what there is nothing to say of. */
function figuresOf(row) {
  const isLoaded = ["READY", "DRAINING"].includes(row.state);
  const known = (value, format) => (value ? format(value) : null);
  return {
    used: known(row.footprint_bytes, size),
    needed: known(row.needed_bytes, size),
    grows: known(Math.max(row.reserved_bytes, row.footprint_bytes), size),
    speed: isLoaded ? (row.tokens_per_s || 0).toFixed(1) : null,
    rows: isLoaded ? String(row.running.length) : null,
    queue: known(row.queued, String),
    context: known(row.context_length, (length) => `${length.toLocaleString("en")} tokens`),
    since: known(row.since_s, duration),
  };
}

/** True if a model that is idle goes by itself. */
function unloadsSoon(row) {
  return row.unloads_in_s !== null && row.unloads_in_s !== undefined;
}

/** True if a download is tried again later, which is no crash. */
function isAgain(row) {
  return row.state === "BACKOFF" && Boolean(row.cause);
}

function isDownload(row) {
  return row.progress?.phase === "download";
}

/** What an unload, a restart or a removal would do, in sentences. */
function follows(row, action) {
  const running = row.running.length;
  const parts = [];
  if (running) {
    parts.push(`${count(running, "answer")} may finish first, within a time limit. After that `
      + (action === "restart" ? "the rest comes from the new process." : "the rest is cut off."));
  } else parts.push("It is not answering anything now.");
  if (row.queued) {
    const each = row.queued === 1;
    const fate = action === "restart" ? `${each ? "waits" : "wait"} until it is back` : `${each ? "is" : "are"} refused`;
    parts.push(`${count(row.queued, "waiting request")} ${fate}.`);
  }
  if (action === "restart") parts.push("It loads again at once.");
  if (action === "unload") parts.push("The next request for it loads it again.");
  if (action === "remove") {
    parts.push("It is removed from the configuration. Its files stay on this machine, so you can add it again.");
  }
  return parts;
}
