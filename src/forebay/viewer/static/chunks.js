// The chunk map, live while a build runs.
import { liveEvents, record, recordUrl } from './api.js';
import { curve } from './charts.js';
import { STATES, chunkMap } from './chunkmap.js';
import { cssColor, facts, figure, fill, h, problemBox, section, table } from './dom.js';
import { PLACES, bytes, count, decimal, duration, percent, rate } from './format.js';
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
    h('div', { class: 'head' }, h('h1', {}, 'Chunks'),
      h('span', { class: 'soft' }, 'JSON: ', h('a', { href: recordUrl(index, 'chunks.json') }, 'chunks'), ' ',
        h('a', { href: recordUrl(index, 'build.json') }, 'build'))),
    lost, progress, build.element, maps, detail);
  /** @type {Record<string, ReturnType<typeof layerMap>>} */
  const shown = {};
  const state = /** @type {Record<string, any>} */ ({ layer: view.query.get('layer'), chunk: view.query.get('chunk'), zoom: view.query.get('zoom') });
  const note = (/** @type {Record<string, any>} */ change) => noteView(index, 'chunks', Object.assign(state, change));
  const open = async (/** @type {string} */ layer, /** @type {number} */ chunk) => {
    note({ layer, chunk });
    fill(detail, detailSection(index, view.cache, await record(index, 'chunk', { layer, chunk })));
  };
  const add = (/** @type {any} */ layer, /** @type {any[]} */ claims) => {
    const zoom = state.layer === layer.layer ? wholeOf(view.query, 'zoom', -1) : -1;
    shown[layer.layer] = layerMap(layer, claims, zoom, (chunk) => open(layer.layer, chunk), (now) => note({ layer: layer.layer, zoom: now }));
    return shown[layer.layer].element;
  };
  await new Promise((done) => {
    const stop = liveEvents(index, (event) => {
      if (event.map && event.map.error) { fill(maps, problemBox(event.map)); done(null); return; }
      if (event.map) {
        fill(maps, event.map.note && problemBox({ error: event.map.note, damaged: true }),
          event.map.layers.length === 0 && h('div', { class: 'box' }, 'Nothing is planned yet.'),
          event.map.layers.map((/** @type {any} */ layer) => add(layer, event.map.claims)));
        build.history(event.history);
      }
      for (const [layer, change] of Object.entries(event.changes || {})) {
        if (shown[layer]) shown[layer].change(change);
        else maps.appendChild(add(change, event.claims)); // a layer whose build began now
      }
      if (event.claims) for (const one of Object.values(shown)) one.claims(event.claims);
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
}

/** @param {any} live */
function progressFigures(live) {
  const share = live.planned ? live.done / live.planned : 0;
  return [h('div', { class: 'figures' },
    figure('chunks', percent(share), `${count(live.done)} of ${count(live.planned)} planned`),
    figure('rows', count(live.rows)),
    figure('stored', bytes(live.bytes)),
    live.running && figure('chunks per second', rate(live.chunks_per_second)),
    live.running && figure('rows per second', rate(live.rows_per_second)),
    live.running && figure('written per second', bytes(live.bytes_per_second)),
    live.running && figure('remaining', duration(live.eta_seconds))),
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
    utilization: curve('workers that compute', '--busy', (value) => percent(value, 0)),
    cpu_percent: curve('CPU of all builders', '--busy', (value) => `${Math.round(value)} %`),
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
        ? table(['builder', '#busy workers', '#CPU', '#memory', 'state'], live.builders.map((/** @type {any} */ one) => [
          `${one.host}, process ${one.pid}`, `${count(one.computing)} of ${count(one.workers)}`, `${Math.round(one.cpu_percent)} %`, bytes(one.memory_bytes),
          one.here ? one.state : `${one.state}, figures of its last heartbeat`]))
        : h('p', { class: 'soft' }, 'No builder holds a chunk now.'));
    },
  };
}

/**
 * @param {any} layer
 * @param {any[]} claims
 * @param {number} zoom
 * @param {(chunk: number) => void} open
 * @param {(zoom: number) => void} zoomed
 */
function layerMap(layer, claims, zoom, open, zoomed) {
  const readout = h('div', { class: 'readout', role: 'status' }, ' ');
  const legend = h('ul', { class: 'legend' });
  const checked = h('span', { class: 'soft' });
  const map = chunkMap(`Chunks of layer ${layer.layer}`, (chunk) => {
    const state = STATES[map.stateOf(chunk)];
    const claim = claims.find((one) => one.layer === layer.layer && one.chunk === chunk);
    readout.textContent = chunk < 0 || !state ? ' ' : `chunk ${count(chunk)}: ${state.name}${claim ? `, ${claim.host} process ${claim.pid}${claim.reason ? `: ${claim.reason}` : ''}` : ''}`;
  }, open, zoomed, zoom);
  const counts = (/** @type {any} */ now) => {
    const all = Object.entries(STATES).map(([code, state]) => ({ ...state, code, number: now.counts[serverName(code)] || 0 }));
    fill(legend, all.filter((one) => one.number).map((one) => h('li', {}, h('i', { style: { background: cssColor(one.color) } }), `${one.name} ${count(one.number)}`)));
    checked.textContent = now.headers_checked ? `${count(now.headers_checked)} headers compared` : '';
  };
  map.set(layer.states);
  counts(layer);
  const element = h('section', { 'data-layer': layer.layer },
    h('div', { class: 'head' }, h('h2', {}, `Layer ${layer.layer}`), h('span', { class: 'line' }, checked,
      h('button', { 'aria-label': 'Zoom out', onclick: () => map.zoomBy(-1) }, '−'), h('button', { 'aria-label': 'Zoom in', onclick: () => map.zoomBy(1) }, '+'))),
    map.element, readout, legend);
  return {
    element,
    moveTo: map.moveTo,
    claims: (/** @type {any[]} */ now) => { claims = now; },
    change: (/** @type {any} */ change) => {
      if (change.states !== undefined) map.set(change.states);
      else map.change(change.cells);
      counts(change);
    },
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
    .map(([name, value]) => /** @type {[string, any]} */ ([name.replaceAll('_', ' '), decimal(Number(value))]));
  return section(`Chunk ${count(found.chunk)} of layer ${found.layer}`,
    found.problem && problemBox({ error: found.problem, damaged: found.state === 'b' }),
    found.first_row !== null && h('p', {}, h('a', { href: viewUrl(index, page, { row: found.first_row }) },
      `Show its rows, ${count(found.first_row)} to ${count(found.first_row + Math.max(0, found.rows - 1))}`)),
    h('div', { class: 'columns' },
      facts([['state', state.name], ['claim', found.claim], ['rows', count(found.rows)], ['samples', count(found.samples)],
        ['failed samples', count(found.failures)], ['file', bytes(found.bytes)], ['revision', found.revision || ''],
        ['SHA-256', found.sha256 && h('code', {}, found.sha256)], ...statistics]),
      table(['source file', '#from', '#to'], found.parts.map((/** @type {any} */ part) => [part.path, count(part.start), count(part.stop)]), `Made from, ${PLACES}`)));
}
