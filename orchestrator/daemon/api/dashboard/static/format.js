// Figures as people read them; "–" where there is none.

const NONE = "–";
const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

export const decimal = (value, digits = 1) => (known(value) ? value.toFixed(digits) : NONE);
export const whole = (value) => (known(value) ? Math.round(value).toLocaleString("en") : NONE);
export const percent = (share) => (known(share) ? `${(share * 100).toFixed(1)} %` : NONE);

export function milliseconds(ms) {
  if (!known(ms)) return NONE;
  if (ms >= 10_000) return `${(ms / 1000).toFixed(1)} s`;
  return ms >= 100 ? `${ms.toFixed(0)} ms` : `${ms.toFixed(1)} ms`;
}

export function bytes(count) {
  if (!known(count) || count === 0) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log2(count) / 10));
  return `${(count / 2 ** (10 * power)).toFixed(power ? 1 : 0)} ${units[power]}`;
}

export const clockTime = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

export function shorten(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

export const shortDevice = (name) => name.replace(/^here\//, "");
