// The log-in with the job's token, and the orders to drain or kill a group, which require it.
// The token is in sessionStorage: for this tab only, until it is closed. It is sent to the lighthouse as a header, never in a URL.

import { byId, idOf, mark, say, show } from "./dom.js";
import { many } from "./format.js";
import { CONNECTED } from "./state.js";

const KEY = "pharos-token";

export class LogIn {
  #tried = false;

  constructor(start) {
    this.start = start;
    const dialog = byId("log-in");
    dialog.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, byId("token").value.trim());
      byId("token").value = "";
      this.#tried = true;
      dialog.close();
      start();
    });
    // Without a token the page has nothing to show. Browsers let a page prevent only the first Escape in a row.
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.addEventListener("close", () => this.token || this.ask());
  }

  get token() {
    return sessionStorage.getItem(KEY) ?? "";
  }

  forget() {
    sessionStorage.removeItem(KEY);
    this.#tried = false;
    show(byId("log-out"), false);
  }

  /** Asks for a token, after the lighthouse has refused a request. */
  ask() {
    const wrong = this.#tried || Boolean(this.token);
    this.forget();
    say(byId("log-in-error"), wrong ? "The lighthouse refuses that token." : "");
    if (!byId("log-in").open) byId("log-in").showModal();
    byId("token").focus();
  }

  works() {
    this.#tried = false;
    show(byId("log-out"), Boolean(this.token));
  }
}

const WORDS = {
  drain: {
    title: "Drain this group?",
    yes: "Drain it",
    text: "Its trainers get SIGTERM: they finish the step and leave; the group that writes the checkpoints saves first. The other groups lose nothing.",
  },
  kill: {
    title: "Kill this group?",
    yes: "Kill it",
    text: "Its trainers are killed at once, and its part of the current step is lost. Its launcher may restart it: then it heals.",
  },
};

export class Orders {
  #asked = null; // [order, group]

  constructor(state, logIn) {
    this.state = state;
    this.logIn = logIn;
    const dialog = byId("order");
    byId("order-no").addEventListener("click", () => dialog.close());
    dialog.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      void this.#give();
    });
  }

  /** The reason why no orders can be given; "" if they can. */
  get barred() {
    return this.state.constants.orders ? "" : "To drain or kill groups from here, the job must have a token (--token_file); this one has none.";
  }

  /** Asks for confirmation of an order. */
  ask(order, group) {
    this.#asked = [order, group];
    const { job } = this.state, words = WORDS[order];
    say(byId("order-title"), words.title);
    byId("order-group").replaceChildren(idOf(group.id));
    const left = job.members - (group.quorum ? 1 : 0);
    const short = left < job.min_replicas ? ` That is too few: the job needs ${job.min_replicas}, and will wait for more groups.` : "";
    const way = group.flags & CONNECTED ? words.text : "It has no stream for orders, so it is removed from the job.";
    say(byId("order-text"), `${way} ${many(left, "group")} would be left.${short}`);
    say(byId("order-yes"), words.yes);
    mark(byId("order-yes"), "order", order);
    say(byId("order-error"), "");
    byId("order").showModal();
    byId("order-no").focus();
  }

  async #give() {
    const [order, group] = this.#asked;
    byId("order-yes").disabled = true;
    try {
      const answer = await fetch("orders", {
        method: "POST",
        headers: { "Content-Type": "application/json", Authorization: `Bearer ${this.logIn.token}` },
        body: JSON.stringify({ order, replica_id: group.id }),
      });
      if (!answer.ok) throw new Error((await answer.text()).trim().slice(0, 300) || `status ${answer.status}`);
      byId("order").close();
      say(byId("live"), `${order}: ${(await answer.json()).done}`);
    } catch (error) {
      say(byId("order-error"), `Not done: ${error.message}`);
    } finally {
      byId("order-yes").disabled = false;
    }
  }
}
