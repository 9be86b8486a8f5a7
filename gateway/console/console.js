// The pages of the console. Text goes into the page as text only: nothing that a record says is ever markup.

import { Refused, box, events, get, key, post, router } from "./api.js";

const REFRESH_MS = 2000;
const PAGE = 100;
const SHOWN_MAX = 200;  // records of the live tail
const DETAILS_MAX = 50;  // queues and routers that are looked at one by one

const main = document.getElementById("main");
const numbers = new Intl.NumberFormat("en");

// -- words

const count = (value) => (value == null ? "–" : numbers.format(value));

function size(bytes) {
  if (bytes == null) return "–";
  let at = 0;
  while (bytes >= 1024 && at < 4) { bytes /= 1024; at += 1; }
  return `${at ? bytes.toFixed(bytes < 10 ? 1 : 0) : bytes} ${["B", "KiB", "MiB", "GiB", "TiB"][at]}`;
}

function duration(ms) {
  const seconds = Math.floor(ms / 1000);
  if (seconds < 120) return `${seconds} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} d`;
}

const time = (ms) => (ms ? new Date(ms).toLocaleString("sv") : "never");

// -- elements

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [attribute, value] of Object.entries(attributes)) {
    if (attribute.startsWith("on")) made.addEventListener(attribute.slice(2), value);
    else if (value != null && value !== false) made.setAttribute(attribute, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

const link = (href, text) => element("a", { href }, text);
const boxLink = (name) => link(`#/boxes/${encodeURIComponent(name)}`, name);
const tile = (label, value, tone) =>
  element("div", { class: "tile" }, element("dt", {}, label), element("dd", { class: tone }, value));
const tiles = (...each) => element("dl", { class: "tiles" }, ...each);

// Columns are [title, kind]; a kind is "", "number" or "name". A cell is text or an element.
function table(columns, rows, empty) {
  const head = element("tr", {}, ...columns.map(([title, kind]) => element("th", { class: kind, scope: "col" }, title)));
  const body = rows.map((row) =>
    element("tr", {}, ...row.map((cell, at) => element("td", { class: columns[at][1] }, cell))));
  if (!rows.length) {
    body.push(element("tr", {}, element("td", { class: "empty", colspan: columns.length }, empty)));
  }
  return element("div", { class: "wide" },
    element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
}

const problem = (error) => element("p", { class: "problem", role: "alert" }, error.message);
const TONES = { ready: "good", none: "good", ok: "good", replaying: "warn", pacing: "warn", blocked: "bad" };
const word = (text) => element("span", { class: TONES[text] || "bad" }, text);

// -- overview

async function overview(signal) {
  let status;
  try {
    status = await get("/v0/status", {}, signal);
  } catch (error) {
    if (!(error instanceof Refused) || error.status !== 403) throw error;
    return [element("h1", {}, "Overview"),
      element("p", { class: "dim" }, "This key is for some boxes only, and the state of the whole server is not shown to it. ",
        link("#/boxes", "Its boxes"))];
  }
  const { disk } = status;
  const wrong = status.checks.filter((each) => each.result !== "ok");
  const why = (each) => element("span", { title: each.next_step || "" }, word("away"), each.reason ? ` ${each.reason}` : "");
  return [
    element("h1", {}, `streams ${status.version}`),
    ...wrong.map((each) => element("p", { class: "problem", role: "alert" },
      `${each.check}: ${each.found}. Next: ${each.next_step}`)),
    tiles(
      tile("Status", status.status, TONES[status.status] || "bad"),
      tile("Pressure", status.pressure, TONES[status.pressure] || "bad"),
      tile("Boxes", count(status.boxes)),
      tile("Records", count(status.records)),
      tile("Stored", size(status.bytes)),
      tile("Open streams", count(status.sse_connections)),
      tile("Watch sessions", count(status.watch_sessions)),
      tile("Memory", size(status.resident_bytes)),
      tile("Disk free", `${size(disk.free_bytes)} of ${size(disk.bytes)}`, disk.free_bytes < disk.bytes / 10 ? "bad" : null),
    ),
    element("h2", {}, "Shards"),
    table(
      [["Shard", ""], ["Status", ""], ["Pressure", ""], ["Up", "number"], ["Boxes", "number"], ["Records", "number"],
        ["Stored", "number"], ["Log queue", "number"], ["Waiting reads", "number"], ["Lag", "number"], ["Memory", "number"]],
      status.shards.map((each) => (each.status === "away" ? [String(each.shard), why(each), ...Array(9).fill("–")] : [
        String(each.shard), word(each.status), word(each.pressure), duration(each.uptime_ms), count(each.boxes),
        count(each.records), size(each.bytes), size(each.wal_queue_bytes), count(each.waiting_reads),
        `${each.lag_ms} ms`, size(each.resident_bytes)])),
      "There are none."),
    element("h2", {}, "Gateways"),
    table(
      [["Gateway", ""], ["Status", ""], ["Pressure", ""], ["Up", "number"], ["Connections", "number"],
        ["Streams", "number"], ["In flight", "number"], ["Lag", "number"], ["Memory", "number"]],
      status.gateways.map((each) => (each.status === "away" ? [String(each.gateway), why(each), ...Array(7).fill("–")] : [
        String(each.gateway), word(each.status), word(each.pressure), duration(each.uptime_ms), count(each.connections),
        count(each.sse_connections), count(each.in_flight), `${each.lag_ms} ms`, size(each.resident_bytes)])),
      "There are none."),
  ];
}

// -- boxes

function search(path, prefix) {
  const field = element("input", {
    type: "search", name: "prefix", value: prefix, placeholder: "Name begins with …", "aria-label": "Name begins with",
  });
  const go = (event) => {
    event.preventDefault();
    location.hash = field.value ? `${path}?prefix=${encodeURIComponent(field.value)}` : path;
  };
  return element("form", { class: "row", onsubmit: go }, field, element("button", {}, "Search"));
}

// Back is the browser's own: each page has its address.
function more(path, prefix, cursor) {
  if (!cursor) return null;
  const asked = new URLSearchParams({ ...(prefix ? { prefix } : {}), cursor });
  return element("p", {}, link(`${path}?${asked}`, "Next page →"));
}

async function boxes(signal, query) {
  const prefix = query.get("prefix") || "";
  const page = await get("/v0/boxes", { prefix, cursor: query.get("cursor"), page_size: PAGE }, signal);
  return [
    element("h1", {}, "Boxes"),
    search("#/boxes", prefix),
    table(
      [["Box", "name"], ["Type", ""], ["Records", "number"], ["Stored", "number"], ["First", "number"], ["Head", "number"],
        ["Durability", ""], ["Priority", "number"]],
      page.boxes.map((each) => [boxLink(each.box), each.type, count(each.count), size(each.bytes), count(each.earliest_seq),
        count(each.head_seq), each.durability, count(each.effective_priority)]),
      prefix ? `No box begins with ${prefix}` : "There is no box yet."),
    more("#/boxes", prefix, page.next_cursor),
  ];
}

// -- one box

async function state(name, signal) {
  const found = await get(box(name), { touch: "false" }, signal);
  const shown = [
    tile("Type", found.type), tile("Records", count(found.count)), tile("Stored", size(found.bytes)),
    tile("Live seqs", found.count ? `${count(found.earliest_seq)} – ${count(found.head_seq)}` : "none"),
    tile("Durability", found.config.durability), tile("Priority", count(found.effective_priority)),
    tile("Last write", time(found.last_write_ts)), tile("Last read", time(found.last_read_ts)),
  ];
  if (found.queue) {
    shown.push(tile("Ready", count(found.queue.ready)), tile("In flight", count(found.queue.in_flight)),
      tile("Dead-lettered", count(found.queue.dead_lettered), found.queue.dead_lettered ? "warn" : null));
  }
  return [tiles(...shown), found];
}

function line(record) {
  const { $seq: seq, $ts: ts, $tag: tag, data } = record;
  return element("li", { title: new Date(ts).toISOString() }, element("span", { class: "seq" }, String(seq)),
    tag == null ? null : element("span", { class: "tag" }, tag), JSON.stringify(data));
}

// Numbers keep their digits (1.0, 1e400, twenty of them) where the browser can tell them.
function exact(name, value, context) {
  const isOther = typeof value === "number" && context?.source !== undefined && String(value) !== context.source;
  return isOther && JSON.rawJSON ? JSON.rawJSON(context.source) : value;
}

// Follows the box until `signal` is aborted; a stream that ends is opened again where it was.
async function follow(name, from, list, told, signal) {
  let at = from;
  const show = (item) => {
    const isAtEnd = list.parentElement.scrollTop + list.parentElement.clientHeight >= list.parentElement.scrollHeight - 8;
    list.append(item);
    while (list.childElementCount > SHOWN_MAX) list.firstElementChild.remove();
    if (isAtEnd) list.parentElement.scrollTop = list.parentElement.scrollHeight;
  };
  while (!signal.aborted) {
    try {
      told("live", "good");
      await events(`${box(name, "/watch")}?from_seq=${at}&include_tags=true`, (event, text) => {
        const data = JSON.parse(text, exact);
        if (event === "record") {
          data.records.forEach((record) => show(line(record)));
          at = data.to_seq;
        } else if (event === "tombstone") {
          show(element("li", { class: "gap" }, `${data.gap_from} – ${data.gap_to} are gone: ${data.reason}`));
          at = Math.max(at, data.gap_to);
        } else if (event === "box-deleted") {
          show(element("li", { class: "gap" }, "The box was deleted."));
        }
      }, signal);
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refused && error.status < 500 && error.status !== 429) { told(error.message, "bad"); return; }
    }
    if (signal.aborted) return;
    told("connecting again …", "warn");
    await new Promise((resolve) => { setTimeout(resolve, REFRESH_MS); });
  }
}

async function oneBox(signal, query, name) {
  const [shown, found] = await state(name, signal);
  const facts = element("div", {}, shown);
  const list = element("ol", {});
  const told = element("span", { class: "pill", role: "status" }, "…");
  const tell = (text, tone) => { told.textContent = text; told.className = `pill ${tone}`; };
  let following = null;
  const pause = element("button", { type: "button", onclick: () => toggle() }, "Pause");
  let last = Math.max(0, found.head_seq - 50);
  const toggle = () => {
    if (following) {
      following.abort();
      following = null;
      last = Number(list.querySelector("li:last-child .seq")?.textContent || last);
      pause.textContent = "Go on";
      tell("paused", "");
      return;
    }
    following = new AbortController();
    pause.textContent = "Pause";
    follow(name, last, list, tell, AbortSignal.any([signal, following.signal]));
  };
  const data = element("textarea", { "aria-label": "Data, as JSON", spellcheck: "false" });
  data.value = '{"hello": "world"}';
  const tag = element("input", { "aria-label": "Tag", placeholder: "Tag (optional)" });
  const result = element("p", { role: "status", class: "dim" });
  const send = async (event) => {
    event.preventDefault();
    try {
      JSON.parse(data.value);
    } catch (error) {
      result.replaceChildren(element("span", { class: "bad" }, `This is not JSON: ${error.message}`));
      return;
    }
    const record = `{"data":${data.value}${tag.value ? `,"tag":${JSON.stringify(tag.value)}` : ""}}`;
    try {
      const answer = await post(box(name), `{"records":[${record}]}`, signal);
      result.textContent = `Written as ${answer.first_seq} in ${answer.performance.server_total_ms} ms.`;
    } catch (error) {
      if (!signal.aborted) result.replaceChildren(element("span", { class: "bad" }, error.message));
    }
  };
  toggle();
  every(signal, async () => facts.replaceChildren((await state(name, signal))[0]));
  return [
    element("h1", {}, name),
    facts,
    element("h2", {}, "Records"),
    element("div", { class: "split" },
      element("div", {}, element("div", { class: "bar" }, told, pause), element("div", { class: "records" }, list)),
      element("div", {},
        element("h2", {}, "Append"),
        element("form", { onsubmit: send }, data, element("div", { class: "bar" }, tag, element("button", {}, "Append")), result),
        element("h2", {}, "Config"),
        element("div", { class: "wide" }, element("pre", {}, JSON.stringify(found.config, null, 2))))),
  ];
}

// -- queues and routers

async function queues(signal, query) {
  const prefix = query.get("prefix") || "";
  const page = await get("/v0/boxes", { prefix, cursor: query.get("cursor"), page_size: 1000 }, signal);
  const found = page.boxes.filter((each) => each.type === "queue");
  const looked = await Promise.all(found.slice(0, DETAILS_MAX).map((each) =>
    get(box(each.box), { touch: "false" }, signal).catch(() => null)));
  return [
    element("h1", {}, "Queues"),
    search("#/queues", prefix),
    table(
      [["Queue", "name"], ["Ready", "number"], ["In flight", "number"], ["Dead-lettered", "number"], ["Stored", "number"],
        ["Lease", "number"], ["Dead letters go to", "name"]],
      looked.filter(Boolean).map((each) => [boxLink(each.box), count(each.queue.ready), count(each.queue.in_flight),
        count(each.queue.dead_lettered), size(each.bytes), `${each.config.lease_ms} ms`,
        each.config.dead_letter ? boxLink(each.config.dead_letter) : "–"]),
      "There is no queue among these boxes."),
    found.length > DETAILS_MAX
      ? element("p", { class: "dim" }, `${found.length - DETAILS_MAX} more; search by the beginning of their names.`) : null,
    more("#/queues", prefix, page.next_cursor),
  ];
}

async function routers(signal, query) {
  const prefix = query.get("prefix") || "";
  const page = await get("/v0/routers", { prefix, cursor: query.get("cursor"), page_size: DETAILS_MAX }, signal);
  const looked = await Promise.all(page.routers.map((each) =>
    get(router(each.router), {}, signal).catch(() => ({ ...each, state: "away" }))));
  return [
    element("h1", {}, "Routers"),
    search("#/routers", prefix),
    table(
      [["Router", "name"], ["From", "name"], ["To", "name"], ["State", ""], ["Lag", "number"], ["Forwarded", "number"],
        ["Last error", "name"]],
      looked.map((each) => [each.router, boxLink(each.source), boxLink(each.dest), word(each.state), count(each.lag),
        count(each.forwarded_total), each.last_error || "–"]),
      "There is no router yet."),
    more("#/routers", prefix, page.next_cursor),
  ];
}

// -- where we are

const PAGES = { "": overview, boxes, queues, routers };
let leaving = new AbortController();

// One at a time, and none while nobody looks.
function every(signal, work) {
  const again = () => setTimeout(async () => {
    if (signal.aborted) return;
    if (!document.hidden) await work().catch(failed(signal));
    if (!signal.aborted) again();
  }, REFRESH_MS);
  again();
}

// A page is left as it is while somebody types, has gone to a link by keyboard, or has marked some text.
function isInUse() {
  const { activeElement } = document;
  return (main.contains(activeElement) && activeElement !== main) || getSelection().type === "Range";
}

const failed = (signal) => (error) => {
  if (signal.aborted) return;
  if (error instanceof Refused && error.status === 401) {
    ask(error.message);
    return;
  }
  main.querySelector(".problem")?.remove();
  main.prepend(problem(error));
};

async function open() {
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  const [path, asked] = location.hash.replace(/^#\/?/, "").split("?");
  const [page, name] = path.split("/");
  const query = new URLSearchParams(asked);
  for (const each of document.querySelectorAll("nav a")) {
    const isHere = each.hash.replace(/^#\/?/, "") === page;
    each.classList.toggle("here", isHere);
    if (isHere) each.setAttribute("aria-current", "page");
    else each.removeAttribute("aria-current");
  }
  const isBox = page === "boxes" && name;
  const make = isBox ? oneBox : PAGES[page] || overview;
  const draw = async () => {
    const made = await make(signal, query, isBox ? decodeURIComponent(name) : "");
    if (!signal.aborted && !isInUse()) main.replaceChildren(...made.filter(Boolean));
  };
  document.getElementById("forget").hidden = !key.get();
  main.replaceChildren(element("p", { class: "dim" }, "…"));
  main.focus();
  getSelection().removeAllRanges();
  await draw().catch((error) => {
    main.replaceChildren();
    failed(signal)(error);
  });
  if (!isBox) every(signal, draw);
}

async function pulse() {
  const shown = document.getElementById("state");
  try {
    const answer = await fetch("/v0/ready", { cache: "no-store", headers: key.get() ? { Authorization: `Bearer ${key.get()}` } : {} });
    shown.textContent = answer.ok ? "ready" : answer.status === 401 ? "asks for a key" : "not ready";
    shown.className = `pill ${answer.ok ? "good" : "warn"}`;
  } catch {
    shown.textContent = "does not answer";
    shown.className = "pill bad";
  }
  setTimeout(pulse, REFRESH_MS);
}

function ask(why) {
  const dialog = document.getElementById("ask");
  if (dialog.open) return;
  document.getElementById("ask-why").textContent = why;
  document.getElementById("key").value = "";
  dialog.showModal();
}

document.getElementById("ask").addEventListener("close", () => {
  const given = document.getElementById("key").value.trim();
  document.getElementById("key").value = "";
  if (given) {
    key.set(given);
    open();
  }
});
document.getElementById("forget").addEventListener("click", () => {
  key.forget();
  open();
});
addEventListener("hashchange", open);
open();
pulse();
