// Schedules: what is due next, how the last one went; create, change, run now, pause, delete.

import { get, parseExact, send, serverRoutes } from "./api.js";
import { BoxLink, Confirm, Empty, Loading, Problem, State, Table, Time, boxPath, count, duration, html, setQuery, useData, useEffect, useState } from "./ui.js";

const path = (name, rest = "") => `/v0/schedules/${encodeURIComponent(name)}${rest}`;
const NEW = { schedule: "", box: "", kind: "cron", cron: "0 3 * * *", every_ms: "60000", time_zone: Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC", catch_up: "one", data: '{"run": true}', tag: "" };
const ZONES = ["UTC", ...(Intl.supportedValuesOf?.("timeZone") || [])];

const exactly = (name) => send("GET", path(name), undefined, undefined, {}, parseExact);
const bodyOf = (each, changes) => Object.fromEntries(Object.entries({
  box: each.box, record: each.record, cron: each.cron, every_ms: each.every_ms, time_zone: each.time_zone, end_ts: each.end_ts, catch_up: each.catch_up, paused: each.paused, ...changes,
}).filter(([, value]) => value != null));

const asFields = (each) => ({ ...NEW, ...each, kind: each.cron ? "cron" : "every", cron: each.cron || NEW.cron, every_ms: String(each.every_ms || NEW.every_ms), data: JSON.stringify(each.record.data, null, 2), tag: each.record.tag || "" });

function Editor({ old, onDone, onClose }) {
  const [fields, setFields] = useState(old ? asFields(old) : NEW);
  const [problem, setProblem] = useState(null);
  const set = (id) => (e) => setFields({ ...fields, [id]: e.target.value });
  let wrong = "";
  try { JSON.parse(fields.data); } catch (error) { wrong = `Data is not JSON: ${error.message}`; }
  const submit = async (event) => {
    event.preventDefault();
    if (wrong) return;
    const { tag: oldTag, data: oldData, ...kept } = old?.record || {};
    const when = fields.kind === "cron" ? { cron: fields.cron, every_ms: null } : { every_ms: Number(fields.every_ms), cron: null };
    const body = bodyOf(old || {}, { ...when, box: fields.box, time_zone: fields.time_zone, catch_up: fields.catch_up });
    // Data goes out as it was typed, with all its digits.
    const record = JSON.stringify({ ...kept, ...(fields.tag ? { tag: fields.tag } : {}) });
    const text = `{"data":${fields.data}${record === "{}" ? "}" : `,${record.slice(1)}`}`;
    delete body.record;
    try { await send("PUT", path(fields.schedule), `${JSON.stringify(body).slice(0, -1)},"record":${text}}`); onDone(fields.schedule); } catch (error) { setProblem(error); }
  };
  const field = (id, label, more = {}) => html`<label>${label} <input name=${id} required value=${fields[id]} ...${more} onInput=${set(id)} /></label>`;
  return html`<form class="panel" id="schedule" onSubmit=${submit}><h2>${old ? `Change ${old.schedule}` : "New schedule"}</h2>
    <div class="grid">${field("schedule", "Name", { disabled: Boolean(old) })}${field("box", "Appends to box", { disabled: Boolean(old) })}
      <label>When <select name="kind" onChange=${set("kind")}><option value="cron" selected=${fields.kind === "cron"}>by a cron expression</option><option value="every" selected=${fields.kind === "every"}>at an interval</option></select></label>
      ${fields.kind === "cron" ? field("cron", "Minute, hour, day, month, weekday") : field("every_ms", `Every (ms) = ${duration(Number(fields.every_ms))}`, { type: "number", min: 100 })}
      ${fields.kind === "cron" && field("time_zone", "Time zone", { list: "zones" })}<datalist id="zones">${ZONES.map((each) => html`<option value=${each}></option>`)}</datalist>
      <label>After downtime <select name="catch_up" onChange=${set("catch_up")}>${[["one", "run the last one that was missed"], ["all", "run all that were missed"], ["none", "run none of them"]].map(([id, words]) => html`<option value=${id} selected=${id === fields.catch_up}>${words}</option>`)}</select></label>
      ${field("tag", "Tag", { required: false })}</div>
    <label>Data of the record, as JSON <textarea name="data" rows="4" spellcheck=${false} aria-invalid=${Boolean(wrong)} value=${fields.data} onInput=${set("data")}></textarea></label>
    <p class="bad" role="status">${wrong}</p><${Problem} error=${problem} />
    <div class="bar"><button type="submit" disabled=${Boolean(wrong)}>${old ? "Save" : "Create"}</button><button type="button" class="quiet" onClick=${onClose}>Cancel</button></div></form>`;
}

const last = (each) => (each.last_error ? html`<span class="bad">${each.last_error}</span>` : each.last_due ? html`<span class="good">appended</span> <${Time} ms=${each.last_due} age=${true} />` : html`<span class="dim">none yet</span>`);
const due = (each) => (each.next_due ? html`<${Time} ms=${each.next_due} /> <span class="dim">in ${duration(Math.max(0, each.next_due - Date.now()))}</span>` : "–");

function Actions({ each, act, onEdit, onRemove }) {
  const name = each.schedule;
  // The record goes back as it was, with all its digits.
  const pause = async () => send("PUT", path(name), bodyOf(await exactly(name), { paused: !each.paused }));
  return html`<span class="bar"><button class="quiet small" onClick=${() => act(() => send("POST", path(name, "/run"), "{}"), (answer) => html`${name} has run: <a href=${boxPath(each.box, "records", { from: answer.seq - 1, open: answer.seq })}>record ${count(answer.seq)}</a>.`)}>Run now</button>
    <button class="quiet small" onClick=${() => act(pause, () => (each.paused ? `${name} is resumed.` : `${name} is paused.`))}>${each.paused ? "Resume" : "Pause"}</button>
    <button class="quiet small" onClick=${onEdit}>Change …</button><button class="quiet small" onClick=${onRemove}>Delete …</button></span>`;
}

export function Schedules({ may, query }) {
  const [note, setNote] = useState("");
  const [problem, setProblem] = useState(null);
  const [removing, setRemoving] = useState(null);
  const [editing, setEditing] = useState(undefined);
  const prefix = query.get("prefix") || "";
  const { data, error, reload } = useData(async (signal) => {
    const routes = await serverRoutes();
    if (!routes.has("GET /v0/schedules")) return { isMissing: true, schedules: [] };
    return get("/v0/schedules", { page_size: 100, prefix, cursor: query.get("cursor") }, signal);
  }, [prefix, query.get("cursor")], 3000);
  useEffect(() => { if (editing !== undefined) document.querySelector("#schedule input:enabled")?.focus(); }, [editing]);
  if (!data) return html`<h1>Schedules</h1><${Problem} error=${error} />${!error && html`<${Loading} />`}`;
  if (data.isMissing) return html`<h1>Schedules</h1><${Empty} title="This server has no schedules">A later version appends records by the clock. Until then a cron job with <code>streams append</code> does it.<//>`;
  const act = async (work, words) => { setProblem(null); try { setNote(words(await work())); reload(); } catch (failure) { setProblem(failure); } };
  const edit = async (each) => { try { setEditing(await exactly(each.schedule)); } catch (failure) { setProblem(failure); } };
  const columns = [
    { title: "Schedule", kind: "name", cell: (each) => html`<b>${each.schedule}</b>` }, { title: "Appends to", kind: "name", cell: (each) => html`<${BoxLink} name=${each.box} tab="records" />` },
    { title: "When", cell: (each) => (each.cron ? html`<code>${each.cron}</code> <span class="dim">${each.time_zone}</span>` : html`every <code>${each.every_ms % 1000 ? `${count(each.every_ms)} ms` : duration(each.every_ms)}</code>`) },
    { title: "Next due", cell: due }, { title: "Last result", kind: "name", cell: last }, { title: "Runs", kind: "number", cell: (each) => count(each.fired_total) }, { title: "State", cell: (each) => html`<${State} text=${each.state} />` },
  ];
  if (may("admin")) columns.push({ title: "Actions", cell: (each) => html`<${Actions} each=${each} act=${act} onEdit=${() => edit(each)} onRemove=${() => setRemoving(each)} />` });
  const isNew = editing === null;
  return html`<div class="title"><h1>Schedules</h1><span class="space"></span>${may("admin") && !isNew && html`<button id="new-schedule" onClick=${() => setEditing(null)}>New schedule</button>`}</div>
    ${editing !== undefined && html`<${Editor} key=${isNew ? "" : editing.schedule} old=${editing} onClose=${() => setEditing(undefined)} onDone=${(name) => { setEditing(undefined); setNote(`${name} is saved.`); reload(); }} />`}
    <form class="bar" role="search" onSubmit=${(event) => { event.preventDefault(); setQuery({ prefix: event.target.prefix.value, cursor: "" }); }}><input type="search" name="prefix" data-search value=${prefix} placeholder="Name begins with …  ( / )" aria-label="Name begins with" /><button class="quiet">Search</button><span role="status" class="good">${note}</span></form>
    <${Problem} error=${problem} /><${Problem} error=${error} />
    ${removing && html`<${Confirm} name=${removing.schedule} title="Delete the schedule" verb="Delete schedule" onConfirm=${() => send("DELETE", path(removing.schedule))} onClose=${() => { setRemoving(null); reload(); }}>Records that it has appended stay.<//>`}
    ${data.schedules.length ? html`<${Table} label="Schedules" rows=${data.schedules} columns=${columns} rowKey=${(each) => each.schedule} />` : html`<${Empty} title=${prefix ? "No schedule begins with that" : "There is no schedule yet"}>A schedule appends a record at each due time: <code>PUT /v0/schedules/nightly {"box": "jobs", "record": {"data": "run"}, "cron": "0 3 * * *"}</code><//>`}
    ${data.next_cursor && html`<button class="quiet" onClick=${() => setQuery({ cursor: data.next_cursor })}>Next page →</button>`}`;
}
