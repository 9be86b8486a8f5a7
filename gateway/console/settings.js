// The config of a box: shown with its meaning, changed field by field; trimming and deleting, after the name is typed.

import { box, hasField, send, serverRoutes } from "./api.js";
import { Code, Confirm, Problem, Select, count, go, html, useState } from "./ui.js";

// A dry run of a delete: the records that it would remove, counted where the server counts, else bounded by the seqs.
async function countDeleted(name, state, before) {
  await serverRoutes();
  if (hasField("DeleteBody", "dry_run")) {
    const answer = await send("POST", box(name, "/delete"), { before_seq: before, dry_run: true });
    return `${count(answer.deleted)} records`;
  } else {
    return before > state.head_seq ? `all ${count(state.count)} records` : `at most ${count(Math.max(0, Math.min(before - state.earliest_seq, state.count)))} records`;
  }
}

const CHOICES = { discard: ["old", "reject"], durability: ["memory", "disk", "fsync", "object"], compact: ["none", "tag"] };

function Field({ id, value, onChange, isDisabled }) {
  if (typeof value === "boolean") return html`<label class="inline"><input type="checkbox" name=${id} checked=${value} disabled=${isDisabled} onChange=${(e) => onChange(e.target.checked)} /> ${id}</label>`;
  if (CHOICES[id]) return html`<${Select} label=${id} name=${id} value=${value} options=${CHOICES[id]} disabled=${isDisabled} onChange=${onChange} />`;
  const isNumber = typeof value === "number";
  const isObject = value !== null && typeof value === "object";
  return html`<label>${id} <input name=${id} type=${isNumber ? "number" : "text"} value=${isObject ? JSON.stringify(value) : value ?? ""} placeholder="none" disabled=${isDisabled}
    onInput=${(e) => { const text = e.target.value; onChange(isNumber ? Number(text) : isObject ? text : text === "" ? null : text); }} /></label>`;
}

export function Settings({ name, state, may, reload }) {
  const [changes, setChanges] = useState({});
  const [problem, setProblem] = useState(null);
  const [note, setNote] = useState("");
  const [asking, setAsking] = useState(null);
  const [before, setBefore] = useState("");
  const isFixed = !may("admin") || state.type === "stream";
  const submit = async (event) => {
    event.preventDefault();
    setProblem(null);
    try {
      const patch = Object.fromEntries(Object.entries(changes).map(([id, value]) => [id, state.config[id] !== null && typeof state.config[id] === "object" && typeof value === "string" ? JSON.parse(value) : value]));
      await send("PUT", box(name), patch);
      setChanges({});
      setNote("Saved.");
      reload();
    } catch (error) { setProblem(error instanceof SyntaxError ? { message: `that is not JSON: ${error.message}` } : error); }
  };
  const askTrim = async (event) => {
    event.preventDefault();
    const seq = Number(before);
    setAsking({ title: "Delete old records", verb: "Delete records", text: `This deletes ${await countDeleted(name, state, seq)} below seq ${count(seq)} for good. Readers see a tombstone.`,
      run: async () => { const answer = await send("POST", box(name, "/delete"), { before_seq: seq }); setNote(`${count(answer.deleted)} records are deleted.`); reload(); } });
  };
  const askDelete = () => setAsking({ title: "Delete the box", verb: "Delete box", text: `This deletes ${name} with all its ${count(state.count)} records, groups, leases and every router from or to it. It cannot be undone.`,
    run: async () => { await send("DELETE", box(name)); go("#/boxes"); } });
  return html`${asking && html`<${Confirm} name=${name} title=${asking.title} verb=${asking.verb} onConfirm=${asking.run} onClose=${() => setAsking(null)}>${asking.text}<//>`}
    <div class="split"><form onSubmit=${submit}><h2>Config</h2>
      ${isFixed && html`<p class="dim">${state.type === "stream" ? "A stream is configured through /v1." : "This key may look at the config and not change it (scope admin)."}</p>`}
      <div class="grid">${Object.entries(state.config).filter(([id]) => id !== "type").map(([id, value]) => html`<${Field} key=${id} id=${id} value=${id in changes ? changes[id] : value} isDisabled=${isFixed} onChange=${(next) => setChanges({ ...changes, [id]: next })} />`)}</div>
      ${!isFixed && html`<div class="bar"><button type="submit" disabled=${!Object.keys(changes).length}>Save ${Object.keys(changes).length ? `${Object.keys(changes).length} changes` : ""}</button>
        <button type="button" class="quiet" disabled=${!Object.keys(changes).length} onClick=${() => setChanges({})}>Reset</button><span role="status" class="good">${note}</span></div>
        <p class="dim">A tighter cap or TTL applies to stored records at once.</p>`}<${Problem} error=${problem} /></form>
    <div><h2>As JSON</h2><${Code}>${JSON.stringify(state.config, null, 2)}<//>
      ${may("delete") && state.type !== "stream" && html`<h2>Danger</h2><form class="bar" onSubmit=${askTrim}><label class="inline">Delete records below seq <input class="narrow" type="number" min="1" required value=${before} onInput=${(e) => setBefore(e.target.value)} /></label>
        <button class="danger" type="submit">Delete records …</button></form><p><button class="danger" id="delete-box" onClick=${askDelete}>Delete box …</button></p>`}</div></div>`;
}
