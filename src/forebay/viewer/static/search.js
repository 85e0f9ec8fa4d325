// Search the text of all rows: one bounded request after the other, with the progress, until enough is found.
import { isBundle, record } from './api.js';
import { fill, h, problemBox, section } from './dom.js';
import { count, counted } from './format.js';
import { rowUrl } from './router.js';

const MOST_HITS = 200; // on the page
const MOST_REQUESTS = 120; // of half a second each, until the reader continues

/** @param {import('./app.js').View} view @param {string} text that the address has @param {(text: string) => void} note put a text into the address */
export function searchSection(view, text, note) {
  if (isBundle) return null;
  const input = h('input', { type: 'search', name: 'text', value: text });
  const status = h('p', { class: 'soft', 'aria-live': 'polite' });
  const bar = h('progress', { max: 1, value: 0, hidden: true, 'aria-label': 'rows searched' });
  const hits = h('ul', { class: 'hits' });
  const more = h('button', { type: 'button', hidden: true, onclick: () => scan() }, 'Continue');
  const stop = h('button', { type: 'button', hidden: true, onclick: () => { turn += 1; pause(); } }, 'Stop');
  let turn = 0;
  let next = /** @type {number | null} */ (0);
  const pause = () => { stop.hidden = true; more.hidden = next === null; };
  const scan = async () => {
    const mine = ++turn;
    const before = hits.childElementCount;
    [more.hidden, stop.hidden, bar.hidden] = [true, false, false];
    for (let asked = 0; next !== null && asked < MOST_REQUESTS && hits.childElementCount - before < MOST_HITS; asked += 1) {
      const found = await record(view.cache.index, 'search', { text: input.value, row: next });
      if (mine !== turn || !view.alive()) return;
      if (found.error) { fill(status, problemBox(found)); next = null; break; }
      next = found.next;
      const done = next === null ? found.rows : next;
      bar.value = done / Math.max(1, found.rows);
      hits.append(...found.hits.map((/** @type {any} */ hit) => hitLine(view, hit, input.value)));
      fill(status, `${count(done)} of ${counted(found.rows, 'row')} searched · ${counted(hits.childElementCount, 'hit')}`,
        found.notes.map((/** @type {string} */ one) => [h('br'), one]));
    }
    pause();
  };
  const begin = () => { next = 0; hits.replaceChildren(); scan(); };
  const form = h('form', { onsubmit: (/** @type {Event} */ event) => { event.preventDefault(); note(input.value); if (input.value) begin(); } },
    h('label', {}, 'text in any row', input), h('button', {}, 'Search'), stop, more);
  view.ending(() => { turn += 1; });
  if (text) begin();
  return section('Search', form, bar, status, hits);
}

/** @param {import('./app.js').View} view @param {any} hit @param {string} text */
function hitLine(view, hit, text) {
  return h('li', {}, h('a', { href: rowUrl(view.cache, hit.row, { text }) }, `row ${count(hit.row)}`), ' ', hit.before, h('mark', {}, hit.match), hit.after);
}
