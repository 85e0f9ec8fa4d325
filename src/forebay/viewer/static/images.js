// Images: a grid with boxes and ignored tokens, and one image with its masks as layers.
import { carriedRows, pictureUrl, record, recordUrl } from './api.js';
import { heatColor } from './charts.js';
import { cssColor, facts, fill, h, missingRow, pageHead, problemBox, section } from './dom.js';
import { count, percent, shortValue } from './format.js';
import { go, noteView, viewUrl, wholeOf } from './router.js';
import { searchSection } from './search.js';
import { rowSteps } from './steps.js';

const PAGE = 24;

/** @param {import('./app.js').View} view */
export async function imagesPage(view) {
  if (!view.cache.rows) { fill(view.box, h('h1', {}, 'Images'), h('div', { class: 'box' }, view.cache.problem || 'The cache has no rows.')); return; }
  const missing = missingRow(view.cache, view.query);
  if (missing) { fill(view.box, h('h1', {}, 'Images'), missing); return; }
  await (view.query.get('one') === null ? gridPage(view) : onePage(view));
}

/** @param {import('./app.js').View} view */
async function gridPage(view) {
  const { index, rows } = view.cache;
  const carried = carriedRows(index) !== null;
  const row = wholeOf(view.query, 'row', 0);
  const patch = view.query.get('patch') || '';
  const flipped = view.query.get('flip') === '1';
  const found = carried ? await carriedPage(index) : await record(index, 'images', { row, count: PAGE, patch });
  if (!view.alive()) return;
  const state = Object.fromEntries(view.query);
  const again = (/** @type {Record<string, any>} */ change) => go(index, 'images', { row, patch, flip: flipped ? 1 : '', ...change });
  fill(view.box,
    pageHead('Images', {
      python: ['import forebay as fb', `cache = fb.open_cache(${JSON.stringify(view.cache.root)})`, `fb.contact_sheet(cache, range(${row}, ${Math.min(rows, row + PAGE)})).save("sheet.png")`],
      json: [['images', recordUrl(index, 'images.json', { row, count: PAGE, patch })]],
    }),
    found.error ? problemBox(found) : [
      h('form', { onsubmit: (/** @type {any} */ event) => { event.preventDefault(); again({ row: event.target.row.value, patch: event.target.patch.value }); } },
        !carried && [h('button', { type: 'button', disabled: row === 0, onclick: () => again({ row: Math.max(0, row - PAGE) }) }, '← previous'),
          h('button', { type: 'button', disabled: row + PAGE >= rows, onclick: () => again({ row: row + PAGE }) }, 'next →'),
          h('label', {}, `row, 0 to ${count(rows - 1)}`, h('input', { type: 'number', name: 'row', min: 0, max: rows - 1, value: row })),
          h('label', {}, 'patch, pixels', h('input', { type: 'number', name: 'patch', min: 1, max: found.size, value: found.patch || '' })), h('button', {}, 'Go')],
        h('label', { class: 'check' }, h('input', { type: 'checkbox', name: 'flip', checked: flipped, onchange: (/** @type {any} */ event) => again({ flip: event.target.checked ? 1 : '' }) }), 'flipped, as training may')),
      h('p', { class: 'soft' }, carried ? `this copy has ${count(found.images.length)} of ${count(rows)} images` : `rows ${count(row)} to ${count(row + found.images.length - 1)} of ${count(rows)}`,
        `, canvas ${found.size} × ${found.size} pixels; the box is outlined, `, found.patch ? `tokens of ${found.patch} × ${found.patch} pixels that are nearly all padding are red: a model can skip them` : 'choose a patch that divides the canvas to see ignored tokens'),
      h('div', { class: 'grid' }, found.images.map((/** @type {any} */ image) => cell(index, found, image, flipped))),
      searchSection(view, view.query.get('text') || '', (text) => noteView(index, 'images', { ...state, text })),
    ]);
}

/** The images that a static copy has, as one page. @param {number} index */
async function carriedPage(index) {
  const found = await Promise.all((carriedRows(index) || []).map((row) => record(index, 'image', { row })));
  const sound = found.filter((one) => !one.error);
  return sound.length ? { ...sound[0], images: sound.map((one) => one.image) } : { error: 'This copy has no images.' };
}

/** @param {number} index @param {any} page @param {any} image @param {boolean} flipped */
function cell(index, page, image, flipped) {
  return h('figure', {}, h('a', { href: viewUrl(index, 'images', { row: image.row, one: 1 }) },
    frame(pictureUrl(index, { row: image.row, side: 224 }), page.size, image, { box: true, ignored: true }, flipped, null),
    h('figcaption', {}, h('b', {}, image.id), h('br'), `row ${count(image.row)} · ${image.original_size.join(' × ')} px`,
      image.tags.length > 0 && [h('br'), image.tags.join(', ')])));
}

/** A picture with drawn layers above it. @param {string} url @param {number} size @param {any} image @param {Record<string, boolean>} layers @param {boolean} flipped @param {any} masks */
function frame(url, size, image, layers, flipped, masks) {
  const canvas = h('canvas', { 'aria-hidden': 'true' });
  const picture = h('img', { src: url, alt: `${image.id}, row ${image.row}`, width: size, height: size, loading: 'lazy' });
  const element = h('div', { class: flipped ? 'frame flip' : 'frame' }, picture, canvas);
  const draw = () => {
    const side = element.clientWidth * (window.devicePixelRatio || 1);
    if (!side) return;
    canvas.width = canvas.height = side;
    const pen = canvas.getContext('2d');
    const [left, top, wide, high] = image.box;
    const box = [flipped ? size - left - wide : left, top, wide, high];
    if (masks && layers.pixels) shade(pen, side, size, box);
    if (masks && layers.padding) cells(pen, side, masks.token_padding, flipped, (share) => `rgb(200 60 50 / ${0.75 * share})`);
    if (masks && layers.latents) cells(pen, side, masks.latent_weights, flipped, (share) => `rgb(${heatColor(share).join(' ')} / 70%)`);
    if (layers.ignored) {
      cells(pen, side, image.ignored.map((/** @type {string} */ line) => [...line].map(Number)), flipped, (share) => (share ? 'rgb(200 60 50 / 45%)' : ''));
    }
    if (layers.box) {
      pen.strokeStyle = cssColor('--accent');
      pen.lineWidth = Math.max(2, side / 160);
      const scale = side / size;
      pen.strokeRect(box[0] * scale + 1, box[1] * scale + 1, Math.max(1, box[2] * scale - 2), Math.max(1, box[3] * scale - 2));
    }
  };
  new ResizeObserver(draw).observe(element);
  return Object.assign(element, { redraw: draw });
}

/** @param {CanvasRenderingContext2D} pen @param {number} side @param {number[][]} grid @param {boolean} flipped @param {(share: number) => string} color */
function cells(pen, side, grid, flipped, color) {
  const step = side / Math.max(1, grid.length);
  grid.forEach((line, y) => line.forEach((share, x) => {
    const fillColor = color(share);
    if (!fillColor) return;
    pen.fillStyle = fillColor;
    const across = flipped ? line.length - 1 - x : x;
    const [left, top] = [Math.round(across * step), Math.round(y * step)];
    const gap = step > 6 ? 1 : 0;
    pen.fillRect(left, top, Math.round((across + 1) * step) - left - gap, Math.round((y + 1) * step) - top - gap);
  }));
}

/** Padding in gray. @param {CanvasRenderingContext2D} pen @param {number} side @param {number} size @param {number[]} box */
function shade(pen, side, size, box) {
  const scale = side / size;
  pen.fillStyle = 'rgb(90 90 90 / 80%)';
  pen.beginPath();
  pen.rect(0, 0, side, side);
  pen.rect(box[0] * scale, box[1] * scale, box[2] * scale, box[3] * scale);
  pen.fill('evenodd');
}

/** @param {import('./app.js').View} view */
async function onePage(view) {
  const { index, rows } = view.cache;
  const row = wholeOf(view.query, 'row', 0);
  const found = await record(index, 'image', { row, patch: view.query.get('patch') || '' });
  if (!view.alive()) return;
  if (found.error) { fill(view.box, h('h1', {}, `Image ${count(row)}`), problemBox(found)); return; }
  const { image } = found;
  const chosen = (view.query.get('layers') ?? 'box,ignored').split(',');
  const names = /** @type {Record<string, string>} */ ({
    box: 'content box', ignored: 'ignored tokens', pixels: 'pixel mask: padding',
    padding: 'share of padding in each token', latents: 'latent weights, cells of 8 × 8', flip: 'flipped left to right',
  });
  const layers = Object.fromEntries(Object.keys(names).map((name) => [name, chosen.includes(name)]));
  const address = (/** @type {number} */ of) => ({ row: of, one: 1, patch: view.query.get('patch'), layers: Object.keys(names).filter((name) => layers[name]).join(',') || 'none' });
  const place = h('div', {});
  const draw = () => fill(place, frame(pictureUrl(index, { row, side: 512 }), found.size, image, layers, layers.flip, found));
  draw();
  fill(view.box,
    pageHead(image.id, {
      note: h('a', { href: viewUrl(index, 'images', { row: Math.floor(row / PAGE) * PAGE }) }, 'all images'),
      python: ['import forebay as fb', `cache = fb.open_cache(${JSON.stringify(view.cache.root)})`, `row = cache[${row}]`, 'print(row["box"], row["original_size"])'],
      json: [['image', recordUrl(index, 'image.json', { row })]],
    }),
    rowSteps(view, row, (next) => go(index, 'images', address(next))),
    h('div', { class: 'columns' },
      section('Canvas', h('div', { class: 'canvas' }, place)),
      h('div', {},
        section('Layers', Object.entries(names).map(([name, title]) => h('p', {}, h('label', { class: 'check' }, h('input', {
          type: 'checkbox', name, checked: layers[name], onchange: (/** @type {any} */ event) => { layers[name] = event.target.checked; noteView(index, 'images', address(row)); draw(); },
        }), title)))),
        section('Image', facts([['row', `${count(row)} of ${count(rows)}`],
          ['chunk', h('a', { href: viewUrl(index, 'chunks', { layer: Object.keys(view.cache.layers)[0], chunk: image.chunk }) }, `${count(image.chunk)}, row ${count(image.row_in_chunk)} there`)],
          ['original size', `${image.original_size.join(' × ')} pixels`], ['canvas', `${found.size} × ${found.size} pixels`],
          ['box', `${image.box[2]} × ${image.box[3]} at ${image.box[0]}, ${image.box[1]}`], ['padding', percent(image.padding)]])),
        section('Tags', image.tags.length ? image.tags.map((/** @type {string} */ tag) => h('span', { class: 'tag' }, tag)) : h('p', { class: 'soft' }, 'none')),
        section('Metadata', Object.keys(found.metadata).length ? facts(Object.entries(found.metadata).map(([name, value]) => /** @type {[string, any]} */ ([name, shortValue(value, 400)]))) : h('p', { class: 'soft' }, 'none')))));
}
