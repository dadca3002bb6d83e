// Elements, and nothing else that makes them: text goes in as text nodes, so no text of a run is ever read as HTML.

/** Make an element: properties by name ("class", "onclick", "aria-label", data), then children: nodes, texts, arrays. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && !name.includes("-") && name !== "list") setProperty(element, name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

function setProperty(element, name, value) {
  if (name === "style") Object.assign(element.style, value);
  else element[name] = value;
}

/** Make an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "fill") element.style.fill = value; // also a variable of the style sheet
    else element.setAttribute(name, value);
  }
  element.append(...children.flat().filter(Boolean));
  return element;
}

/** Replace what an element holds. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** A labelled <select>; `options` are values, or [value, text]. */
export function select(label, options, value, onchange) {
  const choices = options.map((option) => (Array.isArray(option) ? option : [option, option]));
  const box = h("select", { "aria-label": label, onchange: () => onchange(box.value) },
    choices.map(([of, text]) => h("option", { value: of, selected: String(of) === String(value) }, text)));
  return h("label", {}, label, box);
}

/** A button that stays pressed. */
export function toggle(text, isOn, onchange) {
  const button = h("button", { type: "button", "aria-pressed": String(isOn), onclick: () => {
    const now = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(now));
    onchange(now);
  } }, text);
  return button;
}

/** Whether a key is typed into a field, and so is no command. */
export function isTyping(event) {
  return event.ctrlKey || event.metaKey || event.altKey || ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName);
}

/** Call a function when the caller has been quiet for a while. */
export function debounced(action, milliseconds) {
  let timer;
  return (...values) => { clearTimeout(timer); timer = setTimeout(() => action(...values), milliseconds); };
}

/** Offer a text as a file. */
export function download(name, blob) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
