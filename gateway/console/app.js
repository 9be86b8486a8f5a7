// The shell: which page the address names, navigation, the key, the theme, the keyboard.

import { Refused, get, key, serverRoutes } from "./api.js";
import { Box } from "./box.js";
import { Boxes } from "./boxes.js";
import { Lag } from "./lag.js";
import { Operations } from "./operations.js";
import { Overview } from "./overview.js";
import { Palette } from "./palette.js";
import { render } from "./preact.js";
import { Queues } from "./queues.js";
import { Routers } from "./routers.js";
import { Streams } from "./s2.js";
import { Schedules } from "./schedules.js";
import { Empty, html, useEffect, useRef, useState } from "./ui.js";

const PAGES = {
  "": ["Overview", Overview, "o"], boxes: ["Boxes", Boxes, "b"], queues: ["Queues", Queues, "q"], groups: ["Groups", Lag, "u"], routers: ["Routers", Routers, "r"],
  schedules: ["Schedules", Schedules, "s"], s2: ["Streams (S2)", Streams, "t"], operations: ["Operations", Operations, "p"],
};
const THEME = "streams.theme";
const SHORTCUTS = [["Ctrl K", "go to a page or box"], ["/", "search or edit"], ["j  k", "next, previous row"], ["Enter", "open the row"], ["g o", "Overview"], ["g b", "Boxes"], ["g q", "Queues"], ["g u", "Groups"], ["g r", "Routers"], ["g s", "Schedules"], ["g t", "Streams (S2)"], ["g p", "Operations"], ["space", "pause or resume the live tail"], ["[  ]", "earlier, later records"], ["?", "this list"], ["Esc", "close, leave a field"]];

function place() {
  const [path, asked] = location.hash.replace(/^#\/?/, "").split("?");
  const [page, name, tab] = path.split("/").map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
  return { page: page || "", name, tab: tab || "", query: new URLSearchParams(asked), hash: location.hash };
}

function useWho(version) {
  const [who, setWho] = useState(null);
  useEffect(() => {
    get("/v0/whoami").then(setWho).catch((error) => {
      if (error instanceof Refused && error.status === 401) dispatchEvent(new CustomEvent("need-key", { detail: error.message }));
      setWho({ id: "", scopes: [], prefixes: [], limits: {}, isUnknown: true });
    });
  }, [version]);
  return who;
}

function Pulse() {
  const [state, setState] = useState(["…", ""]);
  useEffect(() => {
    let timer = 0;
    const beat = async () => {
      try {
        if (!document.hidden) { await get("/v0/ready"); setState(["ready", "good"]); }
      } catch (error) {
        setState(error.status === 401 ? ["asks for a key", "warn"] : error.status === 0 ? ["does not answer", "bad"] : ["not ready", "warn"]);
      }
      timer = setTimeout(beat, 3000);
    };
    beat();
    return () => clearTimeout(timer);
  }, []);
  return html`<span id="state" class=${`badge ${state[1]}`} role="status">${state[0]}</span>`;
}

function Modal({ id, title, onClose, children }) {
  const dialog = useRef(null);
  useEffect(() => { if (!dialog.current.open) dialog.current.showModal(); }, []);
  return html`<dialog id=${id} ref=${dialog} onClose=${onClose} aria-labelledby=${`${id}-title`}><h2 id=${`${id}-title`}>${title}</h2>${children}</dialog>`;
}

function AskKey({ why, onKey, onClose }) {
  const submit = (event) => { event.preventDefault(); const value = event.target.key.value.trim(); event.target.key.value = ""; if (value) onKey(value); };
  return html`<${Modal} id="ask" title="This server asks for a key" onClose=${onClose}><form onSubmit=${submit}><p class="dim">${why}</p>
    <label>API key <input id="key" name="key" type="password" autocomplete="off" spellcheck=${false} required /></label>
    <p class="dim">It stays in this tab and is gone when the tab is closed.</p><button type="submit">Use it</button></form><//>`;
}

// `auto` follows the system; the choice lasts as long as the tab.
function useTheme() {
  const [theme, setTheme] = useState(sessionStorage.getItem(THEME) || "auto");
  useEffect(() => {
    const system = matchMedia("(prefers-color-scheme: dark)");
    const apply = () => {
      document.documentElement.dataset.theme = theme === "auto" ? (system.matches ? "dark" : "light") : theme;
      dispatchEvent(new Event("theme"));
    };
    apply();
    sessionStorage.setItem(THEME, theme);
    system.addEventListener("change", apply);
    return () => system.removeEventListener("change", apply);
  }, [theme]);
  return [theme, () => setTheme({ auto: "light", light: "dark", dark: "auto" }[theme])];
}

function moveRow(step) {
  const rows = [...document.querySelectorAll("main tbody a.name, main .vrow.item a.name, main .record-line")];
  if (!rows.length) return;
  const at = rows.indexOf(document.activeElement);
  rows[Math.min(rows.length - 1, Math.max(0, at + step))].focus();
}

function useKeyboard(showHelp, showPalette) {
  useEffect(() => {
    let isGo = false;
    const pressed = (event) => {
      const target = event.target;
      if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey) && !document.querySelector("dialog")) { event.preventDefault(); showPalette(); return; }
      const isField = target.closest?.("input, textarea, select, dialog, [contenteditable]");
      if (event.key === "Escape" && isField && !target.closest("dialog")) { target.blur(); return; }
      if (isField || event.ctrlKey || event.metaKey || event.altKey) return;
      const wasGo = isGo;
      isGo = false;
      if (wasGo) {
        const found = Object.entries(PAGES).find(([, each]) => each[2] === event.key);
        if (found) { location.hash = `#/${found[0]}`; event.preventDefault(); }
      } else if (event.key === "g") isGo = true;
      else if (event.key === "/") { document.querySelector("main [data-search]")?.focus(); event.preventDefault(); }
      else if (event.key === "j" || event.key === "k") moveRow(event.key === "j" ? 1 : -1);
      else if (event.key === "[") document.querySelector("[data-prev]")?.click();
      else if (event.key === "]") document.querySelector("[data-next]")?.click();
      else if (event.key === "?") showHelp();
      else if (event.key === " " && document.querySelector("#tail") && !target.closest?.("button, a, summary")) { dispatchEvent(new Event("toggle-live")); event.preventDefault(); }
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
}

function App() {
  const [here, setHere] = useState(place());
  const [version, setVersion] = useState(0);
  const [asking, setAsking] = useState(null);
  const [isHelping, setHelping] = useState(false);
  const [theme, nextTheme] = useTheme();
  const who = useWho(version);
  const main = useRef(null);
  const [isGoing, setGoing] = useState(false);
  useKeyboard(() => setHelping(true), () => setGoing(true));
  useEffect(() => {
    const moved = () => setHere((old) => {
      const next = place();
      if (old.hash === next.hash) return old;
      if (old.page !== next.page || old.name !== next.name || old.tab !== next.tab) { main.current?.focus({ preventScroll: true }); scrollTo(0, 0); }
      return next;
    });
    const need = (event) => setAsking((old) => old ?? event.detail);
    addEventListener("hashchange", moved);
    addEventListener("need-key", need);
    moved(); // the address may have changed before this was listening
    return () => { removeEventListener("hashchange", moved); removeEventListener("need-key", need); };
  }, []);
  const isBox = here.page === "boxes" && here.name;
  const page = PAGES[here.page];
  useEffect(() => {
    const title = isBox ? `${here.name}${here.tab ? ` · ${here.tab}` : ""}` : page ? page[0] : "Not found";
    document.title = `${title} · streams`;
  }, [here]);
  const scopes = new Set(who?.scopes || []);
  const may = (scope) => scopes.has(scope);
  const Page = isBox ? Box : page?.[1];
  const useKey = (value) => { key.set(value); setAsking(null); setVersion(version + 1); };
  const content = !who ? html`<p class="dim">Loading …</p>` : Page
    ? html`<${Page} key=${`${here.page}/${here.name || ""}/${version}`} name=${here.name} tab=${here.tab} query=${here.query} may=${may} who=${who} />`
    : html`<h1>There is no such page</h1><${Empty} title=${`#/${here.page} is not a page of this console`}>Perhaps the link is of another version. <a href="#/">Overview</a><//>`;
  return html`<a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); main.current.focus(); }}>Skip to content</a>
    <header><a class="mark" href="#/">streams</a><nav aria-label="Pages">${Object.entries(PAGES).map(([id, [title]]) => html`<a href=${`#/${id}`} aria-current=${id === here.page ? "page" : null}>${title}</a>`)}</nav>
      <span class="space"></span><${Pulse} key=${version} />${who && !who.isUnknown && who.id !== null && html`<span class="badge" title=${`Scopes: ${who.scopes.join(", ")}`}>${who.scopes.includes("admin") ? "admin" : who.scopes.includes("write") ? "read-write" : "read-only"}</span>`}
      <button class="quiet small" id="go-to" aria-label="Go to Ctrl K" title="Go to a page or box" onClick=${() => setGoing(true)}><span aria-hidden="true">⌕</span><span class="wide-only"> Go to <kbd>Ctrl K</kbd></span></button><a href="/docs">API</a><button class="quiet small" onClick=${nextTheme} title="Theme: follow the system, light, dark">${{ auto: "◐ auto", light: "○ light", dark: "● dark" }[theme]}</button>
      <button class="quiet small" aria-label="Keyboard shortcuts" onClick=${() => setHelping(true)}>?</button>
      ${key.get() && html`<button id="forget" class="quiet small" onClick=${() => { key.forget(); setVersion(version + 1); }}>Forget key</button>`}</header>
    <main id="main" tabindex="-1" ref=${main} data-at=${here.hash}>${content}</main>
    ${asking !== null && html`<${AskKey} why=${asking} onKey=${useKey} onClose=${() => setAsking(null)} />`}
    ${isGoing && html`<${Palette} pages=${Object.entries(PAGES).map(([id, [title]]) => [id, title])} onClose=${() => setGoing(false)} />`}
    ${isHelping && html`<${Modal} id="help" title="Keyboard" onClose=${() => setHelping(false)}><dl class="keys">${SHORTCUTS.map(([keys, words]) => html`<div><dt><kbd>${keys}</kbd></dt><dd>${words}</dd></div>`)}</dl><form method="dialog"><button>Close</button></form><//>`}`;
}

serverRoutes().catch(() => {});
render(html`<${App} />`, document.getElementById("app"));
