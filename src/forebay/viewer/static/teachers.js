// Teacher outputs over timesteps: a slider, heat maps, statistics, and two rows side by side.
import { carriedRows, isBundle, record, recordUrl } from './api.js';
import { axisChart, heatMap } from './charts.js';
import { facts, fill, h, problemBox, section } from './dom.js';
import { count, decimal, percent } from './format.js';
import { go, noteView, viewUrl, wholeOf } from './router.js';

const CARRIED_T = [0.1, 0.3, 0.5, 0.7, 0.9];
const COLORS = ['--mask0', '--mask1', '--mask2', '--mask3', '--mask4', '--mask5', '--accent', '--soft'];

/** @param {import('./app.js').View} view */
export async function teachersPage(view) {
  const { cache, query } = view;
  if (!cache.taught.length || !cache.rows) { fill(view.box, h('h1', {}, 'Teachers'), h('div', { class: 'box' }, 'The cache has no further layers.')); return; }
  const layer = cache.taught.includes(query.get('layer') || '') ? query.get('layer') : cache.taught[0];
  const row = Math.min(wholeOf(query, 'row', 0), cache.rows - 1);
  const beside = query.get('beside') === null ? null : Math.min(wholeOf(query, 'beside', 0), cache.rows - 1);
  let t = Math.min(1, Math.max(0, Number(query.get('t') ?? 0.5) || 0));
  if (isBundle) t = nearest(t);
  const place = h('div', { class: 'beside' });
  const shownT = h('output', {}, `t = ${t.toFixed(3)}`);
  const address = (/** @type {Record<string, any>} */ change) => ({ layer, row, beside, t, ...change });
  let asked = 0;
  const show = async () => {
    const mine = ++asked;
    const rows = beside === null ? [row] : [row, beside];
    const found = await Promise.all(rows.map((one) => record(cache.index, 'teacher', { layer, row: one, t })));
    slider.hidden = !found.some((one) => one.buckets && one.buckets.length);
    if (mine === asked && view.alive()) fill(place, found.map((one, at) => (one.error ? problemBox(one) : rowColumn(cache, one, rows[at]))));
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
    h('div', { class: 'head' }, h('h1', {}, `Layer ${layer}`), h('span', { class: 'soft' }, 'JSON: ', h('a', { href: recordUrl(cache.index, 'teacher.json', { layer, row, t }) }, 'teacher'))),
    h('form', { onsubmit: (/** @type {any} */ event) => { event.preventDefault(); go(cache.index, 'teachers', address({ row: event.target.row.value, beside: event.target.beside.value })); } },
      cache.taught.length > 1 && h('label', {}, 'layer', h('select', { onchange: (/** @type {any} */ event) => go(cache.index, 'teachers', address({ layer: event.target.value })) },
        cache.taught.map((/** @type {string} */ one) => h('option', { value: one, selected: one === layer }, one)))),
      h('label', {}, carried ? `row, one of ${carried.slice(0, 8).join(', ')}` : `row, 0 to ${count(cache.rows - 1)}`, h('input', { type: 'number', name: 'row', min: 0, max: cache.rows - 1, value: row })),
      h('label', {}, 'beside row', h('input', { type: 'number', name: 'beside', min: 0, max: cache.rows - 1, value: beside === null ? '' : beside, placeholder: 'none' })),
      h('button', {}, 'Go'),
      slider),
    place);
  await show();
}

/** @param {number} t */
function nearest(t) {
  return CARRIED_T.reduce((best, one) => (Math.abs(one - t) < Math.abs(best - t) ? one : best));
}

/** @param {any} cache @param {any} found @param {number} row */
function rowColumn(cache, found, row) {
  const page = cache.kind === 'images' ? 'images' : 'rows';
  const between = found.buckets.length > 1 ? `${percent(1 - found.alpha, 0)} of bucket ${found.buckets[found.low]} and ${percent(found.alpha, 0)} of bucket ${found.buckets[found.low + 1]}` : '';
  return h('div', {},
    section(`Row ${count(row)}`,
      facts([['row', h('a', { href: viewUrl(cache.index, page, { row }) }, `${count(row)} of ${count(found.rows)}`)], ['teacher', found.teacher],
        ['here', found.present ? 'present' : 'absent: the teacher could not make this row'],
        ['at t', between], ['rows present', found.presence ? percent(found.present_share) : 'unknown: a chunk of the layer is missing']]),
      found.presence && presenceStrip(found)),
    found.columns.map((/** @type {any} */ column) => columnSection(found, column)));
}

/** @param {any} found */
function presenceStrip(found) {
  const bits = [...found.presence].map(Number);
  const columns = Math.min(bits.length, 256);
  const lines = [];
  for (let at = 0; at < bits.length; at += columns) lines.push(bits.slice(at, at + columns).concat(new Array(Math.max(0, at + columns - bits.length)).fill(NaN)));
  return [h('h3', {}, 'Presence'), heatMap(lines, { height: Math.max(10, Math.min(90, lines.length * 6)), label: `presence of ${bits.length} rows`, most: 1 }),
    h('p', { class: 'soft' }, `bright: present; ${count(bits.length)} rows${found.presence_rows[1] > 1 ? `, every ${count(found.presence_rows[1])}th` : ''}`)];
}

/** @param {any} found @param {any} column */
function columnSection(found, column) {
  const { statistics: s } = column;
  const size = column.shape.length ? `${column.shape.map(count).join(' × ')} values` : 'one number';
  return section(column.column,
    h('p', { class: 'soft' }, `${column.dtype}, ${size}${found.buckets.length ? ` at each of ${found.buckets.length} timesteps` : ''}${column.step > 1 ? `; every ${column.step}th value is drawn` : ''}`),
    column.maps.length || (column.values.length > 1) ? spatial(found, column) : column.over.length ? overTime(found, column) : values(column),
    facts([['mean', decimal(s.mean)], ['deviation', decimal(s.deviation)], ['range', `${decimal(s.least)} to ${decimal(s.most)}`], ['norm', decimal(s.norm)]]));
}

/** @param {any} found @param {any} column */
function spatial(found, column) {
  const most = Math.max(1e-9, ...column.maps.flat(2), ...column.values.flat());
  return [h('h3', {}, `At t = ${found.t.toFixed(3)}`), heatMap(column.values, { height: 220, most, label: `${column.column} at t`, square: true }),
    column.maps.length > 0 && [h('h3', {}, 'Over timesteps'), h('div', { class: 'grid maps' }, column.maps.map((/** @type {number[][]} */ map, /** @type {number} */ at) =>
      h('figure', {}, heatMap(map, { height: 84, most, label: `${column.column} at bucket ${found.buckets[at]}`, square: true }), h('figcaption', {}, `t = ${found.buckets[at]}`))))],
    h('p', { class: 'soft' }, `dark is 0, bright is ${decimal(most)}`)];
}

/** @param {any} found @param {any} column */
function overTime(found, column) {
  const few = column.over[0].length <= 8;
  if (few) {
    return axisChart({
      lines: column.over[0].map((/** @type {number} */ _, /** @type {number} */ at) => ({
        name: column.names[at] || `value ${at}`, values: column.over.map((/** @type {number[]} */ line) => line[at]), color: COLORS[at % COLORS.length],
      })),
      across: found.buckets, xLabel: 'timestep t', yLabel: 'value', format: decimal, dots: true,
    });
  }
  const most = Math.max(1e-9, ...column.over.flat().map(Math.abs));
  return [h('h3', {}, `At t = ${found.t.toFixed(3)}`), heatMap(column.values, { height: 34, signed: true, most, label: `${column.column} at t` }),
    h('h3', {}, 'Over timesteps'), h('div', { class: 'timed' }, found.buckets.map((/** @type {number} */ bucket, /** @type {number} */ at) => [
      h('span', { class: at === found.low || at === found.low + 1 ? 'near' : '' }, bucket), heatMap([column.over[at]], { height: 16, signed: true, most, label: `${column.column} at bucket ${bucket}` })])),
    h('p', { class: 'soft' }, `blue is −${decimal(most)}, white is 0, red is ${decimal(most)}; the two buckets around t are named in bold`)];
}

/** @param {any} column */
function values(column) {
  const most = Math.max(1e-9, ...column.values.flat().map(Math.abs));
  return [heatMap(column.values, { height: 34, signed: true, most, label: column.column }), h('p', { class: 'soft' }, `blue is −${decimal(most)}, white is 0, red is ${decimal(most)}`)];
}
