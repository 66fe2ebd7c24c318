// The plan: what was chosen, what came of it, and why not anything else.

import { byId, html, table } from "./dom.js";
import { decimal, milliseconds, shortDevice } from "./format.js";

let shown = "";

export function showPlan(plan, progress) {
  const text = JSON.stringify([plan, progress && roundProgress(progress)]);
  if (text === shown) return;
  shown = text;
  const open = [...byId("plan").querySelectorAll("details")].map((one) => one.open);
  byId("plan").replaceChildren(...(plan ? describePlan(plan, progress) : [html("p", { class: "quiet" }, "Nothing is left to a plan: cluster.yaml says what runs where.")]));
  byId("plan").querySelectorAll("details").forEach((one, index) => (one.open = open[index] ?? false));
}

const roundProgress = (one) => ({ ...one, measured_tokens_per_s: Math.round(one.measured_tokens_per_s * 10), ratio: Math.round(one.ratio * 100), rounds: 0 });

function describePlan(plan, progress) {
  const predicted = progress?.predicted_tokens_per_s ?? plan.goodput_tokens_per_s;
  const rows = [["Target", plan.target], ["Predicted", `${decimal(predicted)} tokens/s`]];
  if (progress?.missing.length) rows.push(["Of which serve", `${decimal(progress.serving_tokens_per_s)} tokens/s`], ["Does not run", progress.missing.map((one) => one.why).join("; ")]);
  if (progress) rows.push(["Measured", progress.measured_tokens_per_s ? `${decimal(progress.measured_tokens_per_s)} tokens/s` : "–"], ["Rounds take", `${decimal(progress.ratio, 2)} × what was predicted`], ["Objective", progress.objective], ["Made anew", `${progress.plans} times, ${progress.moves} with other workers`], ["Came of it last", progress.last], ["Profiles that drifted", progress.drifted.join(", ")]);
  return [
    html("dl", { class: "facts" }, rows.filter(([, value]) => value).map(([name, value]) => [html("dt", {}, name), html("dd", {}, value)])),
    ...plan.replicas.map(describeReplica),
    plan.standby ? html("p", {}, html("b", {}, "Standby: "), plan.standby) : null,
    html("details", {}, html("summary", {}, `What was not chosen (${plan.rejected.length + plan.more_rejected})`), table("Not chosen, and why", ["What", "Why not"], plan.rejected.map((one) => [one.what, one.why]))),
  ].filter(Boolean);
}

function describeReplica(replica, index) {
  const places = replica.shards.map((one) => `${shortDevice(one.device)} (${one.weights}, ${one.source})`).join(" → ");
  const { prediction } = replica;
  const gain = prediction.plain_tokens_per_s ? `, ${decimal(prediction.goodput_tokens_per_s / prediction.plain_tokens_per_s, 2)} × plain decoding` : "";
  return html(
    "div",
    { class: "planned" },
    html("h3", {}, `Replica ${index + 1}: ${places}`),
    html("p", {}, `${replica.drafter ? `${replica.drafter} drafts ${replica.depth} tokens deep` : "no drafts"}; TTFT ${milliseconds(prediction.ttft_ms)}, TPOT ${milliseconds(prediction.tpot_ms)}${gain}.`),
    html("details", {}, html("summary", {}, "Its score, term by term"), table("Score", ["Term", "0 to 1", "Why"], replica.terms.map((one) => [one.name.replaceAll("_", " "), decimal(one.value, 2), one.why]))),
  );
}
