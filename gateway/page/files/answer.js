// An answer under way. It outlives its worker, which the daemon replaces, and its gateway and the network:
// as soon as mlxsup is back, what there is of the answer is continued.

import { chat, isAway, needsKey, Refused } from "./api.js";

/** States of a model after a crash, until it is loaded again. */
const LOST = ["BACKOFF", "PENDING", "LOADING"];

const PAUSED = {
  user: "Paused. It continues once it is resumed under Requests.",
  class: "Paused for a request with a higher priority. It continues by itself.",
  turn: "Paused for another request. It continues by itself.",
  swap: "Paused while another model has its turn in memory. It continues by itself.",
  memory: "Paused until there is enough memory. It continues by itself.",
};

/** How often it is tried anew without a further word. */
const MOST_TRIES = 5;

/** How often what has come is kept. */
const KEEP_MS = 1000;

export class Answer {
  /**
   * @param conversation whose message it is.
   * @param message which gets the text; its `state` says how it ended.
   * @param onText is told that there is more of it.
   * @param onState is told that what it waits for may have changed.
   * @param onKeep is told that the message should be kept.
   */
  constructor(conversation, message, { onText, onState, onKeep }) {
    this.conversation = conversation;
    this.message = message;
    Object.assign(this, { onText, onState, onKeep });
    this.ending = new AbortController();
    this.waits = null;
    this.generation = 0;
    this.load = null;
    this.stalled = null;
    this.isLost = false;
    this.away = "";
    this.comeBack = null;
    this.keptAt = 0;
    this.tokens = 0;
    this.tokensBefore = message.tokens ?? 0;
    this.wordsAt = [];
  }

  /** Ends it; what there is of it stays. */
  stop() {
    this.ending.abort();
    this.comeBack?.();
  }

  /** Takes a state of the daemon: whether the model was lost, and that there is a daemon at all. */
  see(status) {
    this.comeBack?.();
    const row = status.models.find(({ name }) => name === this.message.model);
    if (!row) return;
    if (row.state === "READY") {
      // The first one that is ready serves the answer; a later one continues it.
      const isOther = this.generation && row.generation > this.generation;
      if (isOther && this.waits?.kind !== "paused") this.message.breaks += 1;
      this.generation = row.generation;
    } else if (LOST.includes(row.state) && this.waits?.kind !== "paused") {
      // The first words may have come from a worker that died before a state named it.
      const last = this.waits?.kind === "answering" ? row.generation - (row.state === "LOADING" ? 1 : 0) : 0;
      this.generation ||= last;
      this.isLost = this.generation > 0;
    }
    const loading = row.progress ? { kind: "loading", share: row.progress.fraction ?? 0 } : null;
    if (this.stalled && !this.isLost) this.waits = this.stalled;
    this.stalled = null;
    if (this.isLost || !this.waits || this.waits.kind === "loading") this.load = loading;
    this.onState();
  }

  /** What it is doing: a sentence, and the share that is done, if that is known. */
  doing() {
    if (this.away) return { sentence: this.away, share: null };
    if (this.isLost) {
      return { sentence: "The model crashed. Reloading; your answer will continue.", share: this.load?.share ?? null };
    }
    const { kind, share, place, reason } = this.waits ?? this.load ?? {};
    switch (kind) {
      case "loading": return { sentence: `Loading ${this.message.model}`, share };
      case "queued": return { sentence: `Waiting in line, place ${place}`, share: null };
      case "paused": return { sentence: PAUSED[reason] ?? PAUSED.user, share: null };
      case "continues": return { sentence: "Continuing", share: null };
      case "reading": return { sentence: "Reading the conversation", share };
      case "answering": return { sentence: this.message.text ? "Answering" : "Thinking", share: null };
      default: return { sentence: "Waiting for the first word", share: null };
    }
  }

  /** Returns once it has ended, one way or another. */
  async run() {
    const { message } = this;
    const most = this.conversation.head.settings.max_tokens;
    for (let tries = 1; ; tries += 1) {
      const before = this.tokens;
      try {
        const body = this.conversation.request(message);
        if (most) body.max_tokens = Math.max(1, most - this.tokens);
        if (!message.text.trim()) Object.assign(message, { text: "", thought: "", calls: [] });
        await chat(body, this.ending.signal, (chunk) => this.take(chunk), (comment) => this.hear(comment));
        message.state = "whole";
      } catch (error) {
        if (this.tokens > before) tries = 0;
        if (this.ending.signal.aborted) message.state = "stopped";
        else if (isAway(error) && tries < MOST_TRIES && (await this.back(error))) continue;
        else if (this.ending.signal.aborted) message.state = "stopped";
        else if (!(error instanceof Refused)) throw error;
        else Object.assign(message, { state: "failed", why: error.message });
      }
      break;
    }
    this.count();
    this.onKeep();
  }

  /** Waits until mlxsup answers again; false if the answer was stopped meanwhile. */
  async back(error) {
    this.message.breaks += 1;
    const lost = this.message.text ? "The answer broke off. It continues" : "mlxsup cannot be reached. It answers";
    this.away = needsKey(error) ? "It continues once you have entered a key." : `${lost} once mlxsup is back.`;
    this.generation = 0;
    this.isLost = false;
    this.waits = null;
    this.stalled = null;
    this.load = null;
    this.onKeep();
    this.onState();
    await new Promise((resolve) => {
      this.comeBack = resolve;
    });
    this.comeBack = null;
    this.away = "";
    this.onState();
    return !this.ending.signal.aborted;
  }

  /** Takes a comment of the gateway: what the answer waits for. */
  hear(comment) {
    const [, place] = comment.match(/^queued, place (\d+)/) ?? [];
    const [, percent] = comment.match(/^loading, (\d+)%/) ?? [];
    const [, done, total] = comment.match(/^reading the prompt, (\d+) of (\d+)/) ?? [];
    const [, reason] = comment.match(/^paused, (\w+)/) ?? [];
    if (reason) this.waits = { kind: "paused", reason };
    // The next word may have come before it.
    else if (comment === "continues" && this.waits?.kind === "paused") this.waits = { kind: "continues" };
    if (reason || comment === "continues") {
      this.onState();
      return;
    }
    let waits = null;
    if (place) waits = { kind: "queued", place };
    if (percent) waits = { kind: "loading", share: percent / 100 };
    if (total) waits = { kind: "reading", share: done / total };
    if (!waits) return;
    // After the first word, the next state of the model says whether it has crashed.
    if (this.waits?.kind === "answering") this.stalled = waits;
    else this.waits = waits;
    this.onState();
  }

  take(chunk) {
    const { message } = this;
    const [choice] = chunk.choices;
    const delta = choice?.delta ?? {};
    if (choice?.finish_reason) message.finish = choice.finish_reason;
    if (chunk.usage) message.counted = (message.counted ?? 0) + chunk.usage.completion_tokens;
    const calls = delta.tool_calls ?? [];
    if (!delta.content && !delta.reasoning_content && !calls.length) return;
    const now = performance.now();
    this.tokens += 1;
    this.wordsAt = [this.wordsAt[0] ?? now, now];
    this.isLost = false;
    this.waits = { kind: "answering" };
    this.stalled = null;
    message.thinkingSince ??= Date.now();
    if (delta.content && !message.text) message.thought_s = (Date.now() - message.thinkingSince) / 1000;
    message.text += delta.content ?? "";
    message.thought += delta.reasoning_content ?? "";
    for (const { function: called } of calls) message.calls.push(called);
    this.onText();
    this.onState();
    if (now - this.keptAt > KEEP_MS) {
      this.keptAt = now;
      this.onKeep();
    }
  }

  /** Notes how many tokens it has and how fast they came; after a break the time says nothing. */
  count() {
    const { message } = this;
    message.tokens = this.tokensBefore + Math.max(message.counted ?? 0, this.tokens);
    delete message.counted;
    delete message.thinkingSince;
    const seconds = (this.wordsAt[1] - this.wordsAt[0]) / 1000;
    const isSteady = !message.breaks && !this.tokensBefore && message.state === "whole" && seconds > 0.5;
    message.speed = isSteady ? (message.tokens - 1) / seconds : null;
  }
}
