// Records of a box: from any seq or time, both ways, filtered, as a tree or raw, with a link to every state.

import { box, diff } from "./api.js";
import { payload, PayloadView } from "./payload.js";
import { Badge, Copy, Empty, JsonTree, Loading, Problem, Time, boxPath, count, html, save, setQuery, useData, useState } from "./ui.js";

const PAGE = 50;
// Deeper than this the page before is looked for in one step only.
const BACK_STEPS = 6;

const asMatch = (tag) => (tag.endsWith("*") ? ["tag", "Glob", tag] : tag);

// The page that ends before `before`. Gaps and filters make pages short, so it looks further back until the page is full.
async function pageBefore(name, before, options, signal) {
  let span = PAGE;
  for (let step = 0; step < BACK_STEPS; step += 1) {
    const from = Math.max(0, before - 1 - span);
    const page = await diff(name, { ...options, from_seq: from, limit: 1000 }, signal);
    const records = page.records.filter((each) => each.$seq < before);
    if (records.length >= PAGE || from === 0) return { ...page, records: records.slice(-PAGE), from, isBack: true };
    span *= 8;
  }
  return diff(name, { ...options, from_seq: Math.max(0, before - 1 - PAGE), limit: PAGE }, signal);
}

async function load(name, query, state, signal) {
  const options = { include_tags: true };
  if (query.get("tag")) options.match = asMatch(query.get("tag"));
  if (query.get("before")) return pageBefore(name, Number(query.get("before")), options, signal);
  if (query.get("ts")) return diff(name, { ...options, from_ts: Number(query.get("ts")), limit: PAGE }, signal);
  const from = query.has("from") ? Number(query.get("from")) : Math.max(0, state.head_seq - PAGE);
  return diff(name, { ...options, from_seq: from, limit: PAGE }, signal);
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

function Record({ name, record, isStream, isOpen, onToggle, may }) {
  const text = payload(record, isStream).line;
  return html`<li class=${isOpen ? "record open" : "record"} data-seq=${record.$seq}>
    <button class="record-line" aria-expanded=${isOpen} onClick=${onToggle}>
      <span class="seq">${record.$seq}</span><span class="when"><${Time} ms=${record.$ts} /></span>
      ${record.$tag != null && html`<span class="tag">${record.$tag}</span>`}<span class="text">${text}</span></button>
    ${isOpen && html`<div class="record-body"><dl class="facts"><div><dt>Seq</dt><dd>${record.$seq}</dd></div>
      <div><dt>Time</dt><dd>${new Date(record.$ts).toISOString()} UTC</dd></div>
      <div><dt>Tag</dt><dd>${record.$tag ?? "–"}</dd></div><div><dt>Node</dt><dd>${record.$node || "–"}</dd></div></dl>
      ${record.meta && html`<div class="label">Meta</div><${JsonTree} value=${record.meta} />`}
      <div class="label">Data</div><${PayloadView} record=${record} isStream=${isStream} />
      <div class="bar"><${Copy} text=${() => JSON.stringify(record.data, null, 2)}>Copy data<//>
        <${Copy} text=${() => asCurl(name, { records: [asRecord(record)] })}>Copy as curl<//><${Copy} text=${() => asPython(name, record)}>Copy as Python<//>
        <${Copy} text=${() => `${location.origin}/${boxPath(name, "records", { from: record.$seq - 1, open: record.$seq })}`}>Copy link<//>
        ${may("write") && !isStream && html`<a class="button quiet small" href=${boxPath(name, "produce", { copy: record.$seq })}>Copy and edit</a>`}</div></div>`}
  </li>`;
}

const REASONS = { ttl: "they expired", cap: "they were evicted by a cap", deleted: "they were deleted", lost: "they were lost in a crash", recreated: "the box was created again", mixed: "they expired or were evicted", source_trim: "the source of a router lost them", from_seq_too_old: "they are older than the box keeps" };
export const Gap = ({ gap }) => html`<li class="gap"><b>${gap.gap_from === gap.gap_to ? `Seq ${count(gap.gap_from)} is` : `Seqs ${count(gap.gap_from)} – ${count(gap.gap_to)} are`} gone</b>: ${REASONS[gap.reason] || gap.reason}</li>`;

export function Records({ name, state, query, may }) {
  const isStream = state.type === "stream";
  const node = query.get("node") || "";
  const isFollowing = !["from", "before", "ts"].some((each) => query.has(each));
  const { data: page, error } = useData((signal) => load(name, query, state, signal), [name, query.toString(), isFollowing ? state.head_seq : 0]);
  const [last, setLast] = useState(null);
  if (page && page !== last) setLast(page);
  const shown = page || last;
  const records = (shown?.records || []).filter((each) => !node || each.$node === node);
  const opened = Number(query.get("open"));
  const first = shown?.records[0]?.$seq;
  const end = shown?.records.at(-1)?.$seq;
  // Deleted records leave no tombstone for a reader that starts before them.
  const asked = query.has("from") ? Number(query.get("from")) : NaN;
  const leading = !shown?.tombstone && !query.get("tag") && !node && first > asked + 1 ? { gap_from: asked + 1, gap_to: first - 1, reason: "deleted" } : null;
  const jump = (event) => {
    event.preventDefault();
    const form = event.target;
    const at = form.time.value ? new Date(form.time.value).getTime() : NaN;
    const seq = form.seq.value;
    setQuery({ from: seq === "" ? null : String(Math.max(0, Number(seq) - 1)), ts: seq === "" && !Number.isNaN(at) ? at : null, before: null, tag: form.tag.value, node: form.node.value, open: seq || null });
  };
  return html`<form class="bar" onSubmit=${jump}>
      <label class="inline">Seq <input name="seq" type="number" min="1" class="narrow" data-search value=${query.has("from") ? Number(query.get("from")) + 1 : ""} /></label>
      <label class="inline">Local time <input name="time" type="datetime-local" step="1" /></label>
      <label class="inline">Tag <input name="tag" class="narrow" placeholder="user-*" value=${query.get("tag") || ""} /></label>
      <label class="inline">Node <input name="node" class="narrow" value=${node} /></label><button type="submit">Go</button></form>
    <div class="bar"><a class="button quiet" href=${boxPath(name, "records", { from: 0, tag: query.get("tag"), node })}>⇤ First</a>
      <button class="quiet" data-prev disabled=${!first || first <= state.earliest_seq} onClick=${() => setQuery({ before: first, from: null, ts: null, open: null })}>← Earlier</button>
      <button class="quiet" data-next disabled=${!end || end >= state.head_seq} onClick=${() => setQuery({ from: end, before: null, ts: null, open: null })}>Later →</button>
      <a class="button quiet" href=${boxPath(name, "records", { tag: query.get("tag"), node })}>Newest ⇥</a>
      <span class="dim" role="status">${first ? `${count(first)} – ${count(end)} of ${count(state.earliest_seq)} – ${count(state.head_seq)}` : ""}</span><span class="space"></span>
      <button class="quiet" disabled=${!records.length} onClick=${() => save(`${name}.ndjson`, "application/x-ndjson", records.map((each) => `${JSON.stringify(each)}\n`).join(""))}>Export NDJSON</button>
      <button class="quiet" disabled=${!records.length} onClick=${() => save(`${name}.csv`, "text/csv", asCsv(records))}>Export CSV</button></div>
    <${Problem} error=${error} />
    ${!shown && !error && html`<${Loading} />`}
    ${shown && html`<ol class="records" aria-label="Records">${(shown.tombstone || leading) && html`<${Gap} gap=${shown.tombstone || leading} />`}
      ${records.map((record, at) => html`${at > 0 && record.$seq > records[at - 1].$seq + 1 && !query.get("tag") && !node ? html`<${Gap} gap=${{ gap_from: records[at - 1].$seq + 1, gap_to: record.$seq - 1, reason: "deleted" }} />` : null}
        <${Record} key=${record.$seq} name=${name} record=${record} isStream=${isStream} may=${may} isOpen=${opened === record.$seq} onToggle=${() => setQuery({ open: opened === record.$seq ? null : record.$seq })} />`)}</ol>`}
    ${shown && !records.length && html`<${Empty} title=${state.count ? "No record matches here" : "This box is empty"}>${state.count ? html`Page on, or <a href=${boxPath(name, "records")}>show the newest</a>.` : "Append one under Produce, or with POST; records appear here at once."}<//>`}`;
}
