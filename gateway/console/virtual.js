// A list of which only the rows in view are in the page. Rows have one height; pages are loaded as they come into view.

import { html, useEffect, useRef, useState } from "./ui.js";

export const ROW = 36;

// `load(cursor)` gives { rows, total, cursor, restarted }. `version` changes when the list is another one.
export function VirtualList({ label, head, row, load, version, refreshMs, onTotal, empty }) {
  const place = useRef(null);
  const store = useRef({ rows: [], cursor: null, total: 0, isLoading: false, isEnd: false });
  const [, redraw] = useState(0);
  const [top, setTop] = useState(0);
  const [error, setError] = useState(null);
  const draw = () => redraw((old) => old + 1);

  const more = async (mine) => {
    if (mine.isLoading || mine.isEnd) return;
    mine.isLoading = true;
    try {
      const page = await load(mine.cursor);
      if (store.current !== mine) return;
      if (page.restarted) mine.rows = [];
      mine.rows = mine.rows.concat(page.rows);
      mine.cursor = page.cursor;
      mine.total = page.total;
      mine.isEnd = !page.cursor;
      setError(null);
      onTotal(mine.rows.length, mine.total);
    } catch (failure) {
      if (failure.status === 401) dispatchEvent(new CustomEvent("need-key", { detail: failure.message }));
      setError(failure);
      mine.isEnd = true;
    }
    mine.isLoading = false;
    draw();
  };
  useEffect(() => {
    store.current = { rows: [], cursor: null, total: 0, isLoading: false, isEnd: false };
    if (place.current) place.current.scrollTop = 0;
    setTop(0);
    more(store.current);
    // While the top is in view the list is taken anew, so that its order and numbers stay true.
    const timer = setInterval(async () => {
      const mine = store.current;
      if (document.hidden || mine.isLoading || !place.current || place.current.scrollTop > ROW * 20 || place.current.contains(document.activeElement)) return;
      try {
        const page = await load(null);
        if (store.current !== mine) return;
        Object.assign(mine, { rows: page.rows, cursor: page.cursor, total: page.total, isEnd: !page.cursor });
        setError(null);
        onTotal(page.rows.length, page.total);
        draw();
      } catch { /* the next one says it */ }
    }, refreshMs);
    return () => clearInterval(timer);
  }, [version]);

  const { rows, total, isEnd } = store.current;
  const height = place.current?.clientHeight || 600;
  const first = Math.max(0, Math.floor(top / ROW) - 8);
  const last = Math.min(rows.length, Math.ceil((top + height) / ROW) + 8);
  useEffect(() => { if (last >= rows.length - 20 && !isEnd) more(store.current); });
  const isEmpty = !rows.length && isEnd;
  return html`<div class="vlist" role="table" aria-label=${label} aria-rowcount=${total + 1}>
    <div class="vhead" role="rowgroup">${head}</div>
    ${isEmpty && !error ? empty : null}
    <div class="vbody" role="rowgroup" ref=${place} tabindex="0" onScroll=${(event) => setTop(event.target.scrollTop)}>
      <div style=${{ height: `${first * ROW}px` }}></div>
      ${rows.slice(first, last).map((each, at) => row(each, first + at))}
      <div style=${{ height: `${Math.max(0, (isEnd ? rows.length : Math.min(total, rows.length + 200)) - last) * ROW}px` }}></div>
    </div>${error && html`<div class="note bad" role="alert">${error.message}</div>`}</div>`;
}
