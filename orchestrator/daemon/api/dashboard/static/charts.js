// The last minutes as lines. What a chart shows now is said in its caption, too.

import uPlot from "./vendor/uPlot.esm.js";
import { byId, html, setText } from "./dom.js";
import { decimal, milliseconds, percent, whole } from "./format.js";
import { colour } from "./theme.js";

const HEIGHT = 132;
const CHARTS = [
  { title: "Tokens/s", series: [["tokens_per_second", "tokens/s", "accent"]], format: (value) => decimal(value) },
  { title: "Acceptance", series: [["acceptance_rate", "acceptance", "good"]], format: percent, top: 1 },
  { title: "Depth", series: [["depth", "depth", "draft"]], format: (value) => decimal(value, 2) },
  { title: "TTFT", series: [["ttft_50", "p50", "accent"], ["ttft_95", "p95", "draft"], ["ttft_99", "p99", "bad"]], format: milliseconds },
  { title: "TPOT", series: [["tpot_50", "p50", "accent"], ["tpot_95", "p95", "draft"], ["tpot_99", "p99", "bad"]], format: milliseconds },
  { title: "Requests", series: [["running", "running", "accent"], ["waiting", "waiting", "bad"]], format: whole },
  { title: "KV cache", series: [["kv", "in use", "accent"]], format: percent, top: 1 },
];

let drawn = [];

function build(chart, holder, width) {
  const axis = { stroke: colour("muted"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  const series = chart.series.map(([, label, name]) => ({ label, stroke: colour(name), width: 2, points: { show: false }, spanGaps: false }));
  return new uPlot(
    {
      width,
      height: HEIGHT,
      legend: { show: false },
      cursor: { show: false },
      padding: [8, 24, 0, 0],
      scales: { y: { range: (_, low, high) => [0, chart.top ?? Math.max(high ?? 0, 1e-3) * 1.15] } },
      axes: [
        { ...axis, size: 24, space: 70, values: "{HH}:{mm}:{ss}" },
        { ...axis, size: 52, space: 34, values: (_, ticks) => ticks.map((tick) => chart.format(tick)) },
      ],
      series: [{}, ...series],
    },
    [[], ...chart.series.map(() => [])],
    holder,
  );
}

/** Draw the charts anew: at the start, and when colours or widths have changed. */
export function installCharts() {
  const parent = byId("charts");
  for (const one of drawn) one.plot.destroy();
  parent.replaceChildren();
  drawn = CHARTS.map((chart) => {
    const holder = html("div", { class: "plot", "aria-hidden": "true" });
    const now = html("span", { class: "now" });
    const keys = chart.series.length > 1 ? chart.series.map(([, label, name]) => html("span", { class: `line ${name}` }, label)) : [];
    parent.append(html("figure", {}, html("figcaption", {}, html("b", {}, chart.title), " ", now, html("span", { class: "lines", "aria-hidden": "true" }, keys)), holder));
    return { chart, now, holder, plot: null };
  });
  for (const one of drawn) one.plot = build(one.chart, one.holder, Math.max(160, one.holder.clientWidth));
}

export function showCharts(history) {
  const last = history.at(-1);
  const times = history.map((one) => one.atS);
  for (const { chart, now, plot } of drawn) {
    plot.setData([times, ...chart.series.map(([name]) => history.map((one) => one[name]))]);
    const said = chart.series.map(([name, label]) => (chart.series.length > 1 ? `${label} ` : "") + chart.format(last?.[name]));
    setText(now, said.join(", "));
  }
}

/** Fit the charts to their places. */
export function resizeCharts() {
  for (const { plot, holder } of drawn) {
    const width = Math.max(160, holder.clientWidth);
    if (plot.width !== width) plot.setSize({ width, height: HEIGHT });
  }
}
