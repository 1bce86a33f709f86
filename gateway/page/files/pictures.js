// The pictures that go with the next message: chosen, pasted or dropped, and shown until they are sent.

import { iconButton, keep, make, mark } from "./view.js";

/** What every model that takes pictures can read; other types are redrawn, if the browser opens them. */
const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];

/** A larger file is redrawn: each further message sends the pictures of all earlier ones again. */
const MOST_BYTES = 2 * 2 ** 20;

/** Of a picture that is redrawn. Models scale pictures down to about this, or less. */
const MOST_SIDE = 2048;
const QUALITY = 0.9;
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
      const name = file.name || "picture";
      if (this.all.length >= MOST) {
        problem = `A message has at most ${MOST} pictures.`;
        break;
      }
      try {
        this.all.push({ id: (this.number += 1), name, url: await urlOf(file) });
      } catch {
        problem = `${name} must be a picture that your browser can open, such as a PNG or JPEG.`;
      }
    }
    this.onProblem(problem);
    this.draw();
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

/** Returns a picture as a `data:` URL that every model can read; rejects if the browser cannot open it. */
function urlOf(file) {
  const isSent = TYPES.includes(file.type) && file.size && file.size <= MOST_BYTES;
  return isSent ? read(file) : redrawn(file);
}

/** Returns a JPEG of a picture: upright, and at most `MOST_SIDE` long. */
async function redrawn(file) {
  const picture = await createImageBitmap(file);
  const scale = Math.min(1, MOST_SIDE / Math.max(picture.width, picture.height));
  const [width, height] = [picture.width, picture.height].map((side) => Math.max(1, Math.round(side * scale)));
  const canvas = make("canvas", { width, height });
  const pen = canvas.getContext("2d");
  pen.imageSmoothingQuality = "high";
  pen.fillStyle = "white"; // a JPEG would show what is transparent in black
  pen.fillRect(0, 0, width, height);
  pen.drawImage(picture, 0, 0, width, height);
  picture.close();
  return canvas.toDataURL("image/jpeg", QUALITY);
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
