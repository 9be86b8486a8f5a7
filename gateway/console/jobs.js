// Jobs of a queue: who works on what until when, what waits, errors; pausing.

import { box, get, send } from "./api.js";
import { Badge, Empty, Loading, Problem, Table, Time, boxPath, count, duration, html, setQuery, useData, useState } from "./ui.js";

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
    try { const answer = await send("POST", box(name, path), { ...which, [field]: number }); setNote(`${count(answer.rescheduled ?? answer.reprioritized ?? answer.changed)} jobs are changed.`); } catch (error) { setProblem(error); }
  };
  return html`<details class="create" id="change"><summary class="button quiet">Change waiting jobs</summary><form class="bar" onSubmit=${submit}>
    <label>Seqs, or a tag <input name="which" required placeholder="12, 13  or  user-*" value=${text} onInput=${(e) => setText(e.target.value)} /></label>
    <label>What <select name="what" onChange=${(e) => setWhat(e.target.value)}><option value="now">due now</option><option value="later">due in … ms</option><option value="priority">priority 0 – 9</option></select></label>
    ${what !== "now" && html`<label>${what === "later" ? "Milliseconds" : "Priority"} <input name="value" type="number" min="0" max=${what === "priority" ? 9 : null} required class="narrow" value=${value} onInput=${(e) => setValue(e.target.value)} /></label>`}
    <button type="submit">Change</button><span role="status" class="good">${note}</span></form><${Problem} error=${problem} /></details>`;
}

export function Jobs({ name, state, query, may, has, reload }) {
  const which = query.get("state") || "leased";
  const cursor = query.get("cursor") || "";
  const hasLeases = has(LEASES);
  const { data, error } = useData(async (signal) => (hasLeases ? get(box(name, "/leases"), { state: which, cursor }, signal) : null), [name, which, cursor, hasLeases], 2000);
  const jobs = data?.jobs || data?.leases || [];
  const nodes = new Map();
  for (const each of jobs) if (each.node) nodes.set(each.node, (nodes.get(each.node) || 0) + 1);
  const { queue } = state;
  const tabs = [["leased", "In flight", queue.in_flight], ["delayed", "Delayed", queue.delayed], ["ready", "Ready", queue.ready]];
  return html`<div class="bar">${hasLeases && html`<div class="segmented" role="group" aria-label="State of jobs">${tabs.map(([id, title, number]) => html`<button aria-pressed=${id === which} onClick=${() => setQuery({ state: id === "leased" ? "" : id, cursor: "" })}>${title} ${count(number)}</button>`)}</div>`}
      <span class="space"></span>${may("write") && has("POST /v0/boxes/{box}/reschedule") && html`<${Change} name=${name} />`}
      ${may("admin") && has("POST /v0/boxes/{box}/pause") && html`<${Pause} name=${name} state=${state} reload=${reload} />`}</div>
    <${Problem} error=${error} />
    ${hasLeases === undefined ? html`<${Loading} />` : !hasLeases ? html`<${Empty} title="This server does not list single jobs">The counts above are exact. Records of waiting jobs are under <a href=${boxPath(name, "records")}>Records</a>.<//>`
    : html`${nodes.size > 0 && html`<p class="dim">Workers: ${[...nodes].map(([node, number]) => html`<${Badge}>${node} · ${number}<//> `)}</p>`}
      <${Table} label="Jobs" rows=${jobs} rowKey=${(each) => each.seq ?? each.$seq} empty=${{ leased: "No worker holds a job now.", delayed: "No job waits for its time.", ready: "No job waits for a worker." }[which]} columns=${[
        { title: "Seq", kind: "number", cell: (each) => html`<a href=${boxPath(name, "records", { from: (each.seq ?? each.$seq) - 1, open: each.seq ?? each.$seq })}>${count(each.seq ?? each.$seq)}</a>` },
        { title: "Worker", kind: "name", cell: (each) => each.node || "–" }, { title: "Deliveries", kind: "number", cell: (each) => count(each.deliveries) },
        { title: which === "delayed" ? "Due" : "Deadline", cell: (each) => { const at = each.deadline || each.deliver_at || each.due_ts; return at ? html`<${Time} ms=${at} /> <span class="dim">in ${duration(Math.max(0, at - Date.now()))}</span>` : "–"; } },
        { title: "Last error", kind: "name", cell: (each) => each.last_error || "–" }]} />
      ${data?.next_cursor && html`<button class="quiet" onClick=${() => setQuery({ cursor: data.next_cursor })}>Next page →</button>`}`}`;
}
