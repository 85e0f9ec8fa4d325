// The tokens of a row: a color per document, underlined where the loss counts, and what each is on hover or by arrow keys.
import { h, visible } from './dom.js';
import { count, decimal } from './format.js';

export const KINDS = ['prompt', 'response', 'thinking', 'tool_call', 'tool_result', 'header', 'stop'];

/**
 * @param {any} row
 * @param {string} color the column of log-probs that colors tokens; empty: documents or spans do
 */
export function tokenStrip(row, color) {
  const used = row.length - row.padding - row.first;
  const readout = h('div', { class: 'readout', role: 'status' }, 'Point at a token, or use the arrow keys.');
  const strip = h('div', { class: 'tokens', tabindex: 0, role: 'application', 'aria-label': 'Tokens of the row: arrow keys move' });
  /** @type {any[]} */
  const spans = new Array(row.tokens.length).fill(null);
  for (const span of row.spans) spans.fill(span, Math.max(0, span.start - row.first), Math.max(0, span.stop - row.first));
  const cells = document.createDocumentFragment();
  const shown = row.tokens.map((/** @type {number} */ _, /** @type {number} */ at) => cell(row, at, used, spans[at], color));
  shown.forEach((/** @type {any} */ one, /** @type {number} */ at) => {
    if (row.candidates.length && (at === 0 || row.documents[at] !== row.documents[at - 1])) cells.appendChild(heading(row, row.documents[at]));
    cells.appendChild(one);
  });
  strip.appendChild(cells);
  let on = -1;
  const point = (/** @type {number} */ at) => {
    if (at < 0 || at >= row.tokens.length) return;
    if (on >= 0) shown[on].classList.remove('on');
    on = at;
    shown[at].classList.add('on');
    readout.textContent = visible(about(row, at, used, spans[at]));
  };
  strip.addEventListener('mouseover', (/** @type {any} */ event) => {
    const at = Number(event.target.dataset.at);
    if (Number.isInteger(at) && event.target !== strip) point(at);
  });
  strip.addEventListener('keydown', (/** @type {KeyboardEvent} */ event) => {
    const steps = /** @type {Record<string, number>} */ ({ ArrowRight: 1, ArrowLeft: -1, ArrowDown: 20, ArrowUp: -20 });
    if (event.key in steps) point(Math.max(0, on) + (on < 0 ? 0 : steps[event.key]));
    else if (event.key === 'Home') point(0);
    else if (event.key === 'End') point(row.tokens.length - 1);
    else return;
    event.preventDefault();
    shown[on].scrollIntoView({ block: 'nearest' });
  });
  return h('div', {}, readout, strip, legend(row, spans, color));
}

/** @param {any} row @param {any[]} spans @param {string} color */
function legend(row, spans, color) {
  const known = KINDS.filter((kind) => spans.some((span) => span && span.kind === kind));
  return h('ul', { class: 'legend' },
    color ? h('li', {}, h('i', { class: 'sure' }), 'likely', h('i', { class: 'unsure', style: { marginLeft: '12px' } }), `unlikely by ${color}, log-prob −8 or less`)
      : known.length ? known.map((kind) => h('li', {}, h('i', { class: `k${KINDS.indexOf(kind)}` }), kind.replace('_', ' ')))
        : h('li', {}, h('i', { class: 'd0' }), h('i', { class: 'd1' }), h('i', { class: 'd2' }), 'a color per document'),
    row.spans.length > 0 ? h('li', {}, h('u', { class: 'trained' }, 'underlined'), ': the loss counts this token; pale: it does not')
      : h('li', {}, h('i', { class: 'last' }), 'the last token of a document, which has no label'),
    row.padding > 0 && h('li', {}, h('i', { class: 'pad' }), 'padding'));
}

/** @param {any} row @param {number} at @param {number} used @param {any} span @param {string} color */
function cell(row, at, used, span, color) {
  const text = at < used ? row.texts[at] ?? `${row.tokens[at]} ` : '·';
  const trained = span ? span.trained : row.labels[at] !== -100; // of a conversation, the tokens that a model learns to write
  const hue = color ? '' : span ? `k${KINDS.indexOf(span.kind)}` : `d${row.documents[at] % 6}`;
  const classes = [at < used ? hue : 'pad', trained && span ? 'trained' : '', trained || at >= used ? '' : span ? 'off' : 'last'];
  const element = document.createElement('span');
  element.className = classes.filter(Boolean).join(' ');
  element.dataset.at = String(at);
  const likely = color ? row.log_probs[color][at] : null;
  if (likely !== null && likely !== undefined) element.style.backgroundColor = `rgb(214 90 50 / ${Math.round(75 * Math.min(1, -likely / 8))}%)`;
  element.textContent = shownText(text);
  return element;
}

/** What begins here, a prompt or a candidate. @param {any} row @param {number} number */
function heading(row, number) {
  return h('b', { class: number ? `begins ${preference(number)}` : 'begins' }, segment(row, number));
}

/** The class of a candidate: candidates are stored best first. @param {number} number from 1 */
export function preference(number) {
  return number === 1 ? 'chosen' : 'rejected';
}

/** The prompt or a candidate of a preference. @param {any} row @param {number} number */
export function segment(row, number) {
  if (number === 0) return 'prompt';
  const { score } = row.candidates[number - 1];
  return `candidate ${number}${number === 1 ? ', preferred' : ''}${score === null ? '' : `, score ${decimal(score)}`}`;
}

/** New lines are shown and kept; a token without text is a thin mark. @param {string} text */
function shownText(text) {
  return text === '' ? '\u2009' : visible(text).replaceAll('\r', '␍').replaceAll('\n', '⏎\n').replaceAll('\t', '⇥\t');
}

/** @param {any} row @param {number} at @param {number} used @param {any} span */
function about(row, at, used, span) {
  const place = count(row.first + at);
  if (at >= used) return `token ${place}: padding, id ${row.tokens[at]}, no label`;
  const text = row.texts[at] !== undefined ? ` ${JSON.stringify(row.texts[at])}` : '';
  const label = row.labels[at] === -100 ? 'no label' : `label ${row.labels[at]}${row.texts[at + 1] !== undefined ? ` ${JSON.stringify(row.texts[at + 1])}` : ''}`;
  const where = row.candidates.length ? segment(row, row.documents[at]) : `document ${row.documents[at] + 1}`;
  const likely = Object.entries(row.log_probs).filter(([, values]) => values[at] !== null).map(([name, values]) => `, ${name} ${decimal(values[at])}`).join('');
  return `token ${place}: id ${row.tokens[at]}${text}, position ${count(row.positions[at])} of ${where}, ${label}${likely}${span ? `; ${span.kind.replace('_', ' ')} of ${span.role}` : ''}`;
}
