// The config of a box: by purpose, each field with its meaning; deleting records and the box, after its name is typed.

import { box, diff, hasField, send, serverRoutes } from "./api.js";
import { Code, Confirm, Problem, Select, count, duration, go, html, size, useState } from "./ui.js";

const CHOICES = { discard: ["old", "reject"], durability: ["memory", "disk", "fsync", "object"], compact: ["none", "tag"] };
const SECTIONS = [
  ["Retention", {
    ttl_ms: "Records expire at this age. 0: never.", cap_records: "Number of records that are kept. 0: no limit.", cap_bytes: "Bytes that are kept. 0: no limit.",
    discard: "At a limit: evict the oldest records, or reject the write.", compact: "tag: keep only the newest record of each tag.", delete_on_empty_ms: "The box is deleted after it was empty for this long. 0: never." }],
  ["Writes", {
    durability: "When a write is acknowledged: in memory, in the log, after its sync, or in the object store.", auto_create: "A write creates the box again after it was deleted.",
    idempotency_window_ms: "How long an idempotency key is remembered.", timestamping: "Whether writers may set the time of a record." }],
  ["Readers", {
    priority: "Boxes with a higher priority are delivered first. Empty: none is set.", auto_priority: "Without a priority: boxes that were read lately come first.", dedupe_node: "Readers may leave out the records of their own node." }],
  ["Jobs", {
    lease_ms: "How long a worker may hold a job before it goes to another one.", max_deliveries: "After this many deliveries a job is a dead letter. 0: no limit.", dead_letter: "The box for dead letters. Empty: none.",
    retry_backoff: "How long a failed job waits, as JSON. Empty: not at all.", rate_per_s: "Deliveries per second. 0: no limit.", key_concurrency: "Jobs with one ordering key that are leased at a time. 0: no limit.",
    fair: "Workers get jobs of all ordering keys in turn.", claim_jitter_ms: "How long claims are collected before they are served together.", leases_durable: "Leases survive a crash.", paused: "Workers get no jobs." }],
];
const KNOWN = new Set(SECTIONS.flatMap(([, fields]) => Object.keys(fields)).concat("type", "durable"));
const COUNT_PAGES = 20;

// The value in words, where the number alone says little.
function inWords(id, value) {
  if (!Number(value)) return "";
  return id.endsWith("_ms") ? `= ${duration(Number(value))}` : id.endsWith("_bytes") ? `= ${size(Number(value))}` : "";
}

function Field({ id, meaning, value, onChange, isDisabled }) {
  const isNumber = typeof value === "number";
  const isObject = value !== null && typeof value === "object";
  const change = (e) => { const text = e.target.value; onChange(isNumber ? Number(text) : text === "" && !isObject ? null : text); };
  const input = typeof value === "boolean" ? html`<input type="checkbox" name=${id} checked=${value} disabled=${isDisabled} onChange=${(e) => onChange(e.target.checked)} />`
    : CHOICES[id] ? html`<select name=${id} disabled=${isDisabled} onChange=${(e) => onChange(e.target.value)}>${CHOICES[id].map((each) => html`<option selected=${each === value}>${each}</option>`)}</select>`
    : html`<input name=${id} type=${isNumber ? "number" : "text"} step="any" value=${isObject ? JSON.stringify(value) : value ?? ""} placeholder="none" disabled=${isDisabled} onInput=${change} />`;
  return html`<label class="setting"><span><b>${id}</b> <span class="words">${inWords(id, value)}</span><br /><span class="dim">${meaning}</span></span>${input}</label>`;
}

// What a delete would remove: counted by the server where it can, else by reading seqs without their data.
async function countDeleted(name, state, body) {
  await serverRoutes();
  if (hasField("DeleteBody", "dry_run")) {
    const answer = await send("POST", box(name, "/delete"), { ...body, dry_run: true });
    return count(answer.deleted ?? answer.would_delete ?? answer.count);
  }
  const before = body.before_seq ?? Infinity;
  if (before > state.head_seq && !body.match) return `all ${count(state.count)}`;
  let found = 0;
  let from = 0;
  for (let page = 0; page < COUNT_PAGES; page += 1) {
    const answer = await diff(name, { from_seq: from, limit: 1000, include_data: false, include_meta: false, ...(body.match ? { match: body.match } : {}) });
    const below = answer.records.filter((each) => each.$seq < before);
    found += below.length;
    from = answer.next_from_seq;
    if (below.length < answer.records.length || answer.caught_up) return count(found);
  }
  return `more than ${count(found)}`;
}

function Delete({ name, state, setAsking, onNote }) {
  const [by, setBy] = useState("seq");
  const [text, setText] = useState("");
  const [problem, setProblem] = useState(null);
  const submit = async (event) => {
    event.preventDefault();
    const body = by === "tag" ? { match: text.endsWith("*") ? ["tag", "Glob", text] : text } : { before_seq: by === "all" ? state.next_seq : Number(text) };
    const words = { tag: `with the tag ${text}`, seq: `below seq ${count(Number(text))}`, all: "of this box" }[by];
    try {
      const number = await countDeleted(name, state, body);
      setAsking({ title: "Delete records", verb: "Delete records", text: html`This deletes <b>${number} records</b> ${words} for good. Readers see a tombstone, or leave them out.`,
        run: async () => { const answer = await send("POST", box(name, "/delete"), body); onNote(`${count(answer.deleted)} records are deleted.`); } });
      setProblem(null);
    } catch (error) { setProblem(error); }
  };
  return html`<form class="bar" onSubmit=${submit}><${Select} label="Delete records" value=${by} options=${[["seq", "below seq"], ["tag", "with tag"], ["all", "all of them"]]} onChange=${(value) => { setBy(value); setText(""); }} />
    ${by !== "all" && html`<input class="narrow" name="delete" aria-label=${by === "tag" ? "Tag" : "Seq"} type=${by === "tag" ? "text" : "number"} min="1" placeholder=${by === "tag" ? "user-*" : ""} required value=${text} onInput=${(e) => setText(e.target.value)} />`}
    <button class="danger" type="submit">Count and delete …</button><${Problem} error=${problem} /></form>`;
}

export function Settings({ name, state, may, reload }) {
  const [changes, setChanges] = useState({});
  const [problem, setProblem] = useState(null);
  const [note, setNote] = useState("");
  const [asking, setAsking] = useState(null);
  const isStream = state.type === "stream";
  const isFixed = !may("admin") || isStream;
  const { config } = state;
  const submit = async (event) => {
    event.preventDefault();
    setProblem(null);
    try {
      const isJson = (id) => id === "retry_backoff" || (config[id] !== null && typeof config[id] === "object");
      const patch = Object.fromEntries(Object.entries(changes).map(([id, value]) => [id, isJson(id) && typeof value === "string" ? JSON.parse(value) : value]));
      await send("PUT", box(name), patch);
      setChanges({});
      setNote("Saved.");
      reload();
    } catch (error) { setProblem(error instanceof SyntaxError ? { message: `that is not JSON: ${error.message}` } : error); }
  };
  const askDelete = () => setAsking({ title: "Delete the box", verb: "Delete box", text: html`This deletes <b>${name}</b> with all its <b>${count(state.count)} records</b>, its groups, leases and schedules, and every router from or to it. It cannot be undone.`,
    run: async () => { await send("DELETE", box(name)); go("#/boxes"); } });
  const others = Object.keys(config).filter((id) => !KNOWN.has(id));
  const sections = SECTIONS.filter(([title]) => title !== "Jobs" || state.queue).concat(others.length ? [["Other", Object.fromEntries(others.map((id) => [id, ""]))]] : []);
  const changed = Object.keys(changes).length;
  return html`${asking && html`<${Confirm} name=${name} title=${asking.title} verb=${asking.verb} onConfirm=${asking.run} onClose=${() => { setAsking(null); reload(); }}>${asking.text}<//>`}
    <div class="split"><form onSubmit=${submit}>
      ${isFixed && html`<p class="dim">${isStream ? html`A stream is configured through /v1: <a href="#/s2">Streams (S2)</a>.` : "This key may look at the config and not change it (scope admin)."}</p>`}
      ${sections.map(([title, fields]) => html`<fieldset class="panel"><legend>${title}</legend>${Object.entries(fields).filter(([id]) => id in config).map(([id, meaning]) => html`
        <${Field} key=${id} id=${id} meaning=${meaning} value=${id in changes ? changes[id] : config[id]} isDisabled=${isFixed} onChange=${(next) => setChanges({ ...changes, [id]: next })} />`)}</fieldset>`)}
      ${!isFixed && html`<div class="bar sticky"><button type="submit" disabled=${!changed}>Save${changed ? ` ${changed} ${changed === 1 ? "change" : "changes"}` : ""}</button>
        <button type="button" class="quiet" disabled=${!changed} onClick=${() => setChanges({})}>Reset</button><span role="status" class="good">${note}</span>
        <span class="dim small">A tighter limit applies to stored records at once.</span></div>`}<${Problem} error=${problem} /></form>
    <div>${may("delete") && !isStream && html`<section class="panel danger"><h2>Danger</h2><${Delete} name=${name} state=${state} setAsking=${setAsking} onNote=${setNote} />
        ${isFixed && html`<p role="status" class="good">${note}</p>`}<p><button class="danger" id="delete-box" onClick=${askDelete}>Delete box …</button></p></section>`}
      <h2>As JSON</h2><${Code}>${JSON.stringify(config, null, 2)}<//></div></div>`;
}
