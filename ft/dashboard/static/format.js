// Formats numbers and times for display.

const WHOLE = new Intl.NumberFormat("en-US");

export const whole = (number) => WHOLE.format(number);

/** "12:03:59", preceded by the date if that is not today's. */
export function clock(atS, nowS = Date.now() / 1000) {
  const at = new Date(atS * 1000);
  const time = at.toLocaleTimeString("en-GB");
  return at.toDateString() === new Date(nowS * 1000).toDateString() ? time : `${at.toLocaleDateString("en-CA")} ${time}`;
}

export function duration(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 172800) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} days`;
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (count >= 1024 && place < units.length - 1) {
    count /= 1024;
    place += 1;
  }
  return `${place && count < 100 ? count.toFixed(1) : Math.round(count)} ${units[place]}`;
}

/** Steps per second or seconds per step, whichever number is larger. */
export function pace(stepsPerS) {
  if (!stepsPerS) return "–";
  return stepsPerS >= 1 ? `${stepsPerS.toPrecision(3)} steps/s` : `${(1 / stepsPerS).toPrecision(3)} s/step`;
}

export const percent = (share) => (share === null || share < 0 ? "–" : `${Math.round(share * 100)}%`);

export const lossText = (loss) => (loss >= 100 ? loss.toFixed(0) : loss.toPrecision(4));

export const many = (count, one, more = `${one}s`) => `${whole(count)} ${count === 1 ? one : more}`;
