// Records of the server, or those that a static bundle carries.

/** @type {Record<string, any> | null} */
const carried = readBundle();

function readBundle() {
  const element = document.getElementById('bundle');
  return element ? JSON.parse(element.textContent || '{}') : null;
}

/** Whether this page was opened from a file that carries its records. */
export const isBundle = carried !== null;

/** The rows that a bundle carries, of one cache. @param {number} cache @returns {number[] | null} */
export function carriedRows(cache) {
  return carried ? (carried.rows || {})[cache] || [] : null;
}

/** The address of a record. @param {number | null} cache @param {string} name @param {Record<string, any>} [query] */
export function recordUrl(cache, name, query = {}) {
  const wanted = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== '');
  const text = wanted.map(([key, value]) => `${key}=${encodeURIComponent(value)}`).join('&');
  return `api/${cache === null ? '' : `${cache}/`}${name}${text ? `?${text}` : ''}`;
}

/** A record; a problem has the field `error`. @param {number | null} cache @param {string} name @param {Record<string, any>} [query] @returns {Promise<any>} */
export async function record(cache, name, query = {}) {
  const url = recordUrl(cache, `${name}.json`, query);
  if (carried) {
    return url in carried.records ? carried.records[url]
      : { error: 'This page is a static copy and does not carry this record.', damaged: false };
  }
  try {
    const answer = await fetch(url, { headers: { accept: 'application/json' } });
    if (!answer.ok) return { error: await answer.text(), damaged: false };
    return await answer.json();
  } catch {
    return { error: 'The server does not answer; is `forebay view` still running?', damaged: false };
  }
}

/** The address of a picture: on the server, or carried. @param {number} cache @param {Record<string, any>} query */
export function pictureUrl(cache, query) {
  const url = recordUrl(cache, 'image.png', query);
  return carried ? carried.pictures[url] || '' : url;
}

/**
 * Events of a running build; returns a function that ends them. A hidden page has none: a browser keeps only six
 * connections to a server, for all its pages together.
 * @param {number} cache
 * @param {(event: any) => void} take
 * @param {(yes: boolean) => void} reached called with whether the server answers
 */
export function liveEvents(cache, take, reached) {
  if (carried) {
    record(cache, 'chunks').then((map) => record(cache, 'build').then((live) => take({ map, live, history: [] })));
    return () => {};
  }
  /** @type {EventSource | null} */
  let events = null;
  const follow = () => {
    if (document.hidden === (events === null)) return;
    if (events) { events.close(); events = null; return; }
    events = new EventSource(recordUrl(cache, 'live'));
    events.onmessage = (message) => { reached(true); take(JSON.parse(message.data)); };
    events.onerror = () => reached(false);
  };
  follow();
  document.addEventListener('visibilitychange', follow);
  return () => { document.removeEventListener('visibilitychange', follow); if (events) events.close(); };
}
