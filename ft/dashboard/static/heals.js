// The current heals: group, sources, and progress.

import { byId, idOf, make, say, show } from "./dom.js";
import { bytes, many } from "./format.js";

const SHOWN = 12;

export class Heals {
  #rows = new Map(); // key -> {row, bar, text}

  constructor(state) {
    this.state = state;
  }

  draw(changed) {
    if (!changed.has("heals")) return;
    const { heals, groups } = this.state;
    show(byId("heals"), heals.length > 0);
    const shown = heals.filter(([key]) => groups.has(key)).slice(0, SHOWN);
    const keys = new Set(shown.map(([key]) => key));
    for (const key of [...this.#rows.keys()]) if (!keys.has(key)) this.#rows.delete(key);
    byId("heal-list").replaceChildren(...shown.map((heal) => this.#row(heal)));
    if (heals.length > shown.length) byId("heal-list").append(make("li", {}, `and ${many(heals.length - shown.length, "more")}`));
  }

  #row([key, sources, done, total]) {
    let made = this.#rows.get(key);
    if (!made) {
      const from = sources.flatMap((source, place) => [place ? " and " : "", idOf(this.state.groups.get(source)?.id ?? "?")]);
      const who = make("p", { id: `heal-${key}` }, idOf(this.state.groups.get(key).id), make("span", { class: "from" }, " ← from "), ...from);
      const bar = make("progress", { max: "100", "aria-labelledby": `heal-${key}` }), text = make("p", { class: "hint" });
      made = { row: make("li", {}, who, bar, text), bar, text };
      this.#rows.set(key, made);
    }
    const percent = total ? Math.floor((100 * done) / total) : 0;
    if (total) made.bar.value = percent;
    else made.bar.removeAttribute("value");
    say(made.text, total ? `${percent}%: ${bytes(done)} of ${bytes(total)}` : "requests the state");
    return made.row;
  }
}
