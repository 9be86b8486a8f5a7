// All queues, the fullest first, as the server sorts them.

import { get } from "./api.js";
import { BoxLink, Empty, Loading, Problem, Table, boxPath, count, duration, html, setQuery, short, size, useData, useRef } from "./ui.js";

const PAGE = 100;

export function Queues({ query }) {
  const q = query.get("q") || "";
  const sort = query.get("sort") || "ready";
  const order = query.get("order") || (sort === "name" ? "asc" : "desc");
  const before = useRef(new Map());
  const { data, error } = useData(async (signal) => {
    const page = await get("/v0/boxes", { kind: "queue", q, sort, order, page_size: PAGE, cursor: query.get("cursor") }, signal);
    const now = Date.now();
    const rows = page.boxes.map((each) => {
      const old = before.current.get(each.box);
      const seconds = old ? (now - old.at) / 1000 : 0;
      const put = old ? Math.max(0, each.head_seq - old.head) : 0;
      return { ...each, inRate: old ? put / seconds : each.rate, outRate: old ? Math.max(0, put - (each.count - old.count)) / seconds : null };
    });
    before.current = new Map(page.boxes.map((each) => [each.box, { at: now, head: each.head_seq, count: each.count }]));
    return { ...page, rows };
  }, [q, sort, order, query.get("cursor")], 2000);
  const ages = useData(async (signal) => {
    const { metrics } = await get("/v0/metrics", {}, signal, { Accept: "application/json" });
    const found = metrics.find((each) => each.name === "streams_queue_oldest_seconds")?.samples || [];
    return new Map(found.map((each) => [each.labels.box, each.value]));
  }, [], 10000);
  const onSort = (by) => setQuery({ sort: by === "ready" ? "" : by, order: by === sort ? (order === "asc" ? "desc" : "asc") : "", cursor: "" });
  const number = (title, cell, by) => ({ title, kind: "number", cell, sort: by });
  return html`<div class="title"><h1>Queues</h1><span class="dim" role="status">${data ? `${count(data.rows.length)} shown / ${count(data.total)} in all` : ""}</span></div>
    <form class="bar" role="search" onSubmit=${(event) => { event.preventDefault(); setQuery({ q: event.target.q.value, cursor: "" }); }}><input type="search" name="q" data-search value=${q} placeholder="Part of the name  ( / )" aria-label="Part of the name" /><button class="quiet">Search</button></form>
    <${Problem} error=${error} />${!data && !error && html`<${Loading} />`}
    ${data && !data.rows.length && html`<${Empty} title=${q ? "No queue matches" : "There is no queue yet"}>A queue hands each job to one worker. Make one: <code>PUT /v0/boxes/jobs {"type": "queue", "dead_letter": "jobs.dead"}</code><//>`}
    ${data && data.rows.length > 0 && html`<${Table} label="Queues" rows=${data.rows} rowKey=${(each) => each.box} sort=${{ by: sort, order }} onSort=${onSort} columns=${[
      { title: "Queue", kind: "name", sort: "name", cell: (each) => html`<${BoxLink} name=${each.box} tab="jobs" />` },
      number("Ready", (each) => html`<b>${count(each.queue.ready)}</b>`, "ready"), number("In flight", (each) => count(each.queue.in_flight)), number("Delayed", (each) => count(each.queue.delayed)),
      number("Dead", (each) => (each.queue.dead_lettered ? html`<a class="warn" href=${boxPath(each.box, "dead")}>${count(each.queue.dead_lettered)}</a>` : "0")),
      number("Oldest", (each) => (each.count ? (ages.data?.has(each.box) ? duration(ages.data.get(each.box) * 1000) : "–") : "–")),
      number("In", (each) => `${short(each.inRate)}/s`, "rate"), number("Out", (each) => (each.outRate === null ? "…" : `${short(each.outRate)}/s`)), number("Stored", (each) => size(each.bytes), "bytes")]} />`}
    ${data?.next_cursor && html`<button class="quiet" onClick=${() => setQuery({ cursor: data.next_cursor })}>Next page →</button>`}`;
}
