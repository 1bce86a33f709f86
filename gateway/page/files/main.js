// Asks for the state once a second while somebody looks, and shows it.

import { Refused, needsKey, state, useKey } from "./api.js";
import { Charts } from "./charts.js";
import { Chat } from "./chat.js";
import { showCrashes } from "./crashes.js";
import { showModels } from "./models.js";
import { showRequests } from "./requests.js";
import { duration, size, write } from "./view.js";

const INTERVAL_MS = 1000;
const LIMIT_MS = 5000;

const byId = (id) => document.getElementById(id);
const charts = new Charts(byId("speed"), byId("memory"));
const chat = new Chat();
const before = new Map();
let timer = null;
let isAsking = false;

/** What a reader of the screen is notified of: models that have changed. */
function news(status) {
  const said = [];
  for (const row of status.models) {
    const now = `${row.name} is ${row.state}, generation ${row.generation}`;
    const isNew = before.has(row.name) && before.get(row.name) !== now;
    if (isNew && ["READY", "FAILED", "BACKOFF", "STOPPED"].includes(row.state)) said.push(now);
    before.set(row.name, now);
  }
  if (said.length) write(byId("news"), said.join("; "));
}

/** Whether a model loses something because other programs need memory. */
function isShort({ memory, models }) {
  return memory.shortage && (memory.over_bytes || models.some((row) => row.memory_wait));
}

function headline(status) {
  const { reserved_bytes: reserved, budget_bytes: budget } = status.memory;
  const parts = [`version ${status.version}`, `up ${duration(status.uptime_s)}`];
  parts.push(budget ? `${size(reserved)} of ${size(budget)} reserved` : `${size(reserved)} reserved`);
  if (isShort(status)) parts.push(`memory is short: ${status.memory.shortage}`);
  if (status.gateway?.restarts) parts.push(`gateway restarted ${status.gateway.restarts} times`);
  return parts.join(" · ");
}

function show({ status, crashes }) {
  byId("alert").hidden = true;
  byId("enter").hidden = true;
  write(byId("daemon"), headline(status));
  news(status);
  showModels(byId("cards"), status);
  showRequests(byId("accounts"), byId("open"), status);
  showCrashes(byId("crashes"), byId("no-crashes"), crashes);
  chat.show(status);
  charts.add(Date.now() / 1000, status);
}

function trouble(error) {
  const why = error instanceof Refused ? error.message : "mlxsup does not answer";
  const isLocked = needsKey(error);
  write(byId("alert"), isLocked ? why : `${why}. Trying again; what is shown may be old.`);
  byId("alert").hidden = false;
  byId("enter").hidden = !isLocked;
  if (isLocked) byId("key").focus();
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
look();
