// The server as its operator sees it: checks, processes, storage, keys, and where to read on.

import { get, serverRoutes } from "./api.js";
import { Processes } from "./overview.js";
import { Badge, Empty, Loading, Problem, Table, Tile, Tiles, count, duration, html, short, size, useData } from "./ui.js";

const sum = (rows, name) => rows.reduce((total, each) => total + (each[name] || 0), 0);

function Keys({ keys }) {
  if (!keys.length) return html`<p class="dim">This server asks for no keys, or your key may not list them.</p>`;
  return html`<${Table} label="Keys" rows=${keys} rowKey=${(each) => each.id} columns=${[
    { title: "Id", kind: "name", cell: (each) => each.id }, { title: "Scopes", cell: (each) => each.scopes.map((scope) => html`<${Badge}>${scope}<//> `) },
    { title: "Prefixes", kind: "name", cell: (each) => each.prefixes.join(", ") || "all boxes" },
    { title: "Limits in use", cell: (each) => Object.entries(each.limits).map(([name, { limit, used }]) => html`<div class="small"><meter min="0" max=${limit} value=${used || 0} aria-label=${name}></meter> ${name} ${short(used)} / ${short(limit)}</div>`) }]} />`;
}

export function Operations({ who }) {
  const { data: status, error } = useData((signal) => get("/v0/status", {}, signal), [], 4000);
  const settings = useData(async (signal) => ((await serverRoutes()).has("GET /v0/config") ? get("/v0/config", {}, signal) : null), []);
  if (!status) return html`<h1>Operations</h1><${Problem} error=${error} />${!error && html`<${Loading} />`}`;
  const up = status.shards.filter((each) => each.status !== "away");
  return html`<h1>Operations</h1><${Problem} error=${error} />
    <h2>Checks</h2><${Table} label="Checks" rows=${status.checks} rowKey=${(each) => each.check} columns=${[
      { title: "Check", cell: (each) => each.check }, { title: "Result", cell: (each) => html`<${Badge} tone=${each.result === "ok" ? "good" : "bad"}>${each.result}<//>` },
      { title: "Found", kind: "text", cell: (each) => html`${each.found}${each.next_step && html`<div class="dim">Next: ${each.next_step}</div>`}` }]} />
    <h2>Storage</h2><${Tiles}>
      <${Tile} label="Disk" value=${size(status.disk.free_bytes)} sub=${`free of ${size(status.disk.bytes)}; refuses below ${size(status.disk.low_bytes)}`} tone=${status.disk.level === "ok" ? "" : "bad"} />
      <${Tile} label="Segments" value=${count(sum(up, "segments"))} sub=${`${size(sum(up, "unsealed_bytes"))} not yet sealed`} />
      <${Tile} label="Log (WAL)" value=${size(sum(up, "wal_queue_bytes"))} sub=${`waits to be written; ${count(sum(up, "unsynced_frames"))} frames not synced`} />
      <${Tile} label="Snapshot" value=${duration(Math.max(0, ...up.map((each) => each.snapshot_age_s || 0)) * 1000)} sub="age of changes that no snapshot has" />
      <${Tile} label="Object store" value=${size(sum(up, "objects_backlog_bytes"))} sub="waits for upload (class object)" />
      <${Tile} label="Cache" value=${size(sum(up, "cache_bytes"))} sub="segments read from disk" /><//>
    <p class="dim">Cold store and backups have a row under Checks. Backups: <code>streams backup TARGET</code>, <code>streams verify</code>.</p>
    <${Processes} status=${status} />
    <h2>Keys</h2><${Keys} keys=${status.keys || []} />
    <h2>Your key</h2><p>${who.id === null ? "This server asks for no key: you may do everything." : html`<code>${who.id}</code> may ${who.scopes.join(", ")} ${who.prefixes.length ? `in ${who.prefixes.join(", ")}` : "everywhere"}.`}</p>
    <h2>Settings</h2>${settings.data ? html`<${Table} label="Settings" rows=${settings.data.settings} rowKey=${(each) => each.name} columns=${[
      { title: "Setting", kind: "name", cell: (each) => each.name }, { title: "Value", kind: "name", cell: (each) => String(each.value) }, { title: "From", cell: (each) => each.origin }]} />`
      : html`<${Empty} title="Settings are not on the wire">On the server, <code>streams config</code> lists each setting with its value and origin.<//>`}
    <h2>Read on</h2><ul class="plain links"><li><a href="/docs">API explorer</a></li><li><a href="/v0/metrics">Metrics for Prometheus</a></li><li><a href="/v0/status">Status as JSON</a></li><li><a href="/v0/openapi.json">OpenAPI document</a></li></ul>`;
}
