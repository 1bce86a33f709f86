// Small helpers to make and update elements, and to write sizes and times.

/** An element with attributes and children; texts are texts, never markup. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
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

/** `1 request`, `2 requests`. */
export function count(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}
