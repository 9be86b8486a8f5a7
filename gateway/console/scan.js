// Reads pages of a box, forward or backward, and keeps the records that a filter wants. It looks at a bounded number of records.

import { diff } from "./api.js";

export const PAGE = 50;
export const LOOK_MAX = 50_000;
const STEP = 1000;
const STEPS_MAX = 200;

// Pages from a place on: { records, tombstone, looked, isPartial, first, last }. `last` is where the next page begins.
export async function forward({ name, options, keep, onLook, signal }, start) {
  if (!keep) return diff(name, { ...options, ...start, limit: PAGE }, signal);
  const found = { records: [], tombstone: null, looked: 0, isPartial: false };
  let place = start;
  for (let step = 0; step < STEPS_MAX; step += 1) {
    const page = await diff(name, { ...options, ...place, limit: STEP }, signal);
    found.looked += page.records.length;
    onLook(found.looked);
    for (const record of page.records) {
      if (keep(record)) found.records.push(record);
      if (found.records.length >= PAGE) return found;
    }
    place = { from_seq: page.next_from_seq };
    found.last = page.next_from_seq;
    if (page.caught_up) { found.last = undefined; return found; }
    if (found.looked >= LOOK_MAX) break;
  }
  found.isPartial = true;
  return found;
}

// All records after `from` and before `before`, in as many pages as it takes.
async function windowOf(name, options, from, before, signal) {
  const records = [];
  let tombstone = null;
  let earliest = 1;
  for (let at = from; at < before - 1;) {
    const page = await diff(name, { ...options, from_seq: at, limit: STEP }, signal);
    tombstone ||= page.tombstone;
    earliest = page.earliest_seq;
    records.push(...page.records.filter((each) => each.$seq < before));
    if (page.caught_up || page.next_from_seq <= at || page.records.at(-1)?.$seq >= before) break;
    at = page.next_from_seq;
  }
  return { records, tombstone, earliest };
}

// The last records before a seq, oldest first. Gaps and filters make it look further back, in growing steps.
export async function backward({ name, options, keep, onLook, signal }, before) {
  const found = { records: [], tombstone: null, looked: 0, isPartial: false };
  let end = before;
  let span = keep ? STEP : PAGE;
  for (let step = 0; step < STEPS_MAX && end > 1; step += 1) {
    const from = Math.max(0, end - 1 - span);
    const part = await windowOf(name, options, from, end, signal);
    found.looked += part.records.length;
    if (keep) onLook(found.looked);
    found.records = (keep ? part.records.filter(keep) : part.records).concat(found.records);
    found.tombstone = part.tombstone;
    if (found.records.length >= PAGE) {
      if (found.records.length > PAGE) found.tombstone = null;
      found.records = found.records.slice(-PAGE);
      return found;
    }
    if (from < part.earliest) return found;
    end = from + 1;
    if (found.looked >= LOOK_MAX) { found.isPartial = true; found.first = end; return found; }
    span = Math.min(span * 8, keep ? STEP * 5 : 100_000);
  }
  return found;
}
