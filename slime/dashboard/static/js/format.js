// Numbers, times and colours for people.

/** A number in as few characters as tell it apart. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return size >= 1000 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(4)));
}

/** `45 s`, `12 min`, `3.5 h`, `2.1 d`. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 120) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} d`;
}

/** How long ago a moment (seconds since 1970) was. */
export function ago(time) {
  return time ? `${duration(Math.max(0, Date.now() / 1000 - time))} ago` : "–";
}

/** A moment (seconds since 1970) as local date and time. */
export function moment(time) {
  if (!time) return "–";
  const date = new Date(time * 1000);
  const pad = (value) => String(value).padStart(2, "0");
  return `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())} ${pad(date.getHours())}:${pad(date.getMinutes())}`;
}

/** Bytes, short. */
export function bytes(size) {
  if (!size) return "–";
  const power = Math.min(4, Math.floor(Math.log10(size) / 3));
  return `${Number((size / 1000 ** power).toPrecision(3))} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}

const COLORS = ["#2d8f6f", "#d0662e", "#3f78c9", "#a3528f", "#a58a10", "#c2495a", "#4b9aa8", "#7d6bc4", "#7c8a3a", "#8a7468"];

/** The colour of the n-th of several things; the first ten are chosen, later ones are computed. */
export function color(index) {
  return COLORS[index] ?? `hsl(${Math.round((index * 137.508) % 360)} 55% 52%)`;
}

/** A colour of `color` that lets through what is behind it. */
export function faded(of, alpha) {
  if (of.startsWith("#")) return of + Math.round(alpha * 255).toString(16).padStart(2, "0");
  return of.replace(")", ` / ${alpha})`);
}

/** The value of a colour of the style sheet. */
export function themed(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
