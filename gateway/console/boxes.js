// All boxes: searched, filtered and sorted by the server, drawn only where they are in view.

import { box, get, send } from "./api.js";
import { Sparkline } from "./charts.js";
import { Badge, BoxLink, Empty, Problem, Select, Time, boxPath, count, go, html, setQuery, short, size, useMemo, useRef, useState } from "./ui.js";
import { VirtualList } from "./virtual.js";

const PAGE = 200;
const COLUMNS = [
  ["Box", "name", "name"], ["Type", "", ""], ["Records", "count", "number"], ["Stored", "bytes", "number"], ["Rate", "rate", "number"],
  ["Ready", "ready", "number"], ["Lag", "lag", "number"], ["Last write", "last_write", "number"],
];

function Create({ may }) {
  const [name, setName] = useState("");
  const [type, setType] = useState("log");
  const [error, setError] = useState(null);
  if (!may("admin")) return null;
  const submit = async (event) => {
    event.preventDefault();
    try { await send("PUT", box(name), { type }); go(boxPath(name, "produce")); } catch (failure) { setError(failure); }
  };
  return html`<details class="create"><summary class="button">New box</summary><form class="bar" onSubmit=${submit}>
    <label>Name <input required value=${name} onInput=${(e) => setName(e.target.value)} /></label>
    <${Select} label="Type" value=${type} options=${["log", "queue"]} onChange=${setType} />
    <button type="submit">Create</button></form><${Problem} error=${error} /></details>`;
}

export function Boxes({ query, may }) {
  const q = query.get("q") || "";
  const kind = query.get("kind") || "";
  const durability = query.get("durability") || "";
  const sort = query.get("sort") || "name";
  const order = query.get("order") || (sort === "name" ? "asc" : "desc");
  const [shown, setShown] = useState([0, 0]);
  const rates = useRef(new Map());
  const load = async (cursor) => {
    const page = await get("/v0/boxes", { q, kind, durability, sort, order, cursor, page_size: PAGE });
    const now = Date.now();
    for (const each of page.boxes) {
      const line = rates.current.get(each.box) || { at: 0, seq: 0, values: [] };
      if (line.at && now > line.at) line.values = line.values.concat(Math.max(0, each.head_seq - line.seq) * 1000 / (now - line.at)).slice(-30);
      Object.assign(line, { at: now, seq: each.head_seq });
      rates.current.delete(each.box);
      rates.current.set(each.box, line);
    }
    while (rates.current.size > 2000) rates.current.delete(rates.current.keys().next().value);
    return { rows: page.boxes, total: page.total, cursor: page.next_cursor, restarted: page.restarted };
  };
  const onSort = (by) => setQuery({ sort: by === "name" ? "" : by, order: by === sort ? (order === "asc" ? "desc" : "asc") : "" });
  const head = html`<div class="vrow" role="row">${COLUMNS.map(([title, by, kind]) => html`<div role="columnheader" class=${kind}
    aria-sort=${by === sort && by ? (order === "asc" ? "ascending" : "descending") : null}>
    ${by ? html`<button class="sort" onClick=${() => onSort(by)}>${title}${by === sort ? (order === "asc" ? " ↑" : " ↓") : ""}</button>` : title}</div>`)}</div>`;
  const row = (each, at) => {
    const line = rates.current.get(each.box)?.values || [];
    const rate = line.length ? line.at(-1) : each.rate;
    return html`<div class="vrow item" role="row" aria-rowindex=${at + 2} key=${each.box}>
      <div role="cell" class="name"><${BoxLink} name=${each.box} tab="records" /></div>
      <div role="cell"><${Badge}>${each.type}<//> <span class="dim small">${each.durability}</span></div>
      <div role="cell" class="number">${count(each.count)}</div><div role="cell" class="number">${size(each.bytes)}</div>
      <div role="cell" class="number"><span class="ratecell">${line.length > 1 ? html`<${Sparkline} values=${line} />` : null}${short(rate)}/s</span></div>
      <div role="cell" class="number">${each.queue ? count(each.queue.ready) : "–"}</div><div role="cell" class="number">${count(each.lag)}</div>
      <div role="cell" class="number"><${Time} ms=${each.last_write_ts} age=${true} /></div></div>`;
  };
  const version = useMemo(() => ({}), [q, kind, durability, sort, order]);
  const isFiltered = q || kind || durability;
  const empty = isFiltered
    ? html`<${Empty} title="No box matches">Search finds a part of the name, and case matters. <a href="#/boxes">Show all boxes</a><//>`
    : html`<${Empty} title="There is no box yet">A box is made by its first append: <code>curl -X POST ${location.origin}/v0/boxes/hello -H 'Content-Type: application/json' -d '{"records":[{"data":{"hello":"world"}}]}'</code><//>`;
  let typing = 0;
  const search = (event) => { clearTimeout(typing); const { value } = event.target; typing = setTimeout(() => setQuery({ q: value }), 200); };
  return html`<div class="title"><h1>Boxes</h1><span class="dim" role="status" id="shown">${count(shown[0])} loaded / ${count(shown[1])} ${isFiltered ? "match" : "in all"}</span>
    <span class="space"></span><${Create} may=${may} /></div>
    <form class="bar" role="search" onSubmit=${(event) => { event.preventDefault(); setQuery({ q: event.target.q.value }); }}>
      <input type="search" name="q" data-search value=${q} placeholder="Part of the name  ( / )" aria-label="Part of the name" onInput=${search} />
      <${Select} label="Type" value=${kind} options=${[["", "all"], "log", "queue", "stream"]} onChange=${(value) => setQuery({ kind: value })} />
      <${Select} label="Class" value=${durability} options=${[["", "all"], "memory", "disk", "fsync", "object"]} onChange=${(value) => setQuery({ durability: value })} />
    </form>
    <${VirtualList} label="Boxes" head=${head} row=${row} load=${load} version=${version} refreshMs=${2500} onTotal=${(loaded, total) => setShown([loaded, total])} empty=${empty} />`;
}
