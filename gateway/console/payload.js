// Payloads of records: JSON as a tree or raw; bytes of S2 records as text, JSON or hex.

import { JsonTree, html, useState } from "./ui.js";

const bytesOf = (base64) => Uint8Array.from(atob(base64), (each) => each.charCodeAt(0));
const decoded = (bytes) => new TextDecoder("utf-8", { fatal: false }).decode(bytes);

function hex(bytes) {
  const lines = [];
  for (let at = 0; at < Math.min(bytes.length, 4096); at += 16) {
    const part = [...bytes.slice(at, at + 16)];
    const codes = part.map((each) => each.toString(16).padStart(2, "0")).join(" ").padEnd(48);
    lines.push(`${at.toString(16).padStart(6, "0")}  ${codes} ${part.map((each) => (each >= 32 && each < 127 ? String.fromCharCode(each) : ".")).join("")}`);
  }
  return lines.join("\n") + (bytes.length > 4096 ? `\n… ${bytes.length - 4096} bytes more` : "");
}

function body(record) {
  try {
    return typeof record.data === "string" ? bytesOf(record.data) : new Uint8Array();
  } catch {
    return new TextEncoder().encode(record.data);
  }
}

// The body of an S2 record as text.
export const textOf = (record) => decoded(body(record));

// The data of a record as a value: of an S2 record, its body if that is JSON.
export const valueOf = (record, isStream) => (isStream ? parsed(textOf(record))?.value : record.data);

// The record in one line of text.
export function payload(record, isStream) {
  const text = isStream ? textOf(record) : JSON.stringify(record.data);
  return { line: text === undefined ? "" : text.length > 400 ? `${text.slice(0, 400)}…` : text };
}

function parsed(text) {
  try { return { value: JSON.parse(text) }; } catch { return null; }
}

export function PayloadView({ record, isStream }) {
  const bytes = isStream ? body(record) : null;
  const text = isStream ? decoded(bytes) : JSON.stringify(record.data, null, 2);
  const json = isStream ? parsed(text) : { value: record.data };
  const views = [...(json ? ["Tree"] : []), isStream ? "Text" : "Raw", ...(isStream ? ["Hex"] : [])];
  const [view, setView] = useState(views[0]);
  const headers = isStream && record.meta?.headers;
  return html`<div class="segmented" role="group" aria-label="View">${views.map((each) => html`<button class="small" aria-pressed=${view === each} onClick=${() => setView(each)}>${each}</button>`)}</div>
    ${view === "Tree" && html`<div class="code"><${JsonTree} value=${json.value} /></div>`}
    ${(view === "Raw" || view === "Text") && html`<pre class="code" tabindex="0">${text}</pre>`}
    ${view === "Hex" && html`<pre class="code" tabindex="0">${hex(bytes)}</pre>`}
    ${headers && headers.length ? html`<div class="label">Headers</div><pre class="code" tabindex="0">${headers.map((pair) => pair.map((each) => decoded(bytesOf(each))).join(": ")).join("\n")}</pre>` : null}`;
}
