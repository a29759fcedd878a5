// The service's answers, and its errors as the sentence that it sends.

const KEY = "maskgr-key";

/** An answer that is an error: `message` is the service's own sentence. */
export class Problem extends Error {
  constructor(status, sentence) {
    super(sentence);
    this.status = status;
  }
}

export const useKey = (key) => sessionStorage.setItem(KEY, key);

export const get = (path, query = {}, signal = undefined) => {
  const given = Object.entries(query).flatMap(([name, value]) => [value].flat().map((one) => [name, one]));
  const asked = new URLSearchParams(given.filter(([, value]) => value !== "" && value != null));
  return call(asked.size ? `${path}?${asked}` : path, { signal });
};

export const post = (path, body, signal = undefined) =>
  call(path, { method: "POST", signal, body: JSON.stringify(body), headers: { "Content-Type": "application/json" } });

async function call(path, { headers = {}, ...rest }) {
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  let answer;
  try {
    answer = await fetch(path, { ...rest, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "The service does not answer; check that it is running, and try again.");
  }
  const content = await answer.json().catch(() => null);
  if (answer.ok && content !== null) return content;
  const silent = `The service answered ${answer.status} without a reason; try again.`;
  throw new Problem(answer.status, content?.detail ?? content?.title ?? silent);
}

/** Runs one call at a time: a newer one ends the older, whose result is then never shown. */
export function latest() {
  let running = new AbortController();
  return async (work) => {
    running.abort();
    const own = (running = new AbortController());
    try {
      const found = await work(own.signal);
      return own.signal.aborted ? null : found;
    } catch (error) {
      if (own.signal.aborted) return null;
      throw error;
    }
  };
}

/** The same request for a shell. */
export function curl(path, body) {
  const address = new URL(path, document.baseURI);
  const quoted = JSON.stringify(body).replaceAll("'", "'\\''");
  const key = sessionStorage.getItem(KEY) ? "  -H 'Authorization: Bearer YOUR_KEY' \\\n" : "";
  const type = "  -H 'Content-Type: application/json' \\\n";
  return `curl ${address.origin}${address.pathname} \\\n${key}${type}  -d '${quoted}'`;
}
