// The whole server at a glance: what needs attention, charts of the last 15 minutes, processes.

import { get } from "./api.js";
import { Chart } from "./charts.js";
import { Badge, Loading, Problem, State, Table, Tile, Tiles, count, counted, duration, html, setQuery, short, size, useData, useEffect, useRef, useState } from "./ui.js";

const SECONDS = 900;

// The history, filled once and then moved on by the second.
function useHistory() {
  const [state, setState] = useState(null);
  const kept = useRef(null);
  useEffect(() => {
    const leaving = new AbortController();
    let timer = 0;
    const add = (answer) => {
      const old = kept.current;
      if (!old) { kept.current = answer; return; }
      for (const [name, values] of Object.entries(answer.series)) {
        const line = old.series[name] || (old.series[name] = Array(SECONDS).fill(null));
        const shift = Math.round((answer.from_ts - old.from_ts) / 1000) + values.length - SECONDS;
        const moved = shift > 0 ? line.slice(shift).concat(Array(Math.min(shift, SECONDS)).fill(null)).slice(-SECONDS) : line.slice();
        values.forEach((value, at) => { moved[SECONDS - values.length + at] = value; });
        old.series[name] = moved;
      }
      old.from_ts = answer.from_ts + (Object.values(answer.series)[0].length - SECONDS) * 1000;
    };
    const run = async () => {
      try {
        if (!document.hidden || !kept.current) {
          add(await get("/v0/history", { seconds: kept.current ? 5 : SECONDS }, leaving.signal));
          const start = kept.current.from_ts / 1000;
          setState({ times: Array.from({ length: SECONDS }, (each, at) => start + at), series: { ...kept.current.series } });
        }
      } catch { /* the status says what is wrong */ }
      if (!leaving.signal.aborted) timer = setTimeout(run, 1000);
    };
    run();
    return () => { leaving.abort(); clearTimeout(timer); };
  }, []);
  return state;
}

const RANGES = [[120, "2 min"], [300, "5 min"], [900, "15 min"]];

function Charts({ query }) {
  const history = useHistory();
  if (!history) return html`<${Loading} />`;
  // A young server has little to show: the shortest range that has all of it.
  const begins = (history.series.requests || []).findIndex((value) => value != null);
  const recorded = begins < 0 ? 0 : SECONDS - begins;
  const seconds = Number(query.get("range")) || RANGES.find(([each]) => each >= recorded)[0];
  const times = history.times.slice(-seconds);
  const series = Object.fromEntries(Object.entries(history.series).map(([name, values]) => [name, values.slice(-seconds)]));
  const line = (label, name, colour) => ({ label, values: series[name] || [], colour });
  const shards = (name) => Object.keys(series).filter((each) => each.startsWith(`${name}.`)).slice(0, 4)
    .map((each, at) => line(`shard ${each.split(".")[1]}`, each, at + 1));
  const rate = (value) => `${short(value)}/s`;
  const ms = (value) => `${short(value)} ms`;
  return html`<div class="title"><h2>Last ${duration(seconds * 1000)}</h2><div class="segmented" role="group" aria-label="Range of the charts">${RANGES.map(([each, words]) => html`
    <button class="small" aria-pressed=${each === seconds} onClick=${() => setQuery({ range: each })}>${words}</button>`)}</div></div><div class="charts">
    <${Chart} title="Records" times=${times} format=${rate} series=${[line("appended", "records_appended", 1), line("read", "records_read", 2)]} />
    <${Chart} title="Requests" times=${times} format=${rate} series=${[line("all", "requests", 1), line("throttled", "throttled", 3), line("errors", "errors", 4)]} />
    <${Chart} title="Log written" times=${times} isBytes=${true} format=${(value) => `${size(value)}/s`} series=${[line("bytes", "bytes_logged", 1)]} />
    <${Chart} title="Append acknowledged" times=${times} format=${ms} series=${[line("p50", "ack_p50_ms", 1), line("p99", "ack_p99_ms", 3)]} />
    <${Chart} title="Disk sync (fsync)" times=${times} format=${ms} series=${[line("p50", "fsync_p50_ms", 1), line("p99", "fsync_p99_ms", 3)]} />
    <${Chart} title="Pressure" times=${times} max=${2} format=${(value) => ["none", "pacing", "throttling"][Math.round(value)] || ""} series=${[line("level", "pressure", 4)]} />
    <${Chart} title="CPU of shards (cores)" times=${times} max=${1} format=${short} series=${shards("shard_cpu")} />
    <${Chart} title="Event loop lag of shards" times=${times} max=${5} format=${ms} series=${shards("shard_lag_ms")} />
    <${Chart} title="Memory of shards" times=${times} isBytes=${true} format=${size} series=${shards("shard_bytes")} />
    <${Chart} title="Disk free" times=${times} isBytes=${true} format=${size} series=${[line("free", "disk_free_bytes", 2)]} />
  </div>`;
}

// Groups whose unread records expire soon, from the metrics of lag and the TTL of each box.
async function expiring(signal) {
  const { metrics } = await get("/v0/metrics", {}, signal, { Accept: "application/json" });
  const ages = metrics.find((each) => each.name === "streams_group_lag_seconds")?.samples || [];
  const worst = ages.filter((each) => each.labels.box && each.value > 60).sort((a, b) => b.value - a.value).slice(0, 10);
  const found = await Promise.all(worst.map(async (each) => {
    const state = await get(`/v0/boxes/${encodeURIComponent(each.labels.box)}`, { touch: "false" }, signal).catch(() => null);
    return state?.config.ttl_ms && each.value * 1000 > 0.8 * state.config.ttl_ms ? each : null;
  }));
  return found.filter(Boolean);
}

function Attention({ status }) {
  const dead = useData((signal) => get("/v0/boxes", { kind: "queue", sort: "ready", page_size: 100 }, signal), [], 10000);
  const soon = useData(expiring, [], 30000);
  const items = status.checks.filter((each) => each.result === "wrong").map((each) => ({
    tone: "bad", title: each.check, text: each.found, step: each.next_step, href: { routers: "#/routers" }[each.check] || "#/operations" }));
  for (const queue of (dead.data?.boxes || []).filter((each) => each.queue?.dead_lettered).slice(0, 5)) {
    items.push({ tone: "warn", title: "dead letters", text: `${queue.box} has given up on ${counted(queue.queue.dead_lettered, "job")} so far`,
      step: "Look at the jobs and their errors, repair the cause, then requeue them.", href: `#/boxes/${encodeURIComponent(queue.box)}/dead` });
  }
  for (const each of soon.data || []) {
    items.push({ tone: "warn", title: "retention", text: `group ${each.labels.group} of ${each.labels.box} is ${duration(each.value * 1000)} behind; its records are about to expire`,
      step: "Speed the reader up, or raise ttl_ms of the box.", href: `#/boxes/${encodeURIComponent(each.labels.box)}/groups` });
  }
  if (!items.length) return html`<div class="note good" role="status"><b>Nothing needs attention.</b> <span class="dim">${status.checks.length} checks pass; no queue has dead letters.</span></div>`;
  return html`<ul class="attention">${items.map((each) => html`<li class=${each.tone}><${Badge} tone=${each.tone}>${each.title}<//>
    <div><div>${each.text}</div><div class="dim">${each.step} <a href=${each.href}>Show</a></div></div></li>`)}</ul>`;
}

const why = (each) => (each.reason ? `${each.status}: ${each.reason}` : each.status);
export function Processes({ status }) {
  const common = [
    { title: "Status", cell: (each) => html`<${State} text=${why(each)} />` },
    { title: "Pressure", cell: (each) => (each.pressure ? html`<${State} text=${each.pressure} />` : "–") },
    { title: "Up", kind: "number", cell: (each) => duration(each.uptime_ms) },
  ];
  const tail = [
    { title: "Lag", kind: "number", cell: (each) => (each.lag_ms == null ? "–" : `${each.lag_ms} ms`) },
    { title: "Memory", kind: "number", cell: (each) => size(each.resident_bytes) },
  ];
  const number = (title, name, format = count) => ({ title, kind: "number", cell: (each) => format(each[name]) });
  return html`<h2>Shards</h2><${Table} label="Shards" rows=${status.shards} empty="There are none." columns=${[
    { title: "Shard", cell: (each) => each.shard }, ...common, number("Boxes", "boxes"), number("Records", "records"), number("Stored", "bytes", size),
    number("Log queue", "wal_queue_bytes", size), number("Waiting reads", "waiting_reads"), number("Waiting claims", "waiting_claims"), ...tail]} />
  <h2>Gateways</h2><${Table} label="Gateways" rows=${status.gateways} empty="There are none." columns=${[
    { title: "Gateway", cell: (each) => each.gateway }, ...common, number("Connections", "connections"), number("Open streams", "sse_connections"),
    number("In flight", "in_flight"), ...tail]} />`;
}

export function Overview({ query }) {
  const { data: status, error } = useData((signal) => get("/v0/status", {}, signal), [], 3000);
  if (!status) return html`<h1>Overview</h1><${Problem} error=${error} />${!error && html`<${Loading} />`}`;
  const { disk, queues, routers } = status;
  return html`<h1>Overview</h1><${Problem} error=${error} />
    <${Attention} status=${status} />
    <${Tiles}>
      <${Tile} label="Status" value=${status.status} tone=${status.status === "ready" ? "good" : "bad"} sub=${`version ${status.version}`} />
      ${status.role && html`<${Tile} label="Role" value=${status.role} sub=${status.replica_lag == null ? "" : `replica lag ${count(status.replica_lag)}`} />`}
      <${Tile} label="Boxes" value=${count(status.boxes)} href="#/boxes" sub=${`${count(status.records)} records`} />
      <${Tile} label="Stored" value=${size(status.bytes)} sub=${`${size(disk.free_bytes)} of ${size(disk.bytes)} free`} tone=${disk.level === "ok" ? "" : "bad"} />
      <${Tile} label="Jobs ready" value=${count(queues.ready)} href="#/queues" sub=${`${count(queues.in_flight)} in flight · oldest ${duration(queues.oldest_s * 1000)}`} />
      <${Tile} label="Routers" value=${count(routers.routers)} href="#/routers" tone=${routers.blocked_routers ? "bad" : ""} sub=${routers.blocked_routers ? `${routers.blocked_routers} blocked` : `${count(routers.lag)} records behind`} />
      <${Tile} label="Open streams" value=${count(status.sse_connections)} sub=${`${count(status.watch_sessions)} watch sessions`} />
    <//>
    <${Charts} query=${query} /><${Processes} status=${status} />`;
}
