// Streams of the S2 API: basins, streams with their tails, configs, access tokens.

import { get } from "./api.js";
import { Badge, BoxLink, Code, Empty, Loading, Problem, Table, Time, count, html, setQuery, useData } from "./ui.js";

const when = (text) => html`<${Time} ms=${text ? Date.parse(text) : 0} />`;

function Basin({ basin, stream }) {
  const inside = { "s2-basin": basin };
  const { data, error } = useData((signal) => get("/v1/streams", { limit: 200 }, signal, inside), [basin], 4000);
  const config = useData((signal) => get(stream ? `/v1/streams/${encodeURIComponent(stream)}` : `/v1/basins/${encodeURIComponent(basin)}`, {}, signal, stream ? inside : {}), [basin, stream]);
  const tails = useData(async (signal) => new Map(await Promise.all((data?.streams || []).slice(0, 50).map(async (each) => [each.name, (await get(`/v1/streams/${encodeURIComponent(each.name)}/records/tail`, {}, signal, inside).catch(() => null))?.tail]))), [data?.streams.length, basin], 4000);
  return html`<h2>Streams of ${basin}</h2><${Problem} error=${error} />
    ${data && (data.streams.length ? html`<${Table} label="Streams" rows=${data.streams} rowKey=${(each) => each.name} columns=${[
      { title: "Stream", kind: "name", cell: (each) => html`<${BoxLink} name=${`${basin}/${each.name}`} tab="records" />` },
      { title: "Tail", kind: "number", cell: (each) => count(tails.data?.get(each.name)?.seq_num) }, { title: "Last record", cell: (each) => html`<${Time} ms=${tails.data?.get(each.name)?.timestamp} age=${true} />` },
      { title: "Created", cell: (each) => when(each.created_at) }, { title: "Actions", cell: (each) => html`<button class="quiet small" onClick=${() => setQuery({ stream: each.name })}>Config</button>` }]} />` : html`<${Empty} title="This basin has no stream">Streams are created by their first append if the basin allows it, or with <code>s2 create-stream</code>.<//>`)}
    <h2>Config of ${stream || basin}</h2>${config.data ? html`<${Code}>${JSON.stringify(config.data.config || config.data, null, 2)}<//>` : html`<${Problem} error=${config.error} />`}`;
}

export function Streams({ query, may }) {
  const basin = query.get("basin") || "";
  const { data, error } = useData((signal) => get("/v1/basins", { limit: 200 }, signal), [], 5000);
  const tokens = useData((signal) => (may("admin") ? get("/v1/access-tokens", { limit: 200 }, signal) : null), [], 10000);
  if (!data) return html`<h1>Streams (S2)</h1><${Problem} error=${error} />${!error && html`<${Loading} />`}`;
  return html`<div class="title"><h1>Streams (S2)</h1><span class="dim">${count(data.basins.length)} basins</span></div>
    ${data.basins.length ? html`<${Table} label="Basins" rows=${data.basins} rowKey=${(each) => each.name} columns=${[
      { title: "Basin", kind: "name", cell: (each) => html`<a class="name" href=${`#/s2?basin=${encodeURIComponent(each.name)}`}>${each.name}</a>` }, { title: "State", cell: (each) => html`<${Badge} tone=${each.deleted_at ? "warn" : "good"}>${each.state || (each.deleted_at ? "deleting" : "active")}<//>` },
      { title: "Created", cell: (each) => when(each.created_at) }]} />` : html`<${Empty} title="There is no basin yet">The S2 API is on the same port: set <code>S2_ACCOUNT_ENDPOINT=${location.host}</code> and run <code>s2 create-basin my-first-basin</code>.<//>`}
    ${basin && html`<${Basin} basin=${basin} stream=${query.get("stream") || ""} />`}
    ${tokens.data && html`<h2>Access tokens</h2>${tokens.data.access_tokens.length ? html`<${Table} label="Access tokens" rows=${tokens.data.access_tokens} rowKey=${(each) => each.id} columns=${[
      { title: "Id", kind: "name", cell: (each) => each.id }, { title: "Expires", cell: (each) => (each.expires_at ? when(each.expires_at) : "never") }, { title: "Scope", kind: "name", cell: (each) => html`<code>${JSON.stringify(each.scope)}</code>` }]} />` : html`<p class="dim">None has been issued. Keys of the server work on /v1 too.</p>`}`}`;
}
