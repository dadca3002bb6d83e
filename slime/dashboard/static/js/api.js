// Requests, and the stream that says which run has changed.

/** Ask for JSON. `parameters` may hold arrays, and leaves out what is undefined or "". */
export async function get(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const part of Array.isArray(value) ? value : [value]) if (part !== undefined && part !== null && part !== "") query.append(name, part);
  }
  const text = query.toString();
  const response = await fetch(`api/${path}${text ? `?${text}` : ""}`);
  if (!response.ok) throw new Error(response.status === 401 ? "the token is missing: open the URL that was printed at the start" : `${response.status} ${await response.text()}`);
  return response.json();
}

/** The part of an address that names a run. */
export function ofRun(id, rest = "") {
  return `runs/${encodeURIComponent(id)}${rest}`;
}

/** Follow runs: `onchange(id, version)` when one has changed (null: it is gone), `onstate(isConnected)`. Returns a function that ends it. */
export function follow(ids, onchange, onstate) {
  const source = new EventSource(`api/events?runs=${ids.map(encodeURIComponent).join(",")}`);
  const seen = new Set();
  source.onopen = () => onstate(true);
  source.onerror = () => onstate(false);
  source.onmessage = (event) => {
    const { run, version } = JSON.parse(event.data);
    if (seen.has(run) || version === null) onchange(run, version); // the first line of each only says how it stands
    seen.add(run);
  };
  return () => source.close();
}
