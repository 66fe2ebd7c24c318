// The cluster as an SVG map. It is drawn anew where its parts have changed; else only what differs is set.

import { byId, html, setAttribute, setText, svg, table } from "./dom.js";
import { bytes, decimal, milliseconds, percent, shortDevice, shorten, whole } from "./format.js";

const NODE_WIDTH = 268;
const GAP = 14;
const HEAD = 30;
const DEVICE = 34;
const CHIP = 30;
const PAD = 8;

let shape = "";
let drawn = { devices: new Map(), workers: new Map(), links: [] };
let chosen = "";
let last = null;

const deviceId = (name) => `device ${name}`;
const nodeOf = (name) => name.slice(0, name.lastIndexOf("/"));
const phaseClass = (phase) => (phase === "ready" ? "ready" : phase === "failed" ? "failed" : "moving");

/** Show the map; where its shape is the same, only states and shares are set. */
export function showMap(map, progress) {
  last = map;
  const width = Math.max(NODE_WIDTH, byId("map").clientWidth);
  const columns = Math.max(1, Math.floor((width - GAP) / (NODE_WIDTH + GAP)));
  const now = JSON.stringify([columns, map.nodes, map.devices.map((one) => one.name), map.workers.map((one) => [one.id, one.device, one.layers, one.phase === "failed"]), map.links.map((one) => [one.from, one.to])]);
  if (now !== shape) {
    shape = now;
    draw(map, columns);
  }
  update(map);
  showPart(progress);
}

function draw(map, columns) {
  const held = document.activeElement?.closest?.("#map [data-part]")?.dataset.part;
  drawn = { devices: new Map(), workers: new Map(), links: [] };
  const places = placeNodes(map, columns);
  const used = Math.min(columns, places.nodes.length || 1);
  const size = [used * (NODE_WIDTH + GAP) + GAP, Math.max(60, places.height)];
  const root = svg("svg", { viewBox: `0 0 ${size.join(" ")}`, width: size[0], height: size[1], role: "group", "aria-label": "Map of the cluster" });
  for (const node of places.nodes) root.append(drawNode(node));
  root.prepend(svg("g", { class: "links", "aria-hidden": "true" }, map.links.map((link) => drawLink(link, places.anchors))));
  root.append(root.firstChild);
  root.addEventListener("keydown", moveFocus);
  byId("map").replaceChildren(root);
  const parts = [...root.querySelectorAll("[data-part]")];
  if (!parts.some((one) => one.dataset.part === chosen)) chosen = "";
  (parts.find((one) => one.dataset.part === (held ?? chosen)) ?? parts[0])?.setAttribute("tabindex", "0");
  if (held) parts.find((one) => one.dataset.part === held)?.focus();
}

/** Put nodes into the shortest column, those with workers first, and say where each worker's chip is. */
function placeNodes(map, columns) {
  const heights = Array(columns).fill(0);
  const anchors = new Map();
  const busy = new Set(map.workers.map((one) => nodeOf(one.device)));
  const sorted = map.nodes.toSorted((one, other) => busy.has(other.name) - busy.has(one.name) || one.name.localeCompare(other.name, "en", { numeric: true }));
  const homeless = map.workers.filter((one) => !one.device);
  const all = homeless.length ? [...sorted, { name: null, title: homeless.every((one) => one.phase === "failed") ? "could not be placed" : "not placed yet", zone: "", left_out: "" }] : sorted;
  const nodes = all.map((node) => {
    const column = heights.indexOf(Math.min(...heights));
    const x = column * (NODE_WIDTH + GAP);
    const y = heights[column];
    let inner = y + HEAD;
    const devices = node.name === null ? [{ name: "", bare: true }] : map.devices.filter((one) => nodeOf(one.name) === node.name);
    const boxes = devices.map((device) => {
      const workers = map.workers.filter((one) => one.device === device.name);
      const box = { device, x: x + PAD, y: inner, workers: [], height: (device.bare ? 4 : DEVICE) + workers.length * CHIP + (workers.length ? 4 : 0) };
      box.workers = workers.map((worker, index) => {
        const place = { worker, x: x + PAD + 6, y: inner + (device.bare ? 4 : DEVICE) + index * CHIP, width: NODE_WIDTH - 2 * PAD - 12 };
        anchors.set(worker.id, place);
        return place;
      });
      inner += box.height + 6;
      return box;
    });
    if (node.left_out) inner += 18;
    const height = inner - y + PAD - 2;
    heights[column] += height + GAP;
    return { node, x, y, height, boxes };
  });
  return { nodes, anchors, height: Math.max(...heights) - GAP };
}

function drawNode({ node, x, y, height, boxes }) {
  const title = node.zone ? `${node.title} · ${node.zone}` : node.title;
  const parts = [
    svg("rect", { class: `node${node.left_out ? " away" : ""}`, x, y, width: NODE_WIDTH, height, rx: 10 }),
    svg("text", { class: "node-name", x: x + PAD + 4, y: y + 20 }, shorten(title === "here" ? "this machine" : title, 34)),
  ];
  if (node.left_out) parts.push(svg("text", { class: "quiet", x: x + PAD + 4, y: y + height - 10 }, shorten(`left out: ${node.left_out}`, 42)));
  return svg("g", {}, parts, boxes.map(drawDevice));
}

function drawDevice({ device, x, y, height, workers }) {
  const width = NODE_WIDTH - 2 * PAD;
  const chips = workers.map(drawWorker);
  if (device.bare) return svg("g", {}, chips);
  const bar = { x: x + 10, y: y + 22, height: 5, rx: 2.5 };
  const all = width - 20;
  const share = svg("text", { class: "share", x: x + width - 10, y: y + 15, "text-anchor": "end" });
  const ours = svg("rect", { ...bar, class: "ours", width: 0 });
  const others = svg("rect", { ...bar, class: "others", width: 0 });
  const group = selectable(deviceId(device.name), "device", [
    svg("rect", { class: "box", x, y, width, height, rx: 7 }),
    svg("text", { class: "device-name", x: x + 10, y: y + 15 }, shorten(device.name.slice(device.name.lastIndexOf("/") + 1), 22)),
    share,
    svg("rect", { ...bar, class: "trough", width: all }),
    others,
    ours,
  ]);
  drawn.devices.set(device.name, { group, share, ours, others, all, x: bar.x });
  return svg("g", {}, group, chips);
}

function drawWorker({ worker, x, y, width }) {
  const label = svg("text", { class: "chip-name", x: x + 22, y: y + 16 });
  const load = svg("text", { class: "share", x: x + width - 8, y: y + 16, "text-anchor": "end" });
  const group = selectable(worker.id, `chip ${worker.role}`, [
    svg("rect", { class: "box", x, y, width, height: CHIP - 5, rx: 6 }),
    svg("circle", { class: "dot", cx: x + 12, cy: y + 12.5, r: 4.5 }),
    label,
    load,
  ]);
  drawn.workers.set(worker.id, { group, label, load, role: worker.role });
  return group;
}

function selectable(id, kind, children) {
  const choose = () => {
    chosen = id;
    for (const one of byId("map").querySelectorAll("[data-part]")) {
      const mine = one.dataset.part === id;
      one.setAttribute("tabindex", mine ? "0" : "-1");
      one.setAttribute("aria-pressed", mine);
    }
    showPart();
  };
  return svg("g", { class: `part-of ${kind}`, "data-part": id, role: "button", tabindex: "-1", "aria-pressed": chosen === id, onclick: choose, onfocus: choose }, children);
}

function drawLink(link, anchors) {
  const from = anchors.get(link.from);
  const to = anchors.get(link.to);
  if (!from || !to) return svg("g");
  const right = to.x > from.x;
  const same = to.x === from.x;
  const start = [right || same ? from.x + from.width : from.x, from.y + 12];
  const end = [right ? to.x : to.x + to.width, to.y + 12];
  const bend = same ? 26 : Math.max(24, Math.abs(end[0] - start[0]) / 2);
  const outward = same ? [bend, bend] : right ? [bend, -bend] : [-bend, bend];
  const line = svg("path", { d: `M${start} C${start[0] + outward[0]},${start[1]} ${end[0] + outward[1]},${end[1]} ${end}` });
  drawn.links.push({ line, from: link.from, to: link.to });
  return line;
}

function moveFocus(event) {
  const step = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const parts = [...byId("map").querySelectorAll("[data-part]")];
  const index = parts.indexOf(event.target.closest("[data-part]"));
  parts[(index + step + parts.length) % parts.length]?.focus();
}

function update(map) {
  for (const device of map.devices) {
    const one = drawn.devices.get(device.name);
    if (!one) continue;
    const ours = Math.min(1, device.ours ?? device.utilisation ?? 0) * one.all;
    const others = Math.min(one.all - ours, (device.others ?? 0) * one.all);
    setAttribute(one.ours, "width", ours.toFixed(1));
    setAttribute(one.others, "x", (one.x + ours).toFixed(1));
    setAttribute(one.others, "width", others.toFixed(1));
    setText(one.share, device.utilisation === null || device.utilisation === undefined ? "" : `${Math.round(device.utilisation * 100)} %`);
    setAttribute(one.group, "aria-label", `device ${shortDevice(device.name)}, ${percent(device.utilisation)} in use${device.hot ? ", hot" : ""}`);
  }
  for (const worker of map.workers) {
    const one = drawn.workers.get(worker.id);
    if (!one) continue;
    const layers = worker.layers ? ` · ${worker.layers}` : "";
    setText(one.label, shorten(`${worker.name}${layers}`, 24));
    setText(one.load, describeLoad(worker));
    setAttribute(one.group, "class", `part-of chip ${worker.role} ${phaseClass(worker.phase)}`);
    setAttribute(one.group, "aria-label", `${worker.role} ${worker.name}${layers}, ${worker.phase}${worker.phase === "failed" ? `: ${worker.detail}` : ""}, on ${shortDevice(worker.device) || "no device yet"}`);
  }
  for (const { line, from, to } of drawn.links) {
    const link = map.links.find((one) => one.from === from && one.to === to);
    if (link) setAttribute(line, "class", `link ${link.kind}${link.up ? "" : " down"}`);
  }
}

function describeLoad(worker) {
  if (worker.phase !== "ready") return worker.phase;
  if (worker.role === "draft") return worker.busy === null ? "" : `${Math.round(worker.busy * 100)} % busy`;
  if (worker.role === "standby") return "standby";
  return `${worker.running} run${worker.waiting ? `, ${worker.waiting} wait` : ""}`;
}

/** Show all that is known of the chosen part. */
function showPart() {
  const worker = last?.workers.find((one) => one.id === chosen);
  const device = last?.devices.find((one) => deviceId(one.name) === chosen);
  if (!worker && !device) return;
  const rows = worker ? listWorker(worker) : listDevice(device);
  const title = worker ? `${worker.role} ${worker.name}` : `device ${shortDevice(device.name)}`;
  const text = JSON.stringify([title, rows]);
  if (byId("part").dataset.shown === text) return;
  byId("part").dataset.shown = text;
  byId("part").replaceChildren(html("h3", {}, title), html("dl", {}, rows.map(([name, value]) => [html("dt", {}, name), html("dd", {}, value)])));
}

function listWorker(worker) {
  const links = last.links.filter((one) => one.from === worker.id || one.to === worker.id);
  const told = links.map((one) => `${one.kind} ${one.from === worker.id ? "to" : "from"} ${(one.from === worker.id ? one.to : one.from).replace(/^draft\/|\/0$/g, "")}${one.up ? "" : " (down)"}${one.answer_ms ? `, answers in ${milliseconds(one.answer_ms)}` : ""}`);
  const rows = [["phase", worker.phase + (worker.held ? ` (${worker.held})` : "")], ["detail", worker.detail], ["device", shortDevice(worker.device)], ["layers", worker.layers], ["adapter", worker.adapter], ["weights", worker.weights], ["drafts by", worker.draft], ["deepest draft", worker.max_depth ? whole(worker.max_depth) : ""], ["streams", worker.role === "draft" ? whole(worker.sequences) : whole(worker.streams)], ["links", told.join("; ")]];
  return rows.filter(([, value]) => value);
}

function listDevice(device) {
  const used = device.memory_total_bytes ? `${bytes(device.memory_total_bytes - device.memory_free_bytes)} of ${bytes(device.memory_total_bytes)}` : "";
  const rows = [["in use", percent(device.utilisation)], ["by us", percent(device.ours)], ["by other programs", percent(device.others)], ["memory", used], ["memory, ours", device.memory_ours_bytes ? bytes(device.memory_ours_bytes) : ""], ["temperature", device.temperature_c ? `${decimal(device.temperature_c, 0)} °C` : ""], ["power", device.power_w ? `${decimal(device.power_w, 0)} W` : ""], ["waiting for it", device.queue_depth ? decimal(device.queue_depth) : ""], ["hot", device.hot ?? ""], ["workers", last.workers.filter((one) => one.device === device.name).map((one) => `${one.role} ${one.name}`).join(", ")]];
  return rows.filter(([, value]) => value && value !== "–");
}

/** The same as tables, made while they are open only. */
export function showTables(map) {
  const devices = map.devices.map((one) => [shortDevice(one.name), percent(one.utilisation), percent(one.ours), percent(one.others), bytes(one.memory_free_bytes), one.temperature_c ? `${decimal(one.temperature_c, 0)} °C` : "–", one.power_w ? `${decimal(one.power_w, 0)} W` : "–"]);
  const workers = map.workers.map((one) => [one.role, one.name, one.phase, shortDevice(one.device) || "–", one.layers || "all", one.phase === "ready" ? describeLoad(one) : one.detail]);
  const links = map.links.map((one) => [one.kind, one.from, one.to, one.up ? "up" : "down", milliseconds(one.answer_ms)]);
  byId("map-tables").replaceChildren(
    table("Workers", ["Role", "Name", "Phase", "Device", "Layers", "Load"], workers),
    table("Devices", ["Device", "In use", "By us", "By others", "Memory free", "Heat", "Power"], devices),
    table("Links", ["Kind", "From", "To", "State", "Answer"], links),
  );
}
