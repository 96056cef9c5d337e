// Questions to the API of the launcher, and its events.

export const API = "/api/v1";
const AGAIN = 3000; // milliseconds, the retry interval that the server sends to browsers
export const TOKEN = "nodepool-token"; // of the session storage

// The JSON, or text, of an answer.
/** @param {string} method @param {string} path @param {unknown} [body] @param {string | null} [token] @returns {Promise<any>} */
export async function call(method, path, body, token = sessionStorage.getItem(TOKEN)) {
  /** @type {Record<string, string>} */
  const headers = { Accept: "application/json" };
  if (token) headers.Authorization = `Bearer ${token}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(`${API}/${path}`, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  const text = await answer.text();
  if (answer.ok) return answer.headers.get("Content-Type")?.startsWith("application/json") && text ? JSON.parse(text) : text;
  /** @type {{ detail?: string, code?: string }} */
  let problem = {};
  try { problem = JSON.parse(text); } catch { /* of a proxy */ }
  throw Object.assign(new Error(problem.detail || text.slice(0, 300) || `The answer has the status ${answer.status}`), { code: problem.code, status: answer.status });
}

/** @template T @param {string} path @returns {Promise<T>} */
export const ask = (path) => call("GET", path);

// Events until the function that is given back is called. A browser tries again by itself when the connection breaks, but not
// after an answer such as 502 of a proxy.
/** @param {() => string} address @param {{ [type: string]: (message: any) => void }} listeners @returns {() => void} */
export function listen(address, listeners) {
  /** @type {EventSource} */
  let source;
  let timer = 0;
  function begin() {
    source = new EventSource(`${API}/${address()}`);
    for (const [type, listener] of Object.entries(listeners)) source.addEventListener(type, listener);
    source.addEventListener("error", () => { if (source.readyState === EventSource.CLOSED) timer = setTimeout(begin, AGAIN); });
  }
  begin();
  return () => { clearTimeout(timer); source.close(); };
}
