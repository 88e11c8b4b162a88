// Makes and updates elements. Strings of a job become text nodes only: no string is ever parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children (elements or text). */
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function makeSvg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** A group's id with its name in bold, isolated (bdi) from the text direction around it. */
export function idOf(id) {
  const at = id.indexOf(":");
  const name = at < 0 ? id : id.slice(0, at);
  return make("bdi", { class: "id", title: id.length > 40 ? id : null }, make("b", {}, name), at < 0 ? "" : id.slice(at));
}

/** Sets the text. This and the next two functions change the DOM only if the value differs. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function mark(element, name, value) {
  if (element.dataset[name] !== value) element.dataset[name] = value;
}

export function show(element, visible) {
  if (element.hidden === visible) element.hidden = !visible;
}

export const byId = (id) => document.getElementById(id);
