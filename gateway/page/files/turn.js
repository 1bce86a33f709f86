// One message of the chat, with what can be done with it.

import { Prose, visible } from "./markdown.js";
import { shown } from "./pictures.js";
import { copyButton, count, icon, iconButton, keep, make, mark, sentence, write } from "./view.js";

/** What is said below an answer that is not whole. */
const ENDS = {
  stopped: "Stopped.", cut: "This answer was cut off.", elsewhere: "Being answered in another tab.",
};

export class Turn {
  /**
   * @param message that it shows.
   * @param actions `retry`, `goOn`, `edit(message, text)` and `choose(message)`.
   */
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.isUser = message.role === "user";
    this.text = make("div", { class: "text", dir: "auto" });
    this.prose = this.isUser ? null : new Prose(this.text);
    this.head = make("strong", { class: "who" });
    this.thought = this.isUser ? null : new Thought();
    this.calls = make("div", { class: "calls" });
    this.end = make("p", { class: "end" });
    this.figures = make("span", { class: "figures quiet" });
    this.beside = new Beside(actions.choose);
    this.goOn = textButton("play", "Continue", () => actions.goOn(this.message));
    this.again = textButton("retry", "Try again", () => actions.retry(this.message));
    this.buttons = make("div", { class: "buttons" }, this.beside.element, copyButton(
      this.isUser ? "Copy message" : "Copy answer", () => this.message.text));
    if (this.isUser) {
      this.change = iconButton("edit", "Edit message", () => this.edit());
    } else {
      this.change = iconButton("retry", "Answer again", () => actions.retry(this.message));
    }
    this.buttons.append(this.change, this.figures);
    const seen = message.pictures?.length ? [shown(message.pictures)] : [];
    const body = make("div", { class: "body" }, ...seen, this.text);
    const more = this.isUser ? [] : [this.calls, this.end, make("div", { class: "next" }, this.goOn, this.again)];
    this.element = make("article", { class: `turn ${message.role}` }, this.head,
      ...(this.thought ? [this.thought.element] : []), body, ...more, this.buttons);
  }

  /**
   * Shows the message as it is now.
   *
   * @param message the same; its text may have grown.
   * @param siblings all that stand beside it.
   * @param isUnderWay whether it is an answer that is being given here.
   * @param isBusy whether any answer of the conversation is.
   * @param isLast whether nothing follows.
   * @param end `elsewhere` or `cut` if an answer is under way, but not here.
   */
  update({ message, siblings, isUnderWay, isBusy, isLast, end }) {
    this.message = message;
    write(this.head, this.isUser ? "You" : message.model);
    this.grow(!isUnderWay);
    this.beside.show(siblings, message, isBusy);
    this.change.hidden = isBusy;
    this.buttons.hidden = isUnderWay;
    if (this.isUser) return;
    keep(this.calls, message.calls.map((call, place) => ({ call, place })), ({ place }) => place, callOf, () => {});
    const state = isUnderWay ? "" : (end ?? message.state);
    const isShort = state === "whole" && message.finish === "length";
    const why = state === "failed" ? sentence(visible(message.why)) : (ENDS[state] ?? "");
    write(this.end, isShort ? "The answer has reached its length limit." : why);
    mark(this.end, "data-state", state);
    const canGoOn = isLast && !isBusy && (isShort || ["stopped", "cut", "failed"].includes(state));
    this.goOn.hidden = !canGoOn || !message.text;
    this.again.hidden = !canGoOn || Boolean(message.text);
    write(this.figures, isUnderWay ? "" : figures(message));
  }

  /** Shows the text as far as it has come. */
  grow(isWhole) {
    const { message } = this;
    if (this.isUser) {
      write(this.text, visible(message.text));
      this.text.hidden ||= !message.text;
    }
    else this.prose.update(message.text, isWhole);
    this.thought?.update(message, isWhole);
  }

  /** Puts the message into a box; what is sent from there stands beside it. */
  edit() {
    const box = make("textarea", { "aria-label": "Edit message", rows: "3" });
    box.value = this.message.text;
    const close = () => {
      form.remove();
      this.text.hidden = !this.message.text;
      this.buttons.hidden = false;
      this.change.focus();
    };
    const form = make("form", { class: "edit" }, box, make("p", { class: "row" },
      make("button", { type: "submit" }, "Send"), textButton("close", "Cancel", close)));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = box.value.trim();
      close();
      if (text || this.message.pictures?.length) this.actions.edit(this.message, text);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      if (event.key === "Enter" && (event.metaKey || event.ctrlKey)) form.requestSubmit();
    });
    this.text.hidden = true;
    this.buttons.hidden = true;
    this.text.after(form);
    box.style.height = `${Math.min(box.scrollHeight + 4, innerHeight / 2)}px`;
    box.focus();
  }
}

/** What a model thought before it answered, folded. */
class Thought {
  constructor() {
    this.title = make("summary");
    this.text = make("div", { class: "thought", dir: "auto", tabindex: "0", role: "region", "aria-label": "Thoughts" });
    this.element = make("details", { class: "thoughts" }, this.title, this.text);
    // A thought may be long: it is shown once it is asked for.
    this.element.addEventListener("toggle", () => this.element.open && write(this.text, visible(this.message.thought)));
  }

  update(message, isWhole) {
    this.message = message;
    this.element.hidden = !message.thought;
    const isThinking = !message.text && !isWhole;
    const seconds = Math.round(message.thought_s ?? 0);
    const length = seconds ? ` for ${count(seconds, "second")}` : "";
    write(this.title, isThinking ? "Thinking…" : `Thought${length}`);
    if (this.element.open) write(this.text, visible(message.thought));
  }
}

/** Which of several messages is shown, with buttons to the others. */
class Beside {
  constructor(choose) {
    this.choose = choose;
    this.place = make("span", { class: "quiet" });
    const step = (by) => () => this.siblings[this.at + by] && this.choose(this.siblings[this.at + by]);
    this.before = iconButton("back", "Show the one before", step(-1));
    this.after = iconButton("forward", "Show the next one", step(1));
    this.element = make("span", { class: "beside" }, this.before, this.place, this.after);
  }

  show(siblings, message, isBusy) {
    this.siblings = siblings;
    this.at = siblings.indexOf(message);
    this.element.hidden = siblings.length < 2 || isBusy;
    write(this.place, `${this.at + 1} of ${siblings.length}`);
    mark(this.before, "aria-disabled", this.at > 0 ? null : "true");
    mark(this.after, "aria-disabled", this.at < siblings.length - 1 ? null : "true");
  }
}

/** A call of a tool that the model asks for; nothing is run. */
function callOf({ call }) {
  let given = call.arguments;
  try {
    given = JSON.stringify(JSON.parse(given), null, 2);
  } catch {
    // It is shown as the model has written it.
  }
  return make("details", { class: "call" }, make("summary", {}, `Wants to use ${visible(call.name)}`),
    make("pre", { tabindex: "0", role: "region", "aria-label": "What it would send" }, visible(given)));
}

function figures({ tokens, speed, breaks }) {
  const parts = [];
  if (tokens) parts.push(count(tokens, "token"));
  if (speed) parts.push(`${speed < 10 ? speed.toFixed(1) : Math.round(speed)} per second`);
  if (breaks) parts.push("continued after a break");
  return parts.join(" · ");
}

function textButton(name, text, onClick) {
  const button = make("button", { type: "button" }, icon(name), ` ${text}`);
  button.addEventListener("click", onClick);
  return button;
}
