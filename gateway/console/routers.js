// Routers: the graph with live rates and lags, the table, creating and deleting; and those of one box.

import { get, router, send } from "./api.js";
import { Graph, NODES_MAX } from "./graph.js";
import { BoxLink, Confirm, Empty, Loading, Problem, State, Table, count, html, setQuery, short, useData, useRef, useState } from "./ui.js";

const PAGE = 100;

// The routers of a page with their progress; rates from the totals of two looks.
function useRouters(params, deps) {
  const before = useRef(new Map());
  return useData(async (signal) => {
    const page = await get("/v0/routers", { page_size: PAGE, ...params }, signal);
    const now = Date.now();
    const rows = await Promise.all(page.routers.map((each) => get(router(each.router), {}, signal).catch((error) => {
      if (error.name === "AbortError") throw error;
      return { ...each, state: "away" };
    })));
    for (const each of rows) {
      const old = before.current.get(each.router);
      if (old && each.forwarded_total != null) each.rate = Math.max(0, each.forwarded_total - old.total) * 1000 / Math.max(1, now - old.at);
      before.current.set(each.router, { at: now, total: each.forwarded_total ?? old?.total ?? 0 });
    }
    return { rows, next: page.next_cursor };
  }, deps, 2500);
}

function RouterTable({ rows, may, onDelete }) {
  const columns = [
    { title: "Router", kind: "name", cell: (each) => each.router }, { title: "From", kind: "name", cell: (each) => html`<${BoxLink} name=${each.source} tab="routers" />` },
    { title: "To", kind: "name", cell: (each) => html`<${BoxLink} name=${each.dest} tab="routers" />` }, { title: "State", cell: (each) => html`<${State} text=${each.state} />` },
    { title: "Lag", kind: "number", cell: (each) => html`<b class=${each.lag ? "warn" : ""}>${count(each.lag)}</b>` }, { title: "Rate", kind: "number", cell: (each) => (each.rate == null ? "…" : `${short(each.rate)}/s`) },
    { title: "Forwarded", kind: "number", cell: (each) => count(each.forwarded_total) }, { title: "Filter", kind: "name", cell: (each) => (each.filter ? JSON.stringify(each.filter) : "–") },
    { title: "Last error", kind: "name", cell: (each) => each.last_error || "–" },
  ];
  if (may("delete")) columns.push({ title: "Actions", cell: (each) => html`<button class="quiet small" onClick=${() => onDelete(each)}>Delete …</button>` });
  return html`<${Table} label="Routers" rows=${rows} columns=${columns} rowKey=${(each) => each.router} empty="There are none." />`;
}

function Create({ source, onDone }) {
  const [fields, setFields] = useState({ router: "", source: source || "", dest: "", filter: "", from_seq: "" });
  const [problem, setProblem] = useState(null);
  const field = (id, label, isNeeded) => html`<label>${label} <input name=${id} required=${isNeeded} value=${fields[id]} onInput=${(e) => setFields({ ...fields, [id]: e.target.value })} /></label>`;
  const submit = async (event) => {
    event.preventDefault();
    const body = { source: fields.source, dest: fields.dest };
    if (fields.filter) body.filter = fields.filter.endsWith("*") ? ["tag", "Glob", fields.filter] : fields.filter;
    if (fields.from_seq !== "") body.from_seq = Number(fields.from_seq);
    try { await send("PUT", router(fields.router), body); setProblem(null); onDone(); } catch (error) { setProblem(error); }
  };
  return html`<details class="create"><summary class="button">New router</summary><form onSubmit=${submit}><div class="grid">${field("router", "Name", true)}${field("source", "From box", true)}${field("dest", "To box", true)}${field("filter", "Only tag (user-*)")}${field("from_seq", "From seq (0 = all)")}</div>
    <div class="bar"><button type="submit">Create or change</button></div><${Problem} error=${problem} /></form></details>`;
}

function Body({ data, error, reload, may, source, empty }) {
  const [removing, setRemoving] = useState(null);
  if (!data) return html`<${Problem} error=${error} />${!error && html`<${Loading} />`}`;
  const boxes = new Set(data.rows.flatMap((each) => [each.source, each.dest]));
  return html`<${Problem} error=${error} />
    ${removing && html`<${Confirm} name=${removing.router} title="Delete the router" verb="Delete router" onConfirm=${() => send("DELETE", router(removing.router))} onClose=${() => { setRemoving(null); reload(); }}>Copies that exist in ${removing.dest} stay; ${count(removing.lag)} records are not copied any more.<//>`}
    ${may("admin") && html`<${Create} source=${source} onDone=${reload} />`}
    ${!data.rows.length ? empty : html`${boxes.size <= NODES_MAX ? html`<${Graph} routers=${data.rows} />` : html`<p class="dim">More than ${NODES_MAX} boxes: search to see a graph.</p>`}<${RouterTable} rows=${data.rows} may=${may} onDelete=${setRemoving} />`}`;
}

export function Routers({ query, may }) {
  const prefix = query.get("prefix") || "";
  const result = useRouters({ prefix, cursor: query.get("cursor") }, [prefix, query.get("cursor")]);
  return html`<h1>Routers</h1>
    <form class="bar" role="search" onSubmit=${(event) => { event.preventDefault(); setQuery({ prefix: event.target.prefix.value, cursor: "" }); }}><input type="search" name="prefix" data-search value=${prefix} placeholder="Name begins with …  ( / )" aria-label="Name begins with" /><button class="quiet">Search</button></form>
    <${Body} ...${result} may=${may} empty=${html`<${Empty} title=${prefix ? "No router begins with that" : "There is no router yet"}>A router copies records from one box into another, exactly once. Make one here or with <code>PUT /v0/routers/NAME {"source": "a", "dest": "b"}</code>.<//>`} />
    ${result.data?.next && html`<button class="quiet" onClick=${() => setQuery({ cursor: result.data.next })}>Next page →</button>`}`;
}

export function BoxRouters({ name, may }) {
  const from = useRouters({ source: name }, [name, "from"]);
  const to = useRouters({ dest: name }, [name, "to"]);
  const data = from.data && to.data && { rows: [...from.data.rows, ...to.data.rows.filter((each) => each.source !== name)] };
  return html`<${Body} data=${data} error=${from.error || to.error} reload=${() => { from.reload(); to.reload(); }} may=${may} source=${name}
    empty=${html`<${Empty} title="No router from or to this box">Routers copy its records elsewhere, or others' records here.<//>`} />`;
}
