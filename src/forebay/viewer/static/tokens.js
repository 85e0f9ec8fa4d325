// The tokens of a row in blocks: documents, turns of a conversation, candidates. Hover or arrow keys explain a token.
import { h, visible } from './dom.js';
import { count, decimal } from './format.js';

export const KINDS = ['prompt', 'response', 'thinking', 'tool_call', 'tool_result', 'header', 'stop'];

/** @param {any} row @param {string} color the column of log-probs that colors tokens; empty: documents or kinds do @param {boolean[]} trainedSpans */
export function tokenStrip(row, color, trainedSpans) {
  const used = row.length - row.padding - row.first;
  const readout = h('div', { class: 'readout', role: 'status' }, 'Point at a token, or use the arrow keys.');
  const strip = h('div', { class: row.spans.length ? 'tokens turns' : 'tokens', tabindex: 0, role: 'application', 'aria-label': 'Tokens of the row: arrow keys move' });
  const spans = new Array(row.tokens.length).fill(null);
  row.spans.forEach((/** @type {any} */ span, /** @type {number} */ at) => spans.fill({ ...span, trained: trainedSpans[at] }, Math.max(0, span.start - row.first), Math.max(0, span.stop - row.first)));
  const shown = row.tokens.map((/** @type {number} */ _, /** @type {number} */ at) => cell(row, at, used, spans[at], color));
  appendBlocks(strip, row, shown, spans, used);
  keyboard(strip, shown, (at) => { readout.textContent = visible(about(row, at, used, spans[at])); });
  return { element: h('div', {}, readout, strip, moreButton(strip, shown), legend(row, spans, color)), trained: spans.map((span) => Boolean(span && span.trained)) };
}

/** Put tokens into a block per document, and per turn of a conversation. @param {any} strip @param {any} row @param {any[]} shown @param {any[]} spans @param {number} used */
function appendBlocks(strip, row, shown, spans, used) {
  let block = strip;
  let turn = strip;
  shown.forEach((one, at) => {
    const number = row.documents[at];
    const isNew = at === 0 || number !== row.documents[at - 1] || at === used;
    if (isNew) {
      block = turn = h('div', { class: 'block' });
      if (at < used) block.append(row.scores ? candidateHeading(row, number) : documentHeading(row, number));
      strip.append(block);
    }
    const span = spans[at];
    if (span && (isNew || span.message !== spans[at - 1].message || spans[at - 1].role !== span.role)) {
      turn = h('div', { class: `turn by-${span.role}` }, h('i', { class: 'who' }, span.role));
      block.append(turn);
    }
    turn.append(one);
  });
}

/** @param {any} strip @param {any[]} shown @param {(at: number) => void} explain */
function keyboard(strip, shown, explain) {
  let on = -1;
  const point = (/** @type {number} */ at) => {
    if (at < 0 || at >= shown.length) return;
    if (on >= 0) shown[on].classList.remove('on');
    on = at;
    shown[at].classList.add('on');
    explain(at);
  };
  strip.addEventListener('mouseover', (/** @type {any} */ event) => {
    if (event.target.dataset.at !== undefined) point(Number(event.target.dataset.at));
  });
  strip.addEventListener('keydown', (/** @type {KeyboardEvent} */ event) => {
    const steps = /** @type {Record<string, number>} */ ({ ArrowRight: 1, ArrowLeft: -1, ArrowDown: 20, ArrowUp: -20 });
    if (event.key in steps) point(Math.max(0, on) + (on < 0 ? 0 : steps[event.key]));
    else if (event.key === 'Home') point(0);
    else if (event.key === 'End') point(shown.length - 1);
    else return;
    event.preventDefault();
    shown[on].scrollIntoView({ block: 'nearest' });
  });
}

/** Tells how many tokens are below the visible part of the box, and shows them all. @param {any} strip @param {any[]} shown */
function moreButton(strip, shown) {
  const button = h('button', { type: 'button', class: 'more', hidden: true, onclick: () => { strip.classList.add('all'); recount(); } });
  const recount = () => {
    const bottom = strip.scrollTop + strip.clientHeight;
    const below = strip.scrollHeight > bottom + 2 ? shown.filter((one) => one.offsetTop > bottom - 8).length : 0;
    button.hidden = below === 0;
    strip.classList.toggle('cut', below > 0);
    button.textContent = `${count(below)} more tokens below: show all`;
  };
  new ResizeObserver(recount).observe(strip);
  strip.addEventListener('scroll', recount);
  return button;
}

/** @param {any} row @param {any[]} spans @param {string} color */
function legend(row, spans, color) {
  const known = KINDS.filter((kind) => spans.some((span) => span && span.kind === kind));
  return h('ul', { class: 'legend' },
    color ? h('li', {}, h('i', { class: 'sure' }), 'likely', h('i', { class: 'unsure', style: { marginLeft: '12px' } }), `unlikely by ${color}, log-prob −8 or less`)
      : known.map((kind) => h('li', {}, h('i', { class: `k${KINDS.indexOf(kind)}` }), kind.replace('_', ' '))),
    row.spans.length > 0 ? h('li', {}, h('u', { class: 'trained' }, 'underlined'), ': trained; pale: not trained')
      : h('li', {}, h('i', { class: 'last' }), 'last token of a document: it has no label'),
    row.padding > 0 && h('li', {}, h('i', { class: 'pad' }), 'padding'));
}

/** @param {any} row @param {number} at @param {number} used @param {any} span @param {string} color */
function cell(row, at, used, span, color) {
  const text = at < used ? row.texts[at] ?? `${row.tokens[at]} ` : '·';
  const trained = span ? span.trained : row.labels[at] !== -100;
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

/** Which document begins here: its sample, its line, and which part of it this is. @param {any} row @param {number} number */
function documentHeading(row, number) {
  const piece = row.pieces[number];
  const name = `${row.spans.length ? 'conversation' : 'document'} ${number + 1}`;
  if (!piece) return h('b', { class: 'begins' }, name);
  const line = row.lines[number] ? `${piece.source.replace(/@\d+$/, '')} line ${count(row.lines[number])}` : piece.source;
  const file = row.parts.length === 1 ? row.parts[0].path : '';
  const part = piece.offset ? `from token ${count(piece.offset)} on` : '';
  const facts = [line || file, `${count(piece.tokens)} tokens`, part, piece.goes_on && 'continues elsewhere'];
  return h('b', { class: 'begins' }, !row.spans.length && h('i', { class: `swatch d${number % 6}` }), name, h('small', { class: 'soft' }, ` · ${facts.filter(Boolean).join(' · ')}`));
}

/** The prompt or a candidate of a preference: candidates are stored best first. @param {any} row @param {number} number */
function candidateHeading(row, number) {
  return h('b', { class: number === 0 ? 'begins' : number === 1 ? 'begins chosen' : 'begins rejected' }, candidateName(row, number));
}

/** @param {any} row @param {number} number */
function candidateName(row, number) {
  if (number === 0) return 'prompt';
  const score = row.scores[number - 1] ?? null;
  return `candidate ${number}${number === 1 ? ', preferred' : ''}${score === null ? '' : `, score ${decimal(score)}`}`;
}

/** New lines are shown and kept; a token without text is a thin line. @param {string} text */
function shownText(text) {
  return text === '' ? '\u2009' : visible(text).replaceAll('\r', '␍').replaceAll('\n', '⏎\n').replaceAll('\t', '⇥\t');
}

/** @param {any} row @param {number} at @param {number} used @param {any} span */
function about(row, at, used, span) {
  const place = count(row.first + at);
  if (at >= used) return `token ${place}: padding, id ${row.tokens[at]}, no label`;
  const text = row.texts[at] !== undefined ? ` ${JSON.stringify(row.texts[at])}` : '';
  const label = row.labels[at] === -100 ? 'no label' : `label ${row.labels[at]}${row.texts[at + 1] !== undefined ? ` ${JSON.stringify(row.texts[at + 1])}` : ''}`;
  const where = row.scores ? candidateName(row, row.documents[at]) : `document ${row.documents[at] + 1}`;
  const likely = Object.entries(row.log_probs).filter(([, values]) => values[at] !== null).map(([name, values]) => `, ${name} ${decimal(values[at])}`).join('');
  return `token ${place}: id ${row.tokens[at]}${text}, position ${count(row.positions[at])} of ${where}, ${label}${likely}${span ? `; ${span.kind.replace('_', ' ')} of ${span.role}` : ''}`;
}
