// The attention mask of a packed row: which tokens (down) see which (across), and the blocks that FlexAttention computes.
import { drawing } from './charts.js';
import { cssColor, h } from './dom.js';
import { count } from './format.js';

/**
 * @param {any} row
 * @param {boolean} blocksShown
 * @param {(yes: boolean) => void} changed
 */
export function maskPicture(row, blocksShown, changed) {
  const { length } = row;
  let ruled = blocksShown;
  const side = 340;
  const canvas = drawing(side, (pen, width, height) => {
    const size = Math.min(width, height);
    const small = Math.min(length, 600);
    const colors = [0, 1, 2, 3, 4, 5].map((at) => rgb(cssColor(`--mask${at}`)));
    const pad = rgb(cssColor('--pad'));
    const picture = new ImageData(small, small);
    let number = 0;
    let start = 0;
    for (let y = 0; y < small; y += 1) {
      const query = Math.floor((y * length) / small);
      while (number < row.seq_lens.length && query >= start + row.seq_lens[number]) { start += row.seq_lens[number]; number += 1; }
      const color = number < row.seq_lens.length ? colors[number % 6] : pad;
      for (let x = 0; x < small; x += 1) {
        const key = Math.floor((x * length) / small);
        if (key <= query && key >= start) picture.data.set([...color, ruled && isFull(row, query, key) ? 255 : 150], 4 * (y * small + x));
      }
    }
    const small2 = document.createElement('canvas');
    small2.width = small2.height = small;
    /** @type {CanvasRenderingContext2D} */ (small2.getContext('2d')).putImageData(picture, 0, 0);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(small2, 0, 0, size, size);
    pen.strokeStyle = cssColor('--line');
    pen.strokeRect(0.5, 0.5, size - 1, size - 1);
    if (!ruled) return;
    pen.beginPath();
    for (let at = row.blocks.size; at < length; at += row.blocks.size) {
      const place = Math.round((at / length) * size) + 0.5;
      pen.moveTo(place, 0); pen.lineTo(place, size); pen.moveTo(0, place); pen.lineTo(size, place);
    }
    pen.stroke();
  }, `Attention mask of ${length} tokens`);
  const box = h('input', { type: 'checkbox', checked: ruled, onchange: (/** @type {any} */ event) => { ruled = event.target.checked; changed(ruled); canvas.redraw(); } });
  const blocks = row.blocks.stop.length;
  const computed = row.blocks.stop.reduce((/** @type {number} */ sum, /** @type {number} */ stop, /** @type {number} */ at) => sum + stop - row.blocks.start[at], 0);
  return h('div', {}, canvas,
    h('p', { class: 'soft' }, `queries down, keys across, ${count(length)} tokens each; ${count(computed)} of ${count(blocks * blocks)} blocks are computed`),
    h('label', { class: 'check' }, box, `blocks of ${row.blocks.size}; darker where a whole block is seen`));
}

/** @param {any} row @param {number} query @param {number} key */
function isFull(row, query, key) {
  const { size, full_start: from, full_stop: to } = row.blocks;
  const line = Math.floor(query / size);
  const across = Math.floor(key / size);
  return across >= from[line] && across < to[line];
}

/** @param {string} hex @returns {number[]} */
function rgb(hex) {
  return [1, 3, 5].map((at) => Number.parseInt(hex.slice(at, at + 2), 16));
}
