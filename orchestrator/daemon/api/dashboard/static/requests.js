// The last requests, and the life of one: what took how long, where it was sent, and why there.

import { byId, html, svg, table } from "./dom.js";
import { clockTime, decimal, milliseconds, percent, whole } from "./format.js";
import { headers } from "./stream.js";

const WIDTH = 760;
const COLOURS = { waiting: "waiting", prefill: "prefill", decode: "decode", pause: "pause" };
let shown = "";

export function showRequests(requests) {
  const text = JSON.stringify(requests);
  if (text === shown || byId("requests").contains(document.activeElement)) return; // nobody's focus is taken away
  shown = text;
  const link = (one) => html("a", { href: `#request/${encodeURIComponent(one.id)}` }, one.id);
  const rows = requests.map((one) => [clockTime(one.came_s), link(one), describeStatus(one), whole(one.prompt_tokens), whole(one.tokens), milliseconds(one.ttft_ms), milliseconds(one.tpot_ms), milliseconds(one.latency_ms), percent(one.acceptance), one.moved ? whole(one.moved) : "–"]);
  const heads = ["Came", "Request", "State", "Prompt", "Tokens", "TTFT", "TPOT", "Latency", "Acceptance", "Moved"];
  byId("requests").replaceChildren(rows.length ? table("The last requests", heads, rows) : html("p", { class: "quiet" }, "None yet."));
}

function describeStatus(one) {
  if (!one.status) return "running";
  return one.status < 400 ? one.finish || "done" : `${one.status} ${one.finish ?? ""}`.trim();
}

export function installRequests() {
  byId("find").addEventListener("submit", (event) => {
    event.preventDefault();
    const id = byId("find-id").value.trim();
    if (id) location.hash = `request/${encodeURIComponent(id)}`;
  });
  addEventListener("hashchange", showChosen);
}

/** Show the request that the address names. */
export async function showChosen() {
  const id = location.hash.startsWith("#request/") ? decodeURIComponent(location.hash.slice(9)) : "";
  if (!id) return;
  try {
    const answer = await fetch(new URL(`../requests/${encodeURIComponent(id)}`, import.meta.url), { headers: headers() });
    const told = await answer.json();
    byId("life").replaceChildren(...(answer.ok ? describeLife(told) : [html("p", { class: "problem" }, told.error.message)]));
    byId("life").querySelector("h3")?.focus();
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
    byId("life").replaceChildren(html("p", { class: "problem" }, "The daemon does not answer."));
  }
}

function describeLife({ id, life, routes }) {
  const parts = [html("h3", { tabindex: "-1" }, `The life of ${id}`)];
  if (life) parts.push(...describeMarks(life));
  if (routes.length) parts.push(...describeRoutes(routes));
  return parts;
}

function describeMarks(life) {
  const endMs = life.figures.latency_ms ?? life.marks.at(-1).at_ms;
  const pieces = listPieces(life, endMs);
  const scale = WIDTH / Math.max(1e-6, ...pieces.map((one) => one.to));
  const lanes = Math.max(...pieces.map((one) => one.index), 0) + 1;
  const bars = pieces.map((one) => svg("rect", { class: COLOURS[one.what], x: (one.from * scale).toFixed(1), y: one.index * 22, width: Math.max(1.5, (one.to - one.from) * scale).toFixed(1), height: 18, rx: 3 }));
  const legend = [...new Set(pieces.map((one) => one.what))].map((what) => html("span", { class: `line ${COLOURS[what]}` }, what));
  const words = { accepted: "taken in", first_token: "first token", moved: "goes on at another replica", ended: "ended" };
  const rows = life.marks.map((one) => [milliseconds(one.at_ms), words[one.what], life.choices > 1 ? whole(one.index) : "", one.what === "ended" ? "" : `replica ${one.engine}`, [one.queue_ms !== null ? `${milliseconds(one.queue_ms)} in the queue, ${milliseconds(one.prefill_ms)} of prefill` : "", one.pause_ms !== null ? `after a pause of ${milliseconds(one.pause_ms)}` : ""].join("")]);
  const figures = life.figures;
  return [
    html("p", {}, `${life.route}: ${life.prompt_tokens} tokens of prompt (${figures.cached_tokens ?? 0} cached), ${life.tokens} of at most ${life.max_tokens} generated${life.status ? `, status ${life.status}, ${figures.finish}` : ", running"}. TTFT ${milliseconds(figures.ttft_ms)}, TPOT ${milliseconds(figures.tpot_ms)}, latency ${milliseconds(endMs)}, acceptance ${percent(figures.acceptance)}.`),
    svg("svg", { viewBox: `0 0 ${WIDTH} ${lanes * 22}`, class: "life", role: "img", "aria-label": "Waiting, prefill and decoding; the table below has the times" }, bars),
    html("p", { class: "legend" }, legend),
    table("Its moments", ["After", "What", "Choice", "Where", "More"], rows),
  ];
}

/** Cut each choice's time into queue, prefill, decoding and pauses. */
function listPieces(life, endMs) {
  const pieces = [];
  for (let index = 0; index < life.choices; index += 1) {
    const marks = life.marks.filter((one) => one.index === index && (one.what === "first_token" || one.what === "moved"));
    const first = marks.find((one) => one.what === "first_token");
    if (!first) {
      pieces.push({ index, what: "waiting", from: 0, to: endMs });
      continue;
    }
    const prefillFrom = Math.max(0, first.at_ms - (first.prefill_ms ?? 0));
    pieces.push({ index, what: "waiting", from: 0, to: prefillFrom }, { index, what: "prefill", from: prefillFrom, to: first.at_ms });
    let from = first.at_ms;
    for (const moved of marks.filter((one) => one.what === "moved")) {
      pieces.push({ index, what: "decode", from, to: moved.at_ms - moved.pause_ms }, { index, what: "pause", from: moved.at_ms - moved.pause_ms, to: moved.at_ms });
      from = moved.at_ms;
    }
    pieces.push({ index, what: "decode", from, to: Math.max(from, endMs) });
  }
  return pieces;
}

function describeRoutes(routes) {
  return routes.map((route) => {
    const rows = route.rated.map((one) => [one.name, one.price_ms === null ? "does not serve" : milliseconds(one.price_ms), one.terms.map((term) => `${term.name.replaceAll("_", " ")} ${decimal(term.cost_ms)} ms (${term.why})`).join("; ")]);
    return html("div", {}, html("p", {}, html("b", {}, `Attempt ${route.attempt}: ${route.replica || "waits"}${route.draft ? ` with ${route.draft}` : ""}. `), route.reason), table(`What attempt ${route.attempt} could choose from`, ["Replica", "Price", "Why"], rows));
  });
}
