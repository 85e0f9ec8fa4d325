// The order of an epoch: the rows of each batch, how well they are mixed, and a running job.
import { isBundle, record, recordUrl } from './api.js';
import { drawing } from './charts.js';
import { cssColor, facts, figure, fill, h, pageHead, problemBox, section, table } from './dom.js';
import { bytes, count, decimal, percent, shortValue } from './format.js';
import { go, rowUrl, wholeOf } from './router.js';

const STEP = 8; // batches on the page
const MOST_LINKS = 24; // rows of a batch
const MOST_RANKS = 8;

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
  const shuffle = found.kind === 'sequential' ? 'None' : `"${found.kind}"`;
  fill(view.box,
    pageHead('Training order', {
      note: 'which rows each training step gets',
      python: ['import forebay as fb', 'from forebay.torch import Loader', `cache = fb.open_cache(${JSON.stringify(cache.root)})`,
        `loader = Loader(cache, global_batch_size=${found.global_batch_size}, seed=${found.seed}, shuffle=${shuffle})`],
      json: [['training', recordUrl(cache.index, 'training.json', wanted)]],
    }),
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
  }, number('seed', 'seed'), number('epoch', 'epoch'), number('world', 'ranks (GPUs)', 1), number('batch', 'global batch size, rows', 1),
  h('label', {}, 'shuffle', h('select', { name: 'shuffle' }, ['auto', 'global', 'window', 'sequential'].map((one) => h('option', { value: one, selected: one === wanted.shuffle }, one)))),
  h('button', { class: 'primary' }, 'Show'));
}

const ORDERS = /** @type {Record<string, string>} */ ({
  global: 'Every row is equally likely at every place: a fully random order.',
  window: 'Rows are mixed within windows of chunks, so that few chunks are open at a time.',
  sequential: 'Rows come in the order in which they are stored.',
});

/** @param {any} cache @param {any} found @param {any} wanted */
function orderSections(cache, found, wanted) {
  const isRandom = found.kind === 'global' || cache.chunks === 1;
  return [
    h('p', {}, ORDERS[found.kind] || ''),
    h('div', { class: 'figures' },
      figure('steps per epoch', count(found.batches), found.leftover_rows ? `${count(found.leftover_rows)} rows left over` : ''), figure('shuffle', found.kind),
      !isRandom && figure('chunks in a batch', percent(found.mixing.chunks, 0), 'a random order has 100%'),
      !isRandom && figure('distance of neighbors', percent(found.mixing.distance, 0), 'a random order has 100%')),
    section('Which row comes when', scatter(found, isRandom)),
    section('Batches', !isBundle && h('div', { class: 'tools' },
      h('button', { disabled: !wanted.at, onclick: () => go(cache.index, 'training', { ...wanted, at: Math.max(0, wanted.at - STEP) }) }, '← earlier'),
      h('button', { disabled: wanted.at + STEP >= found.batches, onclick: () => go(cache.index, 'training', { ...wanted, at: wanted.at + STEP }) }, 'later →')),
    table(['#step', '#chunks', found.world_size > 1 ? 'rows by rank' : 'rows'], found.shown.map((/** @type {any} */ batch) => [count(batch.batch), count(batch.chunks), batchRows(cache, batch, found.world_size)]))),
  ];
}

/** @param {any} cache @param {any} batch @param {number} world */
function batchRows(cache, batch, world) {
  const link = (/** @type {number} */ row) => [h('a', { href: rowUrl(cache, row) }, count(row)), ' '];
  const listed = (/** @type {number[]} */ rows, /** @type {number} */ most) => h('span', {}, rows.slice(0, most).map(link), rows.length > most && `and ${count(rows.length - most)} more`);
  if (world === 1) return h('span', { class: 'links' }, listed(batch.rows, MOST_LINKS));
  const ranks = Array.from({ length: Math.min(world, MOST_RANKS) }, (_, rank) => batch.rows.filter((/** @type {number} */ _row, /** @type {number} */ at) => at % world === rank));
  return h('div', { class: 'links' }, ranks.map((rows, rank) => h('div', {}, h('span', { class: 'soft' }, `rank ${rank}: `), listed(rows, MOST_RANKS))), world > MOST_RANKS && h('span', { class: 'soft' }, `and ${count(world - MOST_RANKS)} more ranks`));
}

/** Row against position; next to a random order, unless this is one. @param {any} found @param {boolean} isRandom */
function scatter(found, isRandom) {
  const last = Math.max(1, found.rows - 1);
  const one = (/** @type {number[]} */ rows, /** @type {string} */ name, /** @type {string} */ color) => h('figure', { class: 'plot' }, drawing(210, (pen, width, height) => {
    const box = { left: 44, right: width - 6, top: 8, bottom: height - 22 };
    pen.strokeStyle = cssColor('--line');
    pen.strokeRect(box.left + 0.5, box.top + 0.5, box.right - box.left - 1, box.bottom - box.top - 1);
    pen.fillStyle = cssColor(color);
    rows.forEach((row, at) => pen.fillRect(box.left + ((box.right - box.left) * found.positions[at]) / last - 1, box.bottom - ((box.bottom - box.top) * row) / last - 1, 2, 2));
    labels(pen, box, height, last);
  }, `row by place in the epoch, ${name}`), h('figcaption', {}, name));
  return h('div', { class: 'charts' }, one(found.order, `this order (${found.kind})`, '--accent'), !isRandom && one(found.random_order, 'a random order', '--soft'));
}

/** @param {CanvasRenderingContext2D} pen @param {Record<string, number>} box @param {number} height @param {number} last */
function labels(pen, box, height, last) {
  pen.fillStyle = cssColor('--soft');
  pen.font = '12px system-ui, sans-serif';
  pen.textBaseline = 'middle';
  const texts = /** @type {[string, number, number, CanvasTextAlign][]} */ ([
    ['row', box.left - 6, (box.top + box.bottom) / 2, 'right'], [short(last), box.left - 6, box.top + 6, 'right'], ['0', box.left - 6, box.bottom - 6, 'right'],
    ['place in the epoch', (box.left + box.right) / 2, height - 8, 'center'], ['0', box.left, height - 8, 'left'], [short(last), box.right, height - 8, 'right']]);
  for (const [text, x, y, align] of texts) { pen.textAlign = align; pen.fillText(text, x, y); }
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
