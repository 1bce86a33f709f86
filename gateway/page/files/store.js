// The conversations that this browser keeps, in its IndexedDB: heads, which the list needs, and messages,
// each on its own, so that two tabs which add to one conversation lose nothing. If the browser keeps nothing
// (a private window may refuse), conversations last as long as the page.

const NAME = "mlxsup";
const CHANNEL = "mlxsup-chats";

const asked = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

export class Store {
  constructor() {
    this.database = null;
    this.channel = new BroadcastChannel(CHANNEL);
  }

  /** Opens it; throws what the browser says if it keeps nothing. */
  async open() {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("heads", { keyPath: "id" });
      request.result.createObjectStore("messages", { keyPath: ["chat", "id"] });
    };
    this.database = await asked(request);
  }

  /** Calls back when another tab has changed a conversation: with its id. */
  follow(onChange) {
    this.channel.onmessage = ({ data }) => onChange(data);
  }

  /** The heads of all, the newest first. */
  async heads() {
    if (!this.database) return [];
    const all = await asked(this.database.transaction("heads").objectStore("heads").getAll());
    return all.sort((one, other) => other.at - one.at);
  }

  /** The head and the messages of one; null if there is none. */
  async read(id) {
    if (!this.database) return null;
    const both = this.database.transaction(["heads", "messages"]);
    const [head, messages] = await Promise.all([
      asked(both.objectStore("heads").get(id)),
      asked(both.objectStore("messages").getAll(all(id))),
    ]);
    return head ? { head, messages } : null;
  }

  /** Keeps a head and some of its messages; other tabs learn of it. */
  async keep(head, messages = []) {
    await this.write((heads, kept) => {
      heads.put(head);
      for (const message of messages) kept.put(message);
    }, head.id);
  }

  async remove(id) {
    await this.write((heads, kept) => {
      heads.delete(id);
      kept.delete(all(id));
    }, id);
  }

  /** The ids of the conversations with a message that contains some words. */
  async search(words) {
    const found = new Set();
    if (!this.database) return found;
    const cursor = this.database.transaction("messages").objectStore("messages").openCursor();
    const wanted = words.toLowerCase();
    return new Promise((resolve, reject) => {
      cursor.onerror = () => reject(cursor.error);
      cursor.onsuccess = () => {
        const at = cursor.result;
        if (!at) return resolve(found);
        if (at.value.text.toLowerCase().includes(wanted)) found.add(at.value.chat);
        return at.continue();
      };
    });
  }

  async write(change, id) {
    if (!this.database) return;
    const both = this.database.transaction(["heads", "messages"], "readwrite");
    const done = new Promise((resolve, reject) => {
      both.oncomplete = resolve;
      both.onerror = () => reject(both.error);
      both.onabort = () => reject(both.error);
    });
    change(both.objectStore("heads"), both.objectStore("messages"));
    // At once: the page may be about to go.
    both.commit();
    await done;
    this.channel.postMessage(id);
  }
}

/** The messages of one conversation. */
function all(id) {
  return IDBKeyRange.bound([id], [id, []]);
}
