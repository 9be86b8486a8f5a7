// Words, numbers, times and small parts that all pages share. Text goes into the page as text only.

import { html, useEffect, useRef, useState } from "./preact.js";
import { Refused } from "./api.js";

export { html };
export { useEffect, useLayoutEffect, useMemo, useRef, useState } from "./preact.js";

const numbers = new Intl.NumberFormat("en");

export const count = (value) => (value == null ? "–" : numbers.format(value));
// A number and its noun: 1 job, 2 jobs.
export const counted = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;
export const short = (value) => {
  if (value == null) return "–";
  if (Math.abs(value) < 10) return value === Math.round(value) ? String(value) : value.toFixed(value < 1 ? 2 : 1);
  if (Math.abs(value) < 10000) return numbers.format(Math.round(value));
  return new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 }).format(value);
};

export function size(bytes) {
  if (bytes == null) return "–";
  let at = 0;
  let rest = bytes;
  while (rest >= 1024 && at < 5) { rest /= 1024; at += 1; }
  return `${at ? rest.toFixed(rest < 10 ? 1 : 0) : Math.round(rest)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][at]}`;
}

export function duration(ms) {
  if (ms == null || !Number.isFinite(ms)) return "–";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  const seconds = Math.floor(ms / 1000);
  if (seconds < 120) return `${seconds} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} d`;
}

const two = (value) => String(value).padStart(2, "0");
export const localTime = (ms) => {
  const at = new Date(ms);
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
};

// Local time, with UTC and the age on hover and for screen readers.
export function Time({ ms, age }) {
  if (!ms) return html`<span class="dim">never</span>`;
  const utc = new Date(ms).toISOString();
  const sinceMs = Date.now() - ms;
  const ago = sinceMs < 1000 ? "just now" : `${duration(sinceMs)} ago`;
  return html`<time datetime=${utc} title=${`${localTime(ms)} local · ${utc} UTC`}>${age ? ago : localTime(ms)}</time>`;
}

// -- places

export const boxPath = (name, tab = "", query) => {
  const params = new URLSearchParams(Object.entries(query || {}).filter(([, value]) => value !== "" && value != null));
  return `#/boxes/${encodeURIComponent(name)}${tab ? `/${tab}` : ""}${params.size ? `?${params}` : ""}`;
};
export const BoxLink = ({ name, tab }) => html`<a class="name" href=${boxPath(name, tab)}>${name}</a>`;
export const go = (hash) => { location.hash = hash; };
export function setQuery(changes) {
  const [path, asked] = location.hash.split("?");
  const query = new URLSearchParams(asked);
  for (const [name, value] of Object.entries(changes)) {
    if (value === "" || value == null || value === false) query.delete(name);
    else query.set(name, value);
  }
  location.hash = query.size ? `${path}?${query}` : path;
}

// -- data

// Loads, and loads again every `everyMs` while the page is looked at. Gives { data, error, reload }.
export function useData(load, deps, everyMs = 0) {
  const [state, setState] = useState({ data: null, error: null });
  const again = useRef(() => {});
  useEffect(() => {
    const leaving = new AbortController();
    let timer = 0;
    const run = async () => {
      clearTimeout(timer);
      try {
        if (!document.hidden || !timer) {
          const data = await load(leaving.signal);
          if (!leaving.signal.aborted) setState({ data, error: null });
        }
      } catch (error) {
        if (leaving.signal.aborted || error.name === "AbortError") return;
        setState((old) => ({ data: old.data, error }));
        if (error instanceof Refused && error.status === 401) dispatchEvent(new CustomEvent("need-key", { detail: error.message }));
      }
      if (everyMs && !leaving.signal.aborted) timer = setTimeout(run, everyMs);
    };
    setState((old) => ({ data: null, error: old.error && null }));
    again.current = run;
    run();
    return () => { leaving.abort(); clearTimeout(timer); };
  }, deps);
  return { ...state, reload: () => again.current() };
}

const STEPS = {
  0: "Check that the server runs (`streams status`) and try again.",
  401: "Enter a key of this server.",
  403: "Use a key with the missing scope or prefix, or ask its operator for one.",
  404: "It may have been deleted, or its name is misspelt.",
  409: "Look at its current state, then decide.",
  429: "The server is under pressure or a limit is reached; wait a moment.",
  503: "A part of the server restarts; this page tries again by itself.",
  507: "The disk is nearly full: delete or trim boxes, or add space.",
};
export function Problem({ error, title }) {
  if (!error) return null;
  if (error.status === 401) return html`<div class="note warn" role="alert"><b>This server asks for a key.</b></div>`;
  const confined = error.status === 403 && /prefix/.test(error.message);
  return html`<div class="note bad" role="alert">
    <b>${title || (confined ? "This key is for some boxes only" : "That did not work")}</b>
    <div>${confined ? "This page shows the whole server. Boxes of your key are under Boxes." : error.message}</div>
    ${!confined && STEPS[error.status] && html`<div class="dim">${STEPS[error.status]}</div>`}
  </div>`;
}

// -- parts

export const Tile = ({ label, value, tone, sub, href }) => html`<div class="tile">
  <dt>${label}</dt><dd class=${tone || ""}>${href ? html`<a href=${href}>${value}</a>` : value}</dd>${sub && html`<dd class="sub">${sub}</dd>`}</div>`;
export const Tiles = ({ children }) => html`<dl class="tiles">${children}</dl>`;
export const Badge = ({ tone, children, title }) => html`<span class=${`badge ${tone || ""}`} title=${title}>${children}</span>`;
const TONES = { ready: "good", none: "good", ok: "good", replaying: "warn", pacing: "warn", active: "good", paused: "warn" };
export const State = ({ text }) => html`<${Badge} tone=${TONES[text] || "bad"}>${text}<//>`;
export const Empty = ({ title, children }) => html`<div class="empty"><b>${title}</b><div>${children}</div></div>`;
export const Code = ({ children }) => html`<pre class="code" tabindex="0">${children}</pre>`;
export const Loading = () => html`<p class="dim" role="status">Loading …</p>`;

export const Select = ({ label, name, value, options, onChange, disabled }) => html`<label class="inline">${label} <select name=${name} disabled=${disabled} onChange=${(e) => onChange(e.target.value)}>
  ${options.map((each) => { const [id, words] = [each].flat(); return html`<option value=${id} selected=${id === value}>${words ?? id}</option>`; })}</select></label>`;

// Columns: { title, cell(row), kind: "number" | "name" | "", sort }.
export function Table({ label, columns, rows, empty, sort, onSort, rowKey }) {
  return html`<div class="wide" tabindex="0" role="region" aria-label=${label}><table>
    <thead><tr>${columns.map((column) => {
      const isSorted = sort && column.sort === sort.by;
      return html`<th scope="col" class=${column.kind || ""} aria-sort=${isSorted ? (sort.order === "asc" ? "ascending" : "descending") : null}>
        ${column.sort && onSort ? html`<button class="sort" onClick=${() => onSort(column.sort)}>${column.title}${isSorted ? (sort.order === "asc" ? " ↑" : " ↓") : ""}</button>` : column.title}</th>`;
    })}</tr></thead>
    <tbody>${rows.map((row, at) => html`<tr key=${rowKey ? rowKey(row) : at}>${columns.map((column) => html`<td class=${column.kind || ""}>${column.cell(row)}</td>`)}</tr>`)}
    ${!rows.length && html`<tr><td colspan=${columns.length} class="dim">${empty}</td></tr>`}</tbody></table></div>`;
}

export function Copy({ text, children }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    await navigator.clipboard?.writeText(typeof text === "function" ? text() : text).catch(() => {});
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<button type="button" class="quiet small" onClick=${copy}>${done ? "Copied" : children}</button>`;
}

export function save(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// A dialog that asks for the name of the thing before it destroys it.
export function Confirm({ name, title, children, verb, onConfirm, onClose }) {
  const dialog = useRef(null);
  const [typed, setTyped] = useState("");
  const [error, setError] = useState(null);
  useEffect(() => { dialog.current.showModal(); }, []);
  const submit = async (event) => {
    event.preventDefault();
    try { await onConfirm(); onClose(true); } catch (failure) { setError(failure); }
  };
  return html`<dialog ref=${dialog} onClose=${() => onClose(false)} aria-labelledby="confirm-title"><form onSubmit=${submit}>
    <h2 id="confirm-title">${title}</h2><div>${children}</div><${Problem} error=${error} />
    <label>Type <code>${name}</code> to confirm <input id="confirm-name" value=${typed} autocomplete="off" spellcheck=${false} onInput=${(e) => setTyped(e.target.value)} /></label>
    <div class="bar end"><button type="button" class="quiet" onClick=${() => dialog.current.close()}>Cancel</button>
    <button type="submit" class="danger" disabled=${typed !== name}>${verb}</button></div></form></dialog>`;
}

// JSON as a tree that opens and closes.
export function JsonTree({ value, name, open }) {
  const label = name === undefined ? null : html`<span class="json-key">${name}: </span>`;
  if (value === null || typeof value !== "object" || JSON.isRawJSON?.(value)) {
    const kind = value === null ? "null" : typeof value === "object" ? "number" : typeof value;
    return html`<div class="json-leaf">${label}<span class=${`json-${kind}`}>${JSON.stringify(value)}</span></div>`;
  }
  const entries = Array.isArray(value) ? value.map((each, at) => [at, each]) : Object.entries(value);
  const shown = entries.slice(0, 200);
  return html`<details class="json" open=${open !== false}><summary>${label}<span class="dim">${Array.isArray(value) ? `[${entries.length}]` : `{${entries.length}}`}</span></summary>
    ${shown.map(([each, inner]) => html`<${JsonTree} name=${each} value=${inner} open=${entries.length < 30} />`)}
    ${entries.length > 200 && html`<div class="dim">… ${entries.length - 200} more; see Raw</div>`}</details>`;
}

export const Tabs = ({ tabs, here, label }) => html`<nav class="tabs" aria-label=${label}>${tabs.map(([id, title, href]) => html`
  <a href=${href} aria-current=${id === here ? "page" : null}>${title}</a>`)}</nav>`;
