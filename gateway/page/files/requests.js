// Who waits and who runs: by account, and each open request.

import { duration, keep, make, write } from "./view.js";

const PAUSES = {
  user: "paused by somebody", turn: "waits for its turn", class: "gave way to a higher class",
  swap: "waits until its model is back", memory: "waits for memory",
};

export class Requests {
  constructor(section) {
    this.accounts = make("tbody", { id: "accounts" });
    this.requests = make("tbody", { id: "open" });
    section.append(
      table("By account", ["Account", "Waiting", "Running", "Weight"], this.accounts),
      table("Open now, running ones first",
        ["Request", "Model", "State", "Tokens", "Waited", "Class", "Account"], this.requests),
    );
  }

  open() {}

  show({ status }) {
    showRequests(this.accounts, this.requests, status);
  }
}

function table(title, columns, body) {
  const heads = columns.map((column) => make("th", { scope: "col" }, column));
  const head = make("thead", {}, make("tr", {}, ...heads));
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title },
    make("table", {}, make("caption", {}, title), head, body));
}

/** Shows the accounts and the open requests of a status. */
function showRequests(accounts, open, status) {
  const clients = Object.entries(status.queue.clients);
  keep(accounts, clients, ([name]) => name, cells(4), (line, [name, account]) => {
    fill(line, [name, account.waiting, account.running, account.weight]);
  });
  keep(open, openRequests(status), (one) => `${one.request.number} ${one.request.client}`, cells(7),
    (line, { request, model, state }) => {
      fill(line, [request.number, model, state, request.tokens_sent, duration(request.waited_s),
        request.class, request.client]);
    });
}

/** All of them with what each is doing: running ones, paused ones, then those in line. */
function openRequests(status) {
  const lists = [["rows", "running"], ["paused_rows", "paused"], ["line", "waiting"]];
  return lists.flatMap(([key, word]) => status.models.flatMap((row) => row[key].map((request) => ({
    request, model: row.name, state: stateOf(request, word),
  }))));
}

function stateOf(request, word) {
  const pause = request.paused ? `, ${PAUSES[request.paused] ?? request.paused}` : "";
  const times = request.resumed === 1 ? "once" : `${request.resumed} times`;
  return word + pause + (request.resumed ? `, resumed ${times} after a crash` : "");
}

function cells(number) {
  return () => {
    const first = make("th", { scope: "row" });
    return make("tr", {}, first, ...Array.from({ length: number - 1 }, () => make("td")));
  };
}

function fill(line, values) {
  values.forEach((value, place) => write(line.children[place], String(value)));
}
