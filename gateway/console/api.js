// The public /v0, as a browser calls it: the key, errors, event streams. Knows nothing of the page.
//
// The key is kept for this tab only and travels in a header, also with event streams, so that it is in no address.

const SLOT = "streams.key";

export const key = {
  get: () => sessionStorage.getItem(SLOT),
  set: (value) => sessionStorage.setItem(SLOT, value),
  forget: () => sessionStorage.removeItem(SLOT),
};

export class Refused extends Error {
  constructor(status, error) {
    super(error.message || `the server answered ${status}`);
    this.status = status;
    this.code = error.code || "";
  }
}

function headers(more) {
  const secret = key.get();
  return { ...(secret ? { Authorization: `Bearer ${secret}` } : {}), ...more };
}

async function sent(path, options) {
  const answer = await fetch(path, { cache: "no-store", credentials: "omit", ...options });
  if (!answer.ok) {
    const told = await answer.json().catch(() => ({}));
    throw new Refused(answer.status, told.error || {});
  }
  return answer;
}

export async function get(path, query, signal) {
  const asked = new URLSearchParams(Object.entries(query || {}).filter(([, value]) => value !== "" && value != null));
  const url = asked.size ? `${path}?${asked}` : path;
  return (await sent(url, { headers: headers(), signal })).json();
}

// `body` is text: what somebody typed goes out as it is, with all its digits.
export async function post(path, body, signal) {
  const options = { method: "POST", headers: headers({ "Content-Type": "application/json" }), body, signal };
  return (await sent(path, options)).json();
}

export const box = (name, rest = "") => `/v0/boxes/${encodeURIComponent(name)}${rest}`;
export const router = (name) => `/v0/routers/${encodeURIComponent(name)}`;

// Calls `tell(event, text of its data)` for each event until the stream ends or `signal` is aborted.
export async function events(path, tell, signal) {
  const answer = await sent(path, { headers: headers({ Accept: "text/event-stream" }), signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      let name = "message";
      const data = [];
      for (const line of frame.split("\n")) {
        if (line.startsWith("event:")) name = line.slice(6).trim();
        else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
      }
      if (data.length) tell(name, data.join("\n"));
    }
  }
}
