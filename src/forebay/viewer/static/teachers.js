// Teacher outputs of a row over timesteps: a slider, heat maps and statistics.
import { carriedRows, isBundle, pictureUrl, record, recordUrl } from './api.js';
import { axisChart, heatMap } from './charts.js';
import { facts, fill, h, missingBox, missingRow, pageHead, problemBox, section } from './dom.js';
import { count, decimal, percent } from './format.js';
import { go, noteView, viewUrl, wholeOf } from './router.js';

const CARRIED_T = [0.1, 0.3, 0.5, 0.7, 0.9];
const COLORS = ['--mask0', '--mask1', '--mask2', '--mask3', '--mask4', '--mask5', '--accent', '--soft'];

/** @param {import('./app.js').View} view */
export async function teachersPage(view) {
  const { cache, query } = view;
  if (!cache.taught.length || !cache.rows) { fill(view.box, h('h1', {}, 'Teachers'), h('div', { class: 'box' }, 'The cache has no added layers.')); return; }
  const layer = query.get('layer') || cache.taught[0];
  const missing = cache.taught.includes(layer) ? missingRow(cache, query) : missingBox(`There is no layer '${layer}' above the base: there is ${cache.taught.join(', ')}.`);
  if (missing) { fill(view.box, h('h1', {}, 'Teachers'), missing); return; }
  const row = wholeOf(query, 'row', 0);
  let t = Math.min(1, Math.max(0, Number(query.get('t') ?? 0.5) || 0));
  if (isBundle) t = nearest(t);
  const place = h('div', {});
  const shownT = h('output', {}, `t = ${t.toFixed(3)}`);
  const address = (/** @type {Record<string, any>} */ change) => ({ layer, row, t, ...change });
  let asked = 0;
  const show = async () => {
    const mine = ++asked;
    const found = await record(cache.index, 'teacher', { layer, row, t });
    slider.hidden = !(found.buckets && found.buckets.length);
    if (mine === asked && view.alive()) fill(place, found.error ? problemBox(found) : rowSections(cache, found, row));
  };
  const slide = (/** @type {any} */ event) => {
    t = isBundle ? nearest(Number(event.target.value)) : Number(event.target.value);
    shownT.textContent = `t = ${t.toFixed(3)}`;
    noteView(cache.index, 'teachers', address({ t }));
    show();
  };
  const slider = h('label', {}, shownT, h('input', { type: 'range', name: 't', min: 0, max: 1, step: 0.005, value: t, 'aria-label': 'timestep t', oninput: slide }));
  const carried = carriedRows(cache.index);
  fill(view.box,
    pageHead(`Layer ${layer}`, {
      note: `of ${cache.root}`,
      python: ['import forebay as fb', `cache = fb.open_cache(${JSON.stringify(cache.root)})`, `print(fb.teachers.features(cache, ${JSON.stringify(layer)}).at([${row}], ${t}))`],
      json: [['teacher', recordUrl(cache.index, 'teacher.json', { layer, row, t })]],
    }),
    h('form', { onsubmit: (/** @type {any} */ event) => { event.preventDefault(); go(cache.index, 'teachers', address({ row: event.target.row.value })); } },
      cache.taught.length > 1 && h('label', {}, 'layer', h('select', { onchange: (/** @type {any} */ event) => go(cache.index, 'teachers', address({ layer: event.target.value })) },
        cache.taught.map((/** @type {string} */ one) => h('option', { value: one, selected: one === layer }, one)))),
      h('label', {}, carried ? `row, one of ${carried.slice(0, 8).join(', ')}` : `row, 0 to ${count(cache.rows - 1)}`, h('input', { type: 'number', name: 'row', min: 0, max: cache.rows - 1, value: row })),
      h('button', {}, 'Go'),
      slider),
    place);
  await show();
}

/** @param {number} t */
function nearest(t) {
  return CARRIED_T.reduce((best, one) => (Math.abs(one - t) < Math.abs(best - t) ? one : best));
}

/** The largest magnitude of a column: equal colors are equal values at all timesteps. @param {any} column */
function largest(column) {
  return [column.values, column.over, column.maps].flat(4).reduce((most, value) => Math.max(most, Math.abs(value)), 1e-9);
}

/** @param {any} cache @param {any} found @param {number} row */
function rowSections(cache, found, row) {
  const page = cache.kind === 'images' ? 'images' : 'rows';
  const between = found.buckets.length > 1 ? `${percent(1 - found.alpha, 0)} of bucket ${found.buckets[found.low]} and ${percent(found.alpha, 0)} of bucket ${found.buckets[found.low + 1]}` : '';
  return h('div', {},
    section(`Row ${count(row)}`,
      facts([['row', h('a', { href: viewUrl(cache.index, page, { row }) }, `${count(row)} of ${count(cache.rows)}`)], ['teacher', found.teacher],
        ['this row', found.present ? 'present' : 'absent: the teacher did not produce it'],
        ['at t', between], ['rows present', found.present_share === null ? 'unknown: a chunk of the layer is missing' : percent(found.present_share)]]),
      page === 'images' && h('img', { src: pictureUrl(cache.index, { row, side: 224 }), alt: `image of row ${row}`, width: 160 })),
    found.columns.map((/** @type {any} */ column) => columnSection(found, column, largest(column))));
}

/** @param {any} found @param {any} column @param {number} most */
function columnSection(found, column, most) {
  const size = column.shape.length ? `${column.shape.map(count).join(' × ')} values` : 'one number';
  return section(column.column,
    h('p', { class: 'soft' }, `${column.dtype}, ${size}${found.buckets.length ? ` at each of ${found.buckets.length} timesteps` : ''}${column.step > 1 ? `; every ${column.step}th value is drawn` : ''}`),
    column.maps.length || (column.values.length > 1) ? spatial(found, column, most) : column.over.length ? overTime(found, column, most) : values(column, most),
    facts([['mean', decimal(column.mean)], ['deviation', decimal(column.deviation)], ['range', `${decimal(column.least)} to ${decimal(column.most)}`], ['norm', decimal(column.norm)]]));
}

/** @param {any} found @param {any} column @param {number} most */
function spatial(found, column, most) {
  return [h('h3', {}, `At t = ${found.t.toFixed(3)}`), heatMap(column.values, { height: 220, most, label: `${column.column} at t`, square: true }),
    column.maps.length > 0 && [h('h3', {}, 'Over timesteps'), h('div', { class: 'grid maps' }, column.maps.map((/** @type {number[][]} */ map, /** @type {number} */ at) =>
      h('figure', {}, heatMap(map, { height: 84, most, label: `${column.column} at bucket ${found.buckets[at]}`, square: true }), h('figcaption', {}, `t = ${found.buckets[at]}`))))],
    h('p', { class: 'soft' }, `dark is 0, bright is ${decimal(most)}`)];
}

/** @param {any} found @param {any} column @param {number} most */
function overTime(found, column, most) {
  const few = column.over[0].length <= 8;
  if (few) {
    return axisChart({
      lines: column.over[0].map((/** @type {number} */ _, /** @type {number} */ at) => ({
        name: column.names[at] || `value ${at}`, values: column.over.map((/** @type {number[]} */ line) => line[at]), color: COLORS[at % COLORS.length],
      })),
      across: found.buckets, xLabel: 'timestep t', yLabel: 'value', format: decimal,
    });
  }
  return [h('h3', {}, `At t = ${found.t.toFixed(3)}`), heatMap(column.values, { height: 34, signed: true, most, label: `${column.column} at t` }),
    h('h3', {}, 'Over timesteps'), h('div', { class: 'timed' }, found.buckets.map((/** @type {number} */ bucket, /** @type {number} */ at) => [
      h('span', { class: at === found.low || at === found.low + 1 ? 'near' : '' }, bucket), heatMap([column.over[at]], { height: 16, signed: true, most, label: `${column.column} at bucket ${bucket}` })])),
    h('p', { class: 'soft' }, `blue is −${decimal(most)}, white is 0, red is ${decimal(most)}; the two buckets around t are named in bold`)];
}

/** @param {any} column @param {number} most */
function values(column, most) {
  return [heatMap(column.values, { height: 34, signed: true, most, label: column.column }), h('p', { class: 'soft' }, `blue is −${decimal(most)}, white is 0, red is ${decimal(most)}`)];
}
