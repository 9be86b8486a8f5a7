// Charts: uPlot for lines over time, small SVG lines for sparklines. Colours come from the style sheet.

import uPlot from "./uplot.js";
import { html, localTime, useEffect, useRef } from "./ui.js";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// `series`: [{ label, values, colour: 1..4 }]; `times`: seconds since 1970; `format`: a number as text.
const POWERS = Array.from({ length: 50 }, (each, at) => 2 ** at);

export function Chart({ title, times, series, format, max, isBytes }) {
  const place = useRef(null);
  const plot = useRef(null);
  const shape = series.map((each) => each.label).join("|");
  useEffect(() => {
    const draw = () => {
      plot.current?.destroy();
      const axis = { stroke: css("--dim"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
      plot.current = new uPlot({
        width: Math.max(200, place.current.clientWidth), height: 140, padding: [8, 8, 0, 0],
        cursor: { drag: { x: false, y: false }, points: { size: 5 } },
        legend: { show: false },
        scales: { y: { range: (self, low, high) => [0, Math.max(max || 0, high || 0) * 1.1 || 1] } },
        axes: [{ ...axis, size: 24, space: 90, values: (self, ticks) => ticks.map((at) => localTime(at * 1000).slice(11, 16)) }, { ...axis, size: 56, ...(isBytes ? { incrs: POWERS } : {}), values: (self, ticks) => ticks.map(format) }],
        series: [{}, ...series.map((each) => ({ label: each.label, stroke: css(`--series-${each.colour}`), width: 1.5, fill: series.length === 1 ? css(`--fill-${each.colour}`) : undefined, points: { show: false }, spanGaps: false }))],
      }, [times, ...series.map((each) => each.values)], place.current);
    };
    draw();
    let width = place.current.clientWidth;
    const resized = new ResizeObserver(() => {
      if (place.current && Math.abs(place.current.clientWidth - width) > 2) {
        width = place.current.clientWidth;
        plot.current?.setSize({ width: Math.max(200, width), height: 140 });
      }
    });
    resized.observe(place.current);
    const themed = () => draw();
    addEventListener("theme", themed);
    return () => { resized.disconnect(); removeEventListener("theme", themed); plot.current?.destroy(); plot.current = null; };
  }, [shape]);
  useEffect(() => { plot.current?.setData([times, ...series.map((each) => each.values)]); }, [times, shape]);
  const last = (values) => values.findLast((value) => value != null);
  const words = series.map((each) => `${each.label} ${format(last(each.values) ?? 0)}`).join(", ");
  return html`<figure class="chart"><figcaption><b>${title}</b><span class="legend">${series.map((each) => html`
    <span><i class=${`swatch s${each.colour}`}></i>${each.label} <b>${last(each.values) == null ? "–" : format(last(each.values))}</b></span>`)}</span></figcaption>
    <div ref=${place} class="plot" role="img" aria-label=${`${title}, now ${words}`}></div></figure>`;
}

export function Sparkline({ values }) {
  const width = 72;
  const height = 18;
  const high = Math.max(...values, 1e-9);
  const points = values.map((value, at) => `${((at / Math.max(1, values.length - 1)) * width).toFixed(1)},${(height - 1 - (value / high) * (height - 2)).toFixed(1)}`).join(" ");
  return html`<svg class="spark" viewBox=${`0 0 ${width} ${height}`} width=${width} height=${height} aria-hidden="true"><polyline points=${points} /></svg>`;
}
