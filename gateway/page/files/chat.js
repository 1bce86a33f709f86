// A chat with one of the models. An answer outlives its worker: a crash is a delay.

import { chat, Refused } from "./api.js";
import { count, keep, make, mark, write } from "./view.js";

const byId = (id) => document.getElementById(id);

/** States after a crash, until there is another worker. */
const LOST = ["BACKOFF", "PENDING", "LOADING"];

/** What is known of the worker of an answer under way. */
class Watched {
  constructor(model) {
    this.model = model;
    this.generation = 0;
    this.isReplaced = false;
  }

  /** What to say of its model's row; empty for nothing. */
  judge(row) {
    if (row.state === "READY") {
      // The first one that is ready serves the answer; a later one continues it.
      this.generation ||= row.generation;
      this.isReplaced ||= row.generation > this.generation;
      return this.isReplaced ? "The worker was replaced; the answer continued where it was." : "";
    }
    const isLost = this.generation > 0 && LOST.includes(row.state);
    return isLost ? "The worker is gone; the answer continues with the next one." : "";
  }
}

export class Chat {
  constructor(section) {
    section.append(form());
    this.models = byId("model");
    this.said = byId("said");
    this.doing = byId("doing");
    this.message = byId("message");
    this.sendButton = byId("send");
    this.stopButton = byId("stop");
    this.messages = [];
    this.status = null;
    // While an answer is under way: what ends it, and its worker.
    this.ending = null;
    this.watched = null;
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("ask").addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    this.message.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    this.stopButton.addEventListener("click", () => this.stop());
    byId("forget").addEventListener("click", () => this.forget());
  }

  open() {}

  /** Takes a status: which models there are, and whether a worker was replaced. */
  show({ status }) {
    this.status = status;
    const create = (row) => make("option", { value: row.name });
    keep(this.models, status.models, (row) => row.name, create, (option, row) => {
      write(option, row.state === "READY" ? row.name : `${row.name} (${row.state.toLowerCase()})`);
    });
    this.watch();
  }

  watch() {
    const row = this.status?.models.find(({ name }) => name === this.watched?.model);
    const news = row ? this.watched.judge(row) : "";
    if (news) write(this.doing, news);
  }

  /** Ends the answer; what there is of it stays. */
  stop() {
    this.ending?.abort();
  }

  /** Begins anew. */
  forget() {
    this.stop();
    this.messages = [];
    this.said.replaceChildren();
    write(this.doing, "");
    this.message.focus();
  }

  async send() {
    const text = this.message.value.trim();
    const model = this.models.value;
    if (!text || !model || this.ending) return;
    const messages = this.messages;
    const asked = { role: "user", content: text };
    messages.push(asked);
    this.message.value = "";
    turn(this.said, "You").text.append(text);
    const answer = turn(this.said, model);
    const ending = this.begin(model);
    const given = { model, ...settings(), messages: [...system(), ...messages] };
    let how = "";
    try {
      await chat(given, ending.signal, (chunk) => this.take(answer, chunk), (comment) => {
        write(this.doing, comment);
      });
    } catch (error) {
      how = this.breakOff(answer, error, ending);
    }
    this.end(answer, how);
    const said = answer.text.textContent;
    if (said) messages.push({ role: "assistant", content: said });
    else if (how) {
      // Nobody has answered it: it can be sent again.
      messages.splice(messages.indexOf(asked), 1);
      this.message.value ||= text;
    }
  }

  begin(model) {
    this.ending = new AbortController();
    this.watched = new Watched(model);
    mark(this.sendButton, "aria-disabled", "true");
    mark(this.stopButton, "aria-disabled", null);
    // A reader of the screen hears the whole answer, not each piece.
    mark(this.said, "aria-busy", "true");
    write(this.doing, "Waiting for the first word");
    this.watch();
    return this.ending;
  }

  take(answer, chunk) {
    const delta = chunk.choices[0]?.delta ?? {};
    if (chunk.usage) answer.tokens = chunk.usage.completion_tokens;
    if (delta.reasoning_content) {
      answer.thought.parentElement.hidden = false;
      answer.thought.append(delta.reasoning_content);
    }
    if (!delta.content && !delta.reasoning_content) return;
    if (!answer.hasBegun) {
      answer.hasBegun = true;
      write(this.doing, "Answering");
    }
    const isAtEnd = this.said.scrollHeight - this.said.scrollTop - this.said.clientHeight < 40;
    if (delta.content) answer.text.append(delta.content);
    if (isAtEnd) this.said.scrollTop = this.said.scrollHeight;
  }

  /** Says why an answer is not whole; returns it. */
  breakOff(answer, error, ending) {
    const why = ending.signal.aborted
      ? "Stopped."
      : `Broken off: ${error instanceof Refused ? error.message : "mlxsup does not answer"}`;
    answer.turn.append(make("p", { class: ending.signal.aborted ? "quiet" : "broken" }, why));
    return why;
  }

  end(answer, how) {
    const tokens = answer.tokens ? `: ${count(answer.tokens, "token")}` : "";
    const replaced = this.watched.isReplaced ? ". Its worker was replaced meanwhile" : "";
    write(this.doing, how || `Complete${tokens}${replaced}.`);
    this.ending = null;
    this.watched = null;
    mark(this.sendButton, "aria-disabled", null);
    mark(this.stopButton, "aria-disabled", "true");
    mark(this.said, "aria-busy", null);
    this.said.scrollTop = this.said.scrollHeight;
  }
}

/** A new message in the list; pieces of text are appended to `text` and `thought`. */
function turn(said, who) {
  const text = make("div", { class: "text" });
  const thought = make("div", { class: "thought" });
  const thoughts = make("details", {}, make("summary", {}, "Reasoning"), thought);
  thoughts.hidden = true;
  const element = make("div", { class: "turn" }, make("strong", {}, who), thoughts, text);
  said.append(element);
  said.scrollTop = said.scrollHeight;
  return { turn: element, text, thought, tokens: 0, hasBegun: false };
}

function system() {
  const content = byId("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}

function settings() {
  const given = { stream_options: { include_usage: true } };
  if (byId("temperature").value) given.temperature = byId("temperature").valueAsNumber;
  if (byId("most").value) given.max_tokens = byId("most").valueAsNumber;
  return given;
}

function form() {
  const field = (label, input) => [make("label", { for: input.id }, label), input];
  const number = (id, attributes) => make("input", { id, type: "number", min: "0", ...attributes });
  return make("form", { id: "ask" },
    make("p", { class: "row" }, ...field("Model", make("select", { id: "model" })),
      make("button", { type: "button", id: "forget" }, "New chat")),
    make("details", {}, make("summary", {}, "Settings"),
      make("p", {}, ...field("System message", make("textarea", { id: "system", rows: "2" }))),
      make("p", { class: "row" },
        ...field("Temperature", number("temperature", { max: "2", step: "0.1", placeholder: "default" })),
        ...field("Most tokens", number("most", { step: "1", placeholder: "no limit" })))),
    make("div", { id: "said", role: "log", "aria-label": "Messages", tabindex: "0" }),
    make("p", { id: "doing", role: "status" }),
    make("p", {}, ...field("Message", make("textarea", { id: "message", rows: "3" }))),
    make("p", { class: "row" }, make("button", { type: "submit", id: "send" }, "Send"),
      make("button", { type: "button", id: "stop", "aria-disabled": "true" }, "Stop")));
}
