// Failovers on a timeline, and as a list.

import { byId, html, svg, table } from "./dom.js";
import { clockTime } from "./format.js";

const WIDTH = 560;
const SPANS_S = [300, 900, 3600, 14_400, 86_400];
const LANES = ["loss", "takeover", "restart", "phase", "draft", "health", "plan", "scale"];
const LANE = 15;
const LEFT = 62;

let shown = "";
let newest = 0;

/** Show the events, the newest first; new ones are said aloud. */
export function showFailovers(events, atS) {
  const text = JSON.stringify(events);
  const tick = Math.floor(atS / 10);
  if (`${text}${tick}` === shown) return;
  const changed = !shown.startsWith(text);
  shown = `${text}${tick}`;
  drawTimeline(events, atS);
  if (!changed) return;
  byId("failovers").replaceChildren(events.length ? table("Failovers, the newest first", ["Time", "What", "Who", "Text"], events.map((one) => [clockTime(one.at_s), one.kind, one.who, one.text])) : html("p", { class: "quiet" }, "None since the daemon started."));
  const fresh = events.filter((one) => one.at_s > newest);
  if (newest && fresh.length) byId("news").textContent = fresh.map((one) => `${one.who} ${one.text}`).join("; ");
  newest = Math.max(atS, ...events.map((one) => one.at_s));
}

function drawTimeline(events, atS) {
  const oldest = Math.min(atS, ...events.map((one) => one.at_s));
  const span = SPANS_S.find((one) => atS - oldest < one) ?? SPANS_S.at(-1);
  const lanes = LANES.filter((kind) => events.some((one) => one.kind === kind));
  const height = Math.max(1, lanes.length) * LANE + 22;
  const place = (when) => LEFT + (WIDTH - LEFT - 8) * Math.max(0, 1 - (atS - when) / span);
  const root = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, class: "timeline", role: "img", "aria-label": `${events.length} events; the table below lists them` });
  root.append(...lanes.map((kind, index) => svg("text", { x: 0, y: index * LANE + 12 }, kind)));
  root.append(svg("line", { class: "axis", x1: LEFT, x2: WIDTH - 8, y1: height - 18, y2: height - 18 }));
  for (const part of [0, 0.5, 1]) root.append(svg("text", { x: place(atS - span * part), y: height - 4, "text-anchor": part === 1 ? "start" : part ? "middle" : "end" }, clockTime(atS - span * part)));
  root.append(...events.filter((one) => atS - one.at_s <= span).map((one) => svg("circle", { class: `event ${one.kind}`, cx: place(one.at_s).toFixed(1), cy: lanes.indexOf(one.kind) * LANE + 8, r: 4.5 })));
  byId("timeline").replaceChildren(root);
}
