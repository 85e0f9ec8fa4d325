// The frame of all pages: which cache, which page, and one listener for the address.
import { isBundle, record } from './api.js';
import { comparePage } from './compare.js';
import { chunksPage } from './chunks.js';
import { fill, h, missingBox, problemBox } from './dom.js';
import { imagesPage } from './images.js';
import { overviewPage } from './overview.js';
import { currentRoute, followLink, go, viewUrl } from './router.js';
import { rowsPage } from './rows.js';
import { teachersPage } from './teachers.js';
import { trainingPage } from './training.js';

/** @typedef {{index: number, root: string, kind: string, layers: Record<string, string>, rows: number, chunks: number, generations: number[], taught: string[], problem: string}} CacheName */
/** @typedef {{cache: CacheName, caches: CacheName[], query: URLSearchParams, box: any, alive: () => boolean, ending: (end: () => void) => void}} View */

const PAGES = {
  overview: { title: 'Overview', draw: overviewPage, has: () => true },
  rows: { title: 'Rows', draw: rowsPage, has: (/** @type {CacheName} */ cache) => cache.kind !== 'images' },
  images: { title: 'Images', draw: imagesPage, has: (/** @type {CacheName} */ cache) => cache.kind === 'images' },
  teachers: { title: 'Teachers', draw: teachersPage, has: (/** @type {CacheName} */ cache) => cache.taught.length > 0 },
  training: { title: 'Training', draw: trainingPage, has: () => true },
  chunks: { title: 'Chunks', draw: chunksPage, has: () => true },
  compare: { title: 'Compare', draw: comparePage, has: () => true },
};

/** @type {CacheName[]} */
let caches = [];
/** @type {(() => void)[]} */
let endings = [];
let turn = 0;

async function show() {
  const mine = ++turn;
  for (const end of endings.splice(0)) end();
  const route = currentRoute();
  const address = location.hash;
  const main = document.getElementById('content');
  const found = await record(null, 'caches');
  if (mine !== turn || !main) return;
  if (found.error) { fill(main, problemBox(found)); return; }
  caches = found;
  const cache = caches[route.cache];
  const name = route.page;
  if (!cache || !(name in PAGES)) { showMissing(main, cache, name, address); return; }
  const page = PAGES[/** @type {keyof typeof PAGES} */ (name)];
  drawTop(cache, name);
  document.title = `${page.title} · ${cache.root.split('/').pop() || cache.root} · forebay`;
  const box = h('div', { class: 'page', 'data-page': name });
  main.replaceChildren(box);
  await page.draw({
    cache, caches, query: route.query, box, alive: () => mine === turn,
    ending: (end) => { if (mine === turn) endings.push(end); else end(); },
  });
  if (mine === turn) box.setAttribute('data-ready', address);
}

/** Say what an address asks for that is not here. @param {Element} main @param {CacheName | undefined} cache @param {string} page @param {string} address */
function showMissing(main, cache, page, address) {
  drawTop(cache || caches[0], '');
  document.title = 'Not found · forebay';
  const message = cache ? `There is no page '${page}'.` : `There is no such cache: this viewer shows ${caches.length === 1 ? 'cache 0' : `caches 0 to ${caches.length - 1}`}.`;
  fill(main, h('div', { class: 'page', 'data-ready': address }, missingBox(message,
    h('ul', {}, caches.map((one) => h('li', {}, h('a', { href: viewUrl(one.index, 'overview') }, one.root)))))));
}

/** @param {CacheName} cache @param {string} page */
function drawTop(cache, page) {
  const top = document.getElementById('top');
  if (!top) return;
  const chosen = caches.length > 1
    ? h('select', { 'aria-label': 'Cache', onchange: (/** @type {any} */ event) => go(Number(event.target.value), 'overview') },
      caches.map((one) => h('option', { value: one.index, selected: one.index === cache.index }, one.root)))
    : h('span', { class: 'root' }, cache.root);
  const shown = Object.entries(PAGES).filter(([, one]) => one.has(cache));
  fill(top,
    h('div', { class: 'brand' }, h('strong', {}, 'forebay'), chosen, isBundle && h('span', { class: 'root' }, 'static copy')),
    h('nav', { 'aria-label': 'Pages' }, shown.map(([name, one]) => h('a',
      { href: viewUrl(cache.index, name), 'aria-current': name === page ? 'page' : undefined }, one.title))));
}

document.addEventListener('click', followLink);
window.addEventListener('hashchange', show);
show();
