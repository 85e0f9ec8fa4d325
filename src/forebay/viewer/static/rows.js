// Rows: packed tokens in blocks of documents, conversations as turns, or the values of any other cache.
import { carriedRows, record, recordUrl } from './api.js';
import { facts, fill, h, missingRow, pageHead, problemBox, section, table } from './dom.js';
import { PLACES, count, counted, percent, shortValue } from './format.js';
import { maskPicture } from './mask.js';
import { go, noteView, viewUrl, wholeOf } from './router.js';
import { searchSection } from './search.js';
import { rowSteps } from './steps.js';
import { tokenStrip } from './tokens.js';

/** What the address of the page has, and how to change it without drawing the page again.
 * @typedef {{read: (name: string) => string, note: (change: Record<string, any>) => void}} Address */

/** @param {import('./app.js').View} view */
export async function rowsPage(view) {
  const { cache, query } = view;
  const carried = carriedRows(cache.index);
  const row = wholeOf(query, 'row', carried && carried.length ? carried[0] : 0);
  if (!cache.rows) { fill(view.box, h('h1', {}, 'Rows'), h('div', { class: 'box' }, cache.problem || 'The cache has no rows.')); return; }
  const missing = missingRow(cache, query);
  if (missing) { fill(view.box, h('h1', {}, 'Rows'), missing); return; }
  const tokens = hasTokens(cache);
  const token = carried ? '' : wholeOf(query, 'token', 0) || '';
  const found = tokens ? await record(cache.index, 'row', { row, token }) : await record(cache.index, 'peek', { row });
  if (!view.alive()) return;
  const state = Object.fromEntries(query);
  const address = {
    read: (/** @type {string} */ name) => state[name] || '',
    note: (/** @type {Record<string, any>} */ change) => noteView(cache.index, 'rows', Object.assign(state, { row }, change)),
  };
  const search = searchSection(view, address.read('text'), (text) => address.note({ text }));
  fill(view.box,
    pageHead(`Row ${count(row)}`, {
      note: found.error ? '' : tokens ? rowNote(found) : `of ${count(cache.rows)}`,
      python: ['import forebay as fb', `cache = fb.open_cache(${JSON.stringify(cache.root)})`, `row = cache[${row}]`, ...(tokens ? [`print(cache.text(${row}))`] : [])],
      json: [...(tokens ? /** @type {[string, string][]} */ ([['row', recordUrl(cache.index, 'row.json', { row, token })]]) : []), ['peek', recordUrl(cache.index, 'peek.json', { row })]],
    }),
    rowSteps(view, row, (next) => go(cache.index, 'rows', { row: next })),
    found.error ? problemBox(found) : tokens ? tokenSections(cache, found, address, search) : [...valueSection(found), search]);
}

/** @param {any} cache */
export function hasTokens(cache) {
  return ['tokens', 'chat', 'preferences'].includes(cache.kind);
}

/** @param {any} row */
function rowNote(row) {
  return `row ${count(row.row_in_chunk)} of ${count(row.chunk_rows)} in chunk ${count(row.chunk)} · generation ${row.generation}`;
}

/** @param {any} cache @param {any} row @param {Address} address @param {any} search */
function tokenSections(cache, row, address, search) {
  const chunk = viewUrl(cache.index, 'chunks', { layer: Object.keys(cache.layers)[0], chunk: row.chunk });
  return [
    row.note && problemBox({ error: row.note }),
    section(row.spans.length ? 'Turns' : 'Documents', parts(cache, row), strip(row, address)),
    h('div', { class: 'columns' },
      row.scores === null && section('Attention', maskPicture(row)),
      h('div', {}, search,
        section('Made from', table(['source file', '#from', '#to'], row.parts.map((/** @type {any} */ part) => [part.path, count(part.start), count(part.stop)]), PLACES),
          h('p', {}, h('a', { href: chunk }, `chunk ${count(row.chunk)}`), lineHint(row))))),
  ];
}

/** @param {any} row */
function lineHint(row) {
  const unknown = row.pieces.length > 0 && row.pieces.every((/** @type {any} */ piece) => !piece.source);
  return unknown && h('span', { class: 'soft' }, ' · To see the file and line of each document, pass --source to forebay view.');
}

/** @param {any} row @param {boolean[]} trained */
function summary(row, trained) {
  const used = row.length - row.padding;
  const documents = row.scores ? `1 prompt, ${counted(row.seq_lens.length - 1, 'candidate')}` : counted(row.seq_lens.length, row.spans.length ? 'conversation' : 'document');
  const whole = row.tokens.length === row.length;
  const number = row.spans.length ? trained.filter(Boolean).length : row.labels.filter((/** @type {number} */ label) => label !== -100).length;
  const padding = row.scores ? '' : ` · ${count(row.padding)} padding (${percent(row.padding / row.length)})`;
  return `${documents} · ${counted(used, 'token')}${whole ? ` (${count(number)} trained)` : ''}${padding}`;
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

/** The tokens with their switches: what colors them, and what is trained. @param {any} row @param {Address} address */
function strip(row, address) {
  const names = Object.keys(row.log_probs);
  const [line, place, code] = [h('p', { class: 'soft' }), h('div', {}), h('code', {})];
  const chosen = { color: address.read('color'), train: Math.max(0, row.policies.findIndex((/** @type {any} */ one) => one.name === address.read('train'))) };
  const draw = () => {
    const policy = row.policies[chosen.train];
    const made = tokenStrip(row, names.includes(chosen.color) ? chosen.color : '', policy ? policy.trained : row.spans.map((/** @type {any} */ one) => one.trained));
    fill(place, made.element);
    fill(line, summary(row, made.trained));
    fill(code, policy && policy.code ? policy.code : '');
  };
  const choice = (/** @type {string} */ title, /** @type {string} */ name, /** @type {[string, string][]} */ options, /** @type {string} */ now, /** @type {(value: string) => void} */ take) =>
    h('label', {}, title, h('select', { name, onchange: (/** @type {any} */ event) => { take(event.target.value); draw(); } },
      options.map(([value, shown]) => h('option', { value, selected: value === now }, shown))));
  draw();
  return [line, (names.length > 0 || row.policies.length > 0) && h('div', { class: 'tools' },
    row.policies.length > 0 && [choice('train on', 'train', row.policies.map((/** @type {any} */ one, /** @type {number} */ at) => [String(at), one.name]), String(chosen.train), (value) => {
      chosen.train = Number(value);
      address.note({ train: chosen.train ? row.policies[chosen.train].name : '' });
    }), code],
    names.length > 0 && choice('color by', 'color', [['', row.spans.length ? 'kind of token' : 'document'], ...names.map((name) => /** @type {[string, string]} */ ([name, name]))], chosen.color, (value) => {
      chosen.color = value;
      address.note({ color: value });
    })), place];
}

/** @param {any} peek */
function valueSection(peek) {
  return [peek.truncated.length > 0 && problemBox({ error: `Cut to a readable size: ${peek.truncated.join('; ')}.` }),
    ...peek.shown.map((/** @type {any} */ row) => section('Values',
      facts([['chunk', `${count(row.chunk)}, row ${count(row.row_in_chunk)} in it`]]),
      table(['column', 'type', 'value'], Object.entries(row.columns).map(([name, cell]) => [
        name, h('code', {}, `${cell.dtype} [${cell.shape.join(', ')}]`),
        h('span', { class: 'mono' }, cell.text !== undefined ? cell.text : shortValue(cell.values, 1200))]))))];
}
