// What a sample of rows looks like: histograms, and the rows that stand out.
import { isBundle, record } from './api.js';
import { h, section } from './dom.js';
import { bytes, count, counted, decimal, percent } from './format.js';
import { rowUrl, viewUrl } from './router.js';

/** @param {import('./app.js').View} view */
export async function shapeSections(view) {
  const found = view.cache.rows ? await record(view.cache.index, 'distribution') : { error: 'no rows' };
  if (found.error || !found.histograms.length) return [];
  const sampled = found.sampled < found.rows ? `of ${count(found.sampled)} rows in chunks at equal distances` : `of all ${counted(found.rows, 'row')}`;
  const lists = [...found.rankings.map((/** @type {any} */ one) => rankingList(view, one)), found.failures.length > 0 && failureList(view, found.failures)];
  return [
    section('Lengths and padding', h('p', { class: 'soft' }, sampled), h('div', { class: 'charts' }, found.histograms.map(histogram))),
    lists.filter(Boolean).length > 0 && section('Rows that stand out', h('p', { class: 'soft' }, `the largest values ${sampled}`), h('div', { class: 'charts' }, lists)),
  ];
}

/** @param {string} unit @param {number} value */
function shown(unit, value) {
  if (unit === 'share') return percent(value);
  if (unit === 'times') return `${value.toFixed(2)}×`;
  return unit === 'bytes' ? bytes(value) : decimal(Math.round(value));
}

/** @param {any} one */
function histogram(one) {
  const high = Math.max(...one.counts, 1);
  const bars = one.counts.map((/** @type {number} */ number, /** @type {number} */ at) => h('i', {
    style: { height: `${number ? Math.max(2, (100 * number) / high) : 0}%` },
    title: `${shown(one.unit, one.edges[at])} to ${shown(one.unit, one.edges[at + 1])}: ${count(number)}`,
  }));
  const last = one.edges[one.edges.length - 1];
  const label = `${one.name}: median ${shown(one.unit, one.median)}, at most ${shown(one.unit, one.most)}`;
  return h('figure', { class: 'histogram' }, h('h3', {}, one.name, h('b', {}, `median ${shown(one.unit, one.median)}`)),
    h('div', { class: 'bars', role: 'img', 'aria-label': label }, bars),
    h('div', { class: 'ends' }, h('span', {}, shown(one.unit, one.edges[0])), h('span', {}, one.most > last ? `${shown(one.unit, last)} and more` : shown(one.unit, last))));
}

/** @param {import('./app.js').View} view @param {any} one */
function rankingList(view, one) {
  return h('div', { class: 'ranking' }, h('h3', {}, one.name), h('ol', {}, one.rows.map((/** @type {any} */ each) => h('li', {},
    isBundle ? `row ${count(each.row)}` : h('a', { href: rowUrl(view.cache, each.row) }, `row ${count(each.row)}`), ` ${shown(one.unit, each.value)}`))));
}

/** @param {import('./app.js').View} view @param {any[]} failures */
function failureList(view, failures) {
  return h('div', { class: 'ranking' }, h('h3', {}, 'most failed samples'), h('ol', {}, failures.map((one) => h('li', {},
    h('a', { href: viewUrl(view.cache.index, 'chunks', { layer: one.layer, chunk: one.chunk }) }, `chunk ${count(one.chunk)}`), ` ${count(one.failures)}`))));
}
