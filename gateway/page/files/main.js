// Shows one view at a time, and asks for the state once a second while the page is looked at.
//
// A view is an object made with its section, which it fills by itself. It has `show(snapshot)`, called with
// each new state (`{status, missing}`: why less of it is here than an operator gets, or empty), and `open(rest)`, called as an address leads to it: `rest` is what
// follows the first `/` of a hash such as `#chat/ID`.

import { Refused, needsKey, state, useKey } from "./api.js";
import { Chat } from "./chat.js";
import { Logs } from "./logs.js";
import { Models } from "./models.js";
import { Requests } from "./requests.js";
import { mark, sentence, write } from "./view.js";

const INTERVAL_MS = 1000;
const LIMIT_MS = 5000;

const byId = (id) => document.getElementById(id);
const views = {
  chat: new Chat(byId("chat")),
  models: new Models(byId("models")),
  requests: new Requests(byId("requests")),
  logs: new Logs(byId("logs")),
};
/** Views for operators only. */
const OPERATORS = ["requests", "logs"];
const before = new Map();
let timer = null;
let isAsking = false;
let isGuest = false;

// ---------------------------------------------------------------- views

/** Shows the view that the address names. */
function navigate(isFirst = false) {
  const [name, ...rest] = location.hash.slice(1).split("/");
  const isOpen = Object.hasOwn(views, name) && !(isGuest && OPERATORS.includes(name));
  const chosen = isOpen ? name : "chat";
  const isOther = document.body.dataset.view !== chosen;
  document.body.dataset.view = chosen;
  for (const key of Object.keys(views)) byId(key).hidden = key !== chosen;
  for (const link of byId("views").children) {
    mark(link, "aria-current", link.hash === `#${chosen}` ? "page" : null);
  }
  document.title = `${byId(`${chosen}-title`).textContent} · mlxsup`;
  views[chosen].open(rest.join("/"));
  if (isOther && !isFirst) byId(chosen).focus({ preventScroll: true });
}

window.addEventListener("hashchange", () => navigate());

// ---------------------------------------------------------------- the state

const NEWS = {
  READY: "is ready", FAILED: "cannot be loaded", BACKOFF: "crashed and loads again", STOPPED: "is not loaded",
};

/** Tells a screen reader which models have changed. */
function news(status) {
  const said = [];
  for (const { name, state, generation } of status.models) {
    const now = `${state} ${generation}`;
    const isNew = before.has(name) && before.get(name) !== now;
    if (isNew && NEWS[state]) said.push(`${name} ${NEWS[state]}`);
    before.set(name, now);
  }
  if (said.length) write(byId("news"), said.join("; "));
}

/** Leaves out the views that are of no use without an operator's key. */
function limit(missing) {
  if (isGuest === Boolean(missing)) return;
  isGuest = Boolean(missing);
  for (const name of OPERATORS) document.querySelector(`nav a[href="#${name}"]`).hidden = isGuest;
  navigate();
}

function show(snapshot) {
  write(byId("alert"), "");
  byId("enter").hidden = true;
  news(snapshot.status);
  limit(snapshot.missing);
  for (const view of Object.values(views)) view.show(snapshot);
}

const LOCKS = {
  missing_api_key: "A key is needed to use this page.",
  invalid_api_key: "This key does not work. It may have been revoked.",
};

function trouble(error) {
  const isLocked = needsKey(error);
  const again = "Trying again…";
  if (!(error instanceof Refused)) write(byId("alert"), `mlxsup cannot be reached. ${again}`);
  else write(byId("alert"), isLocked ? (LOCKS[error.code] ?? error.message) : `${sentence(error.message)} ${again}`);
  byId("enter").hidden = !isLocked;
  // What is being typed must not end up in the key.
  const isTyping = document.activeElement.matches("textarea, input");
  if (isLocked && !isTyping) byId("key").focus();
}

async function look() {
  timer = null;
  isAsking = true;
  let found = null;
  try {
    found = await state(AbortSignal.timeout(LIMIT_MS));
  } catch (error) {
    trouble(error);
  }
  isAsking = false;
  if (found) show(found);
  lookSoon();
}

function lookSoon() {
  // Without a key, the same refusal would come again.
  const isLocked = !byId("enter").hidden;
  if (timer === null && !document.hidden && !isLocked) timer = setTimeout(look, INTERVAL_MS);
}

byId("enter").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value.trim());
  byId("key").value = "";
  if (!isAsking && timer === null) look();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && !isAsking && timer === null) look();
});
navigate(true);
look();
