// Draws routers as a graph: boxes in layers from left to right, edges with rate and lag, edges of cycles marked.

import { boxPath, html, short } from "./ui.js";

const WIDTH = 190;
const HEIGHT = 34;
const GAP_X = 150;
const GAP_Y = 20;
export const NODES_MAX = 120;

// Layers by the longest path, after the edges that close a cycle are set aside.
export function layout(routers) {
  const out = new Map();
  for (const each of routers) {
    for (const name of [each.source, each.dest]) if (!out.has(name)) out.set(name, []);
    out.get(each.source).push(each);
  }
  const state = new Map();
  const back = new Set();
  for (const start of out.keys()) {
    const stack = [[start, 0]];
    if (state.has(start)) continue;
    state.set(start, 1);
    while (stack.length) {
      const top = stack.at(-1);
      const edge = out.get(top[0])[top[1]];
      top[1] += 1;
      if (!edge) { state.set(top[0], 2); stack.pop(); continue; }
      if (state.get(edge.dest) === 1) back.add(edge.router);
      else if (!state.has(edge.dest)) { state.set(edge.dest, 1); stack.push([edge.dest, 0]); }
    }
  }
  const layer = new Map([...out.keys()].map((name) => [name, 0]));
  for (let round = 0; round < out.size; round += 1) {
    let hasMoved = false;
    for (const each of routers) {
      if (!back.has(each.router) && layer.get(each.dest) <= layer.get(each.source)) { layer.set(each.dest, layer.get(each.source) + 1); hasMoved = true; }
    }
    if (!hasMoved) break;
  }
  const columns = [];
  for (const [name, at] of layer) (columns[at] ||= []).push(name);
  const places = new Map();
  columns.forEach((names, x) => {
    // Names under the mean of their sources, so that edges cross less.
    const rank = (name) => {
      const ys = routers.filter((each) => each.dest === name && places.has(each.source)).map((each) => places.get(each.source).y);
      return ys.length ? ys.reduce((sum, each) => sum + each, 0) / ys.length : Infinity;
    };
    if (x) names.sort((a, b) => rank(a) - rank(b));
    names.forEach((name, y) => places.set(name, { x: x * (WIDTH + GAP_X), y: y * (HEIGHT + GAP_Y) }));
  });
  const rows = Math.max(1, ...columns.map((names) => names.length));
  return { places, back, width: columns.length * (WIDTH + GAP_X) - GAP_X, height: rows * (HEIGHT + GAP_Y) + 40 };
}

const cut = (name) => (name.length > 24 ? `${name.slice(0, 11)}…${name.slice(-11)}` : name);

export function Graph({ routers }) {
  const { places, back, width, height } = layout(routers);
  const edge = (each) => {
    const [a, b] = [places.get(each.source), places.get(each.dest)];
    const isBack = back.has(each.router);
    const tone = each.state === "blocked" ? "bad" : isBack ? "cycle" : each.lag ? "warn" : "";
    const from = { x: a.x + WIDTH, y: a.y + HEIGHT / 2 };
    const to = isBack ? { x: b.x + WIDTH / 2, y: b.y + HEIGHT } : { x: b.x, y: b.y + HEIGHT / 2 };
    const path = isBack ? `M${a.x + WIDTH / 2},${a.y + HEIGHT} C${a.x + WIDTH / 2},${height - 4} ${to.x},${height - 4} ${to.x},${to.y}`
      : `M${from.x},${from.y} C${from.x + GAP_X / 2},${from.y} ${to.x - GAP_X / 2},${to.y} ${to.x},${to.y}`;
    // The label of an edge sits where its neighbours are apart: near its end if its source has several edges.
    const t = routers.filter((one) => one.source === each.source).length > 1 ? 0.7 : 0.35;
    const along = (p, q, r, s) => (1 - t) ** 3 * p + 3 * (1 - t) ** 2 * t * q + 3 * (1 - t) * t ** 2 * r + t ** 3 * s;
    const middle = isBack ? { x: (a.x + b.x + WIDTH) / 2, y: 0.125 * (a.y + b.y + 2 * HEIGHT) + 0.75 * (height - 4) - 5 } : { x: along(from.x, from.x + GAP_X / 2, to.x - GAP_X / 2, to.x), y: along(from.y, from.y, to.y, to.y) - 5 };
    return html`<g class=${`edge ${tone}`}><path d=${path} marker-end="url(#arrow)"><title>${each.router}: ${each.state || ""}, lag ${each.lag ?? "?"}${isBack ? ", closes a cycle" : ""}</title></path>
      <text x=${middle.x} y=${middle.y} text-anchor="middle">${each.rate == null ? "" : `${short(each.rate)}/s`}${each.lag ? ` · lag ${short(each.lag)}` : ""}${isBack ? " ↻" : ""}</text></g>`;
  };
  return html`<div class="graph" tabindex="0" role="region" aria-label="Graph of routers; the table below has the same facts"><svg viewBox=${`-4 -4 ${width + 12} ${height + 8}`} width=${width + 12} height=${height + 8} role="group" aria-label="Boxes and the routers between them">
    <defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" class="arrow" /></marker></defs>
    ${routers.map(edge)}${[...places].map(([name, { x, y }]) => html`<a href=${boxPath(name, "routers")} key=${name}><g class="node"><rect x=${x} y=${y} width=${WIDTH} height=${HEIGHT} rx="6" /><text x=${x + WIDTH / 2} y=${y + HEIGHT / 2 + 4} text-anchor="middle">${cut(name)}<title>${name}</title></text></g></a>`)}
  </svg></div>`;
}
