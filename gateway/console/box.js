// One box: its head and its tabs. Each tab has a file of its own.

import { box, get, serverRoutes } from "./api.js";
import { DeadLetters } from "./dead.js";
import { Groups } from "./groups.js";
import { Jobs } from "./jobs.js";
import { Live } from "./live.js";
import { Produce } from "./produce.js";
import { Records } from "./records.js";
import { BoxRouters } from "./routers.js";
import { Settings } from "./settings.js";
import { Badge, Copy, Empty, Loading, Problem, Tabs, Tile, Tiles, Time, boxPath, count, duration, html, size, useData } from "./ui.js";

export function Box({ name, tab, query, may }) {
  const { data: state, error, reload } = useData((signal) => get(box(name), { touch: "false" }, signal), [name], 2500);
  const routes = useData(serverRoutes, []);
  if (!state) return html`<h1 class="name">${name}</h1><${Problem} error=${error} />
    ${error?.status === 404 && html`<${Empty} title="This box does not exist">The first append creates it. <a href="#/boxes">All boxes</a><//>`}${!error && html`<${Loading} />`}`;
  const isStream = state.type === "stream";
  const isQueue = state.type === "queue";
  const has = (route) => routes.data?.has(route);
  const tabs = [["records", "Records"], ["live", "Live"]];
  if (may("write") && !isStream) tabs.push(["produce", "Produce"]);
  if (isQueue) tabs.push(["jobs", "Jobs"]);
  if (isQueue && state.config.dead_letter) tabs.push(["dead", "Dead letters"]);
  tabs.push(["groups", "Groups"], ["routers", "Routers"], ["settings", "Settings"]);
  const here = tabs.some(([id]) => id === tab) ? tab : "records";
  const Page = { records: Records, live: Live, produce: Produce, jobs: Jobs, dead: DeadLetters, groups: Groups, routers: BoxRouters, settings: Settings }[here];
  const { queue } = state;
  return html`<div class="title"><h1 class="name">${name}</h1><${Badge}>${state.type}<//><${Badge}>${state.config.durability}<//>
    ${state.config.paused && html`<${Badge} tone="warn">paused<//>`}<span class="space"></span>
    <${Copy} text=${() => location.href}>Copy link<//></div><${Problem} error=${error} />
    <${Tiles}>
      <${Tile} label="Records" value=${count(state.count)} sub=${size(state.bytes)} />
      <${Tile} label="Live seqs" value=${state.count ? `${count(state.earliest_seq)} – ${count(state.head_seq)}` : "none"} sub=${`next ${count(state.next_seq)}`} />
      ${queue && html`<${Tile} label="Ready" value=${count(queue.ready)} sub=${`${count(queue.in_flight)} in flight · ${count(queue.delayed)} delayed`} />
        <${Tile} label="Dead-lettered" value=${count(queue.dead_lettered)} tone=${queue.dead_lettered ? "warn" : ""} />`}
      <${Tile} label="Last write" value=${html`<${Time} ms=${state.last_write_ts} age=${true} />`} />
      <${Tile} label="Last read" value=${html`<${Time} ms=${state.last_read_ts} age=${true} />`} sub=${`priority ${state.effective_priority.toFixed(0)}${state.config.ttl_ms ? ` · TTL ${duration(state.config.ttl_ms)}` : ""}`} />
    <//>
    <${Tabs} label="Parts of the box" here=${here} tabs=${tabs.map(([id, title]) => [id, title, boxPath(name, id)])} />
    <${Page} name=${name} state=${state} query=${query} may=${may} has=${has} reload=${reload} />`;
}
