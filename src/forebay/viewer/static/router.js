// Every view is a URL: #/0/rows?row=17 is row 17 of the first cache.

/** @typedef {{cache: number, page: string, query: URLSearchParams}} Route */

/** @returns {Route} */
export function currentRoute() {
  const [path, query] = location.hash.replace(/^#\/?/, '').split('?');
  const [cache, page] = path.split('/');
  return { cache: cache === '' ? 0 : /^\d{1,6}$/.test(cache) ? Number(cache) : -1, page: page || 'overview', query: new URLSearchParams(query || '') };
}

/** The address of a view. @param {number} cache @param {string} page @param {Record<string, any>} [query] */
export function viewUrl(cache, page, query = {}) {
  const wanted = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== '');
  const text = new URLSearchParams(wanted.map(([key, value]) => [key, String(value)])).toString();
  return `#/${cache}/${page}${text ? `?${text}` : ''}`;
}

/** The address of one row of a cache. @param {any} cache @param {number} row @param {Record<string, any>} [query] */
export function rowUrl(cache, row, query = {}) {
  return cache.kind === 'images' ? viewUrl(cache.index, 'images', { row, one: 1 }) : viewUrl(cache.index, 'rows', { row, ...query });
}

/** Show another view. @param {number} cache @param {string} page @param {Record<string, any>} [query] */
export function go(cache, page, query = {}) {
  location.hash = viewUrl(cache, page, query).slice(1);
}

/** Put the address of what is shown now into the browser, without drawing anything. @param {number} cache @param {string} page @param {Record<string, any>} query */
export function noteView(cache, page, query) {
  try {
    history.replaceState(null, '', viewUrl(cache, page, query));
  } catch { /* a page inside a notebook has no address */ }
}

/** Follow links to views by the fragment alone: inside a notebook, relative addresses would lead to the notebook. @param {MouseEvent} event */
export function followLink(event) {
  const link = event.target instanceof Element ? event.target.closest('a[href^="#/"]') : null;
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  location.hash = /** @type {string} */ (link.getAttribute('href'));
}

/** A whole number of the address, from 0. @param {URLSearchParams} query @param {string} name @param {number} fallback */
export function wholeOf(query, name, fallback) {
  const text = query.get(name);
  return text !== null && /^\d{1,15}$/.test(text) ? Number(text) : fallback;
}
