// What a cache is: counts, recipes, columns, generations, failures, and what to type next.
import { record, recordUrl } from './api.js';
import { axisChart } from './charts.js';
import { facts, figure, fill, h, problemBox, section, table } from './dom.js';
import { bytes, count, counted, decimal, percent, shortValue, time } from './format.js';
import { viewUrl } from './router.js';

/** @param {import('./app.js').View} view */
export async function overviewPage(view) {
  const { index } = view.cache;
  const [summary, overview] = await Promise.all([record(index, 'summary'), record(index, 'overview')]);
  if (!view.alive()) return;
  fill(view.box,
    heading(view.cache, summary),
    summary.error ? problemBox(summary) : figures(summary, overview),
    overview.error ? problemBox(overview) : h('div', { class: 'columns' },
      commands(overview), overview.generations.length > 0 && generations(overview)),
    !summary.error && summary.layers.map((/** @type {any} */ layer) => layerSection(index, summary, layer)),
    !overview.error && overview.failures > 0 && failures(index, overview),
    !summary.error && about(summary));
}

/** @param {any} cache @param {any} summary */
function heading(cache, summary) {
  const name = cache.root.split('/').filter(Boolean).pop() || cache.root;
  const kind = cache.kind ? `${cache.kind} cache` : 'nothing published yet';
  return h('div', { class: 'head' },
    h('div', {}, h('h1', {}, name), h('span', { class: 'soft' }, summary.error ? kind : `${kind}, generation ${summary.generation}`)),
    h('span', { class: 'soft' }, 'JSON: ', ['summary', 'overview', 'status', 'gaps'].map((one) => [
      h('a', { href: recordUrl(cache.index, `${one}.json`) }, one), ' '])));
}

/** @param {any} summary @param {any} overview */
function figures(summary, overview) {
  const base = summary.layers.find((/** @type {any} */ layer) => layer.layer === summary.base) || { figures: {}, statistics: {} };
  const derived = base.figures;
  const listed = base.chunks || 0;
  return h('div', { class: 'figures' },
    figure('rows', count(summary.rows)),
    figure('stored', bytes(summary.bytes)),
    figure('chunks', count(listed), listed < summary.planned_chunks ? `of ${count(summary.planned_chunks)} planned` : 'complete'),
    derived.padding_share !== undefined && figure('padding', percent(derived.padding_share, 2)),
    derived.bits_per_token !== undefined && figure('bits per token', derived.bits_per_token.toFixed(2)),
    base.statistics.tokens !== undefined && figure('tokens', count(base.statistics.tokens)),
    derived.bytes_per_image !== undefined && figure('per image', bytes(derived.bytes_per_image)),
    derived.tags_per_image !== undefined && figure('tags per image', decimal(derived.tags_per_image)),
    figure('failed samples', count(overview.failures || 0)));
}

/** @param {any} overview */
function commands(overview) {
  return section('Type next', overview.commands.length === 0 && h('p', { class: 'soft' }, 'Nothing is planned yet.'),
    h('ul', { class: 'commands' }, overview.commands.map((/** @type {any} */ one) =>
      h('li', {}, h('code', { class: 'command' }, one.command), h('span', {}, one.why)))));
}

/** @param {any} overview */
function generations(overview) {
  const sound = overview.generations.filter((/** @type {any} */ one) => !one.problem);
  const rows = overview.generations.slice(-8).reverse().map((/** @type {any} */ one) => one.problem
    ? [one.number, written(one.written), '', '', one.problem]
    : [one.number, written(one.written), count(one.rows), bytes(one.bytes), h('code', {}, one.digest.slice(0, 12))]);
  const timed = sound.every((/** @type {any} */ one) => one.written !== null) && sound.length > 1 && sound[0].written < sound[sound.length - 1].written;
  const chart = sound.length > 1 && axisChart({
    lines: [{ name: 'rows', values: sound.map((/** @type {any} */ one) => one.rows), color: '--accent' }],
    across: sound.map((/** @type {any} */ one) => (timed ? one.written : one.number)), xLabel: timed ? 'written, UTC' : 'generation', yLabel: 'rows',
    format: count, formatX: timed ? time : undefined, step: true, zero: true, dots: timed,
  });
  const known = 'Written: the time of the file in UTC, as the store has it';
  return section('Generations', chart,
    table(['#number', 'written', '#rows', '#stored', 'digest'], rows,
      overview.generations_left_out ? `${known}. ${count(overview.generations_left_out)} older ones are not listed` : known));
}

/** @param {number | null} seconds */
function written(seconds) {
  if (seconds === null) return 'unknown';
  const [day, clock] = time(seconds).split(' ');
  return h('span', {}, h('span', { class: 'whole' }, day), ' ', h('span', { class: 'whole' }, clock));
}

/** @param {number} cache @param {any} summary @param {any} layer */
function layerSection(cache, summary, layer) {
  const role = layer.layer === summary.base ? 'decides the rows' : 'further columns';
  const recipe = Object.entries(layer.fields).map(([name, value]) => /** @type {[string, any]} */ ([name, shortValue(value)]));
  const derived = Object.entries(layer.figures).filter(([, value]) => typeof value === 'number')
    .map(([name, value]) => /** @type {[string, any]} */ ([name.replaceAll('_', ' '), figureValue(name, Number(value))]));
  const sums = Object.entries(layer.statistics).filter(([, value]) => typeof value === 'number')
    .map(([name, value]) => /** @type {[string, any]} */ ([name.replaceAll('_', ' '), decimal(Number(value))]));
  return section(`Layer ${layer.layer}`,
    h('p', { class: 'soft' }, `${layer.kind}, ${role}; ${counted(layer.chunks, 'chunk')}, ${counted(layer.rows, 'row')}, ${bytes(layer.bytes)} · `,
      h('a', { href: viewUrl(cache, 'chunks', { layer: layer.layer }) }, 'chunk map')),
    h('div', { class: 'columns thirds' },
      h('div', {}, h('h3', {}, 'Recipe'), facts([...recipe, ['fingerprint', h('code', {}, layer.fingerprint.slice(0, 16))]])),
      h('div', {}, h('h3', {}, 'Columns'), table(['name', 'type'], layer.columns.map((/** @type {string} */ text) => {
        const at = text.indexOf(': ');
        return [text.slice(0, at), h('code', {}, text.slice(at + 2))];
      })),
        derived.length > 0 && [h('h3', {}, 'Figures'), facts(derived)]),
      sums.length > 0 && h('div', {}, h('h3', {}, 'Sums over all chunks'), facts(sums))));
}

/** @param {string} name @param {number} value */
function figureValue(name, value) {
  if (name.endsWith('_share')) return percent(value, 2);
  return name.startsWith('bytes_per') && value >= 1000 ? bytes(value) : decimal(value);
}

/** @param {number} cache @param {any} overview */
function failures(cache, overview) {
  const reasons = Object.entries(overview.reasons).map(([reason, number]) => [reason, count(Number(number))]);
  const read = overview.failures_read < overview.failures ? `of the first ${count(overview.failures_read)} that were read` : undefined;
  return section(`Failed samples: ${count(overview.failures)}`,
    table(['reason', '#samples'], reasons, read),
    h('h3', {}, 'Examples'),
    table(['sample', 'reason', 'detail', 'chunk'], overview.failed_samples.map((/** @type {any} */ one) => [one.sample, one.reason, one.detail,
      h('a', { href: viewUrl(cache, 'chunks', { layer: one.layer, chunk: one.chunk }) }, `${one.layer} ${one.chunk}`)])));
}

/** @param {any} summary */
function about(summary) {
  const versions = summary.versions.map((/** @type {any} */ one) => Object.entries(one).map(([name, value]) => `${name} ${value}`).join(', ')).join(' · ');
  const source = Object.entries(summary.source).filter(([, value]) => value !== '' && value !== null)
    .map(([name, value]) => /** @type {[string, any]} */ ([name, shortValue(value)]));
  return h('div', { class: 'columns' },
    section('Source', facts([['files', count(summary.source_files)], ...source])),
    section('Identity', facts([['folder', summary.root], ['cache id', h('code', {}, summary.cache_id)], ['digest', h('code', {}, summary.digest)],
      ['generations', count(summary.generations)], ['signed', summary.tagged ? 'with a key' : 'no'], ['built with', versions]])));
}
