// The attention mask of a packed row: which tokens (down) see which (across).
import { drawing } from './charts.js';
import { cssColor, h } from './dom.js';
import { count, counted } from './format.js';

const SIDE = 340; // CSS pixels
const MOST = 600; // cells in each direction; of a longer row, every n-th token is drawn

/** @param {any} row */
export function maskPicture(row) {
  const { length } = row;
  const canvas = drawing(SIDE, (pen, width, height) => {
    const size = Math.min(width, height);
    const cells = Math.min(length, MOST);
    const small = document.createElement('canvas');
    small.width = small.height = cells;
    /** @type {CanvasRenderingContext2D} */ (small.getContext('2d')).putImageData(maskPixels(row.seq_lens, length, cells), 0, 0);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(small, 0, 0, size, size);
    pen.strokeStyle = cssColor('--line');
    pen.strokeRect(0.5, 0.5, size - 1, size - 1);
  }, `Attention mask of ${length} tokens`);
  return h('div', {}, canvas,
    h('p', { class: 'soft' }, `Queries down, keys across. Each of the ${counted(row.seq_lens.length, 'document')} sees only itself: ${count(length)} tokens, ${row.padding ? `${count(row.padding)} of them padding` : 'no padding'}.`));
}

/** @param {number[]} lengths @param {number} length @param {number} cells */
function maskPixels(lengths, length, cells) {
  const colors = [0, 1, 2, 3, 4, 5].map((at) => rgb(cssColor(`--mask${at}`)));
  const pad = rgb(cssColor('--pad'));
  const picture = new ImageData(cells, cells);
  let number = 0;
  let start = 0;
  for (let y = 0; y < cells; y += 1) {
    const query = Math.floor((y * length) / cells);
    while (number < lengths.length && query >= start + lengths[number]) { start += lengths[number]; number += 1; }
    const color = number < lengths.length ? colors[number % 6] : pad;
    for (let x = 0; x <= y; x += 1) {
      if (Math.floor((x * length) / cells) >= start) picture.data.set([...color, 220], 4 * (y * cells + x));
    }
  }
  return picture;
}

/** @param {string} hex @returns {number[]} */
function rgb(hex) {
  return [1, 3, 5].map((at) => Number.parseInt(hex.slice(at, at + 2), 16));
}
