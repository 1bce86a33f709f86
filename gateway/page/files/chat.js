// The chat: the list of conversations, the messages of one, and the box to write in.

import { Answer } from "./answer.js";
import { Chats } from "./chats.js";
import { Conversation, newId } from "./conversation.js";
import { Pictures } from "./pictures.js";
import { Settings } from "./settings.js";
import { Store } from "./store.js";
import { Turn } from "./turn.js";
import { icon, iconButton, keep, make, mark, write } from "./view.js";

/** What new conversations begin with: the model and settings of the last one. */
const LAST = "mlxsup-last";
/** What is written and not sent yet, which a reload must not lose. */
const DRAFT = "mlxsup-draft";
const TAB = "mlxsup-tab";

/** For how long an answer of another tab counts as under way without news of it. */
const SILENT_MS = 3000;
/** An answer that this tab was giving when it was closed is continued up to this age. */
const RESUME_MS = 10 * 60 * 1000;
/** So near the end counts as being there, in pixels. */
const NEAR = 48;

const STATES = {
  STOPPED: "not loaded", PENDING: "loading", LOADING: "loading", BACKOFF: "crashed, loads again",
  FAILED: "cannot be loaded", DRAINING: "being unloaded", STOPPING: "being unloaded",
};

const isTouch = matchMedia("(pointer: coarse)");

/** What this browser keeps under a name; nothing if that is none of ours. */
function kept(key) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? {};
  } catch {
    return {};
  }
}

export class Chat {
  constructor(section) {
    this.store = new Store();
    this.tab = sessionStorage.getItem(TAB) ?? newId();
    sessionStorage.setItem(TAB, this.tab);
    this.status = null;
    this.turns = new Map();
    this.answers = new Map(); // by the id of their conversation
    this.heardAt = new Map(); // when another tab has changed a conversation, by its id
    this.isFollowing = true;
    this.opened = 0;
    this.chats = new Chats(this.store, {
      onBegin: () => this.begin(),
      onExport: () => this.export(),
      onGone: (id) => this.forget(id),
      onRename: ({ id, title }) => {
        if (id === this.conversation.head.id) this.conversation.head.title = title;
      },
    });
    this.settings = new Settings((given) => this.setUp(given));
    this.build(section);
    this.conversation = this.fresh();
    this.showSettings();
    this.draw();
    this.message.value = sessionStorage.getItem(DRAFT) ?? "";
    this.fit();
    this.ready = this.store.open().catch(() => {
      write(this.trouble, "This browser cannot keep chats. They are lost when you close this page.");
    });
    this.store.follow((id) => this.changedElsewhere(id));
    // A phone may drop the page once it is out of sight.
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) for (const { conversation, message } of this.answers.values()) this.keep(conversation, [message]);
    });
  }

  // ------------------------------------------------------------ the elements

  build(section) {
    this.models = make("select", { id: "model", "aria-label": "Model" });
    this.models.addEventListener("change", () => {
      this.conversation.head.model = this.models.value;
      this.drawPictures();
      this.remember();
    });
    this.settings.element.hidden = true;
    this.gear = iconButton("settings", "Chat settings", () => this.toggleSettings(),
      { "aria-expanded": "false", "aria-controls": "settings" });
    const beginning = iconButton("add", "New chat", () => this.begin(), { class: "plain icon phone-only" });
    const top = make("div", { class: "talk-bar" }, this.chats.opener, this.models, this.gear, beginning);
    this.turnList = make("div", { class: "turns" });
    this.welcome = make("p", { class: "welcome" });
    this.said = make("div", { id: "said", role: "log", "aria-label": "Messages", tabindex: "0" },
      this.welcome, this.turnList);
    this.newest = make("button", { type: "button", class: "newest" }, icon("down"), " Newest");
    this.newest.hidden = true;
    this.newest.addEventListener("click", () => {
      this.isFollowing = true;
      this.toEnd();
    });
    this.doing = make("span", { id: "doing", role: "status" });
    this.percent = make("span", { "aria-hidden": "true" });
    this.share = make("progress", { max: "1", "aria-label": "Progress" });
    this.waiting = make("div", { class: "waiting" }, make("p", {}, this.doing, " ", this.percent), this.share);
    this.trouble = make("p", { class: "quiet", role: "status" });
    this.message = make("textarea", { id: "message", rows: "1", placeholder: "Write a message",
      "aria-label": "Message", "aria-describedby": "keys", enterkeyhint: isTouch.matches ? "enter" : "send" });
    this.sendButton = make("button", { type: "submit", id: "send" });
    const keys = make("span", { id: "keys", class: "unseen" },
      "Enter sends, Shift and Enter begins a line, Escape stops the answer.");
    this.pictures = new Pictures((problem) => write(this.trouble, problem));
    this.pictures.listenAt(this.message, section);
    const form = make("form", { id: "ask" }, this.pictures.button, this.pictures.input, this.message, this.sendButton, keys);
    this.talk = make("div", { class: "talk" }, top, this.settings.element, this.said, this.newest, this.waiting,
      this.trouble, this.pictures.list, form);
    section.append(this.chats.element, this.chats.curtain, this.talk);

    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.answer) this.stop();
      else this.send();
    });
    this.message.addEventListener("keydown", (event) => {
      const isSent = event.key === "Enter" && !event.shiftKey && !event.isComposing && !isTouch.matches;
      if (!isSent) return;
      event.preventDefault();
      this.send();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !section.hidden && !event.target.closest(".edit, #chats")) this.stop();
    });
    this.message.addEventListener("input", () => {
      this.fit();
      sessionStorage.setItem(DRAFT, this.message.value);
    });
    this.followEnd();
  }

  /** Keeps the newest words in sight, unless the reader has scrolled away from them. */
  followEnd() {
    let before = 0;
    this.said.addEventListener("scroll", () => {
      const { scrollTop, scrollHeight, clientHeight } = this.said;
      if (scrollHeight - scrollTop - clientHeight < NEAR) this.isFollowing = true;
      else if (scrollTop < before) this.isFollowing = false;
      before = scrollTop;
      this.newest.hidden = this.isFollowing;
    });
    const observer = new ResizeObserver(() => this.isFollowing && this.toEnd());
    observer.observe(this.turnList);
    observer.observe(this.said);
  }

  toEnd() {
    this.said.scrollTop = this.said.scrollHeight;
  }

  /** Makes the box as high as its text, up to a third of the window. */
  fit() {
    this.message.style.height = "auto";
    this.message.style.height = `${Math.min(this.message.scrollHeight + 2, innerHeight / 3)}px`;
  }

  // ------------------------------------------------------------ which conversation

  /** The answer under way in the conversation that is shown. */
  get answer() {
    return this.answers.get(this.conversation.head.id);
  }

  fresh() {
    const { model, settings } = kept(LAST);
    return Conversation.begin(model ?? "", settings ?? {});
  }

  /** Shows the conversation of an address; without an id the one that was shown. */
  async open(id) {
    const order = (this.opened += 1);
    await this.ready;
    const current = this.conversation.head;
    if (!id && current.leaf) history.replaceState(null, "", `#chat/${current.id}`);
    if (id && id !== current.id) {
      const found = this.answers.get(id)?.conversation ?? (await this.load(id));
      if (order !== this.opened) return; // another one was chosen meanwhile
      write(this.trouble, found ? "" : "This chat is not in this browser. It may have been deleted.");
      this.display(found ?? this.fresh());
      this.resume();
    }
    await this.chats.refresh(this.conversation.head.id);
  }

  async load(id) {
    const found = await this.store.read(id);
    return found && new Conversation(found.head, found.messages);
  }

  begin() {
    write(this.trouble, "");
    history.pushState(null, "", "#chat");
    this.display(this.fresh());
    this.chats.showAll();
    this.chats.refresh(null);
    this.message.focus();
  }

  display(conversation) {
    this.conversation = conversation;
    this.turns.clear();
    this.turnList.replaceChildren();
    this.isFollowing = true;
    this.showSettings();
    this.draw();
    this.toEnd();
  }

  /** One was deleted. */
  forget(id) {
    const answer = this.answers.get(id);
    if (answer) {
      answer.onKeep = () => {}; // or its end would bring the conversation back
      answer.stop();
    }
    if (id !== this.conversation.head.id) return;
    history.replaceState(null, "", "#chat");
    this.display(this.fresh());
  }

  /** Another tab has changed one: show it as it is there. */
  async changedElsewhere(id) {
    this.heardAt.set(id, Date.now());
    await this.chats.refresh();
    if (id !== this.conversation.head.id || this.answer) return;
    const found = await this.load(id);
    if (!found || id !== this.conversation.head.id || this.answer) return;
    // What is looked at stays, unless something was added to it.
    const { leaf } = this.conversation.head;
    const hasGrown = found.path().some(({ id: one }) => one === leaf);
    if (found.messages.has(leaf) && !hasGrown) found.head.leaf = leaf;
    this.conversation = found;
    this.draw();
  }

  export() {
    const { title } = this.conversation.head;
    const file = new Blob([this.conversation.markdown()], { type: "text/markdown" });
    const name = `${title.replace(/[^\p{L}\p{N} _-]+/gu, "").trim().slice(0, 60) || "chat"}.md`;
    const link = make("a", { href: URL.createObjectURL(file), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  }

  // ------------------------------------------------------------ the model and the settings

  /** Takes a state of the daemon. */
  show({ status }) {
    this.status = status;
    this.drawModels();
    for (const answer of this.answers.values()) answer.see(status);
    if (!this.isResumed) {
      this.isResumed = true;
      this.ready.then(() => this.resume());
    }
  }

  /** Lists the models, and shows which one answers next. */
  drawModels() {
    if (!this.status) return;
    const answering = this.status.models.filter(({ capabilities }) => !capabilities?.length || capabilities.includes("text"));
    const isOpen = document.activeElement === this.models;
    keep(this.models, answering, ({ name }) => name, ({ name }) => make("option", { value: name }), (option, row) => {
      const state = STATES[row.state];
      // A list that is open would jump if its texts changed.
      if (!isOpen || !option.textContent) write(option, state ? `${row.name} (${state})` : row.name);
    });
    const { head } = this.conversation;
    if (!answering.some(({ name }) => name === head.model)) {
      head.model = (answering.find(({ state }) => state === "READY") ?? answering[0])?.name ?? "";
    }
    if (this.models.value !== head.model) this.models.value = head.model;
    this.drawPictures();
    this.drawWelcome();
  }

  /** Says at the button whether the model takes pictures; one whose files are not here yet may. */
  drawPictures() {
    const { model } = this.conversation.head;
    const known = this.status?.models.find(({ name }) => name === model)?.capabilities;
    this.pictures.refuse(known?.length && !known.includes("images") ? `${model} takes text only, no pictures.` : "");
  }

  toggleSettings() {
    const { element } = this.settings;
    element.hidden = !element.hidden;
    mark(this.gear, "aria-expanded", String(!element.hidden));
    if (!element.hidden) element.querySelector("textarea").focus();
  }

  showSettings() {
    this.settings.show(this.conversation.head.settings);
    this.drawModels();
  }

  setUp(settings) {
    this.conversation.head.settings = settings;
    this.remember();
  }

  remember() {
    const { model, settings, leaf } = this.conversation.head;
    localStorage.setItem(LAST, JSON.stringify({ model, settings }));
    if (leaf) this.keep();
  }

  // ------------------------------------------------------------ asking

  send() {
    const text = this.message.value.trim();
    const hasPictures = this.pictures.all.length > 0;
    if ((!text && !hasPictures) || this.answer) return;
    const refusal = hasPictures ? this.pictures.refusal : "";
    write(this.trouble, this.conversation.head.model ? refusal : "There is no model yet. Add one under Models.");
    if (!this.conversation.head.model || refusal) return;
    this.message.value = "";
    sessionStorage.removeItem(DRAFT);
    this.fit();
    this.ask(this.conversation.head.leaf, text, this.pictures.send());
  }

  /** Adds a message of the user below another, and has it answered. */
  ask(parent, text, pictures = []) {
    const { conversation } = this;
    const message = conversation.add(parent, "user", { text, pictures });
    history.replaceState(null, "", `#chat/${conversation.head.id}`);
    this.answerTo(message);
  }

  answerTo(message) {
    const { conversation } = this;
    this.give(conversation.add(message.id, "assistant", {
      model: conversation.head.model, text: "", thought: "", calls: [], breaks: 0, tab: this.tab,
    }));
    this.isFollowing = true;
    this.toEnd();
    if (!isTouch.matches) this.message.focus();
  }

  /** Has an answer given, or continued. */
  async give(message) {
    const { conversation } = this;
    const { id } = conversation.head;
    Object.assign(message, { state: "under way", tab: this.tab, why: "", finish: "", began: Date.now() });
    const isShown = () => this.conversation === conversation;
    const answer = new Answer(conversation, message, {
      onText: () => isShown() && this.turns.get(message.id)?.grow(false),
      onState: () => isShown() && this.drawDoing(),
      onKeep: () => this.keep(conversation, [message]),
    });
    this.answers.set(id, answer);
    this.keep(conversation, [...conversation.path().slice(-2)]);
    this.draw();
    try {
      await answer.run();
    } finally {
      this.answers.delete(id);
      if (isShown()) this.draw();
    }
  }

  /** Continues the answer that this tab was giving when it was reloaded or dropped. */
  resume() {
    const message = this.conversation.messages.get(this.conversation.head.leaf);
    const isOurs = message?.state === "under way" && message.tab === this.tab && !this.answer;
    if (isOurs && this.status && Date.now() - message.began < RESUME_MS) this.give(message);
  }

  stop() {
    this.answer?.stop();
  }

  /** Keeps the conversation and some of its messages. */
  async keep(conversation = this.conversation, messages = []) {
    await this.ready;
    try {
      await this.store.keep({ ...conversation.head }, messages.map((one) => ({ ...one })));
      await this.chats.refresh(this.conversation.head.id);
    } catch (error) {
      write(this.trouble, `This chat could not be saved: ${error.message}`);
    }
  }

  // ------------------------------------------------------------ drawing

  draw() {
    const { conversation, answer } = this;
    const isBusy = Boolean(answer);
    const path = conversation.path();
    keep(this.turnList, path, ({ id }) => id, (message) => this.turn(message), (_, message) => {
      this.turns.get(message.id).update({
        message, isBusy, siblings: conversation.siblings(message), isUnderWay: answer?.message === message,
        isLast: message === path.at(-1), end: message.state === "under way" ? this.elsewhere(message) : undefined,
      });
    });
    // A reader of the screen hears the whole answer, not each piece.
    mark(this.said, "aria-busy", isBusy ? "true" : null);
    const [name, label] = isBusy ? ["stop", "Stop"] : ["send", "Send"];
    this.sendButton.replaceChildren(icon(name));
    mark(this.sendButton, "aria-label", label);
    mark(this.sendButton, "title", label);
    this.drawWelcome();
    this.drawDoing();
  }

  turn(message) {
    const actions = {
      retry: (answer) => this.answerTo(this.conversation.messages.get(answer.parent)),
      goOn: (answer) => this.give(answer),
      edit: ({ parent, pictures }, text) => this.ask(parent, text, pictures),
      choose: (other) => {
        this.conversation.choose(other);
        this.keep();
        this.draw();
      },
    };
    const turn = new Turn(message, actions);
    this.turns.set(message.id, turn);
    return turn.element;
  }

  /** What to say of an answer that is not given here: by another tab, or no longer. */
  elsewhere(message) {
    const { id } = this.conversation.head;
    const silent = Date.now() - Math.max(this.heardAt.get(id) ?? 0, message.tab === this.tab ? 0 : this.openedAt(id));
    if (silent >= SILENT_MS) return "cut";
    clearTimeout(this.later);
    this.later = setTimeout(() => this.draw(), SILENT_MS - silent);
    return "elsewhere";
  }

  /** When the conversation was first looked at here. */
  openedAt(id) {
    if (this.firstSeen?.id !== id) this.firstSeen = { id, at: Date.now() };
    return this.firstSeen.at;
  }

  drawWelcome() {
    this.welcome.hidden = Boolean(this.conversation.head.leaf);
    const hasModel = !this.status || this.models.options.length;
    if (hasModel) write(this.welcome, "What would you like to know?");
    else if (!this.welcome.querySelector("a")) {
      this.welcome.replaceChildren("There is no model yet. Add one under ", make("a", { href: "#models" }, "Models"), ".");
    }
  }

  drawDoing() {
    const { sentence, share } = this.answer?.doing() ?? { sentence: "", share: null };
    const last = this.conversation.messages.get(this.conversation.head.leaf);
    const ended = !sentence && last?.state === "whole" ? "Answered" : "";
    this.waiting.hidden = !this.answer;
    write(this.doing, sentence || ended);
    write(this.percent, share === null ? "" : `${Math.round(share * 100)} %`);
    this.share.hidden = share === null;
    if (share !== null) mark(this.share, "value", String(share));
  }
}
