// A square for each group, ordered by name. Only squares that change are updated, since there may be a thousand.

import { make, mark } from "./dom.js";
import { GLYPHS } from "./glyphs.js";

const NAMES = new Intl.Collator("en", { numeric: true });

export class Grid {
  #squares = new Map(); // key -> element
  #order = ""; // keys of the shown groups, joined, to notice a change
  #keys = [];
  #active = 0; // key of the square that the keyboard is on

  constructor(state, element, choose) {
    this.state = state;
    this.element = element;
    this.choose = choose;
    element.addEventListener("click", (event) => {
      const square = event.target.closest("[data-key]");
      if (square) this.#activate(Number(square.dataset.key), true);
    });
    element.addEventListener("keydown", (event) => this.#key(event));
    element.addEventListener("focus", () => this.#activate(this.#active || this.#keys[0], false));
  }

  draw(groups, chosen) {
    const order = groups.map((group) => group.key).join();
    if (order !== this.#order) this.#arrange(groups, order);
    for (const group of groups) {
      const square = this.#squares.get(group.key), health = this.state.healthOf(group);
      if (square.dataset.health !== health) {
        mark(square, "health", health);
        square.firstChild.data = health === "training" ? "" : (GLYPHS[health] ?? "?");
        square.setAttribute("aria-label", `${group.id.slice(0, 80)}: ${health}`);
        square.title = square.getAttribute("aria-label");
      }
      const selected = String(group.key === chosen);
      if (square.getAttribute("aria-selected") !== selected) square.setAttribute("aria-selected", selected);
    }
  }

  #arrange(groups, order) {
    this.#order = order;
    const sorted = [...groups].sort((one, other) => NAMES.compare(one.id, other.id) || one.key - other.key);
    this.#keys = sorted.map((group) => group.key);
    const keep = new Set(this.#keys);
    for (const key of [...this.#squares.keys()]) if (!keep.has(key)) this.#squares.delete(key);
    for (const key of this.#keys) {
      if (!this.#squares.has(key)) {
        this.#squares.set(key, make("span", { id: `square-${key}`, role: "option", "data-key": key, "aria-selected": "false" }, document.createTextNode("")));
      }
    }
    this.element.replaceChildren(...this.#keys.map((key) => this.#squares.get(key)));
    if (!keep.has(this.#active)) this.#active = 0;
  }

  #activate(key, choose) {
    if (!key) return;
    this.#squares.get(this.#active)?.classList.remove("active");
    this.#active = key;
    this.#squares.get(key).classList.add("active");
    this.element.setAttribute("aria-activedescendant", `square-${key}`);
    if (choose) this.choose(key);
  }

  #key(event) {
    const at = Math.max(0, this.#keys.indexOf(this.#active));
    const across = Math.max(1, this.#columns());
    const to = {
      ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + across, ArrowUp: at - across, Home: 0, End: this.#keys.length - 1,
    }[event.key];
    if (to !== undefined) {
      const key = this.#keys[Math.min(Math.max(to, 0), this.#keys.length - 1)];
      this.#activate(key, false);
      this.#squares.get(key).scrollIntoView({ block: "nearest" });
    } else if (event.key === "Enter" || event.key === " ") {
      this.#activate(this.#active, true);
    } else {
      return;
    }
    event.preventDefault();
  }

  #columns() {
    const [first] = this.element.children;
    return [...this.element.children].findIndex((square) => square.offsetTop > first.offsetTop);
  }
}
