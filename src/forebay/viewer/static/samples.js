// Three rows of a cache at a glance: documents, turns, pictures or values.
import { carriedRows, isBundle, pictureUrl, record } from './api.js';
import { fill, h, problemBox, section } from './dom.js';
import { count, counted, shortValue } from './format.js';
import { rowUrl } from './router.js';

const SHOWN = 3;
const MOST_TEXT = 280; // characters of one document
const MOST_PIECES = 3; // documents, turns or columns of one row

/** @param {import('./app.js').View} view */
export async function sampleSection(view) {
  const place = h('div', { class: 'columns thirds' });
  const draw = async (/** @type {number[]} */ rows) => {
    const cards = await Promise.all(rows.map((row) => sampleCard(view, row)));
    if (view.alive()) fill(place, cards);
  };
  const all = carriedRows(view.cache.index);
  const pick = (/** @type {(at: number) => number} */ share) => {
    const numbers = Array.from({ length: SHOWN }, (_, at) => Math.floor(share(at) * (all ? all.length : view.cache.rows)));
    return [...new Set(numbers)].sort((a, b) => a - b).map((at) => (all ? all[at] : at));
  };
  await draw(pick((at) => (2 * at + 1) / (2 * SHOWN)));
  const other = h('button', { type: 'button', onclick: () => draw(pick(() => Math.random())) }, 'Other rows');
  return section('Sample rows', place, !isBundle && view.cache.rows > SHOWN && h('p', {}, other));
}

/** @param {import('./app.js').View} view @param {number} row */
async function sampleCard(view, row) {
  const { cache } = view;
  const images = cache.kind === 'images';
  const found = await record(cache.index, images ? 'image' : 'peek', { row });
  const link = rowUrl(cache, row);
  return h('article', { class: 'sample' }, h('h3', {}, h('a', { href: link }, `Row ${count(row)}`)),
    found.error ? problemBox(found) : images ? imageSample(cache, found, link) : rowSample(found.shown[0]));
}

/** @param {any} cache @param {any} found @param {string} link */
function imageSample(cache, found, link) {
  const { image } = found;
  return [h('a', { href: link }, h('img', { src: pictureUrl(cache.index, { row: image.row, side: 224 }), alt: image.id, width: 160, height: 160 })),
    h('p', { class: 'soft' }, image.id, h('br'), `${image.original_size.join(' × ')} pixels`), image.tags.map((/** @type {string} */ tag) => h('span', { class: 'tag' }, tag))];
}

/** @param {any} row */
function rowSample(row) {
  if (row.columns) {
    return Object.entries(row.columns).slice(0, MOST_PIECES).map(([name, cell]) =>
      excerpt(name, cell.text !== undefined && cell.text !== null ? cell.text : shortValue(cell.values, MOST_TEXT)));
  }
  const turns = row.pieces.flatMap((/** @type {any} */ piece) => piece.spans.filter((/** @type {any} */ span) => !['header', 'stop'].includes(span.kind)));
  const parts = turns.length ? turns.map((/** @type {any} */ span) => excerpt(span.kind === 'response' || span.kind === 'prompt' ? span.role : `${span.role}: ${span.kind.replace('_', ' ')}`, span.text, `turn by-${span.role}`))
    : row.pieces.map((/** @type {any} */ piece) => excerpt(piece.source || `document, ${counted(piece.tokens, 'token')}`, piece.text));
  const name = turns.length ? 'turn' : 'document';
  return [parts.slice(0, MOST_PIECES), parts.length > MOST_PIECES && h('p', { class: 'soft' }, `and ${counted(parts.length - MOST_PIECES, `more ${name}`)}`)];
}

/** @param {string} title @param {string | null} text @param {string} [kind] */
function excerpt(title, text, kind = '') {
  return h('div', { class: `excerpt ${kind}` }, h('i', { class: 'who' }, title), text === null ? 'no text: the tokenizer is not available' : h('div', { class: 'clamp' }, shortValue(text.trim(), MOST_TEXT)));
}
