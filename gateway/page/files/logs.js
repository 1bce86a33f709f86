// The logs: so far, the last crashes.

import { showCrashes } from "./crashes.js";
import { make } from "./view.js";

export class Logs {
  constructor(section) {
    this.none = make("p", { id: "no-crashes" }, "None since the gateway has started.");
    this.crashes = make("ul", { id: "crashes", class: "crashes", role: "list" });
    section.append(make("h3", {}, "Last crashes"), this.none, this.crashes);
  }

  open() {}

  show({ crashes }) {
    showCrashes(this.crashes, this.none, crashes);
  }
}
