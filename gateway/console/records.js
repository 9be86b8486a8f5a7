// Records of a box: from any seq or time, both ways, filtered, as a tree or raw, with a link to every state.

import { box } from "./api.js";
import { FILTER_HELP, fieldOf, filterOf } from "./filter.js";
import { PayloadView, payload, valueOf } from "./payload.js";
import { LOOK_MAX, PAGE, backward, forward } from "./scan.js";
import { Badge, Copy, Empty, JsonTree, Loading, Problem, boxPath, count, html, localTime, save, setQuery, useData, useState } from "./ui.js";

const asMatch = (tag) => (tag.endsWith("*") ? ["tag", "Glob", tag] : tag);

// The page that the address asks for. Without a place it is the newest one.
function load(name, query, state, isStream, onLook, signal) {
  const options = { include_tags: true, ...(query.get("tag") ? { match: asMatch(query.get("tag")) } : {}) };
  const isMatch = filterOf(query.get("contains") || "", isStream);
  const node = query.get("node");
  const keep = isMatch || node ? (record) => (!node || record.$node === node) && (!isMatch || isMatch(record)) : null;
  const search = { name, options, keep, onLook, signal };
  if (query.get("ts")) return forward(search, { from_ts: Number(query.get("ts")) });
  if (query.has("from")) return forward(search, { from_seq: Number(query.get("from")) });
  return backward(search, query.get("before") ? Number(query.get("before")) : state.head_seq + 1);
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
export function asCurl(name, body) {
  return `curl -X POST ${quoted(`${location.origin}${box(name)}`)} -H 'Content-Type: application/json' -H "Authorization: Bearer $STREAMS_API_KEY" -d ${quoted(JSON.stringify(body))}`;
}
const asRecord = (record) => ({ data: record.data, ...(record.$tag == null ? {} : { tag: record.$tag }), ...(record.$node ? { node: record.$node } : {}), ...(record.meta ? { meta: record.meta } : {}) });
export function asPython(name, record) {
  return `from streams import Client\n\nwith Client(${JSON.stringify(location.origin)}) as client:\n    record = client.box(${JSON.stringify(name)}).get(${record.$seq})\n    print(record)\n`;
}

const csvCell = (value) => {
  const text = value == null ? "" : typeof value === "string" ? value : JSON.stringify(value);
  // A leading sign would make a formula of it in a spreadsheet.
  const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
};
function asCsv(records) {
  const rows = records.map((each) => [each.$seq, new Date(each.$ts).toISOString(), each.$node, each.$tag, each.meta, each.data].map(csvCell).join(","));
  return `seq,ts,node,tag,meta,data\r\n${rows.join("\r\n")}\r\n`;
}

// The line of a record: its data, or the fields that are asked for.
function Line({ record, isStream, fields }) {
  if (!fields.length) return html`<span class="text">${payload(record, isStream).line}</span>`;
  const data = valueOf(record, isStream);
  return html`<span class="text">${fields.map((path) => { const value = fieldOf(data, path); return html`<span class="field"><i>${path}</i> ${value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value)}</span>`; })}</span>`;
}

function Record({ name, record, isStream, isOpen, onToggle, may, fields }) {
  return html`<li class=${isOpen ? "record open" : "record"} data-seq=${record.$seq}>
    <button class="record-line" aria-expanded=${isOpen} onClick=${onToggle}>
      <span class="seq">${record.$seq}</span><span class="when" title=${`${new Date(record.$ts).toISOString()} UTC`}>${localTime(record.$ts)}</span>
      ${record.$tag != null && html`<span class="tag">${record.$tag}</span>`}<${Line} record=${record} isStream=${isStream} fields=${fields} /></button>
    ${isOpen && html`<div class="record-body"><dl class="facts"><div><dt>Seq</dt><dd>${record.$seq}</dd></div>
      <div><dt>Local time</dt><dd>${localTime(record.$ts)}</dd></div><div><dt>UTC</dt><dd>${new Date(record.$ts).toISOString()}</dd></div>
      <div><dt>Tag</dt><dd>${record.$tag ?? "–"}</dd></div><div><dt>Node</dt><dd>${record.$node || "–"}</dd></div></dl>
      ${record.meta && html`<div class="label">Meta</div><div class="code"><${JsonTree} value=${record.meta} /></div>`}
      <div class="label">Data</div><${PayloadView} record=${record} isStream=${isStream} />
      <div class="bar"><${Copy} text=${() => JSON.stringify(record.data, null, 2)}>Copy data<//>
        <${Copy} text=${() => asCurl(name, { records: [asRecord(record)] })}>Copy as curl<//><${Copy} text=${() => asPython(name, record)}>Copy as Python<//>
        <${Copy} text=${() => `${location.origin}/${boxPath(name, "records", { from: record.$seq - 1, open: record.$seq })}`}>Copy link<//>
        ${may("write") && !isStream && html`<a class="button quiet small" href=${boxPath(name, "produce", { copy: record.$seq })}>Copy and edit</a>`}</div></div>`}
  </li>`;
}

const REASONS = { ttl: "they expired", cap: "they were evicted by a cap", deleted: "they were deleted", lost: "they were lost in a crash", recreated: "the box was created again", mixed: "they expired or were evicted", source_trim: "the source of a router lost them", from_seq_too_old: "they are older than the box keeps" };
export const Gap = ({ gap }) => html`<li class="gap"><b>${gap.gap_from === gap.gap_to ? `Seq ${count(gap.gap_from)} is` : `Seqs ${count(gap.gap_from)} – ${count(gap.gap_to)} are`} gone</b>: ${REASONS[gap.reason] || gap.reason}</li>`;

// What was looked at and found, and how to go on.
function Found({ page, records, state, isSearch }) {
  if (!page) return null;
  const first = records[0]?.$seq;
  const range = first ? `${count(first)} – ${count(records.at(-1).$seq)} of ${count(state.earliest_seq)} – ${count(state.head_seq)}` : "";
  if (!isSearch) return html`<span class="dim" role="status">${range}</span>`;
  return html`<span class="dim" role="status"><b>${count(records.length)}</b> match of ${count(page.looked)} looked at${page.isPartial ? html` <${Badge} tone="warn">stopped after ${count(LOOK_MAX)}<//>` : ""}</span>`;
}

function Pages({ name, page, records, state, query, fields }) {
  const [first, end] = [page?.first ?? records[0]?.$seq, page?.last ?? records.at(-1)?.$seq];
  const filters = Object.fromEntries(["tag", "node", "contains", "fields"].map((each) => [each, query.get(each)]));
  return html`<a class="button quiet" href=${boxPath(name, "records", { from: 0, ...filters })} aria-label="First records">⇤<span class="wide-only"> First</span></a>
    <button class="quiet" data-prev disabled=${!first || first <= state.earliest_seq} onClick=${() => setQuery({ before: first, from: null, ts: null, open: null })}>←<span class="wide-only"> Earlier</span></button>
    <button class="quiet" data-next disabled=${!end || end >= state.head_seq} onClick=${() => setQuery({ from: end, before: null, ts: null, open: null })}><span class="wide-only">Later </span>→</button>
    <a class="button quiet" href=${boxPath(name, "records", filters)} aria-label="Newest records"><span class="wide-only">Newest </span>⇥</a>`;
}

const FIELDS = ["tag", "contains", "node", "fields"];
function Filters({ query }) {
  const jump = (event) => {
    event.preventDefault();
    const form = event.target;
    const at = form.time.value ? new Date(form.time.value).getTime() : NaN;
    const seq = form.seq.value;
    const isSame = seq === (query.has("from") ? String(Number(query.get("from")) + 1) : "");
    const place = isSame && Number.isNaN(at) ? {} : { from: seq === "" ? null : String(Math.max(0, Number(seq) - 1)), ts: seq === "" && !Number.isNaN(at) ? at : null, before: null, open: seq || null };
    setQuery({ ...place, ...Object.fromEntries(FIELDS.map((each) => [each, form[each].value])) });
  };
  return html`<form class="filters" key=${query.toString()} onSubmit=${jump}>
    <label>Seq <input name="seq" type="number" min="1" data-search value=${query.has("from") ? Number(query.get("from")) + 1 : ""} /></label>
    <label class="time">Local time <input name="time" type="datetime-local" step="1" /></label>
    <label>Tag <input name="tag" placeholder="user-*" value=${query.get("tag") || ""} /></label>
    <label class="long" title=${FILTER_HELP}>Contains, or field <input name="contains" placeholder="c-279  or  total > 100" value=${query.get("contains") || ""} /></label>
    <label>Node <input name="node" value=${query.get("node") || ""} /></label>
    <label title="Names of fields, separated by commas">Show fields <input name="fields" placeholder="id, customer" value=${query.get("fields") || ""} /></label>
    <button type="submit">Go</button></form>`;
}

export function Records({ name, state, query, may }) {
  const isStream = state.type === "stream";
  const isSearch = Boolean(query.get("contains") || query.get("node"));
  const isFollowing = !isSearch && !["from", "before", "ts"].some((each) => query.has(each));
  const [looked, setLooked] = useState(0);
  const asked = new URLSearchParams(query);
  for (const each of ["open", "fields"]) asked.delete(each);
  const { data: page, error } = useData((signal) => load(name, query, state, isStream, setLooked, signal), [name, asked.toString(), isFollowing ? state.head_seq : 0]);
  const [last, setLast] = useState(null);
  if (page && page !== last) setLast(page);
  const shown = page || (isSearch ? null : last);
  const records = shown?.records || [];
  const fields = (query.get("fields") || "").split(",").map((each) => each.trim()).filter(Boolean);
  const opened = Number(query.get("open"));
  const hasGaps = !query.get("tag") && !isSearch;
  // Deleted records leave no tombstone for a reader that starts before them.
  const start = query.has("from") ? Number(query.get("from")) : NaN;
  const leading = hasGaps && !shown?.tombstone && records[0]?.$seq > start + 1 ? { gap_from: start + 1, gap_to: records[0].$seq - 1, reason: "deleted" } : null;
  return html`<${Filters} query=${query} />
    <div class="bar"><${Pages} name=${name} page=${shown} records=${records} state=${state} query=${query} />
      <${Found} page=${shown} records=${records} state=${state} isSearch=${isSearch} /><span class="space"></span>
      <button class="quiet" disabled=${!records.length} onClick=${() => save(`${name}.ndjson`, "application/x-ndjson", records.map((each) => `${JSON.stringify(each)}\n`).join(""))}><span class="wide-only">Export </span>NDJSON</button>
      <button class="quiet" disabled=${!records.length} onClick=${() => save(`${name}.csv`, "text/csv", asCsv(records))}><span class="wide-only">Export </span>CSV</button></div>
    <${Problem} error=${error} />
    ${!shown && !error && (isSearch ? html`<p class="dim" role="status">Searching … ${count(looked)} records looked at</p>` : html`<${Loading} />`)}
    ${shown && html`<ol class="records" aria-label="Records">${(shown.tombstone || leading) && html`<${Gap} gap=${shown.tombstone || leading} />`}
      ${records.map((record, at) => html`${hasGaps && at > 0 && record.$seq > records[at - 1].$seq + 1 ? html`<${Gap} gap=${{ gap_from: records[at - 1].$seq + 1, gap_to: record.$seq - 1, reason: "deleted" }} />` : null}
        <${Record} key=${record.$seq} name=${name} record=${record} isStream=${isStream} may=${may} fields=${fields} isOpen=${opened === record.$seq} onToggle=${() => setQuery({ open: opened === record.$seq ? null : record.$seq })} />`)}</ol>`}
    ${shown && !records.length && html`<${Empty} title=${state.count ? "No record matches here" : "This box is empty"}>${state.count ? html`Page on, or <a href=${boxPath(name, "records")}>show the newest</a>.` : "Append one under Produce, or with POST; records appear here at once."}<//>`}`;
}
