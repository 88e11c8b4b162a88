// Three plots over one time axis: the loss, the number of groups in the quorum, and a lane of marks for each kind of event.

import { byId, makeSvg, say } from "./dom.js";
import { clock, lossText, many, whole } from "./format.js";
import { Scale, niceTimes, niceValues } from "./scale.js";

const LEFT = 84, RIGHT = 14, TOP = 10, LOSS = 190, GAP = 16, SIZE = 44, LANE = 20, AXIS = 26;
const REDRAW_MS = 1000; // interval of redraws for new points or passing time
const NEAR = 9; // pixels; marks of one lane that are closer are drawn as one

export class Chart {
  #drawn = 0;
  #at = null; // index of the point in the readout; null: the last
  #width = 0;

  constructor(state, element) {
    this.state = state;
    this.element = element;
    new ResizeObserver(() => {
      if (element.clientWidth !== this.#width) this.#render();
    }).observe(element);
    element.addEventListener("pointermove", (event) => this.#point(event.clientX - element.getBoundingClientRect().left));
    element.addEventListener("pointerleave", () => this.#choose(null));
    element.addEventListener("keydown", (event) => this.#key(event));
  }

  draw(changed) {
    const urgent = ["begin", "events", "cut", "sizes"].some((section) => changed.has(section));
    const due = (changed.has("points") || changed.has("time")) && performance.now() - this.#drawn >= REDRAW_MS;
    if (urgent || due) this.#render();
  }

  #render() {
    const { points, sizes, events, constants } = this.state;
    this.#drawn = performance.now();
    this.#width = this.element.clientWidth;
    const width = Math.max(260, this.#width), now = this.state.now();
    const bottom = TOP + LOSS + GAP + SIZE + GAP + LANE * constants.lanes.length;
    const began = Math.min(now - 20, ...[points[0]?.[0], sizes[0]?.[0], [...events.values()][0]?.at].filter(Boolean));
    this.x = new Scale(began, now, LEFT, width - RIGHT);
    const svg = makeSvg("svg", { viewBox: `0 0 ${width} ${bottom + AXIS}`, width, height: bottom + AXIS, "aria-hidden": "true" });
    svg.append(this.#times(bottom, width), this.#loss(points, width), this.#sizes(sizes, now, width), this.#lanes(width));
    this.cursor = makeSvg("line", { class: "cursor", y1: TOP, y2: bottom, x1: -9, x2: -9 });
    this.dot = makeSvg("circle", { class: "dot", r: 4, cx: -9, cy: -9 });
    svg.append(this.cursor, this.dot);
    this.element.replaceChildren(svg);
    this.#readOut();
  }

  #times(bottom, width) {
    const axis = makeSvg("g", { class: "axis" });
    for (const at of niceTimes(this.x.from, this.x.to, Math.floor(width / 110))) {
      const x = this.x.place(at);
      if (x > width - RIGHT - 24 || x < LEFT) continue;
      axis.append(makeSvg("line", { x1: x, x2: x, y1: TOP, y2: bottom }), makeSvg("text", { x, y: bottom + 17, class: "middle" }, clock(at, at)));
    }
    return axis;
  }

  #loss(points, width) {
    const part = makeSvg("g", { class: "loss" });
    const values = points.map(([, , loss]) => loss);
    const low = Math.min(...values), high = Math.max(...values);
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    this.y = values.length ? new Scale(high + room, low - room, TOP, TOP + LOSS) : new Scale(1, 0, TOP, TOP + LOSS);
    for (const value of values.length ? niceValues(this.y.to, this.y.from, 5) : []) {
      const y = this.y.place(value);
      part.append(makeSvg("line", { class: "grid-line", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }), makeSvg("text", { x: LEFT - 8, y: y + 4, class: "end" }, String(value)));
    }
    if (!values.length) part.append(makeSvg("text", { x: (LEFT + width - RIGHT) / 2, y: TOP + LOSS / 2, class: "middle" }, "no loss reported yet"));
    const line = points.map(([at, , loss], place) => `${place ? "L" : "M"}${this.x.place(at).toFixed(1)} ${this.y.place(loss).toFixed(1)}`).join("");
    part.append(makeSvg("path", { class: "line", d: line || "M0 0" }));
    const last = points.at(-1);
    if (last) part.append(makeSvg("circle", { class: "end-dot", r: 3, cx: this.x.place(last[0]), cy: this.y.place(last[2]) }));
    return part;
  }

  #sizes(sizes, now, width) {
    const part = makeSvg("g", { class: "sizes" });
    const top = TOP + LOSS + GAP, most = Math.max(1, ...sizes.map(([, members]) => members));
    const y = new Scale(most, 0, top, top + SIZE);
    part.append(
      makeSvg("line", { class: "grid-line", x1: LEFT, x2: width - RIGHT, y1: top + SIZE, y2: top + SIZE }),
      makeSvg("text", { x: LEFT - 8, y: top + 10, class: "end" }, whole(most)),
      makeSvg("text", { x: LEFT - 8, y: top + SIZE + 2, class: "end" }, "groups 0"),
    );
    let steps = "";
    sizes.forEach(([at, members], place) => {
      const until = sizes[place + 1]?.[0] ?? now, high = y.place(members).toFixed(1);
      steps += `${place ? "L" : `M${this.x.place(at).toFixed(1)} ${top + SIZE}L`}${this.x.place(at).toFixed(1)} ${high}L${this.x.place(until).toFixed(1)} ${high}`;
    });
    if (steps) part.append(makeSvg("path", { class: "area", d: `${steps}L${this.x.place(now).toFixed(1)} ${top + SIZE}Z` }));
    return part;
  }

  #lanes(width) {
    const part = makeSvg("g", { class: "lanes" });
    const top = TOP + LOSS + GAP + SIZE + GAP;
    this.state.constants.lanes.forEach((name, lane) => {
      const y = top + LANE * lane + LANE / 2;
      part.append(makeSvg("line", { class: "grid-line", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }));
      part.append(makeSvg("text", { x: LEFT - 8, y: y + 3.5, class: "end lane-name" }, name));
      let group = null;
      const groups = [];
      for (const event of this.state.events.values()) {
        if (event.lane !== lane) continue;
        const x = this.x.place(event.at);
        if (group && x - group.x < NEAR) group.events.push(event);
        else groups.push((group = { x, events: [event] }));
      }
      for (const { x, events } of groups) part.append(sign(Math.min(x, width - RIGHT), y, events));
    });
    return part;
  }

  // ---- the point under the pointer

  #point(x) {
    const at = this.x?.value(x);
    const { points } = this.state;
    if (at === undefined || !points.length) return;
    let best = 0;
    points.forEach(([when], place) => {
      if (Math.abs(when - at) < Math.abs(points[best][0] - at)) best = place;
    });
    this.#choose(best);
  }

  #key(event) {
    const last = this.state.points.length - 1, at = this.#at ?? last;
    const far = Math.max(1, Math.round(last / 10));
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, PageDown: at - far, PageUp: at + far, Home: 0, End: last, Escape: null }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.#choose(to === null || to >= last ? null : Math.max(0, to));
  }

  #choose(place) {
    this.#at = place;
    this.#readOut();
  }

  #readOut() {
    const { points } = this.state, place = Math.min(this.#at ?? points.length - 1, points.length - 1);
    const point = points[place];
    const words = point ? `step ${whole(point[1])}: loss ${lossText(point[2])} at ${clock(point[0])}${this.#members(point[0])}` : "";
    say(byId("readout"), words);
    for (const [name, value] of [["valuemax", Math.max(0, points.length - 1)], ["valuenow", Math.max(0, place)], ["valuetext", words || "no loss yet"]]) {
      this.element.setAttribute(`aria-${name}`, value);
    }
    const chosen = this.#at !== null && point;
    const x = chosen ? this.x.place(point[0]) : -9;
    this.cursor?.setAttribute("x1", x);
    this.cursor?.setAttribute("x2", x);
    this.dot?.setAttribute("cx", x);
    this.dot?.setAttribute("cy", chosen ? this.y.place(point[2]) : -9);
  }

  #members(at) {
    const size = this.state.sizes.findLast(([when]) => when <= at);
    return size ? `, ${many(size[1], "group")}` : "";
  }
}

/** The mark of one or more events: a cross if one of them is a fault, else a ring. */
function sign(x, y, events) {
  const bad = events.some((event) => event.grade === "bad");
  const text = events.slice(-6).map((event) => `${clock(event.at)} ${event.text}`);
  if (events.length > 6) text.unshift(`${events.length - 6} more`);
  const shape = bad
    ? makeSvg("path", { d: `M${x - 4.5} ${y - 4.5}L${x + 4.5} ${y + 4.5}M${x - 4.5} ${y + 4.5}L${x + 4.5} ${y - 4.5}` })
    : makeSvg("circle", { cx: x, cy: y, r: 4 });
  return makeSvg("g", { class: bad ? "sign bad" : "sign good" }, makeSvg("circle", { class: "reach", cx: x, cy: y, r: 9 }), shape, makeSvg("title", {}, text.join("\n")));
}
