// Line charts and heat maps on canvas, sharp on any screen, drawn again when their width changes.
import { cssColor, h } from './dom.js';
import { duration } from './format.js';

/**
 * A canvas that fills the width of its place and is drawn whenever that changes.
 * @param {number} height in CSS pixels
 * @param {(pen: CanvasRenderingContext2D, width: number, height: number) => void} draw
 * @param {string} label for readers who cannot see it
 */
export function drawing(height, draw, label) {
  const canvas = h('canvas', { role: 'img', 'aria-label': label, style: { width: '100%', height: `${height}px` } });
  let width = 0;
  const redraw = () => {
    if (!width) return;
    const scale = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const pen = canvas.getContext('2d');
    pen.scale(scale, scale);
    draw(pen, width, height);
  };
  new ResizeObserver(([entry]) => { width = entry.contentRect.width; redraw(); }).observe(canvas);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);
  return Object.assign(canvas, { redraw });
}

/** @typedef {{lines: {name: string, values: number[], color: string}[], across: number[], xLabel: string, yLabel: string, format: (value: number) => string}} AxisChart */

/** A chart with axes, named units and a legend. @param {AxisChart} chart */
export function axisChart(chart) {
  const canvas = drawing(190, (pen, width, height) => drawAxes(pen, width, height, chart), `${chart.yLabel} by ${chart.xLabel}`);
  const legend = chart.lines.length > 1 && h('ul', { class: 'legend' }, chart.lines.map((line) =>
    h('li', {}, h('i', { style: { background: cssColor(line.color) } }), line.name)));
  return h('div', { class: 'chart' }, canvas, legend);
}

/** @param {CanvasRenderingContext2D} pen @param {number} width @param {number} height @param {AxisChart} chart */
function drawAxes(pen, width, height, chart) {
  const { across, format } = chart;
  const all = chart.lines.flatMap((line) => line.values).filter(Number.isFinite);
  const [low, high] = [Math.min(...all), Math.max(...all, Math.min(...all) + 1e-9)];
  pen.font = '12px system-ui, sans-serif';
  const ticks = [low, (low + high) / 2, high];
  const left = 8 + Math.max(...ticks.map((tick) => pen.measureText(format(tick)).width));
  const box = { left, right: width - 10, top: 26, bottom: height - 36 };
  const [first, last] = [across[0], across[across.length - 1]];
  const x = (/** @type {number} */ value) => box.left + (box.right - box.left) * (last > first ? (value - first) / (last - first) : 0.5);
  const y = (/** @type {number} */ value) => box.bottom - (box.bottom - box.top) * ((value - low) / (high - low));
  pen.textBaseline = 'middle';
  pen.textAlign = 'right';
  for (const tick of ticks) {
    pen.strokeStyle = cssColor('--line');
    line(pen, [[box.left, Math.round(y(tick)) + 0.5], [box.right, Math.round(y(tick)) + 0.5]]);
    pen.fillStyle = cssColor('--soft');
    pen.fillText(format(tick), box.left - 6, y(tick));
  }
  pen.textAlign = 'left';
  pen.fillText(chart.yLabel, 0, 7);
  pen.textAlign = 'center';
  for (const mark of across.length <= 6 ? across : [first, last]) pen.fillText(String(mark), x(mark), box.bottom + 12);
  pen.fillText(chart.xLabel, (box.left + box.right) / 2, height - 8);
  for (const one of chart.lines) {
    pen.strokeStyle = pen.fillStyle = cssColor(one.color);
    pen.lineWidth = 1.8;
    const points = one.values.map((value, at) => [x(across[at]), y(value)]).filter(([, py]) => Number.isFinite(py));
    line(pen, points);
    for (const [px, py] of points) { pen.beginPath(); pen.arc(px, py, 2.5, 0, 7); pen.fill(); }
  }
}

/** @param {CanvasRenderingContext2D} pen @param {number[][]} points */
function line(pen, points) {
  pen.beginPath();
  points.forEach(([px, py], at) => (at ? pen.lineTo(px, py) : pen.moveTo(px, py)));
  pen.stroke();
}

/** A small curve of recent values that grows on the right, with its peak and its time. @param {string} name @param {string} color @param {(value: number) => string} format */
export function curve(name, color, format) {
  /** @type {number[]} */
  let values = [];
  let tick = 1;
  const now = h('b', {}, '–');
  const canvas = drawing(78, (pen, width, height) => {
    const known = values.filter(Number.isFinite);
    const high = Math.max(...known, 1e-9);
    const floor = height - 16;
    const shown = Math.max(60, values.length);
    pen.strokeStyle = cssColor('--line');
    line(pen, [[0, floor + 0.5], [width, floor + 0.5]]);
    pen.font = '11px system-ui, sans-serif';
    pen.fillStyle = cssColor('--soft');
    pen.textBaseline = 'alphabetic';
    pen.fillText(`${duration(Math.round(shown * tick))} ago`, 0, height - 2);
    pen.textAlign = 'right';
    pen.fillText('now', width, height - 2);
    const points = values.map((value, at) => [width - ((values.length - 1 - at) * width) / shown, floor - (floor - 6) * (value / high)])
      .filter(([, y]) => Number.isFinite(y));
    if (!points.length) return;
    pen.fillStyle = pen.strokeStyle = cssColor(color);
    pen.globalAlpha = 0.14;
    pen.beginPath();
    pen.moveTo(points[0][0], floor);
    for (const [px, py] of points) pen.lineTo(px, py);
    pen.lineTo(points[points.length - 1][0], floor);
    pen.fill();
    pen.globalAlpha = 1;
    pen.lineWidth = 1.6;
    line(pen, points);
    pen.textAlign = 'left';
    pen.fillStyle = cssColor('--soft');
    if (points[0][0] > 96) pen.fillText(`peak ${format(high)}`, 0, 12);
  }, name);
  const element = h('div', { class: 'chart' }, h('h3', {}, name, now), canvas);
  const set = (/** @type {(number | null)[]} */ all, /** @type {number} */ seconds) => {
    values = all.slice(-300).map((value) => (value === null ? NaN : value));
    tick = seconds;
    const last = values[values.length - 1];
    now.textContent = Number.isFinite(last) ? format(last) : '–';
    canvas.redraw();
  };
  return { element, set };
}

/** Values as colored cells. @param {number[][]} rows @param {{signed?: boolean, most?: number, height: number, label: string, square?: boolean}} options */
export function heatMap(rows, options) {
  return drawing(options.height, (pen, width, height) => {
    const columns = Math.max(1, rows[0] ? rows[0].length : 0);
    const flat = rows.flat().filter(Number.isFinite);
    const most = options.most || Math.max(...flat.map(Math.abs), 1e-12);
    const picture = new ImageData(columns, Math.max(1, rows.length));
    rows.forEach((row, y) => row.forEach((value, x) => {
      const color = options.signed ? signedColor(value / most) : heatColor(value / most);
      picture.data.set([...color, Number.isFinite(value) ? 255 : 0], 4 * (y * columns + x));
    }));
    const small = document.createElement('canvas');
    small.width = columns;
    small.height = Math.max(1, rows.length);
    /** @type {CanvasRenderingContext2D} */ (small.getContext('2d')).putImageData(picture, 0, 0);
    pen.imageSmoothingEnabled = columns > 2 * width;
    const side = Math.min(width / columns, height / rows.length);
    if (options.square) pen.drawImage(small, 0, 0, side * columns, side * rows.length);
    else pen.drawImage(small, 0, 0, width, height);
  }, options.label);
}

/** White at 0, blue below, red above. @param {number} share from -1 to 1 @returns {number[]} */
export function signedColor(share) {
  return blend([[40, 90, 170], [247, 247, 247], [180, 40, 45]], (share + 1) / 2);
}

/** Dark at 0, bright at 1. @param {number} share @returns {number[]} */
export function heatColor(share) {
  return blend([[20, 20, 60], [190, 60, 90], [252, 240, 170]], share);
}

/** @param {number[][]} colors @param {number} share */
function blend(colors, share) {
  const place = Math.min(1, Math.max(0, Number.isFinite(share) ? share : 0)) * (colors.length - 1);
  const at = Math.min(colors.length - 2, Math.floor(place));
  return colors[at].map((low, channel) => Math.round(low + (colors[at + 1][channel] - low) * (place - at)));
}
