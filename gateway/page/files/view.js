// Small helpers to make and update elements, and to write sizes and times.

/** An element with attributes and children; texts are texts, never markup. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

const ICONS = {
  add: "M12 5v14M5 12h14", back: "M15 5l-7 7 7 7", check: "M5 12l5 5 9-10", close: "M6 6l12 12M18 6L6 18",
  picture: "M4 5h16v14H4zM4 17l5-6 4 5 3-3 4 4",
  copy: "M9 9h11v11H9zM15 9V4H4v11h5", down: "M12 5v14M6 13l6 6 6-6", edit: "M4 20l1-5L16 4l4 4L9 19z",
  forward: "M9 5l7 7-7 7", list: "M4 6h16M4 12h16M4 18h16", play: "M8 5l11 7-11 7z",
  remove: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13", retry: "M19 12a7 7 0 1 1-2-5l2 2M19 4v5h-5",
  save: "M12 4v11M7 11l5 5 5-5M5 20h14", send: "M12 20V5M6 11l6-6 6 6", settings: "M4 8h10M18 8h2M16 6v4M4 16h2M10 16h10M8 14v4",
  stop: "M5 5h14v14H5z",
};

/** A picture of 24 by 24, which a screen reader passes over. */
export function icon(name) {
  const picture = document.createElementNS(SVG, "svg");
  picture.setAttribute("viewBox", "0 0 24 24");
  picture.setAttribute("aria-hidden", "true");
  const path = picture.appendChild(document.createElementNS(SVG, "path"));
  path.setAttribute("d", ICONS[name]);
  return picture;
}

/** A button that shows a picture, and is called by its label. */
export function iconButton(name, label, onClick, attributes = {}) {
  const all = { type: "button", class: "plain icon", "aria-label": label, title: label, ...attributes };
  const button = make("button", all, icon(name));
  button.addEventListener("click", onClick);
  return button;
}

/** A button that copies a text, and shows for a moment that it has. */
export function copyButton(label, read) {
  const button = iconButton("copy", label, async () => {
    const isCopied = await copy(read());
    button.replaceChildren(icon(isCopied ? "check" : "close"));
    mark(button, "aria-label", isCopied ? "Copied" : "The browser does not allow it");
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      mark(button, "aria-label", label);
    }, 1500);
  });
  return button;
}

/** Puts a text on the clipboard, also where the page comes over plain HTTP; returns whether it is there. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Older ways work on pages that browsers do not call secure.
    const holder = make("textarea", { class: "unseen", "aria-hidden": "true" });
    holder.value = text;
    const before = document.activeElement;
    document.body.append(holder);
    holder.select();
    const isCopied = document.execCommand("copy");
    holder.remove();
    before?.focus();
    return isCopied;
  }
}

/** Sets a text, only if it differs: screen readers read what changes. */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Sets an attribute, only if it differs; null removes it. */
export function mark(element, name, value) {
  if (value === null) element.removeAttribute(name);
  else if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/**
 * Makes the children of a list those of the items, in their order. What stays is never taken out, so
 * that it keeps the focus.
 *
 * @param parent the list.
 * @param items what it shows.
 * @param keyOf the name of an item, which no other has.
 * @param create makes the element of an item.
 * @param update brings an element up to date.
 */
export function keep(parent, items, keyOf, create, update) {
  const wanted = new Set(items.map((item) => String(keyOf(item))));
  for (const child of [...parent.children]) if (!wanted.has(child.dataset.key)) child.remove();
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let element = old.get(key);
    if (!element) {
      element = create(item);
      element.dataset.key = key;
    }
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
    update(element, item);
  }
}

/** `602.7 MiB`, `1.50 GiB`: in the unit that suits it and rounded up, as the command line does. */
export function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  if (bytes > 0 && bytes < 2 ** 10) return `${bytes} B`;
  if (bytes > 0 && bytes * 10 < 2 ** 20) return `${rounded(bytes, 2 ** 10, 1)} KiB`;
  if (bytes < 2 ** 30) return `${rounded(bytes, 2 ** 20, 1)} MiB`;
  if (bytes < 2 ** 40) return `${rounded(bytes, 2 ** 30, 2)} GiB`;
  return `${rounded(bytes, 2 ** 40, 2)} TiB`;
}

function rounded(bytes, unit, digits) {
  return (Math.ceil((bytes * 10 ** digits) / unit) / 10 ** digits).toFixed(digits);
}

/** `2m 5s`: the two largest units. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.max(0, Math.floor(seconds));
  const days = Math.floor(whole / 86400);
  const hours = Math.floor(whole / 3600) % 24;
  const minutes = Math.floor(whole / 60) % 60;
  if (days) return `${days}d ${hours}h`;
  if (hours) return `${hours}h ${minutes}m`;
  if (minutes) return `${minutes}m ${whole % 60}s`;
  return `${whole}s`;
}

/** An error's text as a sentence. */
export function sentence(text) {
  const ended = /[.!?]$/.test(text) ? text : `${text}.`;
  return ended[0].toUpperCase() + ended.slice(1);
}

/** `1 request`, `2 requests`. */
export function count(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}
