// Linear scale from values to positions in the chart, and round values for its axes.

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

/** About `count` round values between `low` and `high`, whose distance is 1, 2 or 5 times a power of ten. */
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

/** At most about `count` round times between `from` and `to`, in seconds since 1970. */
export function niceTimes(from, to, count) {
  const rough = (to - from) / Math.max(1, count);
  const step = STEPS_S.find((length) => length >= rough) ?? 86400 * Math.ceil(rough / 86400);
  const offset = new Date(from * 1000).getTimezoneOffset() * 60; // so that hours are round in local time
  const times = [];
  for (let at = Math.ceil((from - offset) / step) * step + offset; at <= to; at += step) times.push(at);
  return times;
}
