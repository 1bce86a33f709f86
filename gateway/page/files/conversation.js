// A conversation: a tree of messages. An edited message and a repeated answer stand beside the earlier one
// under the same parent, so that nothing is lost; what is shown is the path to one leaf.

const TITLE = 60;

/** A name that no other has; `crypto.randomUUID` is missing where a page comes over plain HTTP. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export class Conversation {
  /**
   * @param head `{id, title, at, model, settings, leaf}`: what the list needs, and what is shown.
   * @param messages each `{id, parent, role, text, …}`, in any order.
   */
  constructor(head, messages = []) {
    this.head = head;
    this.messages = new Map(messages.map((message) => [message.id, message]));
  }

  static begin(model, settings) {
    return new Conversation({ id: newId(), title: "", at: Date.now(), model, settings, leaf: null });
  }

  /** The messages that are shown, the first one first. */
  path() {
    const found = [];
    let message = this.messages.get(this.head.leaf);
    while (message) {
      found.push(message);
      message = this.messages.get(message.parent);
    }
    return found.reverse();
  }

  /** Those that stand beside a message, itself among them, the oldest first. */
  siblings(message) {
    return [...this.messages.values()]
      .filter(({ parent, role }) => parent === message.parent && role === message.role)
      .sort((one, other) => one.at - other.at || (one.id < other.id ? -1 : 1));
  }

  /** Adds a message below another (null: at the beginning), and shows it. */
  add(parent, role, values) {
    const message = { id: newId(), chat: this.head.id, parent, role, at: Date.now(), ...values };
    this.messages.set(message.id, message);
    this.head.leaf = message.id;
    this.head.at = message.at;
    if (!this.head.title && role === "user") this.head.title = titleOf(message.text || "Picture");
    return message;
  }

  /** Shows the path through a message that leads to the newest below it. */
  choose(message) {
    const children = Map.groupBy?.(this.messages.values(), ({ parent }) => parent);
    let leaf = message;
    for (;;) {
      const below = children?.get(leaf.id) ??
        [...this.messages.values()].filter(({ parent }) => parent === leaf.id);
      if (!below.length) break;
      leaf = below.reduce((newest, one) => (one.at >= newest.at ? one : newest));
    }
    this.head.leaf = leaf.id;
  }

  /** What a request sends to get the answer `answer`; text that it has already is continued. */
  request(answer) {
    const given = [];
    const { settings } = this.head;
    if (settings.system?.trim()) given.push({ role: "system", content: settings.system });
    let message = this.messages.get(answer.parent);
    const before = [];
    while (message) {
      before.push(message);
      message = this.messages.get(message.parent);
    }
    for (const { role, text, pictures } of before.reverse()) {
      // An answer that failed before its first word has nothing to tell.
      if (text || role === "user") given.push({ role, content: contentOf(text, pictures) });
    }
    // What ends with an answer is continued.
    if (answer.text.trim()) {
      const thought = answer.thought ? { reasoning_content: answer.thought } : {};
      given.push({ role: "assistant", content: answer.text, ...thought });
    }
    return {
      model: answer.model, messages: given, stream_options: { include_usage: true },
      ...sampling(settings),
    };
  }

  /** The conversation as a Markdown file. */
  markdown() {
    const parts = this.path().map(({ role, text, model, pictures = [] }) => {
      return `## ${role === "user" ? "You" : model}\n\n${names(pictures)}${text.trim()}\n`;
    });
    return [`# ${this.head.title}\n`, ...parts].join("\n");
  }
}

/** What a message says: a text, or pictures before one. */
function contentOf(text, pictures = []) {
  if (!pictures.length) return text;
  const parts = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

function titleOf(text) {
  const line = text.trim().split("\n")[0].replace(/\s+/g, " ");
  return line.length > TITLE ? `${line.slice(0, TITLE - 1)}…` : line;
}

function names(pictures) {
  return pictures.map(({ name }) => `[Picture: ${name}]\n\n`).join("");
}

/** The fields of a request; what is not set is left to the model. */
function sampling(settings) {
  const fields = {};
  for (const name of ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens"]) {
    if (Number.isFinite(settings[name])) fields[name] = settings[name];
  }
  if (settings.thinking) fields.reasoning_effort = settings.thinking;
  return fields;
}
