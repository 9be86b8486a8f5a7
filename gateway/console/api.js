// The public /v0 and /v1, as a browser calls them: the key, errors, event streams. Knows nothing of the pages.
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
    this.detail = error.detail || {};
  }
}

function headers(more) {
  const secret = key.get();
  return { ...(secret ? { Authorization: `Bearer ${secret}` } : {}), ...more };
}

async function request(path, options) {
  let answer;
  try {
    answer = await fetch(path, { cache: "no-store", credentials: "omit", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, { message: "the server does not answer; check that it runs and that the network reaches it" });
  }
  if (!answer.ok) {
    const body = await answer.json().catch(() => ({}));
    throw new Refused(answer.status, body.error || body);
  }
  return answer;
}

// Numbers keep their digits (1.0, 1e400, twenty of them) where the browser can tell them. They are objects then, for
// data of records that is shown as JSON; numbers that pages calculate with or show come from plain parsing.
function exact(name, value, context) {
  const isOther = typeof value === "number" && context?.source !== undefined && String(value) !== context.source;
  return isOther && JSON.rawJSON ? JSON.rawJSON(context.source) : value;
}
export const parseExact = (text) => JSON.parse(text, exact);

export const withQuery = (path, query) => {
  const params = new URLSearchParams(Object.entries(query || {}).filter(([, value]) => value !== "" && value != null));
  return params.size ? `${path}?${params}` : path;
};

export async function get(path, query, signal, more) {
  return (await request(withQuery(path, query), { headers: headers(more), signal })).json();
}

// `body` is a value, or text: what somebody typed goes out as it is, with all its digits.
export async function send(method, path, body, signal, more, parse = JSON.parse) {
  const text = body === undefined || typeof body === "string" ? body : JSON.stringify(body);
  const type = text === undefined ? {} : { "Content-Type": "application/json" };
  const answer = await request(path, { method, headers: headers({ ...type, ...more }), body: text, signal });
  const reply = await answer.text();
  return reply ? parse(reply) : {};
}

export const box = (name, rest = "") => `/v0/boxes/${encodeURIComponent(name)}${rest}`;
export const router = (name) => `/v0/routers/${encodeURIComponent(name)}`;

// Reads records without counting as a reader. Numbers in `data` keep their digits.
export const diff = (name, body, signal) => send("POST", box(name, "/diff"), { ...body, touch: false }, signal, {}, parseExact);

// The whole answer of any request, for the API explorer.
export async function raw(method, path, body, more) {
  const began = performance.now();
  const answer = await fetch(path, { method, cache: "no-store", credentials: "omit", headers: headers(more), body: body || undefined });
  const text = await answer.text();
  return { status: answer.status, headers: [...answer.headers], text, tookMs: performance.now() - began };
}

// Calls `onEvent(event, text of its data)` for each event until the stream ends or `signal` is aborted.
export async function events(path, onEvent, signal) {
  const answer = await request(path, { headers: headers({ Accept: "text/event-stream" }), signal });
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
      if (data.length) onEvent(name, data.join("\n"));
    }
  }
}

// -- what the server has and what the key may do

let routes = null;
let schemas = {};
// Whether a body of this server has a field. Asked before a field is sent that an older server would refuse.
export const hasField = (schema, field) => Boolean(schemas[schema]?.properties?.[field]);
// The routes of this server, from its own description: pages show only what exists.
export async function serverRoutes() {
  if (routes === null) {
    const document = await get("/v0/openapi.json");
    schemas = document.components.schemas;
    routes = new Set(Object.entries(document.paths).flatMap(([path, methods]) =>
      Object.keys(methods).map((method) => `${method.toUpperCase()} ${path}`)));
  }
  return routes;
}
