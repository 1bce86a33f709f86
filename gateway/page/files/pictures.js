// The pictures that go with the next message: chosen, pasted or dropped, and shown until they are sent.

import { iconButton, keep, make, mark, size } from "./view.js";

/** What every model that takes pictures can read; a phone converts its own photographs to one of these. */
const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];
const MOST_BYTES = 20 * 2 ** 20;
const MOST = 50;

export class Pictures {
  /**
   * @param onProblem gets a sentence if something cannot be attached; an empty one if all is well.
   */
  constructor(onProblem) {
    this.onProblem = onProblem;
    this.all = [];
    this.number = 0;
    this.refusal = "";
    this.input = make("input", { type: "file", accept: TYPES.join(","), multiple: "", hidden: "" });
    this.input.addEventListener("change", () => {
      this.add([...this.input.files]);
      this.input.value = "";
    });
    this.button = iconButton("picture", "Attach pictures", () => {
      this.onProblem(this.refusal);
      if (!this.refusal) this.input.click();
    }, { id: "attach" });
    this.list = make("ul", { class: "pictures attached", "aria-label": "Attached pictures" });
    this.draw();
  }

  /** Takes what is pasted into an element, or dropped onto it. */
  listenAt(box, target) {
    box.addEventListener("paste", (event) => this.take(event, event.clipboardData));
    target.addEventListener("dragover", (event) => {
      if (event.dataTransfer.types.includes("Files")) event.preventDefault();
    });
    target.addEventListener("drop", (event) => this.take(event, event.dataTransfer));
  }

  take(event, { files }) {
    if (!files.length) return;
    event.preventDefault();
    this.add([...files]);
  }

  /** Says why the chosen model takes none; empty: it does, or was not loaded yet. */
  refuse(why) {
    this.refusal = why;
    mark(this.button, "aria-disabled", why ? "true" : null);
    mark(this.button, "title", why || "Attach pictures");
    mark(this.button, "aria-label", why ? `Attach pictures: ${why}` : "Attach pictures");
  }

  async add(files) {
    let problem = this.refusal;
    for (const file of problem ? [] : files) {
      const why = this.problemOf(file);
      if (why) problem = why;
      else this.all.push({ id: (this.number += 1), name: file.name || "picture", url: await read(file) });
    }
    this.onProblem(problem);
    this.draw();
  }

  problemOf({ name, type, size: bytes }) {
    if (!TYPES.includes(type)) return `${name} must be a PNG, JPEG, WebP, GIF or BMP.`;
    if (!bytes) return `${name} is empty.`;
    if (bytes > MOST_BYTES) return `${name} must have at most ${size(MOST_BYTES)}, not ${size(bytes)}.`;
    return this.all.length < MOST ? "" : `A message has at most ${MOST} pictures.`;
  }

  /** Returns the pictures for a message, `{name, url}` each, and has none any longer. */
  send() {
    const sent = this.all.map(({ name, url }) => ({ name, url }));
    this.all = [];
    this.draw();
    return sent;
  }

  draw() {
    this.list.hidden = !this.all.length;
    keep(this.list, this.all, ({ id }) => id, ({ id, name, url }) => make("li", {},
      make("img", { src: url, alt: name }),
      iconButton("close", `Remove ${name}`, () => {
        this.all = this.all.filter((one) => one.id !== id);
        this.draw();
        this.button.focus();
      })), () => {});
  }
}

/** The pictures of a message that was sent. */
export function shown(pictures) {
  const list = make("ul", { class: "pictures" });
  list.append(...pictures.map(({ name, url }) => make("li", {}, make("img", { src: url, alt: name }))));
  return list;
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
