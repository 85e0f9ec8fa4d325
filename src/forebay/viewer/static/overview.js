// What a cache is: its health, three rows, how rows are distributed; then recipes, generations and failures.
import { record, recordUrl } from './api.js';
import { facts, figure, fill, h, pageHead, problemBox, section, table } from './dom.js';
import { bytes, count, counted, decimal, duration, figureText, percent, shortValue, time } from './format.js';
import { viewUrl } from './router.js';
import { sampleSection } from './samples.js';
import { shapeSections } from './shape.js';

/** @param {import('./app.js').View} view */
export async function overviewPage(view) {
  const { cache } = view;
  const [summary, overview, samples, shape] = await Promise.all([
    record(cache.index, 'summary'), record(cache.index, 'overview'), cache.rows ? sampleSection(view) : null, shapeSections(view)]);
  if (!view.alive()) return;
  fill(view.box,
    heading(cache, summary),
    overview.error ? problemBox(overview) : healthBanner(cache, overview.health),
    samples, shape,
    summary.error ? problemBox(summary) : figures(summary, overview),
    !overview.error && overview.gaps.length > 0 && gapSection(overview.gaps),
    !overview.error && overview.failures > 0 && failures(cache.index, overview),
    !summary.error && summary.layers.slice().sort((/** @type {any} */ one) => (one.layer === summary.base ? -1 : 0)).map((/** @type {any} */ layer) => layerSection(cache.index, summary, layer)),
    h('div', { class: 'columns' }, !overview.error && overview.generations.length > 0 && generations(overview, summary.generations || 0), !summary.error && about(summary)));
}

/** @param {any} cache @param {any} summary */
function heading(cache, summary) {
  const name = cache.root.split('/').filter(Boolean).pop() || cache.root;
  const kind = cache.kind ? `${cache.kind} cache` : 'nothing published yet';
  return pageHead(name, {
    note: summary.error ? kind : `${kind} · ${counted(summary.rows, 'row')} · generation ${summary.generation}`,
    python: ['import forebay as fb', `cache = fb.open_cache(${JSON.stringify(cache.root)})`, 'print(cache)', 'print(fb.peek(cache))'],
    json: ['summary', 'overview', 'distribution'].map((one) => [one, recordUrl(cache.index, `${one}.json`)]),
  });
}

/** Whether the cache is complete and sound. @param {any} cache @param {any} health */
function healthBanner(cache, health) {
  const { published = 0, missing = 0, claimed = 0, abandoned = 0, made = 0, lost = 0, bad = 0 } = health.chunks;
  const planned = Object.values(health.chunks).reduce((sum, one) => sum + one, 0);
  const checked = health.headers_checked < health.published ? `${count(health.headers_checked)} of ${counted(health.published, 'header')} compared so far` : 'all headers match';
  const damage = [lost && `${counted(lost, 'chunk')} lost`, bad && `${counted(bad, 'chunk')} damaged`].filter(Boolean).join(', ');
  const texts = /** @type {Record<string, string>} */ ({
    complete: `${counted(published, 'chunk')}, ${checked}`,
    building: `${count(published + made)} of ${counted(planned, 'chunk')} made`,
    incomplete: `${counted(missing + claimed + abandoned, 'chunk')} of ${count(planned)} missing${made ? `, ${count(made)} not published yet` : ''}`,
    damaged: `${damage}, of ${count(planned)}`,
    empty: 'nothing is published yet',
  });
  return h('div', { class: `box health ${health.state === 'damaged' ? 'bad' : health.state}`, role: 'status' },
    h('strong', {}, health.state[0].toUpperCase() + health.state.slice(1)), ` · ${texts[health.state]} · `,
    h('a', { href: viewUrl(cache.index, 'chunks') }, 'chunk map'), health.command && h('code', { class: 'command' }, health.command));
}

/** @param {any} summary @param {any} overview */
function figures(summary, overview) {
  const base = summary.layers.find((/** @type {any} */ layer) => layer.layer === summary.base) || { figures: {}, statistics: {} };
  const derived = base.figures;
  return h('div', { class: 'figures' },
    figure('rows', count(summary.rows)),
    figure('stored', bytes(summary.bytes)),
    figure('chunks', count(base.chunks || 0), base.chunks < summary.planned_chunks ? `of ${count(summary.planned_chunks)} planned` : ''),
    derived.padding_share !== undefined && figure('padding', percent(derived.padding_share, 2)),
    derived.bits_per_token !== undefined && figure('bits per token', derived.bits_per_token.toFixed(2)),
    base.statistics.tokens !== undefined && figure('tokens', count(base.statistics.tokens)),
    derived.bytes_per_image !== undefined && figure('per image', bytes(derived.bytes_per_image)),
    derived.tags_per_image !== undefined && figure('tags per image', decimal(derived.tags_per_image)),
    figure('failed samples', count(overview.failures || 0)));
}

/** The chunks that are missing, in the order of a build. @param {any[]} gaps */
function gapSection(gaps) {
  const range = (/** @type {number[]} */ [first, last]) => (first === last ? count(first) : `${count(first)}–${count(last)}`);
  return section('Missing chunks', table(['layer', '#chunks', 'in this order', '#space', '#time'], gaps.map((gap) => [
    gap.layer, count(gap.chunks), gap.missing.map(range).join(', '), gap.bytes === null ? 'unknown' : `about ${bytes(gap.bytes)}`,
    gap.seconds === null ? 'unknown' : `about ${duration(gap.seconds)}`])));
}

/** @param {any} overview @param {number} all */
function generations(overview, all) {
  const rows = overview.generations.slice().reverse().map((/** @type {any} */ one) => [
    one.number, one.written === null ? 'unknown' : h('span', { class: 'whole' }, time(one.written)), one.problem ? '' : count(one.rows), one.problem ? '' : bytes(one.bytes), one.problem || h('code', {}, one.digest.slice(0, 12))]);
  return section('Generations', table(['#number', 'written, UTC', '#rows', '#stored', 'digest'], rows,
    all > rows.length ? `${count(all - rows.length)} older ones are not listed` : undefined));
}

/** @param {number} cache @param {any} summary @param {any} layer */
function layerSection(cache, summary, layer) {
  const role = layer.layer === summary.base ? 'base layer' : 'added layer';
  const numbers = (/** @type {Record<string, any>} */ all) => Object.entries(all).filter(([, value]) => typeof value === 'number')
    .map(([name, value]) => /** @type {[string, any]} */ ([name.replaceAll('_', ' '), figureText(name, value)]));
  const [figuresOf, totals] = [numbers(layer.figures), numbers(layer.statistics)];
  return section(`Layer ${layer.layer}`,
    h('p', { class: 'soft' }, `${layer.kind} · ${role} · ${counted(layer.chunks, 'chunk')} · ${counted(layer.rows, 'row')} · ${bytes(layer.bytes)} · `,
      h('a', { href: viewUrl(cache, 'chunks', { layer: layer.layer }) }, 'chunk map')),
    h('div', { class: 'columns thirds' },
      h('div', {}, h('h3', {}, 'Recipe'), facts([...recipeFacts(layer.fields), ['fingerprint', h('code', {}, layer.fingerprint.slice(0, 16))]])),
      h('div', {}, h('h3', {}, 'Columns'), table(['name', 'type'], layer.columns.map((/** @type {string} */ text) => {
        const at = text.indexOf(': ');
        return [text.slice(0, at), h('code', {}, text.slice(at + 2))];
      })), figuresOf.length > 0 && [h('h3', {}, 'Figures'), facts(figuresOf)]),
      totals.length > 0 && h('div', {}, h('h3', {}, 'Totals'), facts(totals))));
}

/** The fields of a recipe that are set: not null, false or empty. @param {Record<string, any>} fields @returns {[string, any][]} */
function recipeFacts(fields) {
  return Object.entries(fields).filter(([, value]) => value === 0 || (value && Object(value).length !== 0 && JSON.stringify(value) !== '{}'))
    .map(([name, value]) => [name, value === true ? 'yes' : shortValue(value)]);
}

/** @param {number} cache @param {any} overview */
function failures(cache, overview) {
  const reasons = Object.entries(overview.reasons).map(([reason, number]) => [reason, count(Number(number))]);
  return section(`Failed samples: ${count(overview.failures)}`,
    table(['reason', '#samples'], reasons),
    h('h3', {}, 'Examples'),
    table(['sample', 'reason', 'detail', 'chunk'], overview.failed_samples.map((/** @type {any} */ one) => [one.sample, one.reason, one.detail,
      h('a', { href: viewUrl(cache, 'chunks', { layer: one.layer, chunk: one.chunk }) }, `${one.layer} ${one.chunk}`)])));
}

/** @param {any} summary */
function about(summary) {
  const versions = summary.versions.map((/** @type {any} */ one) => Object.entries(one).map(([name, value]) => `${name} ${value}`).join(', ')).join(' · ');
  return h('div', {},
    section('Source', facts([['files', count(summary.source_files)], ...recipeFacts(summary.source)])),
    section('Identity', facts([['folder', summary.root], ['cache id', h('code', {}, summary.cache_id)], ['digest', h('code', {}, summary.digest)],
      ['generations', count(summary.generations)], ['signed', summary.tagged ? 'with a key' : 'no'], ['built with', versions]])));
}
