// The groups: up to IN_TABLE as a table; of more, those with problems as a table and all as a grid of squares.

import { byId, idOf, make, mark, say, show } from "./dom.js";
import { duration, many, percent, whole } from "./format.js";
import { GLYPHS } from "./glyphs.js";
import { Grid } from "./grid.js";
import { CONNECTED, DRAINED, IN_REDUCTION, KILLED } from "./state.js";

const IN_TABLE = 40; // most rows of the table
const COLUMNS = ["Group", "State", "Step", "Phase", "Quorum", "Age", "Goodput", "Orders"];
const NAMES = new Intl.Collator("en", { numeric: true });

/** The worst state first, then by name; not by values that change at every step, so that rows do not move under the pointer. */
export const inOrder = (one, other) => other.health - one.health || NAMES.compare(one.id, other.id) || one.key - other.key;

export class Groups {
  #rows = new Map(); // key -> its cells
  #find = "";
  #chosen = 0; // key

  constructor(state, orders) {
    this.state = state;
    this.orders = orders;
    this.body = make("tbody", { role: "rowgroup" });
    const heads = COLUMNS.map((name) => make("th", { scope: "col", role: "columnheader" }, name));
    // roles are set, since the narrow layout's display: block removes the implicit ones
    byId("table").append(
      make("table", { role: "table" }, make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...heads)), this.body),
    );
    this.grid = new Grid(state, byId("grid"), (key) => {
      this.#chosen = key;
      this.draw(new Set(["rows"]));
      this.#rows.get(key)?.row.scrollIntoView({ block: "nearest" });
    });
    byId("find").addEventListener("input", () => {
      this.#find = byId("find").value.trim().toLowerCase();
      this.draw(new Set(["rows"]));
    });
  }

  draw(changed) {
    if (!["begin", "names", "rows", "gone", "phases", "time"].some((section) => changed.has(section))) return;
    if (changed.has("begin")) this.#forget();
    const all = [...this.state.groups.values()].filter((group) => group.health !== undefined);
    const few = all.length <= IN_TABLE;
    const training = this.state.constants.health.indexOf("training");
    const wanted = all.filter((group) =>
      this.#find ? group.id.toLowerCase().includes(this.#find) : few || group.health !== training || group.key === this.#chosen,
    );
    const chosen = (group) => (group.key === this.#chosen && !few ? 0 : 1);
    const shown = wanted.sort((one, other) => chosen(one) - chosen(other) || inOrder(one, other)).slice(0, IN_TABLE);
    this.#table(shown);
    show(byId("all"), !few);
    if (!few) this.grid.draw(all, this.#chosen);
    this.#note(all.length, wanted.length, shown.length, few);
  }

  #forget() {
    this.#rows.clear();
    this.#chosen = 0;
    this.body.replaceChildren();
    say(byId("orders-note"), this.orders.barred);
  }

  #note(all, wanted, shown, few) {
    const left = wanted > shown ? `, ${whole(shown)} of them here` : "";
    const found = this.#find ? `${many(wanted, "group")} with that in the name${left}` : "";
    const worst = few ? many(all, "group") : wanted ? `${whole(wanted)} of ${many(all, "group")} need attention${left}` : `all ${many(all, "group")} are training`;
    say(byId("groups-note"), found || (all ? worst : "none yet"));
  }

  #table(shown) {
    const keep = new Set(shown.map((group) => group.key));
    for (const [key, { row }] of this.#rows) {
      if (!keep.has(key)) {
        row.remove();
        this.#rows.delete(key);
      }
    }
    let before = null;
    for (const group of shown.reverse()) {
      const { row } = this.#row(group);
      if (row.nextSibling !== before || !row.isConnected) this.body.insertBefore(row, before);
      before = row;
    }
  }

  #row(group) {
    let made = this.#rows.get(group.key);
    if (!made) this.#rows.set(group.key, (made = this.#make(group)));
    const { state } = this, health = state.healthOf(group);
    mark(made.row, "health", health);
    mark(made.row, "chosen", String(group.key === this.#chosen));
    say(made.glyph, GLYPHS[health] ?? "?");
    say(made.health, health);
    say(made.ranks, group.ranks ? many(group.ranks, "rank") : "");
    say(made.note, this.#words(group, health));
    say(made.step, group.step < 0 ? "–" : whole(group.step));
    say(made.phase, state.phaseOf(group) || "–");
    say(made.quorum, group.quorum ? `#${group.quorum}` : "none");
    say(made.age, ["lost", "left"].includes(health) || !group.born ? "–" : duration(state.now() - group.born));
    say(made.goodput, percent(group.goodput < 0 ? null : group.goodput / 100));
    for (const order of ["drain", "kill"]) made[order].disabled = Boolean(this.#noOrder(group, order, health));
    return made;
  }

  #words(group, health) {
    const words = [];
    if (group.note) words.push(group.note);
    if (group.silent) words.push(`silent for ${group.silent} s`);
    if (group.flags & IN_REDUCTION && health === "training") words.push("waits in the all-reduce");
    if (group.flags & KILLED) words.push("killed by an operator");
    else if (group.flags & DRAINED) words.push("drained by an operator");
    return words.join("; ");
  }

  #noOrder(group, order, health) {
    if (this.orders.barred || ["lost", "left"].includes(health)) return true;
    return order === "drain" && (!(group.flags & CONNECTED) || Boolean(group.flags & (DRAINED | KILLED)));
  }

  #make(group) {
    const made = {};
    for (const name of ["health", "note", "step", "phase", "quorum", "age", "goodput"]) made[name] = make("span", { class: name });
    made.phase = make("bdi", { class: "phase" });
    made.glyph = make("span", { class: "glyph", "aria-hidden": "true" });
    made.ranks = make("span", { class: "hint" });
    const buttons = ["drain", "kill"].map((order) => {
      const title = order === "drain" ? "Drain" : "Kill";
      made[order] = make("button", { type: "button", class: order, "aria-label": `${title} ${group.id.slice(0, 80)}` }, title);
      made[order].addEventListener("click", () => this.orders.ask(order, this.state.groups.get(group.key) ?? group));
      return made[order];
    });
    const cells = [
      [idOf(group.id), " ", made.ranks],
      [make("span", { class: "word" }, made.glyph, made.health), made.note],
      ...["step", "phase", "quorum", "age", "goodput"].map((name) => [made[name]]),
      buttons,
    ].map((children, place) => make(place ? "td" : "th", { role: place ? "cell" : "rowheader", scope: place ? null : "row", "data-label": COLUMNS[place] }, ...children));
    made.row = make("tr", { role: "row" }, ...cells);
    return made;
  }
}
