// From values to places in a picture, and round values to write beside it.

export class Scale {
  constructor(from, to, first, last) {
    Object.assign(this, { from, to, first, last });
  }

  place(value) {
    return this.first + ((value - this.from) / (this.to - this.from || 1)) * (this.last - this.first);
  }

  value(place) {
    return this.from + ((place - this.first) / (this.last - this.first || 1)) * (this.to - this.from);
  }
}

/** At most about `count` round values between the two: 1, 2 or 5 times a power of ten apart. */
export function niceValues(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  if (!(rough > 0) || !Number.isFinite(rough)) return [];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const digits = Math.max(0, -Math.floor(Math.log10(step)));
  const values = [];
  for (let value = Math.ceil(low / step) * step; value <= high && values.length <= 2 * count; value += step) values.push(Number(value.toFixed(Math.min(20, digits))));
  return values;
}

const STEPS_S = [5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

/** Round instants (seconds since 1970) between the two, at most about `count`. */
export function niceTimes(from, to, count) {
  const rough = (to - from) / Math.max(1, count);
  const step = STEPS_S.find((length) => length >= rough) ?? 86400 * Math.ceil(rough / 86400);
  const offset = new Date(from * 1000).getTimezoneOffset() * 60; // whole hours of the clock on the wall
  const times = [];
  for (let at = Math.ceil((from - offset) / step) * step + offset; at <= to; at += step) times.push(at);
  return times;
}
