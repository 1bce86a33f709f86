// Questions before anything that takes something away, and the form for the key of an operator.

import { useKey } from "./api.js";
import { make } from "./view.js";

/**
 * Asks a question in a window of its own; the answer is no unless its button is pressed.
 *
 * @param question the title.
 * @param follows what would happen, in sentences.
 * @param verb on the button that agrees.
 * @returns a promise of true if it was agreed to.
 */
export function confirmed(question, follows, verb) {
  const title = make("h2", { id: "question" }, question);
  const yes = make("button", { type: "submit", value: "yes" }, verb);
  const no = make("button", { type: "button" }, "Cancel");
  const dialog = make("dialog", { "aria-labelledby": "question" },
    make("form", { method: "dialog" }, title, ...follows.map((text) => make("p", {}, text)),
      make("p", { class: "row" }, yes, no)));
  no.addEventListener("click", () => dialog.close());
  document.body.append(dialog);
  dialog.showModal();
  no.focus();
  return new Promise((answer) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      answer(dialog.returnValue === "yes");
    });
  });
}

/** What the models show to a viewer whose key is no operator's. */
export class Locked {
  constructor(section, reason) {
    const id = `${section.id}-key`;
    const key = make("input", { id, type: "password", autocomplete: "off", spellcheck: "false" });
    const form = make("form", { class: "row" }, make("label", { for: id }, "Key of an operator"), key,
      make("button", { type: "submit" }, "Use it"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (key.value.trim()) useKey(key.value.trim());
      key.value = "";
    });
    this.element = make("div", { class: "locked" }, make("p", {}, reason), form);
    this.element.hidden = true;
    section.append(this.element);
  }

  show(missing) {
    this.element.hidden = !missing;
  }
}
