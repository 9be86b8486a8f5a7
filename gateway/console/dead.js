// Dead letters of a queue: jobs that were delivered too often. Looked at, put back, or deleted.

import { box, diff, hasField, send } from "./api.js";
import { FILTER_HELP, filterOf } from "./filter.js";
import { PayloadView, payload } from "./payload.js";
import { BoxLink, Confirm, Empty, Loading, Problem, Time, count, counted, html, useData, useState } from "./ui.js";

const PAGE = 200;

export function DeadLetters({ name, state, may }) {
  const from = state.config.dead_letter;
  const [filter, setFilter] = useState("");
  const [opened, setOpened] = useState(0);
  const [note, setNote] = useState("");
  const [problem, setProblem] = useState(null);
  const [removing, setRemoving] = useState(null);
  const { data, error, reload } = useData((signal) => diff(from, { limit: PAGE, include_tags: true }, signal).catch((failure) => { if (failure.status === 404) return { records: [], head_seq: 0 }; throw failure; }), [from], 3000);
  if (!data) return html`<${Problem} error=${error} />${!error && html`<${Loading} />`}`;
  const own = data.records.filter((each) => !each.meta?.$dead_letter_from || each.meta.$dead_letter_from === name);
  const isMatch = filterOf(filter);
  const shown = own.filter((each) => !isMatch || isMatch(each));
  // All of them, in as many steps as it takes.
  const requeue = async (more, words) => {
    setProblem(null);
    try {
      let [moved, answer] = [0, null];
      do {
        answer = await send("POST", box(name, "/requeue"), { from, ...more });
        moved += answer.requeued;
      } while (!more.seqs && answer.requeued && answer.pending);
      setNote(`${count(moved)} ${words}`);
      reload();
    } catch (failure) { setProblem(failure); }
  };
  const askDelete = async (seq) => {
    const answer = hasField("DeleteBody", "dry_run") ? await send("POST", box(from, "/delete"), { before_seq: seq + 1, dry_run: true }).catch(() => null) : null;
    setRemoving({ seq, count: answer?.deleted });
  };
  const canPick = hasField("RequeueBody", "seqs");
  const mayMove = may("read") && may("write");
  return html`<div class="bar"><span>Dead letters of this queue go to <${BoxLink} name=${from} tab="records" />.</span><span class="space"></span>
      <label class="inline" title=${FILTER_HELP}>Contains, or field <input data-search value=${filter} onInput=${(e) => setFilter(e.target.value)} /></label>
      ${mayMove && html`<button disabled=${!own.length} onClick=${() => requeue({ max: 1000 }, "jobs are back in the queue.")}>Requeue all</button>
        ${canPick && html`<button class="quiet" disabled=${!filter || !shown.length} onClick=${() => requeue({ seqs: shown.map((each) => each.$seq) }, "matching jobs are back in the queue.")}>Requeue ${count(shown.length)} shown</button>`}`}</div>
    <p role="status" class="good">${note}</p><${Problem} error=${problem} /><${Problem} error=${error} />
    ${removing && html`<${Confirm} name=${from} title="Delete a dead letter" verb="Delete" onConfirm=${() => send("POST", box(from, "/delete"), { before_seq: removing.seq + 1 })} onClose=${() => { setRemoving(null); reload(); }}>This deletes ${removing.count == null ? "every dead letter" : html`<b>${count(removing.count)} dead letters</b>`} up to seq ${count(removing.seq)} in ${from} for good.<//>`}
    ${shown.length ? html`<ol class="records" aria-label="Dead letters">${shown.map((record) => html`<li class=${opened === record.$seq ? "record open" : "record"} key=${record.$seq}>
      <button class="record-line" aria-expanded=${opened === record.$seq} onClick=${() => setOpened(opened === record.$seq ? 0 : record.$seq)}><span class="seq">${record.$seq}</span><span class="when"><${Time} ms=${record.$ts} /></span>
        <span class="tag">${counted(record.meta?.$dead_letter_deliveries, "delivery", "deliveries")}</span>${record.meta?.$dead_letter_error && html`<span class="bad">${record.meta.$dead_letter_error}</span>`}<span class="text">${payload(record).line}</span></button>
      ${opened === record.$seq && html`<div class="record-body"><dl class="facts"><div><dt>Was seq</dt><dd>${record.meta?.$dead_letter_src_seq ?? "–"}</dd></div><div><dt>Worker</dt><dd>${record.meta?.$dead_letter_node || "–"}</dd></div><div><dt>Error</dt><dd>${record.meta?.$dead_letter_error || "not reported"}</dd></div></dl>
        <${PayloadView} record=${record} /><div class="bar">${mayMove && canPick && html`<button class="small" onClick=${() => requeue({ seqs: [record.$seq] }, "job is back in the queue.")}>Requeue this one</button>`}
        ${may("delete") && html`<button class="danger small" onClick=${() => askDelete(record.$seq)}>Delete up to here …</button>`}</div></div>`}</li>`)}</ol>`
      : html`<${Empty} title="No dead letters">Every job of this queue was finished within ${count(state.config.max_deliveries)} deliveries, or still is tried.<//>`}`;
}
