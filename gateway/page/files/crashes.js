// The last crashes: which process, when, why, and what it had printed.

import { log } from "./api.js";
import { cause, duration, keep, make, write } from "./view.js";

/** Shows them, the newest first. */
export function showCrashes(list, none, crashes) {
  none.hidden = crashes.length > 0;
  keep(list, crashes, (one) => `${one.model} ${one.generation} ${one.at}`, create, (element, one) => {
    write(element.querySelector("time"), one.at === null ? "" : ago(one.at));
  });
}

function ago(at) {
  return `${duration(Date.now() / 1000 - at)} ago`;
}

function create(one) {
  const title = `${one.model}, generation ${one.generation}: ${cause(one)}`;
  const time = make("time", one.at === null ? {} : { datetime: new Date(one.at * 1000).toISOString() });
  const name = `What ${one.model}, generation ${one.generation}, had printed`;
  const lines = make("pre", { tabindex: "0", role: "region", "aria-label": name });
  const details = make("details", {}, make("summary", {}, "Its last lines"), lines);
  details.addEventListener("toggle", () => {
    if (details.open) read(one, lines);
  });
  return make("li", {}, make("p", {}, make("strong", {}, title), " ", time), details);
}

async function read(one, lines) {
  write(lines, "…");
  try {
    const found = await log(one.model, one.generation);
    write(lines, found.join("\n") || "It had printed nothing, or the log no longer has it.");
  } catch (error) {
    write(lines, `They cannot be read: ${error.message}`);
  }
}
