// The groups of all boxes, those that are furthest behind first, from the metrics of the server.

import { get } from "./api.js";
import { catchUp } from "./groups.js";
import { BoxLink, Empty, Loading, Problem, Table, boxPath, count, duration, html, setQuery, useData, useRef } from "./ui.js";

export function Lag({ query }) {
  const q = query.get("q") || "";
  const samples = useRef(new Map());
  const { data, error } = useData(async (signal) => {
    const { metrics } = await get("/v0/metrics", {}, signal, { Accept: "application/json" });
    const of = (name) => metrics.find((each) => each.name === name)?.samples || [];
    const keyOf = (each) => `${each.labels.box}\0${each.labels.group}`;
    const ages = new Map(of("streams_group_lag_seconds").map((each) => [keyOf(each), each.value]));
    const rows = of("streams_group_lag_records").filter((each) => each.labels.box).map((each) => ({ key: keyOf(each), ...each.labels, lag: each.value, age: ages.get(keyOf(each)) }));
    for (const each of rows) samples.current.set(each.key, [...(samples.current.get(each.key) || []), { at: Date.now(), lag: each.lag }].slice(-15));
    const total = of("streams_groups").reduce((sum, each) => sum + each.value, 0);
    return { rows: rows.sort((a, b) => b.lag - a.lag), total };
  }, [], 3000);
  if (!data) return html`<h1>Groups</h1><${Problem} error=${error} />${!error && html`<${Loading} />`}`;
  const rows = data.rows.filter((each) => `${each.group} ${each.box}`.includes(q));
  const eta = (each) => { const ms = catchUp(samples.current.get(each.key) || []); return each.lag === 0 ? html`<span class="good">up to date</span>` : ms === null ? "…" : ms === Infinity ? html`<span class="bad">not catching up</span>` : duration(ms); };
  return html`<div class="title"><h1>Groups</h1><span class="dim" role="status">${count(rows.length)} shown / ${count(data.total)} in all</span></div><${Problem} error=${error} />
    <form class="bar" role="search" onSubmit=${(event) => event.preventDefault()}><input type="search" data-search value=${q} placeholder="Part of a group or box  ( / )" aria-label="Part of a group or box" onInput=${(e) => setQuery({ q: e.target.value })} />${data.total > data.rows.length && html`<span class="dim">Those with the largest lag are listed; all groups of a box are on its page.</span>`}</form>
    ${data.rows.length ? html`<${Table} label="Groups" rows=${rows} rowKey=${(each) => each.key} empty="No group matches." columns=${[
      { title: "Group", kind: "name", cell: (each) => html`<a class="name" href=${boxPath(each.box, "groups")}>${each.group}</a>` }, { title: "Reads box", kind: "name", cell: (each) => html`<${BoxLink} name=${each.box} tab="records" />` },
      { title: "Lag", kind: "number", cell: (each) => html`<b class=${each.lag ? "warn" : ""}>${count(each.lag)}</b>` }, { title: "Oldest unread", kind: "number", cell: (each) => (each.lag && each.age != null ? duration(each.age * 1000) : "–") }, { title: "Caught up in", kind: "number", cell: eta }]} />`
      : html`<${Empty} title="No group reads anything yet">A group is a cursor that the server keeps for a reader. Create one on the page of a box, under Groups, or read with <code>diff {"group": "NAME"}</code> after <code>PUT /v0/boxes/BOX/groups/NAME {"cursor": 0}</code>.<//>`}`;
}
