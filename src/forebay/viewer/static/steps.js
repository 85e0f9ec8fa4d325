// From row to row: buttons, left and right arrow keys, and `r` for a random row.
import { carriedRows } from './api.js';
import { h } from './dom.js';
import { count } from './format.js';

/** @param {import('./app.js').View} view @param {number} row @param {(row: number) => void} show */
export function rowSteps(view, row, show) {
  const { cache } = view;
  const carried = carriedRows(cache.index);
  const to = (/** @type {number} */ next) => show(Math.max(0, Math.min(cache.rows - 1, next)));
  const step = (/** @type {number} */ way) => {
    if (!carried) return to(row + way);
    return to(carried[Math.max(0, Math.min(carried.length - 1, carried.indexOf(row) + way))]);
  };
  const random = () => to(carried ? carried[Math.floor(Math.random() * carried.length)] : Math.floor(Math.random() * cache.rows));
  const keys = /** @type {Record<string, () => void>} */ ({ ArrowLeft: () => step(-1), ArrowRight: () => step(1), r: random });
  const press = (/** @type {KeyboardEvent} */ event) => {
    const typing = event.target instanceof Element && event.target.closest('input, select, [role=application]');
    if (!typing && !event.ctrlKey && !event.metaKey && !event.altKey && event.key in keys) keys[event.key]();
  };
  document.addEventListener('keydown', press);
  view.ending(() => document.removeEventListener('keydown', press));
  const number = h('input', { type: 'number', min: 0, max: cache.rows - 1, value: row, name: 'row', autocomplete: 'off' });
  return h('form', { onsubmit: (/** @type {Event} */ event) => { event.preventDefault(); to(Number(number.value) || 0); } },
    h('button', { type: 'button', onclick: () => step(-1), disabled: row === 0, title: 'left arrow key' }, '← previous'),
    h('button', { type: 'button', onclick: () => step(1), disabled: row >= cache.rows - 1, title: 'right arrow key' }, 'next →'),
    h('button', { type: 'button', onclick: random, title: 'key r' }, 'random'),
    carried ? h('span', { class: 'soft' }, `this copy has ${count(carried.length)} of ${count(cache.rows)} rows`)
      : [h('label', {}, `row, 0 to ${count(cache.rows - 1)}`, number), h('button', {}, 'Go')]);
}
