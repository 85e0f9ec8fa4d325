// Rows: packed tokens with a color per document, or the values of any other cache.
import { carriedRows, isBundle, record, recordUrl } from './api.js';
import { facts, fill, h, problemBox, section, table } from './dom.js';
import { PLACES, count, percent, shortValue } from './format.js';
import { maskPicture } from './mask.js';
import { go, noteView, viewUrl, wholeOf } from './router.js';
import { preference, segment, tokenStrip } from './tokens.js';

/** What the address of the page says, and how to change it without drawing the page again.
 * @typedef {{said: (name: string) => string, note: (change: Record<string, any>) => void}} Address */

/** @param {import('./app.js').View} view */
export async function rowsPage(view) {
  const { cache, query } = view;
  const carried = carriedRows(cache.index);
  const row = Math.min(wholeOf(query, 'row', carried && carried.length ? carried[0] : 0), Math.max(0, cache.rows - 1));
  if (!cache.rows) { fill(view.box, h('h1', {}, 'Rows'), h('div', { class: 'box' }, cache.problem || 'The cache has no rows.')); return; }
  const tokens = ['tokens', 'chat', 'preferences'].includes(cache.kind);
  const token = carried ? '' : wholeOf(query, 'token', 0) || '';
  const found = tokens ? await record(cache.index, 'row', { row, token }) : await record(cache.index, 'peek', { row });
  if (!view.alive()) return;
  const state = Object.fromEntries(query);
  const address = {
    said: (/** @type {string} */ name) => state[name] || '',
    note: (/** @type {Record<string, any>} */ change) => noteView(cache.index, 'rows', Object.assign(state, { row }, change)),
  };
  fill(view.box,
    h('div', { class: 'head' }, h('h1', {}, `Row ${count(row)}`), h('span', { class: 'soft' }, 'JSON: ',
      tokens && [h('a', { href: recordUrl(cache.index, 'row.json', { row, token }) }, 'row'), ' '],
      h('a', { href: recordUrl(cache.index, 'peek.json', { row }) }, 'peek'))),
    steps(cache, row, carried, address),
    found.error ? problemBox(found) : tokens ? tokenSections(cache, found, address) : valueSection(found));
}

/** @param {any} cache @param {number} row @param {number[] | null} carried @param {Address} address */
function steps(cache, row, carried, address) {
  const to = (/** @type {number} */ next) => go(cache.index, 'rows', { row: Math.max(0, Math.min(cache.rows - 1, next)) });
  const step = (/** @type {number} */ way) => {
    if (!carried) return to(row + way);
    return to(carried[Math.max(0, Math.min(carried.length - 1, carried.indexOf(row) + way))]);
  };
  const number = h('input', { type: 'number', min: 0, max: cache.rows - 1, value: row, name: 'row', autocomplete: 'off' });
  const form = h('form', { onsubmit: (/** @type {Event} */ event) => { event.preventDefault(); to(Number(number.value) || 0); } },
    h('button', { type: 'button', onclick: () => step(-1), disabled: row === 0 }, '← previous'),
    h('button', { type: 'button', onclick: () => step(1), disabled: row >= cache.rows - 1 }, 'next →'),
    carried
      ? h('span', { class: 'soft' }, `this copy carries ${count(carried.length)} of ${count(cache.rows)} rows`)
      : [h('label', {}, `row, 0 to ${count(cache.rows - 1)}`, number), h('button', {}, 'Go'),
        h('button', { type: 'button', onclick: () => to(Math.floor(Math.random() * cache.rows)) }, 'random')]);
  return h('div', {}, form, !carried && sourceForm(cache, 'rows', address));
}

/**
 * Jump to a chunk, or to the rows of a source file.
 * @param {any} cache
 * @param {string} page
 * @param {Address} address
 */
export function sourceForm(cache, page, address) {
  const path = h('input', { type: 'search', placeholder: 'part.jsonl:17', name: 'path', value: address.said('path') });
  const chunk = h('input', { type: 'number', min: 0, name: 'chunk', placeholder: '0' });
  const found = h('div', { 'aria-live': 'polite' });
  const find = async () => {
    const places = await record(cache.index, 'find', { path: path.value });
    const lineWanted = /:\d+$/.test(path.value) && Array.isArray(places) && places.length > 0 && !places[0].exact;
    fill(found, places.error ? problemBox(places) : places.length === 0 ? h('p', { class: 'soft' }, 'No row was made from such a file.')
      : [lineWanted && h('p', { class: 'soft' }, 'These are the rows of the whole file: to find the row of a line, pass --source to forebay view.'),
        table(['source file', '#from', '#to', '#chunk', 'rows'], places.map((/** @type {any} */ place) => [place.path, count(place.start), count(place.stop), place.chunk,
          place.first_row === null ? 'not published' : h('a', { href: viewUrl(cache.index, page, { row: place.first_row }) },
            place.exact ? `row ${count(place.first_row)}` : `from row ${count(place.first_row)}`)]), `Places ${PLACES}`)]);
  };
  const form = h('form', {
    onsubmit: async (/** @type {Event} */ event) => {
      event.preventDefault();
      if (chunk.value === '' || path.value) { address.note({ path: path.value }); await find(); return; }
      const detail = await record(cache.index, 'chunk', { layer: Object.keys(cache.layers)[0], chunk: chunk.value });
      if (detail.error || detail.first_row === null) fill(found, h('p', { class: 'soft' }, detail.error || 'This chunk has no rows.'));
      else go(cache.index, page, { row: detail.first_row });
    },
  }, h('label', {}, 'chunk', chunk), h('label', {}, 'source file, or file:line', path), h('button', {}, 'Find rows'));
  if (address.said('path')) find();
  return h('details', { open: Boolean(address.said('path')) }, h('summary', { class: 'soft' }, 'Jump to a chunk or a source file'), form, found);
}

/** @param {any} cache @param {any} row @param {Address} address */
function tokenSections(cache, row, address) {
  const used = row.length - row.padding;
  const about = h('section', {}, h('h2', {}, 'Row'), facts([['row', `${count(row.row)} of ${count(row.rows)}`],
    ['chunk', h('a', { href: viewUrl(cache.index, 'chunks', { layer: Object.keys(cache.layers)[0], chunk: row.chunk }) }, `${count(row.chunk)}, row ${count(row.row_in_chunk)} of ${count(row.chunk_rows)}`)],
    ['generation', row.generation]]));
  return [
    row.note && problemBox({ error: row.note }),
    section('Tokens', h('p', { class: 'soft' }, summary(row, used)), parts(cache, row), colored(row, address)),
    h('div', { class: 'columns' },
      row.blocks ? section('Attention', maskPicture(row, address.said('blocks') !== '0', (yes) => address.note({ blocks: yes ? '' : 0 }))) : about,
      row.blocks ? h('div', {}, about, searchSection(cache, row, address)) : searchSection(cache, row, address)),
    row.candidates.length > 0 ? candidates(row) : pieces(row),
    section('Source of the chunk', table(['source file', '#from', '#to'], row.parts.map((/** @type {any} */ part) => [part.path, count(part.start), count(part.stop)]), PLACES)),
  ];
}

/** @param {any} row @param {number} used */
function summary(row, used) {
  const trained = row.labels.filter((/** @type {number} */ label) => label !== -100).length;
  const whole = row.tokens.length === row.length;
  const documents = row.candidates.length ? `a prompt and ${count(row.candidates.length)} candidates` : `${count(row.seq_lens.length)} ${row.seq_lens.length === 1 ? 'document' : 'documents'}`;
  const padding = row.candidates.length ? '' : `, ${count(row.padding)} padding (${percent(row.padding / row.length)})`;
  return `${count(used)} tokens in ${documents}${padding}${whole ? `, the loss counts ${count(trained)}` : ''}`;
}

/** Which tokens of a long row are shown. @param {any} cache @param {any} row */
function parts(cache, row) {
  if (row.tokens.length === row.length) return null;
  const to = (/** @type {number} */ token) => go(cache.index, 'rows', { row: row.row, token });
  const stop = row.first + row.tokens.length;
  return h('div', { class: 'tools' },
    h('button', { disabled: row.first === 0, onclick: () => to(Math.max(0, row.first - row.tokens.length)) }, '← earlier tokens'),
    h('button', { disabled: stop >= row.length, onclick: () => to(stop) }, 'later tokens →'),
    h('span', { class: 'soft' }, `tokens ${count(row.first)} to ${count(stop - 1)} of ${count(row.length)}`));
}

/** The tokens, colored by documents or by a column of log-probs. @param {any} row @param {Address} address */
function colored(row, address) {
  const names = Object.keys(row.log_probs);
  const place = h('div', {});
  const draw = (/** @type {string} */ color) => fill(place, tokenStrip(row, names.includes(color) ? color : ''));
  draw(address.said('color'));
  return [names.length > 0 && h('div', { class: 'tools' }, h('label', {}, 'color by', h('select', {
    name: 'color', onchange: (/** @type {any} */ event) => { address.note({ color: event.target.value }); draw(event.target.value); },
  }, h('option', { value: '' }, row.spans.length ? 'kind of span' : 'document'), names.map((name) => h('option', { value: name, selected: name === address.said('color') }, name))))), place];
}

/** @param {any} row */
function pieces(row) {
  const more = row.seq_lens.length - row.pieces.length;
  return section('Documents', table(['document', '#tokens', 'part', 'text'], row.pieces.map((/** @type {any} */ piece, /** @type {number} */ at) => [
    h('span', { class: piece.source ? '' : 'whole' }, h('i', { class: `swatch d${at % 6}` }), piece.source || `document ${piece.document}`), count(piece.tokens), part(piece),
    piece.text === null ? '' : shortValue(piece.text, 90)])), more > 0 && h('p', { class: 'soft' }, `and ${count(more)} more`));
}

/** Which part of a document a piece is. @param {any} piece */
function part(piece) {
  if (!piece.offset) return piece.goes_on ? 'its start' : 'whole';
  return `from token ${count(piece.offset)}${piece.goes_on ? ', continues elsewhere' : ''}`;
}

/** @param {any} row */
function candidates(row) {
  return section('Candidates', table(['candidate', '#tokens', 'text'], row.candidates.map((/** @type {any} */ one, /** @type {number} */ at) => [
    h('span', {}, h('i', { class: `swatch ${preference(at + 1)}` }), segment(row, at + 1)), count(one.tokens), shortValue(one.text, 400)])));
}

/** @param {any} cache @param {any} row @param {Address} address */
function searchSection(cache, row, address) {
  if (isBundle) return null;
  const text = h('input', { type: 'search', name: 'text', value: address.said('text') });
  const found = h('div', { 'aria-live': 'polite' });
  const search = async () => {
    const result = await record(cache.index, 'search', { chunk: row.chunk, text: text.value });
    const searched = result.rows_searched < result.rows_in_chunk ? `the first ${count(result.rows_searched)} rows` : `${count(result.rows_searched)} rows`;
    fill(found, result.error ? problemBox(result) : [
      h('p', { class: 'soft' }, `${count(result.hits.length)} of ${searched} have it${result.note ? `; ${result.note}` : ''}`),
      result.hits.length > 0 && table(['#row', 'text'], result.hits.map((/** @type {any} */ hit) => [
        h('a', { href: viewUrl(cache.index, 'rows', { row: hit.row, text: text.value }) }, count(hit.row)), h('span', {}, hit.before, h('mark', {}, hit.match), hit.after)]))]);
  };
  const form = h('form', { onsubmit: (/** @type {Event} */ event) => { event.preventDefault(); address.note({ text: text.value }); search(); } },
    h('label', {}, `text in chunk ${count(row.chunk)}`, text), h('button', {}, 'Search'));
  if (address.said('text')) search();
  return section('Search', form, found);
}

/** @param {any} peek */
function valueSection(peek) {
  return peek.shown.map((/** @type {any} */ row) => section(`Row ${count(row.row)}, chunk ${count(row.chunk)}, row ${count(row.row_in_chunk)} there`,
    table(['column', 'type', 'value'], Object.entries(row.columns).map(([name, cell]) => [
      name, h('code', {}, `${cell.dtype} [${cell.shape.join(', ')}]`),
      h('span', { class: 'mono' }, cell.text !== undefined ? cell.text : shortValue(cell.values, 1200))]))));
}
