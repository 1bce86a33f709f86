// Markdown of a model, as elements: markdown-it reads it, and what it found is built from a list of known
// elements, one by one. No text ever becomes markup. A text that would be too much for a browser is shown
// as it stands.

import MarkdownIt from "./lib-markdown.js";
import { copyButton, make } from "./view.js";

/** Beyond these a text is shown as it stands: a parse takes less than a second up to there. */
const MOST_CHARACTERS = 100_000;
const MOST_PIECES = 20_000;
const MOST_NESTING = 40;
const MOST_COLOURED = 20_000;
/** Characters of a plain text in one element: the browser lays out the last of them anew for each word. */
const PLAIN_PART = 10_000;
/** Of the time, at most this share goes into showing what has come. */
const SHARE = 0.1;

const PROTOCOLS = new Set(["http:", "https:", "mailto:"]);
const ELEMENTS = {
  paragraph: "p", bullet_list: "ul", ordered_list: "ol", list_item: "li", blockquote: "blockquote",
  table: "table", thead: "thead", tbody: "tbody", tr: "tr", th: "th", td: "td",
  em: "em", strong: "strong", s: "s",
};
/** Headings of an answer stand below those of the page. */
const HEADINGS = { h1: "h3", h2: "h4", h3: "h5", h4: "h6", h5: "h6", h6: "h6" };

const reader = new MarkdownIt({ html: false, linkify: true, breaks: true, maxNesting: MOST_NESTING });
reader.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
// Each address is checked where its link is made; here they would become text with brackets.
reader.validateLink = () => true;

/**
 * A text whose characters are all seen: a control character becomes its picture, and one that turns the
 * direction of writing becomes its number, because either can hide what a text says.
 */
export function visible(text) {
  return text
    .replace(/\r\n?/g, "\n")
    .replace(/[\u0000-\u0008\u000b-\u001f]/g, (one) => String.fromCharCode(0x2400 + one.charCodeAt(0)))
    .replace(/[\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g, (one) => {
      return `[U+${one.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}]`;
    });
}

/** The top level pieces of a text, each with its source and tokens; null if it is too much to show so. */
function blocksOf(text) {
  if (text.length > MOST_CHARACTERS) return null;
  const known = {};
  const tokens = reader.parse(text, known);
  const lines = text.split("\n");
  const links = Object.keys(known.references ?? {}).length;
  const blocks = [];
  let pieces = 0;
  for (const token of tokens) {
    pieces += 1 + (token.children?.length ?? 0);
    // What is nested deeper is left out by the reader.
    if (pieces > MOST_PIECES || token.level >= MOST_NESTING - 2) return null;
    if (token.level === 0 && token.nesting >= 0) {
      // A link may be defined below the text that uses it.
      const source = `${links} ${lines.slice(...token.map).join("\n")}`;
      blocks.push({ source, tokens: [] });
    }
    blocks.at(-1).tokens.push(token);
  }
  return blocks.length || !text.trim() ? blocks : null;
}

/** An element that shows a text which grows. What has not changed is not made anew. */
export class Prose {
  constructor(element) {
    this.element = element;
    this.shown = [];
    this.plain = "";
    this.text = "";
    this.isWhole = false;
    this.timer = null;
    this.notBefore = 0;
  }

  /**
   * Shows a text; one that is not whole yet a little later, if the last took long.
   *
   * @param text all of it.
   * @param isWhole whether nothing more comes.
   */
  update(text, isWhole) {
    this.text = text;
    this.isWhole = isWhole;
    if (isWhole) this.draw();
    else this.timer ??= setTimeout(() => this.draw(), Math.max(30, this.notBefore - performance.now()));
  }

  draw() {
    clearTimeout(this.timer);
    this.timer = null;
    const began = performance.now();
    const text = visible(this.text);
    const blocks = this.plain ? null : blocksOf(text);
    if (blocks) this.drawBlocks(blocks);
    else this.drawPlain(text);
    const now = performance.now();
    this.notBefore = now + (now - began) * (1 / SHARE - 1);
  }

  drawBlocks(blocks) {
    blocks.forEach(({ source, tokens }, place) => {
      const isLast = place === blocks.length - 1;
      const isGrowing = isLast && !this.isWhole;
      const key = `${isGrowing ? "…" : ""}${source}`;
      if (this.shown[place]?.key === key) return;
      const code = tokens[0].type === "fence" && this.shown[place]?.code;
      if (code && code.info === tokens[0].info) {
        code.take(tokens[0].content, isGrowing);
        this.shown[place].key = key;
        return;
      }
      const made = build(tokens, isGrowing);
      const old = this.element.children[place];
      if (old) old.replaceWith(made.element);
      else this.element.append(made.element);
      this.shown[place] = { key, code: made.code };
    });
    while (this.element.children.length > blocks.length) this.element.lastElementChild.remove();
    this.shown.length = blocks.length;
  }

  drawPlain(text) {
    if (!text.startsWith(this.plain) || !this.plain) {
      this.element.replaceChildren();
      this.shown = [];
      this.plain = "";
    }
    let rest = text.slice(this.plain.length);
    while (rest) {
      let part = this.element.lastElementChild;
      const isFull = !part || part.textContent.length >= PLAIN_PART;
      if (isFull) part = this.element.appendChild(make("div", { class: "as-it-stands" }));
      const taken = rest.slice(0, PLAIN_PART - part.textContent.length);
      part.append(taken);
      rest = rest.slice(taken.length);
    }
    this.plain = text;
  }
}

// ---------------------------------------------------------------- elements

/** The element of one top level piece; `code` if it is a code block. */
function build(tokens, isGrowing) {
  const root = make("div");
  let place = root;
  let code = null;
  for (const token of tokens) {
    if (token.nesting < 0) {
      if (!token.hidden) place = place.parentElement;
    } else if (token.nesting > 0) {
      if (token.hidden) continue;
      const element = opened(token);
      place.append(element);
      place = element;
    } else if (token.type === "fence" || token.type === "code_block") {
      code = new Code(token.info ?? "");
      code.take(token.content, isGrowing);
      place.append(code.element);
    } else if (token.type === "inline") {
      buildInline(place, token.children);
    } else if (token.type === "hr") {
      place.append(make("hr"));
    }
  }
  const [only] = root.children;
  if (!only) return { element: root, code };
  if (only.tagName !== "TABLE") return { element: only, code: only === code?.element ? code : null };
  const attributes = { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" };
  return { element: make("div", attributes, only), code: null };
}

function opened(token) {
  const kind = token.type.replace(/_open$/, "");
  if (kind === "heading") return make(HEADINGS[token.tag]);
  const element = make(ELEMENTS[kind] ?? "span");
  if (kind === "ordered_list" && token.attrGet("start")) element.setAttribute("start", token.attrGet("start"));
  const side = token.attrGet("style")?.match(/^text-align:(left|center|right)$/)?.[1];
  if (side) element.className = side;
  return element;
}

function buildInline(parent, tokens) {
  let place = parent;
  for (const token of tokens) {
    if (token.type === "link_open") {
      const link = linkTo(token.attrGet("href"));
      place.append(link);
      place = link;
    } else if (token.nesting > 0) {
      const element = opened(token);
      place.append(element);
      place = element;
    } else if (token.nesting < 0) {
      place = place.parentElement;
    } else if (token.type === "image") {
      // No picture is loaded: its address would tell another site who reads this.
      const link = linkTo(token.attrGet("src"));
      link.append(`Picture: ${token.content || token.attrGet("src").slice(0, 80)}`);
      place.append(link);
    } else if (token.type === "code_inline") {
      place.append(make("code", {}, token.content));
    } else if (token.type === "softbreak" || token.type === "hardbreak") {
      place.append(make("br"));
    } else {
      place.append(token.content);
    }
  }
}

/** A link, or no more than a text if its address leads to no other site. */
function linkTo(address) {
  let found = null;
  try {
    found = new URL(address);
  } catch {
    // An address within this page means nothing here.
  }
  if (!found || !PROTOCOLS.has(found.protocol)) return make("span", { class: "no-link" });
  return make("a", { href: found.href, title: found.href, target: "_blank", rel: "noopener noreferrer" });
}

// ---------------------------------------------------------------- code

/** A code block with its language and a button that copies it. */
class Code {
  constructor(info) {
    this.info = info;
    this.language = info.trim().split(/\s+/)[0].toLowerCase();
    this.text = make("code");
    const name = make("span", { class: "language" }, this.language || "text");
    const label = `Code${this.language ? `, ${this.language}` : ""}`;
    this.scroll = make("pre", { tabindex: "0", role: "region", "aria-label": label }, this.text);
    const copy = copyButton("Copy code", () => this.source);
    this.element = make("div", { class: "code" }, make("div", { class: "code-head" }, name, copy), this.scroll);
    this.source = "";
  }

  take(text, isGrowing) {
    const source = text.replace(/\n$/, "");
    if (source !== this.source || !this.text.firstChild) this.text.replaceChildren(source);
    this.source = source;
    if (isGrowing || !this.language || source.length > MOST_COLOURED) return;
    plain.set(this.text, { language: this.language, source });
    sight.observe(this.text);
  }
}

/** Codes without colours yet: they get them as they come into sight, since a long chat has many. */
const plain = new WeakMap();
const sight = new IntersectionObserver((changes) => {
  for (const { isIntersecting, target } of changes) {
    if (!isIntersecting) continue;
    sight.unobserve(target);
    colour(target);
  }
});
let lowlight = null;

/** Colours a code, once the library is there and if it knows the language. */
async function colour(element) {
  lowlight ??= import("./lib-highlight.js").then(({ common, createLowlight }) => createLowlight(common));
  const colours = await lowlight;
  const { language, source } = plain.get(element);
  if (!colours.registered(language) || element.textContent !== source) return;
  element.replaceChildren(...colours.highlight(language, source).children.map(coloured));
}

function coloured(node) {
  if (node.type === "text") return node.value;
  return make("span", { class: node.properties.className.join(" ") }, ...node.children.map(coloured));
}
