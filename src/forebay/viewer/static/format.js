// Numbers, sizes and times as people read them.

/** The unit of places in source files, for captions. */
export const PLACES = 'in bytes of text files, rows of tables';

/** @param {number} value */
export function count(value) {
  return Number.isFinite(value) ? value.toLocaleString('en-US') : '–';
}

/** @param {number} value @param {string} name of one */
export function counted(value, name) {
  return `${count(value)} ${name}${value === 1 ? '' : 's'}`;
}

/** @param {number} value */
export function bytes(value) {
  const units = ['B', 'kB', 'MB', 'GB', 'TB', 'PB'];
  let power = 0;
  while (value >= 999.95 && power < units.length - 1) { value /= 1000; power += 1; }
  return power === 0 ? `${Math.round(value)} B` : `${value.toFixed(1)} ${units[power]}`;
}

/** @param {number | null | undefined} seconds */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return '–';
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  const minutes = Math.floor(whole / 60);
  if (minutes === 0) return `${whole} s`;
  const two = (/** @type {number} */ number) => String(number).padStart(2, '0');
  return minutes < 60 ? `${minutes} min ${two(whole % 60)} s` : `${Math.floor(minutes / 60)} h ${two(minutes % 60)} min`;
}

/** A moment in UTC. @param {number} seconds since 1970 */
export function time(seconds) {
  return new Date(1000 * seconds).toISOString().slice(0, 19).replace('T', ' ');
}

/** @param {number} share */
export function percent(share, digits = 1) {
  return Number.isFinite(share) ? `${(100 * share).toFixed(digits)}%` : '–';
}

/** @param {number} value */
export function rate(value) {
  return value >= 100 ? count(Math.round(value)) : value.toFixed(value >= 10 ? 1 : 2);
}

/** @param {number} value */
export function decimal(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return '–';
  return Number.isInteger(value) || Math.abs(value) >= 10000 ? count(Math.round(value)) : value.toPrecision(4).replace(/\.?0+$/, '');
}

/** A figure or total of a layer, in the unit of its name. @param {string} name @param {number} value */
export function figureText(name, value) {
  if (/share$|utilization$|^share_of_/.test(name)) return percent(value, 2);
  return /bytes$|^bytes_per_/.test(name) && value >= 1000 ? bytes(value) : decimal(value);
}

/** A value of a recipe or a record on one line, shortened; numbers exactly as they are stored. @param {any} value */
export function shortValue(value, most = 120) {
  const text = typeof value === 'string' ? value : value !== null && typeof value === 'object' ? listed(value) : String(value);
  return text !== undefined && text.length > most ? `${text.slice(0, most)}…` : text;
}

/** Lists and objects without the signs of JSON where nothing is nested. @param {any} value @returns {string} */
function listed(value) {
  const simple = (/** @type {any} */ one) => one === null || typeof one !== 'object';
  if (Array.isArray(value)) {
    if (value.every(simple)) return value.length ? value.join(', ') : 'none';
    return value.every((one) => one && !Array.isArray(one) && typeof one === 'object') ? value.map(listed).join(' · ') : JSON.stringify(value);
  }
  const pairs = Object.entries(value).filter(([, one]) => one !== null);
  if (!pairs.length) return 'none';
  const flat = (/** @type {any} */ one) => simple(one) || (Array.isArray(one) && one.every(simple));
  return pairs.every(([, one]) => flat(one)) ? pairs.map(([name, one]) => `${name} ${Array.isArray(one) ? one.join(', ') : one}`).join(', ') : JSON.stringify(value);
}
