// Groups of a box: cursor, lag, and how long the group needs to catch up; moving and deleting cursors.

import { box, diff, get, send } from "./api.js";
import { Confirm, Empty, Loading, Problem, Table, count, duration, html, short, useData, useRef, useState } from "./ui.js";

// The time until a lag is gone at the speed of the last samples; null if it grows or stands.
export function catchUp(samples) {
  if (samples.length < 2) return null;
  const [first, last] = [samples[0], samples.at(-1)];
  const gained = (first.lag - last.lag) / ((last.at - first.at) / 1000);
  if (!last.lag) return 0;
  return gained > 0 ? (last.lag / gained) * 1000 : Infinity;
}

function Move({ name, group, head, onDone }) {
  const [cursor, setCursor] = useState(group.cursor);
  const [problem, setProblem] = useState(null);
  // To the last record before a time: the next one that the group reads is the first one at or after it.
  const moveTo = async (event) => {
    const at = new Date(event.target.value).getTime();
    if (Number.isNaN(at)) return;
    try { const page = await diff(name, { from_ts: at, limit: 1, include_data: false }); setCursor(page.records.length ? page.records[0].$seq - 1 : head); } catch (error) { setProblem(error); }
  };
  const move = async (to) => {
    try { await send("PUT", box(name, `/groups/${encodeURIComponent(group.group)}`), { cursor: to, if_cursor: group.cursor }); onDone(); } catch (error) { setProblem(error); }
  };
  return html`<form class="bar" onSubmit=${(event) => { event.preventDefault(); move(Number(cursor)); }}>
    <label class="inline">Move ${group.group} to <input type="number" min="0" class="narrow" value=${cursor} onInput=${(e) => setCursor(e.target.value)} /></label><label class="inline">or to local time <input type="datetime-local" step="1" onChange=${moveTo} /></label>
    <span class="dim">${count(Math.max(0, head - cursor))} records to read then</span><button type="submit">Move</button>
    <button type="button" class="quiet" onClick=${() => move(0)}>To the beginning</button><button type="button" class="quiet" onClick=${() => move(head)}>To the head</button>
    <button type="button" class="quiet" onClick=${onDone}>Cancel</button><${Problem} error=${problem} /></form>`;
}

function Create({ name, head, onDone }) {
  const [group, setGroup] = useState("");
  const [from, setFrom] = useState("head");
  const [problem, setProblem] = useState(null);
  const submit = async (event) => {
    event.preventDefault();
    try { await send("PUT", box(name, `/groups/${encodeURIComponent(group)}`), { cursor: from === "head" ? head : 0 }); setGroup(""); setProblem(null); onDone(); } catch (error) { setProblem(error); }
  };
  return html`<details class="create"><summary class="button">New group</summary><form class="bar" onSubmit=${submit}><label>Name <input name="group" required value=${group} onInput=${(e) => setGroup(e.target.value)} /></label>
    <label>Reads from <select name="from" onChange=${(e) => setFrom(e.target.value)}><option value="head">now on</option><option value="start">the beginning</option></select></label><button type="submit">Create</button></form><${Problem} error=${problem} /></details>`;
}

export function Groups({ name, state, may }) {
  const samples = useRef(new Map());
  const [moving, setMoving] = useState(null);
  const [removing, setRemoving] = useState(null);
  const { data, error, reload } = useData(async (signal) => {
    const page = await get(box(name, "/groups"), { page_size: 200 }, signal);
    for (const each of page.groups) samples.current.set(each.group, [...(samples.current.get(each.group) || []), { at: Date.now(), lag: each.lag }].slice(-15));
    return page;
  }, [name], 2000);
  if (!data) return html`<${Problem} error=${error} />${!error && html`<${Loading} />`}`;
  const eta = (each) => {
    const ms = catchUp(samples.current.get(each.group) || []);
    return each.lag === 0 ? "up to date" : ms === null ? "…" : ms === Infinity ? html`<span class="bad">not catching up</span>` : duration(ms);
  };
  const columns = [
    { title: "Group", kind: "name", cell: (each) => each.group }, { title: "Cursor", kind: "number", cell: (each) => count(each.cursor) },
    { title: "Lag", kind: "number", cell: (each) => html`<b class=${each.lag ? "warn" : ""}>${short(each.lag)}</b>` }, { title: "Caught up in", kind: "number", cell: eta },
  ];
  if (may("write")) columns.push({ title: "Actions", cell: (each) => html`<span class="bar"><button class="quiet small" onClick=${() => setMoving(each)}>Move …</button>${may("delete") && html`<button class="quiet small" onClick=${() => setRemoving(each)}>Delete …</button>`}</span>` });
  return html`<${Problem} error=${error} />${may("write") && html`<${Create} name=${name} head=${state.head_seq} onDone=${reload} />`}
    ${removing && html`<${Confirm} name=${removing.group} title="Delete the group" verb="Delete group" onConfirm=${() => send("DELETE", box(name, `/groups/${encodeURIComponent(removing.group)}`))} onClose=${() => { setRemoving(null); reload(); }}>Its cursor at ${count(removing.cursor)} is forgotten. The records stay.<//>`}
    ${moving && html`<${Move} name=${name} group=${moving} head=${state.head_seq} onDone=${() => { setMoving(null); reload(); }} />`}
    ${data.groups.length ? html`<${Table} label="Groups" rows=${data.groups} columns=${columns} rowKey=${(each) => each.group} />`
      : html`<${Empty} title="No group reads this box">A group is a cursor that the server keeps for a reader. Commit one with <code>PUT /v0/boxes/${name}/groups/NAME {"cursor": 0}</code> and read with <code>diff {"group": "NAME"}</code>.<//>`}`;
}
