// The list of events, newest first; new faults are announced to screen readers.

import { byId, make, say, show } from "./dom.js";
import { clock, whole } from "./format.js";
import { LANE_GLYPHS } from "./glyphs.js";

const SHOWN = 150;

export class Events {
  #items = new Map(); // number -> {item, times}
  #hidden = new Set(); // lanes
  #heard = null; // number of the newest event that was announced, or was there at first; null: no event has arrived

  constructor(state) {
    this.state = state;
  }

  draw(changed) {
    if (changed.has("begin")) this.#begin();
    if (!changed.has("events")) return;
    const { events } = this.state;
    const shown = [...events.values()].filter((event) => !this.#hidden.has(event.lane)).slice(-SHOWN).reverse();
    show(byId("no-events"), events.size === 0);
    const keep = new Set(shown.map((event) => event.number));
    for (const [number, { item }] of this.#items) {
      if (!keep.has(number)) {
        item.remove();
        this.#items.delete(number);
      }
    }
    let before = null;
    for (const event of shown.reverse()) {
      const item = this.#item(event);
      if (item.nextSibling !== before || !item.isConnected) byId("event-list").insertBefore(item, before);
      before = item;
    }
    this.#readOut([...events.values()]);
  }

  #begin() {
    this.#items.clear();
    byId("event-list").replaceChildren();
    this.#heard = null;
    if (byId("lanes").childElementCount > 1) return;
    this.state.constants.lanes.forEach((name, lane) => {
      const box = make("input", { type: "checkbox", id: `lane-${lane}`, checked: true });
      box.addEventListener("change", () => {
        this.#hidden[box.checked ? "delete" : "add"](lane);
        this.draw(new Set(["events"]));
      });
      const glyph = make("span", { class: "glyph", "aria-hidden": "true" }, LANE_GLYPHS[name] ?? "");
      byId("lanes").append(make("label", { for: `lane-${lane}` }, box, glyph, name));
    });
  }

  #item(event) {
    let made = this.#items.get(event.number);
    if (!made) {
      const lane = this.state.constants.lanes[event.lane];
      const times = make("span", { class: "times" });
      const item = make(
        "li",
        { "data-grade": event.grade },
        make("time", { datetime: new Date(event.at * 1000).toISOString() }, clock(event.at)),
        make("span", { class: "lane" }, make("span", { class: "glyph", "aria-hidden": "true" }, event.grade === "bad" ? "✕" : LANE_GLYPHS[lane]), lane),
        make("span", { class: "text" }, make("bdi", {}, event.text), times),
        make("span", { class: "step" }, `step ${whole(event.step)}`),
      );
      made = { item, times };
      this.#items.set(event.number, made);
    }
    say(made.times, event.times > 1 ? ` ×${event.times}` : "");
    return made.item;
  }

  #readOut(events) {
    const newest = events.at(-1)?.number ?? 0;
    if (this.#heard !== null) {
      const bad = events.filter((event) => event.number > this.#heard && event.grade === "bad");
      if (bad.length) say(byId("live"), bad.slice(-3).map((event) => event.text).join(". "));
    }
    this.#heard = newest;
  }
}
