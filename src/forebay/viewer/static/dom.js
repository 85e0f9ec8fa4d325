// Elements and text. Everything that comes from a cache becomes a text node: no string is ever parsed as HTML.

/** @typedef {Node | string | number | null | undefined | false} Child */
/** @typedef {Child | Child[] | Child[][]} Children */

/**
 * Make an element; properties that begin with `on` are listeners, `class` and `data-…` are attributes.
 * @param {string} tag
 * @param {Record<string, any>} [properties]
 * @param {...Children} children
 * @returns {any}
 */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (name === 'style') Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? '' : String(value));
  }
  append(element, children);
  return element;
}

/** @param {Node} element @param {Children[]} children */
export function append(element, children) {
  for (const child of children.flat(2)) {
    if (child === null || child === undefined || child === false) continue;
    element.appendChild(child instanceof Node ? child : document.createTextNode(visible(String(child))));
  }
}

/** Replace the content of an element. @param {Element} element @param {...Children} children */
export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
}

/** Text without the characters that change the direction or the meaning of the text next to it. @param {string} text */
export function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/g,
    (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, '0')}`);
}

/** A section with a heading. @param {string} title @param {...Children} children */
export function section(title, ...children) {
  return h('section', {}, h('h2', {}, title), ...children);
}

/** Names and values in two columns; pairs without a value are left out. @param {[string, Child][]} pairs */
export function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== '' && value !== null && value !== undefined);
  return h('dl', { class: 'facts' }, shown.map(([name, value]) => [h('dt', {}, name), h('dd', {}, value)]));
}

/** A table; columns whose heading begins with `#` hold numbers. @param {string[]} heads @param {Child[][]} rows @param {string} [caption] */
export function table(heads, rows, caption) {
  const kind = heads.map((head) => (head.startsWith('#') ? 'number' : ''));
  return h('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': caption || heads.join(', ').replaceAll('#', '') },
    h('table', {},
      caption && h('caption', {}, caption),
      h('thead', {}, h('tr', {}, heads.map((head, at) => h('th', { scope: 'col', class: kind[at] }, head.replace('#', ''))))),
      h('tbody', {}, rows.map((row) => h('tr', {}, row.map((cell, at) => h('td', { class: kind[at] }, cell)))))));
}

/** A message in place of what cannot be shown. @param {{error: string, damaged?: boolean, layer?: string, chunk?: number}} problem */
export function problemBox(problem) {
  return h('div', { class: problem.damaged ? 'box bad' : 'box', role: 'alert' },
    h('strong', {}, problem.damaged ? 'Damaged' : 'Not available'), h('p', {}, problem.error));
}

/** A message where an address leads to nothing. @param {string} message @param {...Children} children */
export function missingBox(message, ...children) {
  return h('div', { class: 'box', role: 'alert', 'data-missing': '' }, h('strong', {}, 'Not found'), h('p', {}, message), ...children);
}

/** A box where an address has a row that the cache does not have, else null. @param {any} cache @param {URLSearchParams} query */
export function missingRow(cache, query) {
  const row = query.get('row') || '0';
  return /^\d{1,15}$/.test(row) && Number(row) < cache.rows ? null
    : missingBox(`There is no row ${row}: this cache has rows 0 to ${(cache.rows - 1).toLocaleString('en-US')}.`);
}

/** The heading of a page with its code in Python and its records. @param {string} title @param {{note?: Children, python?: string[], json?: [string, string][]}} facts */
export function pageHead(title, facts) {
  const records = (facts.json || []).map(([name, url]) => [h('a', { href: url }, name), ' ']);
  return h('div', { class: 'head' },
    h('div', {}, h('h1', {}, title), facts.note && h('span', { class: 'soft' }, facts.note)),
    h('div', { class: 'side' }, records.length > 0 && h('span', { class: 'soft' }, 'JSON: ', ...records),
      facts.python && pythonBox(facts.python.join('\n'))));
}

/** Code that shows the same in Python, with a button that copies it. @param {string} code */
function pythonBox(code) {
  const button = h('button', { type: 'button', onclick: async () => { await copyText(code); button.textContent = 'Copied'; } }, 'Copy');
  return h('details', { class: 'python' }, h('summary', {}, 'Python'), h('pre', { class: 'command mono' }, code), button);
}

/** @param {string} text */
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // a page that is not served by this machine may not use the clipboard
    const area = document.body.appendChild(h('textarea', {}, text));
    area.select();
    document.execCommand('copy');
    area.remove();
  }
}

/** A figure: one number with its unit and name. @param {string} name @param {string} value @param {string} [note] */
export function figure(name, value, note) {
  return h('div', { class: 'figure' }, h('span', { class: 'value' }, value), h('span', { class: 'name' }, name),
    note && h('span', { class: 'note' }, note));
}

/** The value of a CSS variable of the page. @param {string} name */
export function cssColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
