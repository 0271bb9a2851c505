// What is new in a run, as it happens.

const RETRY_MS = 1500;

/**
 * Follows a run from an event on, through interruptions of the connection.
 *
 * `listener.news(entries)` gets new events of the requested types; `listener.reload()` reports that what is known may be
 * wrong or incomplete; `listener.trouble(sentence)` that the run cannot be read; `listener.connected(yes)` how it stands.
 */
export class Live {
  constructor(run, types, cursor, listener) {
    this.query = { run, types };
    this.cursor = cursor;
    this.listener = listener;
    this.closed = false;
    this.lost = false;
    this.connect();
  }

  connect() {
    const query = new URLSearchParams({ run: this.query.run, after: this.cursor });
    for (const type of this.query.types) query.append("type", type);
    this.source = new EventSource(`api/stream?${query}`);
    this.source.addEventListener("open", () => this.opened());
    this.source.addEventListener("error", () => this.failed());
    this.source.addEventListener("news", (message) => this.forward(message));
    this.source.addEventListener("reload", () => this.listener.reload());
    this.source.addEventListener("trouble", (message) => this.listener.trouble(JSON.parse(message.data).error));
  }

  opened() {
    this.listener.connected(true);
    // Meanwhile a resumed run may have made anew what is known here.
    if (this.lost) this.listener.reload();
    this.lost = false;
  }

  failed() {
    this.lost = true;
    this.listener.connected(false);
    if (this.source.readyState !== EventSource.CLOSED || this.closed) return;
    this.timer = setTimeout(() => this.connect(), RETRY_MS);
  }

  forward(message) {
    const entries = JSON.parse(message.data);
    this.cursor = Number(message.lastEventId);
    if (entries.some((entry) => entry.type === "run_resumed")) this.listener.reload();
    else this.listener.news(entries);
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
    this.source.close();
  }
}
