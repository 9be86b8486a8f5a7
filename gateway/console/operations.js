// The server as its operator sees it: checks, storage of each shard, processes, keys, settings, and where to read on.

import { get, serverRoutes } from "./api.js";
import { Processes } from "./overview.js";
import { Badge, Empty, Loading, Problem, Table, Tabs, Tile, Tiles, count, duration, html, setQuery, short, size, useData } from "./ui.js";

const sum = (rows, name) => rows.reduce((total, each) => total + (each[name] || 0), 0);
// `streams verify` in a text of the server as what it is: a command.
const withCommands = (text) => text.split("`").map((part, at) => (at % 2 ? html`<code>${part}</code>` : part));

// The value of a metric by shard.
function byShard(metrics, name) {
  const values = new Map();
  for (const { labels, value } of metrics.find((each) => each.name === name)?.samples || []) values.set(labels.shard, (values.get(labels.shard) || 0) + value);
  return values;
}

function Checks({ status }) {
  const checks = [...status.checks].sort((a, b) => (a.result === "ok") - (b.result === "ok"));
  return html`<${Table} label="Checks" rows=${checks} rowKey=${(each) => each.check} columns=${[
    { title: "Check", cell: (each) => html`<b>${each.check}</b>` }, { title: "Result", cell: (each) => html`<${Badge} tone=${each.result === "ok" ? "good" : "bad"}>${each.result}<//>` },
    { title: "Found", kind: "text", cell: (each) => html`${withCommands(each.found)}${each.next_step && html`<div class="dim">Next: ${withCommands(each.next_step)}</div>`}` }]} />`;
}

function Storage({ status }) {
  const { data, error } = useData(async (signal) => (await get("/v0/metrics", {}, signal, { Accept: "application/json" })).metrics, [], 5000);
  const up = status.shards.filter((each) => each.status !== "away");
  const metrics = data || [];
  const column = (title, name, format = count) => { const values = byShard(metrics, name); return { title, kind: "number", cell: (each) => { const value = values.get(String(each.shard)); return value == null ? "–" : format(value); } }; };
  const own = (title, name, format = count) => ({ title, kind: "number", cell: (each) => format(each[name]) });
  const shard = { title: "Shard", cell: (each) => html`<b>${each.shard}</b>` };
  const backup = metrics.find((each) => each.name === "streams_backup_age_seconds")?.samples[0]?.value;
  const cold = status.checks.find((each) => each.check === "cold store");
  const table = (title, columns) => html`<h2>${title}</h2><${Table} label=${title} rows=${up} rowKey=${(each) => each.shard} columns=${[shard, ...columns]} empty="No shard answers." />`;
  return html`<${Problem} error=${error} /><${Tiles}>
      <${Tile} label="Disk free" value=${size(status.disk.free_bytes)} sub=${`of ${size(status.disk.bytes)}; refuses below ${size(status.disk.low_bytes)}`} tone=${status.disk.level === "ok" ? "" : "bad"} />
      <${Tile} label="Stored" value=${size(status.bytes)} sub=${`${count(status.records)} records, ${count(sum(up, "segments"))} segments`} />
      <${Tile} label="Oldest change without snapshot" value=${duration(Math.max(0, ...up.map((each) => each.snapshot_age_s || 0)) * 1000)} sub="a restart replays what no snapshot has" />
      <${Tile} label="Cold store" value=${cold?.result === "ok" ? "ok" : "failing"} tone=${cold?.result === "ok" ? "good" : "bad"} sub=${cold?.found} />
      <${Tile} label="Object store" value=${size(sum(up, "objects_backlog_bytes"))} sub="not yet uploaded (class object)" />
      <${Tile} label="Last backup" value=${backup == null ? "none" : `${duration(backup * 1000)} ago`} tone=${backup == null ? "warn" : ""} sub="streams backup TARGET" /><//>
    ${table("Log (WAL)", [column("Written", "streams_wal_bytes_total", size), column("Changes", "streams_wal_frames_total", short), column("Groups", "streams_wal_batches_total", short), column("Syncs", "streams_wal_fsyncs_total", short),
      column("Files begun", "streams_wal_rotations_total"), own("To be written", "wal_queue_bytes", size), own("Not synced", "unsynced_frames")])}
    ${table("Segments and snapshots", [own("Segments", "segments"), own("Not yet sealed", "unsealed_bytes", size), own("Cache", "cache_bytes", size), own("Without snapshot", "snapshot_age_s", (value) => duration(value * 1000)), own("Records", "records"), own("Stored", "bytes", size)])}
    ${table("Cold tier and object chains", [column("Failed calls of the cold store", "streams_cold_store_failures_total"), column("Failing for", "streams_cold_store_failing_seconds", (value) => (value ? duration(value * 1000) : "–")),
      column("Groups uploaded", "streams_object_puts_total"), column("Uploaded", "streams_object_put_bytes_total", size), column("Chains begun", "streams_object_bases_total"), column("Failed uploads", "streams_object_failures_total"), own("Waits", "objects_backlog_bytes", size)])}`;
}

function Keys({ keys, who }) {
  return html`<p>${who.id === null ? "This server asks for no key: everybody who reaches it may do everything." : html`Your key <code>${who.id}</code> may ${who.scopes.join(", ")} ${who.prefixes.length ? `in ${who.prefixes.join(", ")}` : "everywhere"}.`}</p>
    ${keys.length ? html`<${Table} label="Keys" rows=${keys} rowKey=${(each) => each.id} columns=${[
      { title: "Id", kind: "name", cell: (each) => html`<code>${each.id}</code>` }, { title: "Scopes", cell: (each) => each.scopes.map((scope) => html`<${Badge}>${scope}<//> `) },
      { title: "Prefixes", kind: "name", cell: (each) => each.prefixes.join(", ") || "all boxes" },
      { title: "Limits in use", cell: (each) => Object.entries(each.limits).map(([name, { limit, used }]) => html`<div class="small"><meter min="0" max=${limit} value=${used || 0} aria-label=${name}></meter> ${name} ${short(used)} / ${short(limit)}</div>`) }]} />`
      : html`<${Empty} title="No keys to show">${who.id === null ? html`Set <code>STREAMS_API_KEYS</code> or <code>STREAMS_API_KEYS_FILE</code> to ask for keys.` : "Your key may not list them (scope admin)."}<//>`}`;
}

function Settings({ query }) {
  const q = (query.get("q") || "").toLowerCase();
  const isChanged = query.get("changed") === "1";
  const { data, error } = useData(async (signal) => ((await serverRoutes()).has("GET /v0/settings") ? get("/v0/settings", {}, signal) : { isMissing: true, settings: [] }), []);
  if (!data) return html`<${Problem} error=${error} />${!error && html`<${Loading} />`}`;
  if (data.isMissing) return html`<${Empty} title="This server does not list its settings">On the server, <code>streams config</code> lists each setting with its value and origin.<//>`;
  const rows = data.settings.filter((each) => (!isChanged || each.from !== "default") && `${each.variable} ${each.help}`.toLowerCase().includes(q));
  return html`<form class="bar" role="search" onSubmit=${(event) => event.preventDefault()}><input type="search" data-search value=${query.get("q") || ""} placeholder="Part of the name or meaning  ( / )" aria-label="Part of the name or meaning" onInput=${(e) => setQuery({ q: e.target.value })} />
      <label class="inline"><input type="checkbox" checked=${isChanged} onChange=${(e) => setQuery({ changed: e.target.checked ? "1" : "" })} /> Only those that are set</label><span class="dim" role="status">${count(rows.length)} of ${count(data.settings.length)}</span></form>
    <${Table} label="Settings" rows=${rows} rowKey=${(each) => each.name} empty="No setting matches." columns=${[
      { title: "Setting", kind: "text", cell: (each) => html`<code>${each.variable}</code><div class="dim small">${each.help}</div>` }, { title: "Value", kind: "name", cell: (each) => html`<b>${each.value || "–"}</b>` },
      { title: "Default", kind: "name", cell: (each) => each.default || "–" }, { title: "From", cell: (each) => html`<${Badge} tone=${each.from === "default" ? "" : "good"}>${each.from}<//>` }]} />`;
}

export function Operations({ who, may, name, query }) {
  const { data: status, error } = useData((signal) => get("/v0/status", {}, signal), [], 4000);
  if (!status) return html`<h1>Operations</h1><${Problem} error=${error} />${!error && html`<${Loading} />`}`;
  const tabs = [["", "Checks"], ["storage", "Storage"], ["processes", "Processes"], ["keys", "Keys"]];
  if (may("admin")) tabs.push(["settings", "Settings"]);
  const here = tabs.some(([id]) => id === name) ? name : "";
  const Page = { "": Checks, storage: Storage, processes: Processes, keys: Keys, settings: Settings }[here];
  return html`<div class="title"><h1>Operations</h1><span class="dim">version ${status.version}</span><span class="space"></span><span class="links"><a href="/docs">API explorer</a><a href="/v0/metrics">Metrics</a><a href="/v0/status">Status as JSON</a></span></div><${Problem} error=${error} />
    <${Tabs} label="Parts of the operations" here=${here} tabs=${tabs.map(([id, title]) => [id, title, `#/operations${id ? `/${id}` : ""}`])} />
    <${Page} status=${status} who=${who} keys=${status.keys || []} query=${query} />`;
}
