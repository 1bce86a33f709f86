// The requests: those that wait and run, with what can be done to them, and the last that have ended.

import { get, post, why } from "./api.js";
import { confirmed } from "./dialog.js";
import { count, duration, keep, make, mark, write } from "./view.js";

const WAITS = {
  rows: "", load: "its model is loading", turn: "it is another request's turn",
  limit: "its account has reached its limit", memory: "its model waits for memory",
  swap: "its model takes turns in memory with another", restart: "its model restarts",
  backoff: "its model restarts after a crash", download: "its model cannot be downloaded right now",
};

const GAVE_WAY = {
  turn: "waits for its turn", class: "gave way to a request with a higher priority",
  swap: "waits until its model is back in memory", memory: "waits for memory",
};

const PRIORITIES = { interactive: "High", normal: "Normal", batch: "Low" };

const OUTCOMES = {
  stop: "Complete", length: "Complete, at its length limit", tool_calls: "Complete, with a tool call",
  prompt_only: "Prompt read", cancelled: "Cancelled", gone: "Cancelled: the program has disconnected",
};

export class Requests {
  constructor(section) {
    this.section = section;
    this.summary = make("p", { id: "summary", class: "quiet" });
    this.accounts = make("ul", { id: "accounts", class: "plainlist", role: "list" });
    this.open_ = make("ul", { id: "open", class: "requests", role: "list" });
    this.answer = make("p", { id: "request-answer", role: "status" });
    this.ended = make("ul", { id: "ended", class: "requests", role: "list" });
    this.last = make("h3", {}, "Recent requests");
    this.content = make("div", {}, this.summary, this.answer, this.open_, this.accounts, this.last, this.ended);
    section.append(this.content);
    this.status = null;
    this.isAsking = false;
  }

  open() {
    if (this.status) this.refresh();
  }

  show({ status, missing }) {
    this.status = missing ? null : status;
    if (this.status && !this.section.hidden) this.refresh();
  }

  /** Asks for the list; one question at a time. */
  async refresh() {
    if (this.isAsking) return;
    this.isAsking = true;
    try {
      this.draw(await get("/page/requests"));
    } catch (error) {
      write(this.summary, `The requests cannot be shown: ${why(error)}.`);
    } finally {
      this.isAsking = false;
    }
  }

  draw({ requests, more, ended }) {
    write(this.summary, summary(requests, more));
    const ids = requests.map(({ id }) => id);
    const nameOf = (one) => (ids.indexOf(one.id) === ids.lastIndexOf(one.id) ? one.id : one.number);
    keep(this.open_, requests, (one) => `${one.number} ${one.id}`, (one) => this.line(one), (line, one) => {
      line.request = { ...one, name: nameOf(one) };
      write(line.querySelector(".what"), stage(one));
      write(line.querySelector(".about"), about(one));
      const bar = line.querySelector("progress");
      bar.hidden = one.prefill === null;
      if (one.prefill !== null) mark(bar, "value", String(one.prefill));
      const isPaused = one.state === "paused" || one.state === "pausing";
      write(line.querySelector('[data-action="pause"]'), isPaused ? "Resume" : "Pause");
      const select = line.querySelector("select");
      if (document.activeElement !== select) select.value = one.priority;
    });
    const clients = Object.entries(this.status?.queue.clients ?? {});
    this.accounts.hidden = clients.length < 2;
    keep(this.accounts, clients, ([name]) => name, () => make("li"), (line, [name, account]) => {
      write(line, `${origin(name, this.status)}: ${account.running} running, ${account.waiting} waiting`);
    });
    this.last.hidden = ended.length === 0;
    keep(this.ended, ended, (one) => `${one.number} ${one.at}`, endedLine, (line, one) => {
      write(line.querySelector("time"), `${duration(Date.now() / 1000 - one.at)} ago`);
    });
  }

  line(one) {
    const title = make("strong", {}, `${one.number} ${one.model}`);
    const pause = make("button", { type: "button", "data-action": "pause" }, "Pause");
    const cancel = make("button", { type: "button", "data-action": "cancel" }, "Cancel");
    const options = Object.entries(PRIORITIES).map(([value, word]) => make("option", { value }, word));
    const priority = make("select", {}, ...options);
    const line = make("li", {}, make("div", {}, title, " ", make("span", { class: "what" }),
      make("div", { class: "about quiet" }),
      make("progress", { max: "1", "aria-label": `Prompt of ${one.number}, read so far` })),
      make("div", { class: "row" }, make("label", { class: "row" }, "Priority", priority), pause, cancel));
    for (const button of [pause, cancel]) button.setAttribute("aria-describedby", `request-${one.number.slice(1)}`);
    title.id = `request-${one.number.slice(1)}`;
    pause.addEventListener("click", () => this.act(line, pause.textContent.toLowerCase()));
    cancel.addEventListener("click", () => this.cancel(line));
    priority.addEventListener("change", () => this.act(line, "prioritize", { priority: priority.value }));
    return line;
  }

  async cancel(line) {
    const { number, model, tokens_sent: tokens } = line.request;
    const follows = tokens
      ? `The answer stops here. The client keeps the ${count(tokens, "token")} it has received.`
      : "The client gets an empty answer.";
    if (await confirmed(`Cancel request ${number} to ${model}?`, [follows], "Cancel request")) {
      this.act(line, "cancel");
    }
  }

  async act(line, action, more = {}) {
    const { name, number } = line.request;
    try {
      await post(`/page/requests/${action}`, { request: name, ...more });
      write(this.answer, "");
    } catch (error) {
      write(this.answer, `${number}: ${why(error)}`);
    }
    this.refresh();
  }
}

function summary(requests, more) {
  if (!requests.length) {
    return "No request is open. Ask something in the chat or from a program, and it appears here.";
  }
  const waiting = requests.filter(({ state }) => state === "waiting").length;
  const paused = requests.filter(({ state }) => state === "paused" || state === "pausing").length;
  const parts = [`${requests.length - waiting - paused} running`, `${waiting} waiting`];
  if (paused) parts.push(`${paused} paused`);
  if (more) parts.push(`${more} more not listed`);
  return parts.join(", ");
}

/** What a request is doing, in words. */
function stage(one) {
  const expected = one.expected_s >= 1 ? `, about ${duration(one.expected_s)}` : "";
  switch (one.state) {
    case "waiting": {
      const reason = one.paused ? GAVE_WAY[one.paused] : WAITS[one.reason];
      return `waits, place ${one.place}${reason ? `: ${reason}` : ""}${expected}`;
    }
    case "reading": {
      const share = one.prefill === null ? "" : `, ${Math.round(one.prefill * 100)}%`;
      return `reads the prompt${share}${expected}`;
    }
    case "pausing":
      return "pausing";
    case "paused":
      return "paused until you resume it";
    default:
      return "answers";
  }
}

function about(one) {
  const parts = [count(one.tokens_sent, "token")];
  if (one.tokens_per_s && one.state === "answering") parts.push(`${one.tokens_per_s.toFixed(1)} tokens/s`);
  parts.push(`began ${duration(one.age_s)} ago`, `from ${origin(one.client)}`);
  if (one.resumed) parts.push(`continued after ${one.resumed === 1 ? "a crash" : `${one.resumed} crashes`}`);
  return parts.join(" · ");
}

/** The program that has sent a request, in words: an account, a process or a terminal. */
function origin(client) {
  const [, kind, pid] = /^(process|terminal) (\d+)@\d+$/.exec(client) ?? [];
  if (kind === "process") return `a program (process ${pid})`;
  return kind ? `a terminal (${pid})` : client;
}

function endedLine(one) {
  const how = OUTCOMES[one.outcome] ?? `Failed: ${one.outcome.replaceAll("_", " ")}`;
  const parts = [how, one.outcome === "prompt_only" ? "" : count(one.tokens, "token"), `in ${duration(one.total_s)}`]
    .filter(Boolean);
  if (one.tokens_per_s >= 0.1) parts.push(`${one.tokens_per_s.toFixed(1)} tokens/s`);
  return make("li", { "data-outcome": one.outcome }, make("strong", {}, `${one.number} ${one.model}`),
    ` ${parts.join(" · ")} · `, make("time", { datetime: new Date(one.at * 1000).toISOString() }));
}
