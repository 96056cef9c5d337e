// Numbers, sizes, durations and moments as people read them. The API has the plain values.

/** @type {[number, string][]} */
const STEPS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
const SIZES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
// Resource of a limit -> its name, and the bytes of one unit if it is a size.
/** @type {{ [resource: string]: [string, number] }} */
const RESOURCES = { ram: ["RAM", 2 ** 20], disk: ["disk", 2 ** 30], "volume-gb": ["volume size", 2 ** 30] };
const USE = /^(\S+) ([\d.e+-]+)\/([\d.e+-]+)$/;

// A browser knows no later date; a record may contain any number.
/** @param {number} seconds */
export const isMoment = (seconds) => Math.abs(seconds) < 8e12;

/** @param {number} value */
export function number(value, digits = 1) {
  return new Intl.NumberFormat("en-US", { maximumFractionDigits: Math.abs(value) < 1 ? Math.max(2, digits) : digits }).format(value);
}

// The two largest units: "3 min 7 s", and fractions below 10 s: "0.12 s".
/** @param {number} seconds */
export function duration(seconds) {
  if (seconds > 0 && seconds < 9.95) return `${Number(seconds.toPrecision(2))} s`;
  let left = Math.max(0, Math.round(seconds));
  const parts = [];
  for (const [size, unit] of STEPS) {
    const count = Math.floor(left / Number(size));
    left %= Number(size);
    if (count) parts.push(`${number(count)} ${unit}`);
    else if (parts.length) break;
  }
  return parts.slice(0, 2).join(" ") || "0 s";
}

// Whole seconds: ages change while somebody reads them.
/** @param {number} seconds */
export const age = (seconds) => duration(Math.floor(Math.max(0, seconds)));

/** @param {number} value */
function unitOf(value) {
  return value < 1 ? 0 : Math.min(SIZES.length - 1, Math.floor(Math.log2(value) / 10));
}

/** @param {number} value @param {number} unit */
function inUnit(value, unit) {
  const amount = value / 1024 ** unit;
  return number(amount, unit && amount < 100 ? 1 : 0);
}

/** @param {number} value */
export function bytes(value) {
  const unit = unitOf(Math.abs(value));
  return `${inUnit(value, unit)} ${SIZES[unit]}`;
}

// "RAM 160 of 977 GiB": both in the unit of the limit.
/** @param {string} resource @param {number} used @param {number} limit */
export function use(resource, used, limit) {
  const [name, size] = RESOURCES[resource] || [resource, 0];
  if (!size) return `${name} ${number(used)} of ${number(limit)}`;
  const unit = unitOf(Math.max(used, limit) * size);
  return `${name} ${inUnit(used * size, unit)} of ${inUnit(limit * size, unit)} ${SIZES[unit]}`;
}

// The limits of a table, "cores 1/4, ram 512/1e+06"; any other text stays as it is.
/** @param {string} text */
export function uses(text) {
  const parts = text.split(", ").flatMap((part) => { const found = USE.exec(part); return found ? [found] : []; });
  if (parts.length < text.split(", ").length) return text;
  const shown = parts.filter(([, , used, limit]) => Number(used) || Number(limit));
  return (shown.length ? shown : parts).map(([, resource, used, limit]) => use(resource, Number(used), Number(limit))).join(", ");
}

// A name in a command: a shell must not read anything else in it.
/** @param {string} text */
export const shellQuoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

// As the texts of the server: "2026-11-02 10:00:00 UTC".
/** @param {number} seconds @param {1 | 2 | 3} [digits] of fractions */
function written(seconds, digits) {
  if (!isMoment(seconds)) return String(seconds);
  const found = new Intl.DateTimeFormat("en-US", {
    year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23", timeZoneName: "short",
    fractionalSecondDigits: digits,
  }).formatToParts(seconds * 1000);
  const { year, month, day, hour, minute, second, fractionalSecond, timeZoneName } = Object.fromEntries(found.map(({ type, value }) => [type, value]));
  return `${year}-${month}-${day} ${hour}:${minute}:${second}${digits ? `.${fractionalSecond}` : ""} ${timeZoneName}`;
}

/** @param {number} seconds of UNIX time */
export const moment = (seconds) => written(seconds);

// With milliseconds: steps of a launch are that short.
/** @param {number} seconds of UNIX time */
export const precisely = (seconds) => written(seconds, 3);
