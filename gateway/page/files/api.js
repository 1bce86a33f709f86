// What this page asks its gateway for. The token proves that it comes from here; where keys are needed,
// a key is what counts.

const KEY = "mlxsup-key";

let key = sessionStorage.getItem(KEY) ?? "";
let token = document.querySelector('meta[name="mlxsup-token"]').content;

/** An answer that is an error; `message` is a sentence for people, `code` names its kind. */
export class Refused extends Error {
  constructor(status, message, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Errors that end by themselves: another daemon or gateway is about to start. */
const AWAY = ["unreachable", "daemon_lost", "daemon_silent", "shutting_down", "broken_off"];

/** Sends this key from now on, until the browser's tab is closed. */
export function useKey(given) {
  key = given;
  sessionStorage.setItem(KEY, given);
}

/** Whether it was refused for want of a key that counts. */
export function needsKey(error) {
  return error instanceof Refused && (error.status === 401 || error.status === 403);
}

/** True if the same request may succeed later, with nothing changed in it. */
export function isAway(error) {
  return needsKey(error) || AWAY.includes(error.code);
}

function headers() {
  return { "x-mlxsup-token": token, ...(key && { authorization: `Bearer ${key}` }) };
}

/** The error of a response. */
async function refusal(response) {
  try {
    const { message, code } = (await response.json()).error;
    return new Refused(response.status, message, code);
  } catch {
    // It is not one of the gateway's own errors: the status has to do.
    return new Refused(response.status, `${response.status} ${response.statusText}`);
  }
}

/** A gateway that was started anew has another token, and a page that contains it. */
async function renewToken() {
  const response = await fetch("/", { headers: { accept: "text/html" }, cache: "no-store" });
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  const renewed = page.querySelector('meta[name="mlxsup-token"]')?.content;
  const isNew = Boolean(renewed) && renewed !== token;
  if (isNew) token = renewed;
  return isNew;
}

async function ask(path, options = {}) {
  const send = () => {
    const all = { ...options.headers, ...headers() };
    return fetch(path, { ...options, headers: all, cache: "no-store" });
  };
  let response = await send();
  if (response.status === 403 && (await renewToken())) response = await send();
  if (!response.ok) throw await refusal(response);
  return response;
}

/** Gets what is at a path, as an object. */
export async function get(path, query = {}, signal = null) {
  return (await ask(`${path}?${new URLSearchParams(query)}`, { signal })).json();
}

/** Gets what is at a path, as a file. */
export async function getFile(path, query) {
  return (await ask(`${path}?${new URLSearchParams(query)}`)).blob();
}

/** Asks for a change; returns once it is accepted. */
export async function post(path, body) {
  const headers = { "content-type": "application/json" };
  return (await ask(path, { method: "POST", headers, body: JSON.stringify(body) })).json();
}

/** The daemon's status, and why less of it is shown than an operator gets. */
export function state(signal) {
  return get("/page/state", {}, signal);
}

/** Why something did not work, in a sentence. */
export function why(error) {
  return error instanceof Refused ? error.message : "mlxsup does not answer";
}

/**
 * Streams an answer.
 *
 * @param body of `POST /v1/chat/completions`.
 * @param signal ends it.
 * @param onChunk gets each chunk.
 * @param onComment gets what the answer waits for.
 * @throws Refused if it is refused or breaks off; AbortError if it was ended.
 */
export async function chat(body, signal, onChunk, onComment) {
  const response = await reached(fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...headers() },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  }), signal);
  if (!response.ok) throw await refusal(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reached(reader.read(), signal);
    if (done) throw new Refused(0, "The answer has broken off.", "broken_off");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event.startsWith(": ")) onComment(event.slice(2));
      if (!event.startsWith("data: ")) continue;
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(0, chunk.error.message, chunk.error.code);
      onChunk(chunk);
    }
  }
}

/** What a connection leads to; one that fails for want of a peer is an error for people, too. */
async function reached(promise, signal) {
  try {
    return await promise;
  } catch (error) {
    if (signal.aborted) throw error;
    throw new Refused(0, "mlxsup cannot be reached.", "unreachable");
  }
}
