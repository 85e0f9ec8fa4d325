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

/**
 * @param {Node} element
 * @param {Children[]} children
 */
export function append(element, children) {
  for (const child of children.flat(2)) {
    if (child === null || child === undefined || child === false) continue;
    element.appendChild(child instanceof Node ? child : document.createTextNode(visible(String(child))));
  }
}

/**
 * Replace the content of an element.
 * @param {Element} element
 * @param {...Children} children
 */
export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
}

/**
 * Text without the characters that change the direction or the meaning of what stands beside it.
 * @param {string} text
 */
export function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/g,
    (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, '0')}`);
}

/**
 * A section with a heading.
 * @param {string} title
 * @param {...Children} children
 */
export function section(title, ...children) {
  return h('section', {}, h('h2', {}, title), ...children);
}

/**
 * Names and values in two columns; pairs without a value are left out.
 * @param {[string, Child][]} pairs
 */
export function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== '' && value !== null && value !== undefined);
  return h('dl', { class: 'facts' }, shown.map(([name, value]) => [h('dt', {}, name), h('dd', {}, value)]));
}

/**
 * A table; columns whose heading begins with `#` hold numbers.
 * @param {string[]} heads
 * @param {Child[][]} rows
 * @param {string} [caption]
 */
export function table(heads, rows, caption) {
  const kind = heads.map((head) => (head.startsWith('#') ? 'number' : ''));
  return h('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': caption || heads.join(', ').replaceAll('#', '') },
    h('table', {},
      caption && h('caption', {}, caption),
      h('thead', {}, h('tr', {}, heads.map((head, at) => h('th', { scope: 'col', class: kind[at] }, head.replace('#', ''))))),
      h('tbody', {}, rows.map((row) => h('tr', {}, row.map((cell, at) => h('td', { class: kind[at] }, cell)))))));
}

/**
 * A message in place of what cannot be shown.
 * @param {{error: string, damaged?: boolean, layer?: string, chunk?: number}} problem
 */
export function problemBox(problem) {
  return h('div', { class: problem.damaged ? 'box bad' : 'box', role: 'alert' },
    h('strong', {}, problem.damaged ? 'Damaged' : 'Not available'), h('p', {}, problem.error));
}

/**
 * A figure: one number with its unit and name.
 * @param {string} name
 * @param {string} value
 * @param {string} [note]
 */
export function figure(name, value, note) {
  return h('div', { class: 'figure' }, h('span', { class: 'value' }, value), h('span', { class: 'name' }, name),
    note && h('span', { class: 'note' }, note));
}

/**
 * The value of a CSS variable of the page.
 * @param {string} name
 */
export function cssColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
