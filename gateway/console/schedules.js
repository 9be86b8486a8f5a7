// Schedules, where the server has them: next due time, last result, run now, pause.

import { get, send, serverRoutes } from "./api.js";
import { BoxLink, Confirm, Empty, Loading, Problem, State, Table, Time, count, html, useData, useState } from "./ui.js";

const path = (name, rest = "") => `/v0/schedules/${encodeURIComponent(name)}${rest}`;

export function Schedules({ may }) {
  const [note, setNote] = useState("");
  const [problem, setProblem] = useState(null);
  const [removing, setRemoving] = useState(null);
  const { data, error, reload } = useData(async (signal) => {
    const routes = await serverRoutes();
    if (!routes.has("GET /v0/schedules")) return { isMissing: true, schedules: [] };
    return { ...(await get("/v0/schedules", { page_size: 200 }, signal)), canRun: routes.has("POST /v0/schedules/{schedule}/run") };
  }, [], 3000);
  if (!data) return html`<h1>Schedules</h1><${Problem} error=${error} />${!error && html`<${Loading} />`}`;
  if (data.isMissing) return html`<h1>Schedules</h1><${Empty} title="This server has no schedules">A later version appends records by the clock. Until then a cron job with <code>streams append</code> does it.<//>`;
  const act = async (work, words) => { setProblem(null); try { await work(); setNote(words); reload(); } catch (failure) { setProblem(failure); } };
  const nameOf = (each) => each.schedule || each.name;
  const pause = (each) => { const { box, record, cron, every_ms: every, time_zone: zone, end_ts: end, catch_up: catchUp } = each;
    const body = Object.fromEntries(Object.entries({ box, record, cron, every_ms: every, time_zone: zone, end_ts: end, catch_up: catchUp, paused: !each.paused }).filter(([, value]) => value != null));
    return act(() => send("PUT", path(nameOf(each)), body), each.paused ? "Resumed." : "Paused."); };
  const columns = [
    { title: "Schedule", kind: "name", cell: nameOf }, { title: "Appends to", kind: "name", cell: (each) => html`<${BoxLink} name=${each.box} tab="records" />` },
    { title: "When", cell: (each) => html`<code>${each.cron || `every ${count(each.every_ms)} ms`}</code> <span class="dim">${each.time_zone || ""}</span>` },
    { title: "Next due", cell: (each) => html`<${Time} ms=${each.next_due} />` }, { title: "Last due", cell: (each) => html`<${Time} ms=${each.last_due} age=${true} />` },
    { title: "Fired", kind: "number", cell: (each) => count(each.fired_total) }, { title: "State", cell: (each) => html`<${State} text=${each.paused ? "paused" : each.state || "ok"} />` },
    { title: "Last error", kind: "name", cell: (each) => each.last_error || "–" },
  ];
  if (may("admin")) columns.push({ title: "Actions", cell: (each) => html`<span class="bar">${data.canRun !== false && html`<button class="quiet small" onClick=${() => act(() => send("POST", path(nameOf(each), "/run"), "{}"), `${nameOf(each)} has fired.`)}>Run now</button>`}
    <button class="quiet small" onClick=${() => pause(each)}>${each.paused ? "Resume" : "Pause"}</button><button class="quiet small" onClick=${() => setRemoving(each)}>Delete …</button></span>` });
  return html`<h1>Schedules</h1><p role="status" class="good">${note}</p><${Problem} error=${problem} /><${Problem} error=${error} />
    ${removing && html`<${Confirm} name=${nameOf(removing)} title="Delete the schedule" verb="Delete schedule" onConfirm=${() => send("DELETE", path(nameOf(removing)))} onClose=${() => { setRemoving(null); reload(); }}>Records that it has appended stay.<//>`}
    ${data.schedules.length ? html`<${Table} label="Schedules" rows=${data.schedules} columns=${columns} rowKey=${nameOf} />` : html`<${Empty} title="There is no schedule yet">A schedule appends a record at each due time: <code>PUT /v0/schedules/nightly {"box": "jobs", "record": {"data": "run"}, "cron": "0 3 * * *"}</code><//>`}`;
}
