// The figures in the first row, and the series that the charts draw.

import { byId, html, setAttribute, setText } from "./dom.js";
import { decimal, milliseconds, percent, whole } from "./format.js";

const DEPTH_WINDOW_S = 30;
const PERCENTILES = ["50", "95", "99"];

const sum = (figures, name) => Object.values(figures.engines).reduce((all, one) => all + (one[name] ?? 0), 0);

/** The share of accepted drafts over all replicas: as /metrics has it where one replica drafts, else weighed by its
 * tokens a second. */
function readAcceptance(figures) {
  const known = Object.values(figures.engines).filter((one) => one.acceptance_rate !== undefined);
  if (known.length < 2) return known[0]?.acceptance_rate ?? null;
  const weights = known.map((one) => one.tokens_per_second || 1e-9);
  const all = weights.reduce((left, right) => left + right, 0);
  return known.reduce((total, one, index) => total + (one.acceptance_rate * weights[index]) / all, 0);
}

function readKv(figures) {
  const known = Object.values(figures.engines).map((one) => one.kv_cache_usage_perc).filter((one) => one !== undefined);
  return known.length ? Math.max(...known) : null;
}

/** Drafted tokens a draft, over the last seconds that were seen; since the start where nothing was drafted in them. */
function readDepth(figures, history, atS) {
  const drafts = sum(figures, "spec_decode_num_drafts_total");
  const drafted = sum(figures, "spec_decode_num_draft_tokens_total");
  const before = history.find((one) => one.atS >= atS - DEPTH_WINDOW_S);
  if (before && drafts > before.drafts) return (drafted - before.drafted) / (drafts - before.drafts);
  return drafts ? drafted / drafts : null;
}

/** What is shown of a model's figures; `history` has those before. */
export function readFigures(figures, history, atS) {
  const found = {
    atS,
    tokens_per_second: sum(figures, "tokens_per_second"),
    acceptance_rate: readAcceptance(figures),
    depth: readDepth(figures, history, atS),
    running: sum(figures, "num_requests_running"),
    waiting: sum(figures, "num_requests_waiting"),
    kv: readKv(figures),
    drafts: sum(figures, "spec_decode_num_drafts_total"),
    drafted: sum(figures, "spec_decode_num_draft_tokens_total"),
    generated: sum(figures, "generation_tokens_total"),
    requests: sum(figures, "request_success_total"),
    losses: sum(figures, "worker_losses_total"),
  };
  for (const name of ["ttft", "tpot"])
    for (const percentile of PERCENTILES) {
      const seconds = figures.percentiles[name]?.[percentile];
      found[`${name}_${percentile}`] = seconds === undefined ? null : seconds * 1000;
    }
  return found;
}

const TILES = [
  ["Tokens/s", [["tokens_per_second", "", (value) => decimal(value)]], "of the last 30 s"],
  ["Acceptance", [["acceptance_rate", "", percent]], "of drafted tokens, 30 s"],
  ["Depth", [["depth", "", (value) => decimal(value, 2)]], "drafted tokens a draft"],
  ["TTFT", PERCENTILES.map((one) => [`ttft_${one}`, `p${one}`, milliseconds]), "last 1000 sequences"],
  ["TPOT", PERCENTILES.map((one) => [`tpot_${one}`, `p${one}`, milliseconds]), "last 1000 sequences"],
  ["Queue", [["waiting", "wait", whole], ["running", "run", whole]], "requests"],
  ["KV cache", [["kv", "", percent]], "in use, fullest replica"],
  ["Served", [["requests", "requests", whole], ["generated", "tokens", whole]], "since the start"],
  ["Lost workers", [["losses", "", whole]], "since the start"],
];

const cells = new Map();

export function installFigures() {
  for (const [title, parts, note] of TILES) {
    const values = parts.map(([name, label, format]) => {
      const value = html("b", { "data-figure": name }, "–");
      cells.set(name, { value, format });
      return html("span", { class: "value" }, label ? html("small", {}, label) : null, " ", value);
    });
    const list = html("dd", { class: parts.length > 1 ? "several" : "" }, values, html("span", { class: "note" }, note));
    byId("figures").append(html("div", { class: "tile" }, html("dt", {}, title), list));
  }
}

export function showFigures(found) {
  for (const [name, { value, format }] of cells) {
    setText(value, format(found[name]));
    setAttribute(value, "data-value", found[name] ?? "");
  }
}
