// The page: takes what the daemon says into its state, and shows it at the next frame.

import { installCharts, resizeCharts, showCharts } from "./charts.js";
import { byId, html, setAttribute, setText } from "./dom.js";
import { installFigures, readFigures, showFigures } from "./figures.js";
import { showFailovers } from "./failovers.js";
import { showMap, showTables } from "./map.js";
import { showPlan } from "./plan.js";
import { installRequests, showChosen, showRequests } from "./requests.js";
import { follow, keepKey, readKey } from "./stream.js";
import { installTheme } from "./theme.js";

const MOST_POINTS = 900;
const state = { parts: {}, histories: new Map(), atS: 0, number: 0, waiting: false };

const chosenModel = () => Number(byId("model").value || 0);
const part = (name) => state.parts[`model/${chosenModel()}/${name}`];

function take(kind, event) {
  if (kind === "state") state.parts = {};
  Object.assign(state.parts, event.parts);
  state.atS = event.at_s;
  state.number = event.number;
  state.parts.about.models.forEach((_, index) => {
    const history = state.histories.get(index) ?? state.histories.set(index, []).get(index);
    history.push(readFigures(state.parts[`model/${index}/figures`], history, event.at_s));
    if (history.length > MOST_POINTS) history.shift();
  });
  if (state.waiting) return;
  state.waiting = true;
  requestAnimationFrame(() => {
    state.waiting = false;
    show();
  });
}

function show() {
  showAbout(state.parts.about);
  const { phase, detail, missing } = part("state");
  const degraded = phase === "ready" && missing.length > 0;
  const told = degraded ? `degraded: ${missing.length} replica${missing.length > 1 ? "s do" : " does"} not serve` : phase;
  const why = degraded ? missing.join("; ") : detail;
  if (byId("phase").textContent !== told) byId("news").textContent = `The model is ${told}. ${why}`;
  setText(byId("phase"), told);
  setAttribute(byId("phase"), "class", `pill ${degraded ? "restarting" : phase}`);
  setAttribute(byId("phase"), "title", why);
  const history = state.histories.get(chosenModel());
  showFigures(history.at(-1));
  showMap(part("map"));
  if (byId("map-tables").parentElement.open) showTables(part("map"));
  showCharts(history);
  showPlan(part("plan"), part("progress"));
  showFailovers(state.parts.failovers, state.atS);
  showRequests(state.parts.requests);
  if (!byId("content").dataset.number) performance.mark("first-state");
  setAttribute(byId("content"), "data-number", state.number);
}

function showAbout({ version, models }) {
  setText(byId("version"), version);
  const names = models.map((name, index) => name || `model ${index + 1}`);
  const select = byId("model");
  if ([...select.options].map((one) => one.text).join("\n") !== names.join("\n")) {
    const before = select.value;
    select.replaceChildren(...names.map((name, index) => html("option", { value: index }, name)));
    select.value = before || "0";
  }
  byId("model-choice").hidden = names.length < 2;
}

function redraw() {
  installCharts();
  if (state.number) show();
}

function askForKey(problem) {
  byId("key-form").hidden = false;
  byId("content").hidden = true;
  if (problem) setText(byId("key-problem"), problem);
  byId("key").focus();
}

function start() {
  byId("key-form").hidden = true;
  byId("content").hidden = false;
  resizeCharts();
  void showChosen();
  void follow({
    told: take,
    linked: (up, text) => {
      setText(byId("link"), text);
      setAttribute(byId("link"), "class", up ? "pill ready" : "pill failed");
    },
    refused: askForKey,
  });
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey(byId("key").value.trim());
  start();
});
byId("model").addEventListener("change", () => state.number && show());
byId("map-tables").parentElement.addEventListener("toggle", () => state.number && showTables(part("map")));
addEventListener("resize", () => {
  resizeCharts();
  if (state.number) showMap(part("map"));
});
installTheme(byId("theme"), redraw);
installFigures();
installCharts();
installRequests();
if (document.documentElement.dataset.keys === "yes" && !readKey()) askForKey("");
else start();
