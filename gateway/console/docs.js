// The API explorer: every route of /v0 and the calls of /v1, from the server's own description; each can be tried here.

import { get, key, raw } from "./api.js";
import { render } from "./preact.js";
import { Code, Copy, Loading, Problem, html, useData, useEffect, useState } from "./ui.js";

const S2 = [
  ["GET", "/v1/basins", "List basins."], ["POST", "/v1/basins", "Create a basin.", '{"basin": "my-first-basin"}'], ["GET", "/v1/basins/{basin}", "Config of a basin."], ["DELETE", "/v1/basins/{basin}", "Delete a basin."],
  ["GET", "/v1/streams", "List streams of a basin (header s2-basin)."], ["POST", "/v1/streams", "Create a stream.", '{"stream": "orders"}'], ["GET", "/v1/streams/{stream}", "Config of a stream."], ["DELETE", "/v1/streams/{stream}", "Delete a stream."],
  ["GET", "/v1/streams/{stream}/records/tail", "Tail of a stream."], ["GET", "/v1/streams/{stream}/records", "Read records.", "", ["seq_num", "count", "tail_offset", "timestamp"]], ["POST", "/v1/streams/{stream}/records", "Append records.", '{"records": [{"body": "hello"}]}'],
  ["GET", "/v1/access-tokens", "List access tokens."],
];

const place = (document, ref) => ref.slice(2).split("/").reduce((value, part) => value?.[part], document);
const resolved = (document, schema) => (schema?.$ref ? place(document, schema.$ref) : schema);

// An example of a schema: its example or default, else the required fields.
function example(document, schema, depth = 0) {
  const own = resolved(document, schema);
  if (!own || depth > 4) return null;
  if (own.example !== undefined) return own.example;
  if (own.examples) return own.examples[0];
  if (own.default !== undefined) return own.default;
  if (own.enum) return own.enum[0];
  if (own.anyOf || own.oneOf) return example(document, (own.anyOf || own.oneOf)[0], depth + 1);
  const type = [own.type].flat()[0];
  if (type === "object" || own.properties) return Object.fromEntries((own.required || []).map((name) => [name, example(document, own.properties?.[name], depth + 1)]));
  if (type === "array") return [example(document, own.items, depth + 1)];
  return { integer: own.minimum || 0, number: 0, boolean: true, string: "text" }[type] ?? null;
}

function operations(document) {
  const rows = [];
  for (const [path, methods] of Object.entries(document.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      if (!["get", "put", "post", "delete", "patch"].includes(method) || path.startsWith("/console")) continue;
      const schema = operation.requestBody?.content?.["application/json"]?.schema;
      rows.push({ id: `${method.toUpperCase()} ${path}`, method: method.toUpperCase(), path, summary: operation.summary || "", group: operation.tags?.[0] || "other", codes: Object.keys(operation.responses || {}),
        params: (operation.parameters || []).map((each) => (each.$ref ? place(document, each.$ref) : each)), body: schema ? JSON.stringify(example(document, schema), null, 2) : "", schema: resolved(document, schema) });
    }
  }
  for (const [method, path, summary, body, query] of S2) {
    const names = [...path.matchAll(/\{(\w+)\}/g)].map((each) => ({ name: each[1], in: "path", required: true }));
    const inBasin = path.startsWith("/v1/streams") ? [{ name: "s2-basin", in: "header", required: true }] : [];
    rows.push({ id: `${method} ${path}`, method, path, summary, group: "S2 (/v1)", codes: [], params: [...names, ...inBasin, ...(query || []).map((name) => ({ name, in: "query" }))], body: body || "", schema: null });
  }
  return rows;
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function Operation({ operation }) {
  const [values, setValues] = useState({});
  const [body, setBody] = useState(operation.body);
  const [answer, setAnswer] = useState(null);
  const [problem, setProblem] = useState(null);
  const isStream = /\/(watch|work|ws)(\/|$)/.test(operation.path) && operation.method === "GET";
  const path = () => {
    const filled = operation.path.replace(/\{(\w+)\}/g, (all, name) => encodeURIComponent(values[name] || ""));
    const query = new URLSearchParams(operation.params.filter((each) => each.in === "query" && values[each.name]).map((each) => [each.name, values[each.name]]));
    return query.size ? `${filled}?${query}` : filled;
  };
  const headers = () => ({ ...(body ? { "Content-Type": "application/json" } : {}), ...Object.fromEntries(operation.params.filter((each) => each.in === "header" && values[each.name]).map((each) => [each.name, values[each.name]])) });
  const curl = () => `curl -X ${operation.method} ${quoted(location.origin + path())}${key.get() ? ' -H "Authorization: Bearer $STREAMS_API_KEY"' : ""}${Object.entries(headers()).map(([name, value]) => ` -H ${quoted(`${name}: ${value}`)}`).join("")}${body ? ` -d ${quoted(body)}` : ""}`;
  const submit = async (event) => {
    event.preventDefault();
    setProblem(null);
    try { setAnswer(await raw(operation.method, path(), body, headers())); } catch (error) { setAnswer(null); setProblem(error); }
  };
  const pretty = (text) => { try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; } };
  return html`<h1><span class=${`verb ${operation.method.toLowerCase()}`}>${operation.method}</span> <code>${operation.path}</code></h1><p>${operation.summary}</p>
    <form onSubmit=${submit}>${operation.params.length > 0 && html`<h2>Parameters</h2><div class="grid">${operation.params.map((each) => html`<label title=${each.description || each.schema?.description || ""}>${each.name} (${each.in})${each.required ? " *" : ""}
      ${each.schema?.enum ? html`<select name=${each.name} value=${values[each.name] || ""} onChange=${(e) => setValues({ ...values, [each.name]: e.target.value })}><option value="">default</option>${each.schema.enum.map((one) => html`<option>${one}</option>`)}</select>`
        : html`<input name=${each.name} required=${each.required} placeholder=${each.schema?.default === undefined ? "" : String(each.schema.default)} value=${values[each.name] || ""} onInput=${(e) => setValues({ ...values, [each.name]: e.target.value })} />`}</label>`)}</div>`}
      ${(operation.schema || operation.body) && html`<h2>Body</h2><textarea rows="8" aria-label="Body" spellcheck=${false} value=${body} onInput=${(e) => setBody(e.target.value)}></textarea>`}
      ${isStream ? html`<p class="dim">This is a stream: follow it with <code>curl -N</code>.</p>` : null}
      <div class="bar">${!isStream && html`<button type="submit">Send</button>`}<${Copy} text=${curl}>Copy as curl<//></div></form><${Problem} error=${problem} />
    ${answer && html`<h2>Answer <span class=${answer.status < 400 ? "good" : "bad"}>${answer.status}</span> <span class="dim">in ${answer.tookMs.toFixed(0)} ms</span></h2><pre class="code" tabindex="0" id="answer">${pretty(answer.text)}</pre>
      <details><summary>Headers</summary><pre class="code" tabindex="0">${answer.headers.map((pair) => pair.join(": ")).join("\n")}</pre></details>`}
    ${operation.schema && html`<h2>Fields of the body</h2><${Code}>${JSON.stringify(operation.schema, null, 2)}<//>`}
    ${operation.codes.length > 0 && html`<h2>Statuses</h2><p>${operation.codes.join(", ")}</p>`}`;
}

function Explorer() {
  const { data, error } = useData(async () => { const document = await get("/v0/openapi.json"); return { version: document.info.version, rows: operations(document) }; }, []);
  const [here, setHere] = useState(decodeURIComponent(location.hash.slice(1)));
  const [filter, setFilter] = useState("");
  const [secret, setSecret] = useState(key.get() || "");
  useEffect(() => {
    const moved = () => setHere(decodeURIComponent(location.hash.slice(1)));
    const system = matchMedia("(prefers-color-scheme: dark)");
    const theme = () => { const chosen = sessionStorage.getItem("streams.theme"); document.documentElement.dataset.theme = chosen && chosen !== "auto" ? chosen : system.matches ? "dark" : "light"; };
    theme();
    system.addEventListener("change", theme);
    addEventListener("hashchange", moved);
    return () => { removeEventListener("hashchange", moved); system.removeEventListener("change", theme); };
  }, []);
  const rows = (data?.rows || []).filter((each) => `${each.id} ${each.summary}`.toLowerCase().includes(filter.toLowerCase()));
  const groups = [...new Set(rows.map((each) => each.group))];
  const operation = data?.rows.find((each) => each.id === here) || data?.rows[0];
  useEffect(() => { if (operation) document.title = `${operation.id} · streams`; }, [operation?.id]);
  return html`<header><a class="mark" href="/">streams</a><nav aria-label="Pages"><a href="/">Console</a><a href="/docs" aria-current="page">API</a><a href="/v0/openapi.json">OpenAPI</a></nav><span class="space"></span>
      <label class="inline">Key <input type="password" autocomplete="off" class="narrow" value=${secret} onInput=${(e) => { setSecret(e.target.value); if (e.target.value) key.set(e.target.value); else key.forget(); }} /></label></header>
    <main><${Problem} error=${error} />${!data && !error && html`<${Loading} />`}
    ${data && html`<div class="explorer"><div><input type="search" data-search aria-label="Find a call" placeholder="Find a call" value=${filter} onInput=${(e) => setFilter(e.target.value)} />
      <nav aria-label="Calls">${groups.map((group) => html`<h3>${group}</h3>${rows.filter((each) => each.group === group).map((each) => html`<a href=${`#${encodeURIComponent(each.id)}`} aria-current=${each.id === operation.id ? "true" : null}><span class=${`verb ${each.method.toLowerCase()}`}>${each.method}</span><span>${each.path}</span></a>`)}`)}</nav></div>
      <div><${Operation} key=${operation.id} operation=${operation} /></div></div>`}</main>`;
}

render(html`<${Explorer} />`, document.getElementById("app"));
