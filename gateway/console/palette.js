// Goes to any page or box by a part of its name: ctrl-K.

import { get } from "./api.js";
import { boxPath, go, html, useEffect, useRef, useState } from "./ui.js";

const FOUND_MAX = 8;

export function Palette({ pages, onClose }) {
  const dialog = useRef(null);
  const [text, setText] = useState("");
  const [boxes, setBoxes] = useState([]);
  const [at, setAt] = useState(0);
  useEffect(() => { dialog.current.showModal(); }, []);
  useEffect(() => {
    const leaving = new AbortController();
    const timer = setTimeout(() => get("/v0/boxes", { q: text, page_size: FOUND_MAX, ...(text ? {} : { sort: "rate" }) }, leaving.signal).then((page) => setBoxes(page.boxes)).catch(() => {}), 80);
    return () => { clearTimeout(timer); leaving.abort(); };
  }, [text]);
  const found = [...pages.filter(([, title]) => text && title.toLowerCase().includes(text.toLowerCase())).map(([id, title]) => [`#/${id}`, title, "page"]),
    ...boxes.map((each) => [boxPath(each.box, each.type === "queue" ? "jobs" : "records"), each.box, each.type])];
  const here = Math.min(at, Math.max(0, found.length - 1));
  const open = (href) => { go(href); dialog.current.close(); };
  const pressed = (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") { setAt((here + (event.key === "ArrowDown" ? 1 : found.length - 1)) % Math.max(1, found.length)); event.preventDefault(); }
  };
  return html`<dialog id="palette" ref=${dialog} onClose=${onClose} aria-label="Go to"><form onSubmit=${(event) => { event.preventDefault(); if (found[here]) open(found[here][0]); }}>
    <input role="combobox" aria-expanded="true" aria-controls="palette-found" aria-activedescendant=${found.length ? `palette-${here}` : null} aria-label="Page or box" placeholder="Page or box …" autocomplete="off" spellcheck=${false} value=${text} onInput=${(e) => { setText(e.target.value); setAt(0); }} onKeyDown=${pressed} /></form>
    <ul id="palette-found" role="listbox" aria-label="Found">${found.map(([href, title, kind], index) => html`<li id=${`palette-${index}`} role="option" key=${href} aria-selected=${index === here} onClick=${() => open(href)}><span>${title}</span><span class="dim small">${kind}</span></li>`)}</ul></dialog>`;
}
