// Appends records: one or a batch, checked before they are sent; a record can be copied here and edited.

import { box, diff, hasField, parseExact, send } from "./api.js";
import { asCurl } from "./records.js";
import { Badge, Copy, Problem, boxPath, count, html, useEffect, useState } from "./ui.js";

const QUEUE_FIELDS = [["ordering_key", "Ordering key", {}], ["delay_ms", "Delay (ms)", { type: "number", min: 0 }], ["job_priority", "Priority (0–9)", { type: "number", min: 0, max: 9 }]];
const EXAMPLE = '{"hello": "world"}';

// What a schema says about a value, for the part of JSON Schema that people write most. The server has the last word.
function violation(schema, value, at = "data") {
  if (!schema || typeof schema !== "object") return "";
  const kind = value === null ? "null" : Array.isArray(value) ? "array" : Number.isInteger(value) ? "integer" : typeof value;
  const types = schema.type ? [schema.type].flat() : [];
  if (types.length && !types.includes(kind) && !(kind === "integer" && types.includes("number"))) return `${at}: is ${kind}, the schema asks for ${types.join(" or ")}`;
  if (schema.enum && !schema.enum.some((each) => JSON.stringify(each) === JSON.stringify(value))) return `${at}: is none of ${JSON.stringify(schema.enum)}`;
  if (kind === "object") {
    for (const name of schema.required || []) if (!(name in value)) return `${at}.${name}: is missing`;
    for (const [name, inner] of Object.entries(schema.properties || {})) {
      const wrong = name in value && violation(inner, value[name], `${at}.${name}`);
      if (wrong) return wrong;
    }
  }
  if (kind === "array" && schema.items) for (const [index, each] of value.entries()) { const wrong = violation(schema.items, each, `${at}[${index}]`); if (wrong) return wrong; }
  return "";
}

// The records as JSON texts, so that what was typed goes out with all its digits; or why not.
function check(text, isBatch, schema) {
  const parts = isBatch ? text.split("\n").map((each) => each.trim()).filter(Boolean) : [text.trim()];
  if (!parts.length || !parts[0]) return { error: "Enter JSON." };
  for (const [index, part] of parts.entries()) {
    let value;
    try { value = JSON.parse(part); } catch (error) { return { error: `${isBatch ? `Line ${index + 1} is` : "This is"} not JSON: ${error.message}` }; }
    const wrong = violation(schema, value);
    if (wrong) return { error: `${isBatch ? `Line ${index + 1}: ` : ""}${wrong}` };
  }
  return { parts };
}

export function Produce({ name, state, query }) {
  const [text, setText] = useState(EXAMPLE);
  const [isBatch, setBatch] = useState(false);
  const [fields, setFields] = useState({ tag: "", node: "", meta: "", ordering_key: "", delay_ms: "", job_priority: "" });
  const [sent, setSent] = useState([]);
  const [problem, setProblem] = useState(null);
  const isQueue = state.type === "queue";
  const schema = state.config.schema;
  useEffect(() => {
    if (!query.get("copy")) return;
    const seq = Number(query.get("copy"));
    diff(name, { from_seq: seq - 1, limit: 1, include_tags: true }).then(({ records: [record] }) => {
      if (record?.$seq !== seq) { setProblem({ message: `record ${seq} is gone; write another one` }); return; }
      setText(JSON.stringify(record.data, null, 2));
      setFields((old) => ({ ...old, tag: record.$tag ?? "", node: record.$node || "", meta: record.meta ? JSON.stringify(record.meta) : "" }));
    }).catch(setProblem);
  }, [query.get("copy")]);
  const result = check(text, isBatch, schema);
  let metaError = "";
  if (fields.meta) try { JSON.parse(fields.meta); } catch (error) { metaError = `Meta is not JSON: ${error.message}`; }
  const recordTexts = () => result.parts.map((part) => {
    const more = [];
    for (const each of ["tag", "node", "ordering_key"]) if (fields[each]) more.push(`"${each}":${JSON.stringify(fields[each])}`);
    for (const each of ["delay_ms", "job_priority"]) if (fields[each]) more.push(`"${each}":${Number(fields[each])}`);
    if (fields.meta) more.push(`"meta":${fields.meta}`);
    return `{"data":${part}${more.length ? `,${more.join(",")}` : ""}}`;
  });
  const post = async (body) => {
    setProblem(null);
    try {
      const answer = await send("POST", box(name), body);
      setSent((old) => [{ first: answer.first_seq, last: answer.last_seq, ms: answer.performance.server_total_ms, body }, ...old].slice(0, 10));
    } catch (error) { setProblem(error); }
  };
  const submit = (event) => { event.preventDefault(); if (result.parts && !metaError) post(`{"records":[${recordTexts().join(",")}]}`); };
  const field = (id, label, more = {}) => html`<label>${label} <input name=${id} value=${fields[id]} ...${more} onInput=${(e) => setFields({ ...fields, [id]: e.target.value })} /></label>`;
  const format = () => { try { setText(JSON.stringify(parseExact(text), null, 2)); } catch { /* the check below the editor says it */ } };
  return html`<div class="split"><form onSubmit=${submit}>
      <div class="bar"><label class="inline"><input type="checkbox" checked=${isBatch} onChange=${(e) => setBatch(e.target.checked)} /> One record a line</label>
        ${!isBatch && html`<button type="button" class="quiet small" onClick=${format}>Format</button>`}${schema && html`<${Badge}>schema is checked<//>`}</div>
      <textarea class="editor" data-search aria-label="Data, as JSON" aria-invalid=${Boolean(result.error)} spellcheck=${false} rows="14" value=${text} onInput=${(e) => setText(e.target.value)}></textarea>
      <p class=${result.error || metaError ? "bad" : "good"} role="status" id="check">${result.error || metaError || (isBatch ? `${count(result.parts.length)} records, all valid` : "Valid JSON")}</p>
      <div class="grid">${field("tag", "Tag")}${field("node", "Node")}${field("meta", "Meta (JSON)")}
        ${isQueue && QUEUE_FIELDS.filter(([id]) => hasField("NewRecord", id)).map(([id, label, more]) => field(id, label, more))}</div>
      <div class="bar"><button type="submit" disabled=${Boolean(result.error || metaError)}>Append</button>
        <${Copy} text=${() => (result.parts ? asCurl(name, parseExact(`{"records":[${recordTexts().join(",")}]}`)) : "")}>Copy as curl<//></div>
      <${Problem} error=${problem} /></form>
    <div><h2>Sent from here</h2>${sent.length ? html`<ul class="plain">${sent.map((each) => html`<li><span class="good" role="status">Written as <a href=${boxPath(name, "records", { from: each.first - 1, open: each.first })}>${each.first === each.last ? each.first : `${each.first} – ${each.last}`}</a></span>
      <span class="dim">in ${each.ms} ms</span> <button class="quiet small" onClick=${() => post(each.body)}>Send again</button></li>`)}</ul>` : html`<p class="dim">Records that you append are listed here, with their seqs, and can be sent again.</p>`}</div></div>`;
}
