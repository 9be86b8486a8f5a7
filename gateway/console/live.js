// The records of a box as they are written. Paused, nothing is lost: the tail goes on where it was.

import { Refused, box, events } from "./api.js";
import { FILTER_HELP } from "./filter.js";
import { PayloadView } from "./payload.js";
import { RECORDS_MAX, Tail } from "./tail.js";
import { Badge, boxPath, count, html, localTime, save, short, useEffect, useRef, useState } from "./ui.js";

const BACKLOG = 50;
const AGAIN_MS = 1500;
const EXPORT_MAX = 10_000;

// Follows the box until `signal` is aborted; a stream that ends is opened again where it was.
async function follow(name, tail, place, tell, signal) {
  const at = place;
  while (!signal.aborted) {
    try {
      tell("live", "good");
      await events(`${box(name, "/watch")}?from_seq=${at.seq}&include_tags=true&touch=false&limit=250`, (event, text) => {
        const data = JSON.parse(text);
        if (event === "record") {
          tail.add(text, data.records);
          at.seq = data.to_seq;
        } else if (event === "tombstone") {
          tail.addGap(`${data.gap_from} – ${data.gap_to} are gone: ${data.reason}`);
          at.seq = Math.max(at.seq, data.gap_to);
        } else if (event === "box-deleted") tail.addGap("The box was deleted.");
      }, signal);
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refused && error.status && error.status < 500 && error.status !== 429) { tell(error.message, "bad"); return; }
    }
    if (signal.aborted) return;
    tell("connecting again …", "warn");
    await new Promise((resolve) => { setTimeout(resolve, AGAIN_MS); });
  }
}

export function Live({ name, state }) {
  const place = useRef(null);
  const tail = useRef(null);
  const position = useRef({ seq: Math.max(0, state.head_seq - BACKLOG) });
  const [isPaused, setPaused] = useState(false);
  const [opened, setOpened] = useState(null);
  const [word, setWord] = useState(["…", ""]);
  const [counts, setCounts] = useState({ received: 0, kept: 0, dropped: 0, rate: 0 });

  useEffect(() => {
    let lastAt = performance.now();
    let lastCount = 0;
    const mine = new Tail(place.current, {
      isStream: state.type === "stream",
      onOpen: setOpened,
      onCounts: (each) => {
        const data = place.current?.dataset;
        if (data) Object.assign(data, { received: each.received, kept: each.received - each.dropped, dropped: each.dropped, frames: each.frames, layouts: each.layouts });
      },
    });
    tail.current = mine;
    const timer = setInterval(() => {
      const now = performance.now();
      setCounts({ received: mine.received, kept: mine.received - mine.dropped, dropped: mine.dropped, rate: (mine.received - lastCount) * 1000 / (now - lastAt) });
      lastAt = now;
      lastCount = mine.received;
    }, 500);
    return () => { clearInterval(timer); mine.close(); };
  }, [name]);
  useEffect(() => {
    if (isPaused) { setWord(["paused", "warn"]); return undefined; }
    const leaving = new AbortController();
    follow(name, tail.current, position.current, (text, tone) => setWord([text, tone]), leaving.signal);
    return () => leaving.abort();
  }, [name, isPaused]);
  useEffect(() => {
    const toggle = () => setPaused((old) => !old);
    addEventListener("toggle-live", toggle);
    return () => removeEventListener("toggle-live", toggle);
  }, []);
  return html`<div class="bar"><${Badge} tone=${word[1]}><span id="live-state">${word[0]}</span><//>
      <button id="pause" aria-pressed=${isPaused} onClick=${() => setPaused(!isPaused)}>${isPaused ? "Resume" : "Pause"} <kbd>space</kbd></button>
      <button class="quiet" onClick=${() => tail.current && (tail.current.isAtEnd = true, tail.current.plan())}>To the end</button>
      <button class="quiet" title=${`The newest ${count(EXPORT_MAX)} that are kept and match`} onClick=${() => save(`${name}.ndjson`, "application/x-ndjson", tail.current.kept(EXPORT_MAX).map((each) => `${JSON.stringify(each)}\n`).join(""))}>NDJSON</button>
      <label class="inline" title=${FILTER_HELP}>Contains, or field <input data-search placeholder="total > 100  ( / )" onInput=${(e) => tail.current.setFilter(e.target.value)} /></label><span class="space"></span>
      <span class="dim" id="live-counts"><b>${short(counts.rate)}</b>/s · ${count(counts.received)} received · ${count(counts.kept)} kept${counts.dropped ? html` · <b class="warn">${count(counts.dropped)} dropped</b> (the newest ${count(RECORDS_MAX)} are kept)` : null}</span></div>
    <div class="tail" id="tail" ref=${place} tabindex="0" role="log" aria-live="off" aria-label="Live records"></div>
    ${opened ? html`<section class="panel" id="opened" key=${opened.$seq}><div class="title"><h2>Record ${opened.$seq}</h2><span class="dim">${localTime(opened.$ts)}</span>${opened.$tag != null && html`<${Badge}>${opened.$tag}<//>`}<span class="space"></span>
      <a href=${boxPath(name, "records", { from: opened.$seq - 1, open: opened.$seq })}>In Records</a><button class="quiet small" onClick=${() => setOpened(null)}>Close</button></div><${PayloadView} record=${opened} isStream=${state.type === "stream"} /></section>`
      : html`<p class="dim small">Click a record to look into it.</p>`}`;
}
