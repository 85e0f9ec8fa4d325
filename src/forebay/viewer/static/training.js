// The order of an epoch: rows of batches, how well they are shuffled, what each node reads, and a running job.
import { isBundle, record, recordUrl } from './api.js';
import { axisChart, drawing } from './charts.js';
import { cssColor, facts, figure, fill, h, problemBox, section, table } from './dom.js';
import { bytes, count, decimal, percent, shortValue } from './format.js';
import { go, viewUrl, wholeOf } from './router.js';

const NODES = 12; // ranks that are listed

/** @param {import('./app.js').View} view */
export async function trainingPage(view) {
  const { cache, query } = view;
  const wanted = isBundle ? {} : {
    seed: wholeOf(query, 'seed', 0), epoch: wholeOf(query, 'epoch', 0), world: Math.max(1, wholeOf(query, 'world', 1)),
    batch: Math.max(1, wholeOf(query, 'batch', Math.min(48, Math.max(1, cache.rows)))), shuffle: query.get('shuffle') || 'auto', at: wholeOf(query, 'at', 0),
  };
  const found = cache.rows ? await record(cache.index, 'training', wanted) : { error: cache.problem || 'The cache has no rows.' };
  const jobs = isBundle ? [] : await record(cache.index, 'statistics');
  if (!view.alive()) return;
  const jobBox = h('div', {}, jobSections(jobs));
  if (Array.isArray(jobs) && jobs.length) {
    const timer = setInterval(async () => fill(jobBox, jobSections(await record(cache.index, 'statistics'))), 1000);
    view.ending(() => clearInterval(timer));
  }
  fill(view.box,
    h('div', { class: 'head' }, h('h1', {}, 'Training order'), h('span', { class: 'soft' }, 'JSON: ', h('a', { href: recordUrl(cache.index, 'training.json', wanted) }, 'training'), ' ',
      !isBundle && h('a', { href: recordUrl(cache.index, 'remote.json', { world: wanted.world, batch: wanted.batch, seed: wanted.seed }) }, 'remote'))),
    !isBundle && orderForm(cache, wanted), jobBox,
    found.error ? problemBox(found) : orderSections(cache, found, wanted));
}

/** @param {any} cache @param {any} wanted */
function orderForm(cache, wanted) {
  const number = (/** @type {string} */ name, /** @type {string} */ title, low = 0) => h('label', {}, title, h('input', { type: 'number', name, min: low, value: wanted[name] }));
  return h('form', {
    onsubmit: (/** @type {any} */ event) => {
      event.preventDefault();
      const all = ['seed', 'epoch', 'world', 'batch', 'shuffle'].map((name) => [name, event.target.elements[name].value]);
      go(cache.index, 'training', Object.fromEntries(all));
    },
  }, number('seed', 'seed'), number('epoch', 'epoch'), number('world', 'world size', 1), number('batch', 'global batch size, rows', 1),
  h('label', {}, 'shuffle', h('select', { name: 'shuffle' }, ['auto', 'global', 'window', 'sequential'].map((one) => h('option', { value: one, selected: one === wanted.shuffle }, one)))),
  h('button', { class: 'primary' }, 'Show'));
}

/** @param {any} cache @param {any} found @param {any} wanted */
function orderSections(cache, found, wanted) {
  return [
    h('div', { class: 'figures' }, figure('batches of an epoch', count(found.batches), found.leftover_rows ? `${count(found.leftover_rows)} rows left over` : ''), figure('order', found.kind),
      figure('chunks in a batch', percent(found.quality.chunks, 0), 'of a global shuffle'), figure('distance of rows', percent(found.quality.travel, 0), 'of a global shuffle')),
    h('div', { class: 'columns' },
      section('Which row comes when', scatter(found)),
      section('How well it is shuffled', table(['', '#this order', '#global shuffle'], [
        ['chunks that a batch touches', percent(found.quality.chunks), percent(found.global_quality.chunks)],
        ['units that a batch touches', percent(found.quality.units), percent(found.global_quality.units)],
        ['distance between successive rows', percent(found.quality.travel), percent(found.global_quality.travel)]],
      'Measured on 64 batches; 100 % is what chance gives. A unit is a run of rows that is read at once.'))),
    section('Batches', h('div', { class: 'tools' },
      !isBundle && h('button', { disabled: !wanted.at, onclick: () => go(cache.index, 'training', { ...wanted, at: Math.max(0, wanted.at - 8) }) }, '← earlier'),
      !isBundle && h('button', { disabled: wanted.at + 8 >= found.batches, onclick: () => go(cache.index, 'training', { ...wanted, at: wanted.at + 8 }) }, 'later →')),
    table(['#batch', '#chunks', found.world_size > 1 ? 'rows by rank' : 'rows'], found.shown.map((/** @type {any} */ batch) => [count(batch.batch), count(batch.chunks), batchRows(cache, batch, found.world_size)]))),
    section('What a node downloads in an epoch', found.note && h('p', { class: 'soft' }, found.note), h('div', { class: 'columns' },
      h('div', {}, axisChart({
        lines: [{ name: 'bytes', values: found.tiers.map((/** @type {any} */ one) => one.bytes_per_node), color: '--accent' }],
        across: found.tiers.map((/** @type {any} */ one) => Math.round(100 * one.share)), xLabel: 'size of the tier, % of what the node reads', yLabel: 'downloaded per node, epochs after the first', format: bytes, zero: true, dots: true,
      }), h('p', { class: 'soft' }, `as forebay estimate --remote computes it, with window shuffle and one rank per node; the cache has ${bytes(found.cache_bytes)}`)),
      table(['#rank', '#chunks read', '#bytes, each chunk once'], found.nodes.slice(0, NODES).map((/** @type {any} */ node) => [node.rank, count(node.chunks), bytes(node.bytes)]),
        found.world_size > NODES ? `The first ${NODES} of ${count(found.world_size)} ranks` : undefined))),
  ];
}

/** @param {any} cache @param {any} batch @param {number} world */
function batchRows(cache, batch, world) {
  const page = cache.kind === 'images' ? 'images' : 'rows';
  const link = (/** @type {number} */ row) => [h('a', { href: viewUrl(cache.index, page, page === 'images' ? { row, one: 1 } : { row }) }, count(row)), ' '];
  if (world === 1) return h('span', { class: 'links' }, batch.rows.slice(0, 64).map(link), batch.rows.length > 64 && `and ${count(batch.rows.length - 64)} more`);
  const ranks = Array.from({ length: Math.min(world, 8) }, (_, rank) => batch.rows.filter((/** @type {number} */ _row, /** @type {number} */ at) => at % world === rank));
  return h('div', { class: 'links' }, ranks.map((rows, rank) => h('div', {}, h('span', { class: 'soft' }, `rank ${rank}: `), rows.slice(0, 16).map(link), rows.length > 16 && '…')), world > 8 && h('span', { class: 'soft' }, `and ${count(world - 8)} more ranks`));
}

/** Row against position, this order beside a global shuffle. @param {any} found */
function scatter(found) {
  const one = (/** @type {number[]} */ rows, /** @type {string} */ name, /** @type {string} */ color) => h('figure', { class: 'plot' }, drawing(210, (pen, width, height) => {
    const box = { left: 44, right: width - 6, top: 8, bottom: height - 22 };
    pen.strokeStyle = cssColor('--line');
    pen.strokeRect(box.left + 0.5, box.top + 0.5, box.right - box.left - 1, box.bottom - box.top - 1);
    pen.fillStyle = cssColor(color);
    const last = Math.max(1, found.rows - 1);
    rows.forEach((row, at) => pen.fillRect(box.left + ((box.right - box.left) * found.positions[at]) / last - 1, box.bottom - ((box.bottom - box.top) * row) / last - 1, 2, 2));
    pen.fillStyle = cssColor('--soft');
    pen.font = '12px system-ui, sans-serif';
    pen.textBaseline = 'middle';
    pen.textAlign = 'right';
    pen.fillText('row', box.left - 6, (box.top + box.bottom) / 2);
    pen.fillText(short(last), box.left - 6, box.top + 6);
    pen.fillText('0', box.left - 6, box.bottom - 6);
    pen.textAlign = 'center';
    pen.fillText('position in the epoch', (box.left + box.right) / 2, height - 8);
    pen.textAlign = 'left';
    pen.fillText('0', box.left, height - 8);
    pen.textAlign = 'right';
    pen.fillText(short(last), box.right, height - 8);
  }, `row by position, ${name}`), h('figcaption', {}, name));
  return h('div', { class: 'charts' }, one(found.order, `this order (${found.kind})`, '--accent'), one(found.global_order, 'a global shuffle', '--soft'));
}

/** @param {number} value */
function short(value) {
  return value < 10000 ? count(value) : value < 1e6 ? `${Math.round(value / 1000)}k` : `${(value / 1e6).toFixed(1)}M`;
}

/** @param {any} jobs */
function jobSections(jobs) {
  if (!Array.isArray(jobs)) return [];
  return jobs.map((job) => section(`Running job: ${job.path}`, job.problem ? problemBox({ error: job.problem }) : facts(Object.entries(job.statistics).flatMap(([name, value]) => (
    value && typeof value === 'object' && !Array.isArray(value) ? Object.entries(value).map(([inner, one]) => /** @type {[string, any]} */ ([`${name} ${inner}`.replaceAll('_', ' '), jobValue(inner, one)]))
      : [/** @type {[string, any]} */ ([name.replaceAll('_', ' '), jobValue(name, value)])])))));
}

/** @param {string} name @param {any} value */
function jobValue(name, value) {
  if (typeof value !== 'number') return value === null ? '' : shortValue(value, 200);
  if (name.includes('bytes')) return bytes(value);
  return /second|waited|gathering|opening/.test(name) ? `${value.toFixed(2)} s` : decimal(value);
}
