// The live tail: keeps records within bounds and draws those in view, at most once a frame.
//
//     event ──► buffer (bounded by records and bytes) ──► rows in view, drawn in the next animation frame
//
// A frame reads the scroll position once, then writes. Rows are a fixed pool of elements whose text changes, so the page
// has the same number of elements at any rate. Records are parsed for display only when they come into view.
//
// Counts: received = kept + dropped. Records leave the buffer from the front, in whole batches.

import { parseExact } from "./api.js";
import { filterOf } from "./filter.js";
import { payload } from "./payload.js";
import { localTime } from "./ui.js";

export const RECORDS_MAX = 100_000;
export const BYTES_MAX = 48 * 1024 * 1024;
const ROW = 24;
const POOL = 64;

export class Tail {
  constructor(place, { isStream, onCounts, onOpen }) {
    this.place = place;
    this.isStream = isStream;
    this.onCounts = onCounts;
    this.batches = [];
    this.rows = [];
    this.bytes = 0;
    this.received = 0;
    this.dropped = 0;
    this.filter = null;
    this.frame = 0;
    this.layouts = 0;
    this.frames = 0;
    this.isAtEnd = true;
    this.rates = [];
    this.inner = document.createElement("div");
    this.inner.className = "tail-inner";
    this.pool = Array.from({ length: POOL }, () => {
      const line = document.createElement("div");
      line.className = "tail-row";
      const parts = ["seq", "when", "tag", "text"].map((name) => {
        const part = document.createElement("span");
        part.className = name;
        line.append(part);
        return part;
      });
      this.inner.append(line);
      return { line, parts, row: null };
    });
    place.replaceChildren(this.inner);
    this.inner.addEventListener("click", (event) => {
      const row = this.pool.find((each) => each.line.contains(event.target))?.row;
      if (row?.batch) onOpen(this.record(row));
    });
    this.onScroll = () => { this.hasScrolled = true; this.plan(); };
    place.addEventListener("scroll", this.onScroll, { passive: true });
    this.resized = new ResizeObserver(() => { this.height = place.clientHeight; this.plan(); });
    this.resized.observe(place);
    this.height = 600;
  }

  close() {
    cancelAnimationFrame(this.frame);
    this.resized.disconnect();
    this.place.removeEventListener("scroll", this.onScroll);
  }

  // `text` is the data of one event; `records` are its records, parsed plainly.
  add(text, records) {
    const batch = { text, count: records.length, exact: null };
    this.batches.push(batch);
    this.bytes += text.length * 2;
    this.received += records.length;
    records.forEach((record, at) => this.rows.push({ batch, at, gap: null }));
    this.dropFront();
    this.plan();
  }

  addGap(gap) {
    this.rows.push({ batch: null, at: 0, gap });
    this.plan();
  }

  dropFront() {
    let count = 0;
    while (this.batches.length > 1 && (this.received - this.dropped - count > RECORDS_MAX || this.bytes > BYTES_MAX)) {
      const batch = this.batches.shift();
      this.bytes -= batch.text.length * 2;
      count += batch.count;
    }
    if (!count) return;
    this.dropped += count;
    let cut = 0;
    for (let left = count; left > 0; cut += 1) if (this.rows[cut].batch) left -= 1;
    this.rows.splice(0, cut);
  }

  setFilter(text) {
    this.filter = filterOf(text, this.isStream);
    this.matching = null;
    this.plan();
  }

  record(row) {
    if (!row.batch.exact) row.batch.exact = parseExact(row.batch.text).records;
    return row.batch.exact[row.at];
  }

  visible() {
    if (!this.filter) return this.rows;
    if (!this.matching || this.matching.first !== this.rows[0]) this.matching = { first: this.rows[0], upTo: 0, rows: [] };
    const { matching } = this;
    for (; matching.upTo < this.rows.length; matching.upTo += 1) {
      const row = this.rows[matching.upTo];
      if (row.gap || this.filter(this.record(row))) matching.rows.push(row);
    }
    return matching.rows;
  }

  // The records that are kept and match, the newest last; at most `max` of them.
  kept(max) {
    return this.visible().filter((row) => row.batch).slice(-max).map((row) => this.record(row));
  }

  plan() {
    if (!this.frame) this.frame = requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = 0;
    this.frames += 1;
    const rows = this.visible();
    const total = rows.length * ROW;
    const longest = Math.max(0, total - this.height);
    // One read of the layout, before anything is written.
    if (this.hasScrolled) {
      const { scrollTop } = this.place;
      this.layouts += 1;
      this.isAtEnd = scrollTop >= (this.lastTotal || 0) - this.height - ROW;
      this.top = scrollTop;
      this.hasScrolled = false;
    }
    const top = this.isAtEnd ? longest : Math.min(this.top || 0, longest);
    const first = Math.max(0, Math.floor(top / ROW) - 4);
    this.inner.style.height = `${total}px`;
    this.lastTotal = total;
    this.pool.forEach((each, at) => this.fill(each, rows[first + at], first + at));
    if (this.isAtEnd && this.top !== longest) { this.place.scrollTop = longest; this.top = longest; }
    if (this.batches.length > 200) for (const batch of this.batches.slice(0, -100)) batch.exact = null;
    this.onCounts(this);
  }

  fill(each, row, at) {
    if (!row) { if (each.row !== null) { each.line.hidden = true; each.row = null; } return; }
    if (each.row !== row) {
      each.row = row;
      each.line.hidden = false;
      const [seq, when, tag, text] = each.parts;
      if (row.gap) {
        each.line.className = "tail-row gap";
        seq.textContent = when.textContent = tag.textContent = "";
        text.textContent = row.gap;
      } else {
        const record = this.record(row);
        each.line.className = "tail-row";
        seq.textContent = record.$seq;
        when.textContent = localTime(record.$ts).slice(11);
        tag.textContent = record.$tag ?? "";
        text.textContent = payload(record, this.isStream).line;
      }
    }
    each.line.style.transform = `translateY(${at * ROW}px)`;
  }
}
