// The list of kept conversations: find one, begin, rename, export and delete.

import { iconButton, icon, keep, make, mark, write } from "./view.js";

const SEARCH_AFTER_MS = 150;

export class Chats {
  /**
   * @param store that keeps them.
   * @param onBegin begins another conversation.
   * @param onExport saves the one that is shown.
   * @param onGone is told the id of one that was deleted.
   * @param onRename gets the head of one that has another title.
   */
  constructor(store, { onBegin, onExport, onGone, onRename }) {
    this.store = store;
    Object.assign(this, { onExport, onGone, onRename });
    this.current = null;
    this.all = [];
    this.found = null;
    this.renaming = null;
    const begin = make("button", { type: "button", id: "begin" }, icon("add"), " New chat");
    begin.addEventListener("click", () => {
      this.close();
      onBegin();
    });
    this.search = make("input", { id: "search", type: "search", placeholder: "Search", "aria-label": "Search chats" });
    this.search.addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.find(), SEARCH_AFTER_MS);
    });
    this.list = make("ul", { id: "kept", role: "list" });
    this.none = make("p", { class: "quiet" });
    this.note = make("p", { class: "row", role: "status" });
    this.shut = iconButton("close", "Close the list", () => this.close(), { class: "plain icon phone-only" });
    const top = make("div", { class: "row" }, begin, this.shut);
    this.element = make("aside", { id: "chats", "aria-label": "Chats" }, top, this.search, this.list, this.none,
      this.note, make("p", { class: "quiet hint" }, "Your chats are kept in this browser only."));
    this.element.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !this.renaming) this.close();
    });
    this.opener = iconButton("list", "Chats", () => this.open(),
      { class: "plain icon phone-only", "aria-expanded": "false", "aria-controls": "chats" });
    this.curtain = make("div", { class: "curtain" });
    this.curtain.addEventListener("click", () => this.close());
  }

  /** On a small screen, lays the list over the chat. */
  open() {
    this.element.classList.add("open");
    mark(this.opener, "aria-expanded", "true");
    this.shut.focus();
  }

  close() {
    if (!this.element.classList.contains("open")) return;
    this.element.classList.remove("open");
    mark(this.opener, "aria-expanded", "false");
    this.opener.focus();
  }

  /** Shows all, whatever was searched for. */
  showAll() {
    this.search.value = "";
    this.found = null;
  }

  /** Shows what is kept now; `current` is the id of the one that is open. */
  async refresh(current = this.current) {
    this.current = current;
    this.all = await this.store.heads();
    this.draw();
  }

  async find() {
    const words = this.search.value.trim();
    this.found = words ? await this.store.search(words) : null;
    this.draw();
  }

  draw() {
    const words = this.search.value.trim().toLowerCase();
    const shown = this.all.filter(({ id, title }) => {
      return !words || this.found?.has(id) || title.toLowerCase().includes(words);
    });
    keep(this.list, shown, ({ id }) => id, (head) => this.item(head.id), (item, head) => {
      const isCurrent = head.id === this.current;
      const link = item.querySelector("a");
      write(link, head.title);
      mark(link, "href", `#chat/${head.id}`);
      mark(link, "aria-current", isCurrent ? "true" : null);
      item.querySelector(".tools").hidden = !isCurrent || this.renaming === head.id;
    });
    const none = words ? "No matching chats." : "No chats yet.";
    write(this.none, shown.length ? "" : none);
  }

  item(id) {
    const link = make("a", { dir: "auto" });
    link.addEventListener("click", () => this.close());
    const item = make("li", {}, link);
    item.append(make("span", { class: "tools" },
      iconButton("edit", "Rename this chat", () => this.rename(id, item)),
      iconButton("save", "Save this chat as a file", () => this.onExport()),
      iconButton("remove", "Delete this chat", () => this.remove(id))));
    return item;
  }

  rename(id, item) {
    const head = this.all.find((one) => one.id === id);
    const link = item.querySelector("a");
    const box = make("input", { "aria-label": "Name of this chat" });
    box.value = head.title;
    const end = async (isKept) => {
      if (this.renaming !== id) return;
      this.renaming = null;
      const title = box.value.trim();
      box.remove();
      link.hidden = false;
      if (isKept && title) {
        head.title = title;
        this.onRename(head);
        await this.store.keep(head);
      }
      this.draw();
      item.querySelector("button").focus();
    };
    box.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) end(true);
      if (event.key === "Escape") end(false);
    });
    box.addEventListener("blur", () => end(true));
    this.renaming = id;
    link.hidden = true;
    link.after(box);
    this.draw();
    box.select();
  }

  /** Deletes one; for a while it can be brought back. */
  async remove(id) {
    const kept = await this.store.read(id);
    await this.store.remove(id);
    this.onGone(id);
    await this.refresh(null);
    if (!kept) return;
    const undo = make("button", { type: "button" }, "Undo");
    undo.addEventListener("click", async () => {
      this.note.replaceChildren();
      await this.store.keep(kept.head, kept.messages);
      await this.refresh();
      location.hash = `#chat/${id}`;
    });
    this.note.replaceChildren("Deleted.", undo);
    undo.focus();
  }
}
