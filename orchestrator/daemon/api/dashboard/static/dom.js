// Makes elements without HTML strings: nothing that the daemon says is ever read as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

export const html = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
export const byId = (id) => document.getElementById(id);

/** Set an attribute or a text only where it differs: what does not change is not laid out again. */
export function setAttribute(element, name, value) {
  const text = String(value);
  if (element.getAttribute(name) !== text) element.setAttribute(name, text);
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A table with a caption; each row is a list of texts or elements. */
export function table(caption, heads, rows) {
  const head = html("tr", {}, heads.map((one) => html("th", { scope: "col" }, one)));
  const body = rows.map((row) => html("tr", {}, row.map((cell) => html("td", {}, cell))));
  const whole = html("table", {}, html("caption", {}, caption), html("thead", {}, head), html("tbody", {}, body));
  return html("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, whole);
}
