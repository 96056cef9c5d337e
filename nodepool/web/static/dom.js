// What pages are made of. Everything that comes from the cluster is set as text, never as markup.

import { age, isMoment, moment } from "./format.js";

export { age, moment, precisely } from "./format.js";

/**
 * @template {string} Name
 * @param {Name} name @param {Attributes | null} [attributes] @param {Child[]} children
 * @returns {Name extends keyof HTMLElementTagNameMap ? HTMLElementTagNameMap[Name] : Element}
 */
export function el(name, attributes, ...children) {
  const made = document.createElementNS(SVG.has(name) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml", name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (typeof value === "function") made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, String(value));
  }
  fill(made, ...children);
  return /** @type {any} */ (made);
}
const SVG = new Set(["svg", "rect", "path", "line", "title"]);

// An element of index.html.
/** @param {string} id */
export const byId = (id) => /** @type {HTMLElement} */ (document.getElementById(id));

/** @param {Element} place @param {Child[]} children */
export function fill(place, ...children) {
  const flat = /** @type {(Node | string)[]} */ (children.flat(/** @type {1} */ (Infinity)));
  place.replaceChildren(...flat.filter((child) => child !== null && child !== undefined && /** @type {unknown} */ (child) !== false));
}

/** @param {number} seconds @returns {Child} */
export function since(seconds) {
  if (!isMoment(seconds)) return String(seconds);
  const made = el("time", { datetime: new Date(seconds * 1000).toISOString(), title: moment(seconds), "data-since": seconds });
  made.textContent = age(Date.now() / 1000 - seconds);
  return made;
}

// A time in the future.
/** @param {number} seconds @returns {Child} */
export function until(seconds) {
  if (!isMoment(seconds)) return String(seconds);
  const left = seconds - Date.now() / 1000;
  return el("time", { datetime: new Date(seconds * 1000).toISOString(), title: moment(seconds) }, left > 0 ? `in ${age(left)}` : "due");
}

// Ids, and names that are not much longer, stay in one line.
/** @param {string} name */
export const shortClass = (name) => (String(name).length <= 24 ? "id" : null);

/** @param {string} kind @param {string} name */
export function link(kind, name) {
  return el("a", { href: `/ui/${kind}/${encodeURIComponent(name)}`, class: shortClass(name) }, String(name));
}

/** @param {string} text */
export function state(text) {
  return el("span", { class: `state ${/^[a-z -]+$/.test(text) ? text.replaceAll(" ", "-") : ""}` }, String(text));
}

/** @param {Child[]} parts @returns {Child[]} */
export function joined(parts) {
  return parts.flatMap((part, index) => (index ? [", ", part] : [part]));
}

// Each once, with how often it is there.
/** @param {string} kind @param {string[]} names @returns {Child[]} */
export function links(kind, names) {
  const found = new Map();
  for (const name of names) found.set(name, (found.get(name) || 0) + 1);
  return joined([...found].map(([name, times]) => (times > 1 ? [link(kind, name), ` \u00d7${times}`] : link(kind, name))));
}

/** @param {Counts} value */
export function counts(value) {
  return Object.entries(value).map(([name, count]) => `${count} ${name}`).join(", ") || "none";
}

// A command, and a button that copies it.
/** @param {string} text @param {string | null} [title] */
export function command(text, title = null) {
  const code = el("code", { class: "command", title }, text);
  const button = el("button", { type: "button", class: "copy", "aria-label": `Copy ${text}`, onclick: async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch { // not over plain HTTP from another machine, or not permitted
      getSelection()?.selectAllChildren(code);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  } }, "Copy");
  return el("span", { class: "copied" }, code, " ", button);
}

// A text of the server: ids lead to their pages, and what is in backquotes is a command or an option.
const PIECES = /`([^`]+)`|\b(\d{3}-\d{10})\b|(?<=\bnodes? (?:\d{10}, )*)\b(\d{10})\b/g;
/** @param {string} text @returns {Child[]} */
export function rich(text) {
  /** @type {Child[]} */
  const parts = [];
  let end = 0;
  for (const found of String(text).matchAll(PIECES)) {
    const [all, code, request, node] = found;
    parts.push(text.slice(end, found.index));
    if (code) parts.push(/^(nodepool|ssh|systemctl) /.test(code) ? command(code) : el("code", {}, code));
    else parts.push(request ? link("request", request) : link("node", node));
    end = found.index + all.length;
  }
  return [...parts, text.slice(end)];
}
