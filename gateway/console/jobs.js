// Jobs of a queue: who works on what until when, what waits, errors; pausing.

import { box, get, send } from "./api.js";
import { Empty, Loading, Problem, Table, Tile, Tiles, Time, boxPath, count, counted, duration, html, setQuery, useData, useState } from "./ui.js";

const LEASES = "GET /v0/boxes/{box}/leases";

function Pause({ name, state, reload }) {
  const [problem, setProblem] = useState(null);
  const isPaused = Boolean(state.config.paused);
  const toggle = async () => {
    try { await send("POST", box(name, isPaused ? "/resume" : "/pause"), "{}"); reload(); } catch (error) { setProblem(error); }
  };
  return html`<button id="pause-queue" class=${isPaused ? "" : "quiet"} onClick=${toggle}>${isPaused ? "Resume claims" : "Pause claims"}</button><${Problem} error=${problem} />`;
}

// Waiting and delayed jobs, by seq or tag: when they are due, and what goes first.
function Change({ name }) {
  const [text, setText] = useState("");
  const [what, setWhat] = useState("now");
  const [value, setValue] = useState("");
  const [note, setNote] = useState("");
  const [problem, setProblem] = useState(null);
  const submit = async (event) => {
    event.preventDefault();
    const which = /^\d+(\s*,\s*\d+)*$/.test(text.trim()) ? { seqs: text.split(",").map(Number) } : { match: text.endsWith("*") ? ["tag", "Glob", text] : text };
    const [path, field, number] = what === "priority" ? ["/reprioritize", "job_priority", Number(value)] : ["/reschedule", "delay_ms", what === "now" ? 0 : Number(value)];
    setProblem(null);
    try { const answer = await send("POST", box(name, path), { ...which, [field]: number }); setNote(`${counted(answer.rescheduled ?? answer.reprioritized, "job")} changed.`); } catch (error) { setProblem(error); }
  };
  return html`<details class="create" id="change"><summary class="button quiet">Change waiting jobs</summary><form class="bar" onSubmit=${submit}>
    <label>Seqs, or a tag <input name="which" required placeholder="12, 13  or  user-*" value=${text} onInput=${(e) => setText(e.target.value)} /></label>
    <label>What <select name="what" onChange=${(e) => setWhat(e.target.value)}><option value="now">due now</option><option value="later">due in … ms</option><option value="priority">priority 0 – 9</option></select></label>
    ${what !== "now" && html`<label>${what === "later" ? "Milliseconds" : "Priority"} <input name="value" type="number" min="0" max=${what === "priority" ? 9 : null} required class="narrow" value=${value} onInput=${(e) => setValue(e.target.value)} /></label>`}
    <button type="submit">Change</button><span role="status" class="good">${note}</span></form><${Problem} error=${problem} /></details>`;
}

const EMPTY = { leased: "No worker holds a job now.", delayed: "No job waits for its time.", ready: "No job waits for a worker." };
const seqLink = (name) => (each) => html`<a class="name" href=${boxPath(name, "records", { from: each.seq - 1, open: each.seq })}>${count(each.seq)}</a>`;
const due = (at) => (at ? html`<${Time} ms=${at} /> <span class="dim">${at > Date.now() ? `in ${duration(at - Date.now())}` : "over"}</span>` : "–");
const failure = (each) => (each.last_error ? html`<span class="bad" title=${each.last_error}>${each.last_error}</span>${each.last_node && html` <span class="dim">on ${each.last_node}</span>`}` : "–");

// Columns of a list of jobs in one state.
function columnsOf(which, name, act) {
  const when = { leased: { title: "Lease until", cell: (each) => due(each.deadline) }, delayed: { title: "Due", cell: (each) => (each.moving ? "on its way to the dead letters" : due(each.due_ts)) } }[which];
  const columns = [
    { title: "Seq", kind: "number", cell: seqLink(name) }, which === "leased" && { title: "Worker", kind: "name", cell: (each) => html`<b>${each.node}</b>` }, when,
    { title: "Deliveries", kind: "number", cell: (each) => count(each.deliveries) }, { title: "Priority", kind: "number", cell: (each) => count(each.job_priority || 0) },
    { title: "Key", kind: "name", cell: (each) => each.ordering_key || "–" }, { title: "Last error", kind: "name", cell: failure },
    act && which === "delayed" && { title: "Actions", cell: (each) => (each.moving ? "" : html`<button class="quiet small" onClick=${() => act("/reschedule", { seqs: [each.seq], delay_ms: 0 })}>Due now</button>`) },
    act && which === "ready" && { title: "Actions", cell: (each) => html`<button class="quiet small" onClick=${() => act("/reprioritize", { seqs: [each.seq], job_priority: 9 })}>First</button>` },
  ];
  return columns.filter(Boolean);
}

// How many jobs of the page each worker holds, and until when its first lease runs.
function Workers({ jobs }) {
  const workers = new Map();
  for (const { node, deadline } of jobs) {
    const old = workers.get(node);
    workers.set(node, { node, jobs: (old?.jobs || 0) + 1, first: Math.min(old?.first ?? Infinity, deadline) });
  }
  return workers.size > 0 && html`<div class="few"><${Tiles}>${[...workers.values()].map((each) => html`<${Tile} label="Worker" value=${each.node} sub=${`${counted(each.jobs, "job")} · first lease ends in ${duration(Math.max(0, each.first - Date.now()))}`} />`)}<//></div>`;
}

export function Jobs({ name, state, query, may, has, reload }) {
  const which = query.get("state") || "leased";
  const cursor = query.get("cursor") || "";
  const hasLeases = has(LEASES);
  const [problem, setProblem] = useState(null);
  const { data, error, reload: again } = useData((signal) => (hasLeases ? get(box(name, "/leases"), { state: which, cursor }, signal) : null), [name, which, cursor, hasLeases], 2000);
  const act = async (path, body) => { setProblem(null); try { await send("POST", box(name, path), body); again(); } catch (failed) { setProblem(failed); } };
  const jobs = data?.jobs || [];
  const { queue } = state;
  const tabs = [["leased", "In flight", queue.in_flight], ["delayed", "Delayed", queue.delayed], ["ready", "Ready", queue.ready]];
  const mayChange = may("write") && has("POST /v0/boxes/{box}/reschedule");
  return html`<div class="bar">${hasLeases && html`<div class="segmented" role="group" aria-label="State of jobs">${tabs.map(([id, title, number]) => html`<button aria-pressed=${id === which} onClick=${() => setQuery({ state: id === "leased" ? "" : id, cursor: "" })}>${title} ${count(number)}</button>`)}</div>`}
      <span class="space"></span>${mayChange && html`<${Change} name=${name} />`}
      ${may("admin") && has("POST /v0/boxes/{box}/pause") && html`<${Pause} name=${name} state=${state} reload=${reload} />`}</div>
    <${Problem} error=${error} /><${Problem} error=${problem} />
    ${hasLeases === undefined || (hasLeases && !data && !error) ? html`<${Loading} />` : !hasLeases ? html`<${Empty} title="This server does not list single jobs">The counts above are exact. Records of waiting jobs are under <a href=${boxPath(name, "records")}>Records</a>.<//>`
    : html`${which === "leased" && html`<${Workers} jobs=${jobs} />`}
      <${Table} label="Jobs" rows=${jobs} rowKey=${(each) => each.seq} empty=${EMPTY[which]} columns=${columnsOf(which, name, mayChange ? act : null)} />
      ${data?.next_cursor && html`<button class="quiet" onClick=${() => setQuery({ cursor: data.next_cursor })}>Next page →</button>`}`}`;
}
