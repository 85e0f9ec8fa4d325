// Two caches, or two generations of one: what differs.
import { isBundle, record, recordUrl } from './api.js';
import { fill, h, missingBox, pageHead, problemBox, section, table } from './dom.js';
import { count, counted, figureText, shortValue } from './format.js';
import { go, wholeOf } from './router.js';

/** @param {import('./app.js').View} view */
export async function comparePage(view) {
  const { caches, query, cache } = view;
  const b = wholeOf(query, 'b', cache.index === 0 ? Math.min(1, caches.length - 1) : 0);
  if (b >= caches.length) { fill(view.box, h('h1', {}, 'Compare'), missingBox(`There is no cache ${b}: this viewer shows ${counted(caches.length, 'cache')}.`)); return; }
  const wanted = isBundle ? { a: 0, b: Math.min(1, caches.length - 1) }
    : { a: cache.index, b, generation_a: query.get('generation_a') || '', generation_b: query.get('generation_b') || '' };
  const found = await record(null, 'compare', wanted);
  if (!view.alive()) return;
  const all = query.get('all') === '1';
  const sides = found.error ? [] : [`${found.a}, generation ${found.generation_a}`, `${found.b}, generation ${found.generation_b}`];
  fill(view.box,
    pageHead('Compare', { json: [['compare', recordUrl(null, 'compare.json', wanted)]] }),
    !isBundle && choice(view, wanted, all),
    found.error ? problemBox(found) : [
      h('p', {}, `A: ${sides[0]}`, h('br'), `B: ${sides[1]}`),
      chunkSection(found),
      groups(found).map(([group, facts]) => factSection(group, facts, all))]);
}

/** @param {import('./app.js').View} view @param {any} wanted @param {boolean} all */
function choice(view, wanted, all) {
  const { caches, cache } = view;
  const generations = (/** @type {string} */ name, /** @type {any} */ of) => h('label', {}, `generation of ${name.toUpperCase()}`, h('select', { name: `generation_${name}` },
    h('option', { value: '' }, 'newest'), [...of.generations].reverse().map((/** @type {number} */ one) => h('option', { value: one, selected: String(one) === String(wanted[`generation_${name}`]) }, one))));
  return h('form', {
    onsubmit: (/** @type {any} */ event) => {
      event.preventDefault();
      const value = (/** @type {string} */ name) => event.target.elements[name].value;
      go(Number(value('a')), 'compare', { b: value('b'), generation_a: value('generation_a'), generation_b: value('generation_b'), all: event.target.elements.all.checked ? 1 : '' });
    },
  }, ['a', 'b'].map((name) => [h('label', {}, `cache ${name.toUpperCase()}`, h('select', { name }, caches.map((one) => h('option', { value: one.index, selected: one.index === wanted[name] }, one.root)))),
    generations(name, name === 'a' ? cache : caches[wanted.b])]),
  h('label', { class: 'check' }, h('input', { type: 'checkbox', name: 'all', checked: all }), 'also what is the same'), h('button', { class: 'primary' }, 'Compare'));
}

/** @param {any} found */
function chunkSection(found) {
  const base = found.chunks[0] || { same_rows: 0 };
  const damage = ['a', 'b'].map((side) => found.chunks.reduce((/** @type {number} */ sum, /** @type {any} */ one) => sum + one[`damaged_${side}`], 0));
  const counts = ['same', 'differ', 'only in A', 'only in B', ...['damaged in A', 'damaged in B'].filter((_, at) => damage[at])];
  const field = (/** @type {string} */ name) => name.replace(' in', '').replace(' ', '_').toLowerCase();
  return section('Rows and chunks',
    damage.map((number, at) => number > 0 && problemBox({ error: `${'AB'[at]}: ${counted(number, 'chunk')} damaged; run \`forebay repair\`.`, damaged: true })),
    h('p', {}, `${counted(base.same_rows, 'row')} the same, of ${count(found.rows_a)} in A and ${count(found.rows_b)} in B.`),
    h('p', { class: 'soft' }, 'Chunks with the same number, compared by the content digests in both indexes; no file was read. Damaged chunks are lost, or have another size or header.'),
    table(['layer', ...counts.map((name) => `#${name}`)], found.chunks.map((/** @type {any} */ one) => [one.layer, ...counts.map((name) => count(one[field(name)]))])));
}

/** @param {any} found @returns {[string, any[]][]} */
function groups(found) {
  /** @type {Record<string, any[]>} */
  const all = {};
  for (const fact of found.facts) (all[fact.group] = all[fact.group] || []).push(fact);
  return Object.entries(all);
}

/** @param {string} group @param {any[]} facts @param {boolean} all */
function factSection(group, facts, all) {
  const differ = facts.filter((fact) => !fact.same);
  const shown = all ? facts : differ;
  const heading = group[0].toUpperCase() + group.slice(1);
  if (group === 'identity') {
    return h('details', {}, h('summary', { class: 'soft' }, 'Ids and digests'), table(['name', 'A', 'B'], facts.map((fact) => [title(fact), plain(fact, fact.a), plain(fact, fact.b)])));
  }
  const only = facts.every((fact) => fact.b === null) ? 'A' : facts.every((fact) => fact.a === null) ? 'B' : '';
  if (only) return section(`${heading}, only in ${only}`, table(['fact', only], facts.map((fact) => [title(fact), plain(fact, only === 'A' ? fact.a : fact.b)])));
  return section(heading, h('p', { class: 'soft' }, differ.length ? `${count(differ.length)} of ${count(facts.length)} facts differ` : `all ${count(facts.length)} facts are the same`),
    shown.length > 0 && table(['fact', 'A', 'B'], shown.map((fact) => [title(fact), side(fact, fact.a), side(fact, fact.b)])));
}

/** @param {any} fact */
function isRecipe(fact) {
  return fact.group.startsWith('recipe');
}

/** The name of a fact; fields of a recipe are written as they are typed. @param {any} fact */
function title(fact) {
  return isRecipe(fact) ? fact.name : fact.name.replaceAll('_', ' ');
}

/** @param {any} fact @param {any} value */
function side(fact, value) {
  return h('span', { class: fact.same ? '' : 'differs' }, plain(fact, value));
}

/** @param {any} fact @param {any} value @returns {string} */
function plain(fact, value) {
  if (value === null || value === undefined) return '–';
  if (typeof value !== 'number' || isRecipe(fact)) return shortValue(value, 300);
  return figureText(fact.name.replace(/^(sum|figure): /, ''), value);
}
