// Server-sent events by fetch, which unlike EventSource can send the token as a header. A connection that breaks or is silent is reopened,
// and the lighthouse sends the updates since the last id. https://html.spec.whatwg.org/multipage/server-sent-events.html

const SILENCE_MS = 15000; // timeout of a silent connection: the lighthouse sends something every 5 s
const FIRST_WAIT_MS = 300, LONGEST_WAIT_MS = 5000;

export class Stream {
  #lastId = "";
  #wait = FIRST_WAIT_MS;
  #over = false;
  #abort = null;

  /** Callbacks: token() returns the token or ""; hear(update); state(words, kind) of the connection; refuse() if the token is wrong. */
  constructor({ token, hear, state, refuse }) {
    Object.assign(this, { token, hear, state, refuse });
  }

  async run() {
    while (!this.#over) {
      let why = "the connection ended";
      try {
        if ((await this.#read()) === "refused") return;
      } catch (error) {
        why = error.name === "AbortError" ? "no data arrived" : error.message;
      }
      if (this.#over) return;
      this.state(`reconnecting: ${why}`, "bad");
      await new Promise((done) => setTimeout(done, this.#wait * (0.75 + Math.random() / 2)));
      this.#wait = Math.min(2 * this.#wait, LONGEST_WAIT_MS);
    }
  }

  close() {
    this.#over = true;
    this.#abort?.abort();
  }

  async #read() {
    this.#abort = new AbortController();
    let silence = this.#listen();
    try {
      const headers = { Accept: "text/event-stream" };
      if (this.token()) headers.Authorization = `Bearer ${this.token()}`;
      if (this.#lastId) headers["Last-Event-ID"] = this.#lastId;
      const answer = await fetch("events", { headers, cache: "no-store", signal: this.#abort.signal });
      if (answer.status === 401) {
        this.refuse();
        return "refused";
      }
      if (!answer.ok) throw new Error((await answer.text()).trim().slice(0, 200) || `status ${answer.status}`);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return "ended";
        clearTimeout(silence);
        silence = this.#listen();
        const events = (rest + value).split("\n\n");
        rest = events.pop();
        for (const event of events) this.#take(event);
      }
    } finally {
      clearTimeout(silence);
    }
  }

  #listen() {
    return setTimeout(() => this.#abort.abort(), SILENCE_MS);
  }

  #take(event) {
    let id = "", data = "";
    for (const line of event.split("\n")) {
      if (line.startsWith("id: ")) id = line.slice(4);
      else if (line.startsWith("data: ")) data += line.slice(6);
    }
    if (data) this.hear(JSON.parse(data));
    if (id) {
      this.#lastId = id; // only the last event of an update has an id
      this.#wait = FIRST_WAIT_MS;
      this.state("live", "good");
    }
  }
}
