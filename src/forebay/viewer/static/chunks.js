// The chunk map, live while a build runs.
import { liveEvents, record, recordUrl } from './api.js';
import { curve } from './charts.js';
import { STATES, chunkMap } from './chunkmap.js';
import { cssColor, facts, figure, fill, h, missingBox, pageHead, problemBox, section, table } from './dom.js';
import { PLACES, bytes, count, counted, duration, figureText, percent, rate } from './format.js';
import { noteView, viewUrl, wholeOf } from './router.js';

/** @param {import('./app.js').View} view */
export async function chunksPage(view) {
  const { index } = view.cache;
  const lost = h('div', {});
  const progress = h('div', {});
  const maps = h('div', {});
  const detail = h('div', { 'aria-live': 'polite' });
  const build = buildSection();
  fill(view.box,
    pageHead('Chunks', {
      python: ['import forebay as fb', `print(fb.status(${JSON.stringify(view.cache.root)}))`],
      json: ['chunks', 'build'].map((name) => [name, recordUrl(index, `${name}.json`)]),
    }),
    lost, progress, build.element, maps, detail);
  /** @type {Record<string, ReturnType<typeof layerMap>>} */
  const shown = {};
  const open = async (/** @type {string} */ layer, /** @type {number} */ chunk) => {
    noteView(index, 'chunks', { layer, chunk });
    fill(detail, detailSection(index, view.cache, await record(index, 'chunk', { layer, chunk })));
  };
  const add = (/** @type {any} */ layer, /** @type {any[]} */ claims) => {
    shown[layer.layer] = layerMap(layer, claims, (chunk) => open(layer.layer, chunk));
    return shown[layer.layer].element;
  };
  let drawn = '?'; // the layers whose maps are on the page, and the note above them
  const drawMaps = (/** @type {any} */ map) => {
    const frame = [map.note, ...map.layers.map((/** @type {any} */ layer) => layer.layer)].join();
    if (frame === drawn) for (const layer of map.layers) shown[layer.layer].show(layer, map.claims);
    else {
      fill(maps, map.note && problemBox({ error: map.note, damaged: true }),
        map.layers.length === 0 && h('div', { class: 'box' }, 'Nothing is planned yet.'),
        map.layers.map((/** @type {any} */ layer) => add(layer, map.claims)));
    }
    drawn = frame;
  };
  await new Promise((done) => {
    const stop = liveEvents(index, (event) => {
      if (event.map && event.map.error) { fill(maps, problemBox(event.map)); done(null); return; }
      if (event.map) drawMaps(event.map);
      if (event.history) build.history(event.history);
      build.show(event.live);
      fill(progress, progressFigures(event.live));
      done(null);
    }, (yes) => {
      fill(lost, !yes && problemBox({ error: 'The server does not answer; is `forebay view` still running? The map is as it was last seen.' }));
      if (!yes) done(null);
    });
    view.ending(stop);
  });
  const layer = view.query.get('layer') || Object.keys(shown)[0];
  const chunk = wholeOf(view.query, 'chunk', -1);
  if (shown[layer] && chunk >= 0) { shown[layer].moveTo(chunk); await open(layer, chunk); }
  else if (layer && !shown[layer]) fill(detail, missingBox(`There is no layer '${layer}' in this cache.`));
}

/** @param {any} live */
function progressFigures(live) {
  const share = live.planned ? live.moment.done / live.planned : 0;
  return [h('div', { class: 'figures' },
    figure('chunks', percent(share), `${count(live.moment.done)} of ${count(live.planned)} planned`),
    figure('published rows', count(live.rows)),
    figure('stored', bytes(live.bytes)),
    live.running && figure('chunks per second', rate(live.moment.chunks_per_second)),
    live.running && figure('rows per second', rate(live.moment.rows_per_second)),
    live.running && figure('written per second', bytes(live.moment.bytes_per_second)),
    live.running && figure('remaining', duration(live.moment.eta_seconds))),
  h('div', { class: 'bar', role: 'progressbar', 'aria-label': 'chunks', 'aria-valuenow': Math.round(100 * share), style: { marginBottom: '16px' } },
    h('i', { style: { width: `${100 * share}%` } }))];
}

/** Builders and curves while a build runs; hidden before. */
function buildSection() {
  const curves = {
    chunks_per_second: curve('chunks per second', '--good', rate),
    rows_per_second: curve('rows per second', '--accent', rate),
    bytes_per_second: curve('written per second', '--accent', bytes),
    eta_seconds: curve('remaining', '--soft', duration),
    builders: curve('builders', '--warn', count),
    workers: curve('workers', '--warn', count),
    cpu_percent: curve('CPU of all builders', '--busy', (value) => `${Math.round(value)}%`),
    memory_bytes: curve('memory of all builders', '--lost', bytes),
  };
  const builders = h('div', {});
  const element = h('section', { hidden: true, 'data-build': 'idle' }, h('h2', {}, 'Build'),
    h('div', { class: 'charts' }, Object.values(curves).map((one) => one.element)), h('h3', {}, 'Builders'), builders);
  /** @type {any[]} */
  let moments = [];
  const draw = () => {
    moments = moments.slice(-600);
    const seconds = moments.length > 1 ? (moments[moments.length - 1].time - moments[0].time) / (moments.length - 1) : 1;
    for (const [name, one] of Object.entries(curves)) one.set(moments.map((moment) => moment[name]), seconds);
  };
  return {
    element,
    history: (/** @type {any[]} */ all) => { moments = all.slice(); draw(); },
    show: (/** @type {any} */ live) => {
      if (!live.running && !moments.length) return;
      element.hidden = false;
      element.setAttribute('data-build', live.running ? 'running' : 'ended');
      if (live.running) { moments.push(live.moment); draw(); }
      fill(builders, live.builders.length
        ? table(['builder', 'layer', 'phase', '#chunks made', '#per second', '#workers', '#CPU', '#memory', 'state'], live.builders.map((/** @type {any} */ one) => [
          `${one.host}, process ${one.pid}`, one.layer, one.phase, count(one.built), rate(one.chunks_per_second), count(one.workers),
          `${Math.round(one.cpu_percent)}%`, bytes(one.memory_bytes), one.state]), 'As of their last heartbeats')
        : h('p', { class: 'soft' }, 'No builder is running.'));
    },
  };
}

/** @param {any} layer @param {any[]} claims @param {(chunk: number) => void} open */
function layerMap(layer, claims, open) {
  const readout = h('div', { class: 'readout', role: 'status' }, ' ');
  const legend = h('ul', { class: 'legend' });
  const checked = h('span', { class: 'soft' });
  const map = chunkMap(`Chunks of layer ${layer.layer}`, (chunk) => {
    const state = STATES[map.stateOf(chunk)];
    const claim = claims.find((one) => one.layer === layer.layer && one.chunk === chunk);
    readout.textContent = chunk < 0 || !state ? ' ' : `chunk ${count(chunk)}: ${state.name}${claim ? `, ${claim.host} process ${claim.pid}` : ''}`;
  }, open);
  const counts = (/** @type {any} */ now) => {
    const all = Object.entries(STATES).map(([code, state]) => ({ ...state, code, number: now.counts[serverName(code)] || 0 }));
    fill(legend, all.filter((one) => one.number).map((one) => h('li', {}, h('i', { style: { background: cssColor(one.color) } }), `${one.name} ${count(one.number)}`)));
    checked.textContent = now.headers_checked ? `${count(now.headers_checked)} of ${counted(now.published, 'header')} compared` : '';
  };
  map.set(layer.states);
  counts(layer);
  const element = h('section', { 'data-layer': layer.layer },
    h('div', { class: 'head' }, h('h2', {}, `Layer ${layer.layer}`), checked),
    map.element, readout, legend);
  return {
    element,
    moveTo: map.moveTo,
    show: (/** @type {any} */ now, /** @type {any[]} */ held) => { claims = held; map.set(now.states); counts(now); },
  };
}

/** @param {string} code */
function serverName(code) {
  return code === 'u' ? 'made' : STATES[code].name;
}

/** @param {number} index @param {any} cache @param {any} found */
function detailSection(index, cache, found) {
  if (found.error) return problemBox(found);
  const page = cache.kind === 'images' ? 'images' : 'rows';
  const state = STATES[found.state] || { name: found.state };
  const statistics = Object.entries(found.statistics).filter(([, value]) => typeof value === 'number')
    .map(([name, value]) => /** @type {[string, any]} */ ([name.replace('failed.', 'failed: ').replaceAll('_', ' '), figureText(name, Number(value))]));
  return section(`Chunk ${count(found.chunk)} of layer ${found.layer}`,
    found.problem && problemBox({ error: found.problem, damaged: found.state === 'b' }),
    found.first_row !== null && h('p', {}, h('a', { href: viewUrl(index, page, { row: found.first_row }) },
      `Show its rows, ${count(found.first_row)} to ${count(found.first_row + Math.max(0, found.rows - 1))}`)),
    h('div', { class: 'columns' },
      facts([['state', state.name], ['builder', found.claim], ['rows', count(found.rows)], ['samples', count(found.samples)],
        ['failed samples', count(found.failures)], ['file', bytes(found.bytes)],
        ['SHA-256', found.sha256 && h('code', {}, found.sha256)], ...statistics]),
      table(['source file', '#from', '#to'], found.parts.map((/** @type {any} */ part) => [part.path, count(part.start), count(part.stop)]), `Made from, ${PLACES}`)));
}
