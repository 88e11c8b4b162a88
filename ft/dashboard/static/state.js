// The state of the page: updates of ft/dashboard/feed.py are applied in order. Nothing is drawn here.

// Values of a row after its key (ft/dashboard/view.py, View.rows)
const ROW = ["step", "phase", "health", "quorum", "silent", "goodput", "flags", "note"];
export const IN_REDUCTION = 1, CONNECTED = 2, DRAINED = 4, KILLED = 8; // flags
const MOST_EVENTS = 400, MOST_POINTS = 2000;

export class State {
  constructor() {
    this.clear();
  }

  clear() {
    this.constants = { health: [], lanes: [], orders: false };
    this.groups = new Map(); // key -> {key, id, ranks, born, step, phase, ...}
    this.phases = [];
    this.job = null;
    this.heals = []; // [key, [keys of sources], received bytes, total bytes]
    this.points = []; // [seconds since 1970, step, loss]
    this.sizes = []; // [seconds since 1970, members]
    this.events = new Map(); // number -> {number, at, lane, grade, step, text, times}
    this.skew = 0; // seconds by which the lighthouse's clock is ahead of this browser's
  }

  /** Seconds since 1970 on the lighthouse's clock. */
  now() {
    return Date.now() / 1000 + this.skew;
  }

  /** Applies an update and returns the names of the sections that changed. */
  apply(update) {
    const changed = new Set(Object.keys(update));
    if (update.begin) {
      this.clear();
      this.constants = update.begin[0];
      for (const all of ["names", "rows", "job", "heals", "points", "sizes", "events"]) changed.add(all);
    }
    if (update.now) this.skew = update.now[0] - Date.now() / 1000;
    for (const key of update.gone ?? []) this.groups.delete(key);
    this.phases.push(...(update.phases ?? []));
    for (const [key, id, ranks, born] of update.names ?? []) this.groups.set(key, { ...this.groups.get(key), key, id, ranks, born });
    for (const [key, ...values] of update.rows ?? []) {
      const group = this.groups.get(key);
      if (group) ROW.forEach((name, place) => (group[name] = values[place]));
    }
    if (update.job) this.job = update.job[0];
    if (update.heals) this.heals = update.heals[0];
    if (update.cut) this.points = this.points.filter(([, step]) => step <= update.cut[0]);
    if (update.points) this.points = thinned(this.points.concat(update.points));
    if (update.sizes) this.sizes = this.sizes.concat(update.sizes).slice(-MOST_EVENTS);
    for (const event of update.events ?? []) this.#hear(event);
    return changed;
  }

  #hear([number, at, lane, grade, step, text, times]) {
    this.events.set(number, { number, at, lane, grade, step, text, times });
    if (this.events.size > MOST_EVENTS) this.events.delete(this.events.keys().next().value);
  }

  healthOf(group) {
    return this.constants.health[group.health] ?? "";
  }

  phaseOf(group) {
    return this.phases[group.phase] ?? "";
  }
}

/** At most MOST_POINTS points; of more, half as many, over all steps (ft/dashboard/history.py, thinned). */
export function thinned(points) {
  if (points.length <= MOST_POINTS) return points;
  const last = points.length - 1, steps = points[last][1] - points[0][1];
  let size = 1;
  while (steps / size > MOST_POINTS / 2 - 2) size *= 2;
  const interval = (place) => Math.floor(points[place][1] / size);
  return points.filter((_, place) => place === 0 || place === last || interval(place) !== interval(place - 1));
}
