// Parts of a page that are replaced only when their data change: what a reader is clicking on, or has opened, stays.

import { el, fill } from "./dom.js";

const FOCUS = "a, button, summary, [tabindex]";

/** @param {Element} place */
function opened(place) {
  return [...place.querySelectorAll("details")].map((each) => each.open);
}

// A part of a page. show() gets what `make` returns for the data, unless it is shown already.
/** @template T @param {string} name @param {Attributes} attributes */
export function part(name = "div", attributes = {}) {
  const place = el(name, attributes);
  let known = "";
  return {
    place,
    /** @param {T} data @param {(data: T) => Child} make */
    show(data, make) {
      const text = JSON.stringify(data);
      if (text === known) return;
      known = text;
      const open = opened(place), focused = [...place.querySelectorAll(FOCUS)].findIndex((each) => each === document.activeElement);
      fill(place, make(data));
      place.querySelectorAll("details").forEach((each, index) => { each.open = open[index] || false; });
      if (focused >= 0) /** @type {HTMLElement} */ (place.querySelectorAll(FOCUS)[focused])?.focus();
    },
  };
}

// A list of parts, one for each row; only parts that are not where they belong are moved.
/** @template T @param {(row: T) => string} keyOf @param {(row: T) => Child} make */
export function list(keyOf, make) {
  const place = el("div", {});
  /** @typedef {ReturnType<typeof part<T>>} Part */
  /** @type {Map<string, Part>} */
  let parts = new Map();
  return {
    place,
    /** @param {T[]} rows */
    show(rows) {
      /** @type {Map<string, Part>} */
      const next = new Map();
      for (const row of rows) next.set(keyOf(row), parts.get(keyOf(row)) || part());
      for (const row of rows) next.get(keyOf(row))?.show(row, make);
      for (const [key, each] of parts) if (!next.has(key)) each.place.remove();
      [...next.values()].forEach((each, index) => {
        if (place.children[index] !== each.place) place.insertBefore(each.place, place.children[index] || null);
      });
      parts = next;
    },
  };
}
