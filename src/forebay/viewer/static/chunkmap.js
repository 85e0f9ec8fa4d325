// Chunks as cells on a canvas: 100,000 of them, scrolled, reached by mouse and keyboard.
import { cssColor, h } from './dom.js';

export const STATES = /** @type {Record<string, {name: string, color: string}>} */ ({
  p: { name: 'published', color: '--good' },
  u: { name: 'made, not listed yet', color: '--made' },
  c: { name: 'claimed', color: '--busy' },
  '.': { name: 'missing', color: '--missing' },
  a: { name: 'abandoned', color: '--abandoned' },
  l: { name: 'lost', color: '--lost' },
  b: { name: 'bad', color: '--bad' },
});
const SIZES = [24, 18, 14, 11, 8, 6, 4]; // pixels of a cell: the first that fits; the last one scrolls
const HEIGHT = 360;

/** A map of one layer's chunks. @param {string} label @param {(chunk: number) => void} hovered @param {(chunk: number) => void} chosen */
export function chunkMap(label, hovered, chosen) {
  /** @type {string[]} */
  let cells = [];
  let cursor = 0;
  let pointed = false; // by keys or a click: only then the cursor is drawn
  let width = 0;
  const canvas = h('canvas', { class: 'map', role: 'img', 'aria-label': label });
  const spacer = h('div', {});
  const scroller = h('div', {
    class: 'drawing', tabindex: 0, role: 'application', 'aria-label': `${label}: arrow keys move, Enter opens a chunk`,
    style: { overflowY: 'auto', maxHeight: `${HEIGHT}px` },
  }, h('div', { style: { position: 'sticky', top: '0', height: '0' } }, canvas), spacer);

  const side = () => SIZES.find((size) => Math.ceil(cells.length / Math.max(1, Math.floor(width / size))) * size <= HEIGHT) || SIZES[SIZES.length - 1];
  const columns = () => Math.max(1, Math.floor(width / side()));

  const draw = () => {
    if (!width) return;
    const size = side();
    const across = columns();
    const total = Math.ceil(cells.length / across) * size;
    const height = Math.max(size, Math.min(HEIGHT, total));
    const scale = window.devicePixelRatio || 1;
    spacer.style.height = `${total}px`;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const pen = canvas.getContext('2d', { alpha: true });
    pen.scale(scale, scale);
    const firstLine = Math.floor(scroller.scrollTop / size);
    const shift = firstLine * size - scroller.scrollTop;
    const first = firstLine * across;
    const last = Math.min(cells.length, first + (Math.ceil(height / size) + 1) * across);
    const inner = size >= 6 ? size - 1 : size >= 4 ? size - 0.5 : size;
    /** @type {Record<string, string>} */
    const colors = {};
    for (const [code, state] of Object.entries(STATES)) colors[code] = cssColor(state.color);
    let before = '';
    for (let at = first; at < last; at += 1) {
      const code = cells[at];
      if (code !== before) { pen.fillStyle = colors[code] || colors['.']; before = code; }
      pen.fillRect(((at - first) % across) * size, shift + Math.floor((at - first) / across) * size, inner, inner);
    }
    if (pointed && cursor >= first && cursor < last && cells.length) {
      pen.strokeStyle = cssColor('--ink');
      pen.lineWidth = size >= 6 ? 2 : 1;
      const x = (cursor % across) * size;
      const y = shift + (Math.floor(cursor / across) - firstLine) * size;
      pen.strokeRect(x - 0.5, y - 0.5, inner + 1, inner + 1);
    }
  };

  const cellAt = (/** @type {MouseEvent} */ event) => {
    const place = canvas.getBoundingClientRect();
    const line = Math.floor((event.clientY - place.top + scroller.scrollTop) / side());
    const chunk = line * columns() + Math.floor((event.clientX - place.left) / side());
    return chunk >= 0 && chunk < cells.length ? chunk : -1;
  };
  const moveTo = (/** @type {number} */ chunk) => {
    cursor = Math.max(0, Math.min(cells.length - 1, chunk));
    pointed = true;
    const top = Math.floor(cursor / columns()) * side();
    if (top < scroller.scrollTop) scroller.scrollTop = top;
    if (top + side() > scroller.scrollTop + HEIGHT) scroller.scrollTop = top + side() - HEIGHT;
    hovered(cursor);
    draw();
  };
  canvas.addEventListener('mousemove', (/** @type {MouseEvent} */ event) => hovered(cellAt(event)));
  canvas.addEventListener('mouseleave', () => hovered(-1));
  canvas.addEventListener('click', (/** @type {MouseEvent} */ event) => {
    const chunk = cellAt(event);
    if (chunk >= 0) { moveTo(chunk); chosen(chunk); }
  });
  scroller.addEventListener('scroll', draw);
  scroller.addEventListener('keydown', (/** @type {KeyboardEvent} */ event) => {
    const steps = /** @type {Record<string, number>} */ ({
      ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns(), ArrowUp: -columns(), Home: -cells.length, End: cells.length,
      PageDown: 10 * columns(), PageUp: -10 * columns(),
    });
    if (event.key in steps) moveTo(cursor + steps[event.key]);
    else if (event.key === 'Enter' && cells.length) chosen(cursor);
    else return;
    event.preventDefault();
  });
  new ResizeObserver(() => { width = scroller.clientWidth; draw(); }).observe(scroller);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
  return {
    element: scroller,
    stateOf: (/** @type {number} */ chunk) => cells[chunk],
    set: (/** @type {string} */ states) => { cells = states.split(''); draw(); },
    moveTo,
  };
}
