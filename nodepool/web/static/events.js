// The page of events, as they happen.

import { ask, listen } from "./api.js";
import { el, fill, link, precisely } from "./dom.js";
import { nothing } from "./empty.js";
import { number } from "./format.js";
import { filters } from "./tables.js";

const MOST_EVENTS = 500;

/** @param {View} view */
export async function eventsPage({ main, onStop }) {
  const given = new URLSearchParams(location.search);
  const list = el("ol", { class: "history", "aria-label": "Events", "aria-live": "off" });
  const types = Object.keys((await ask("")).event_types);
  const strange = given.getAll("type").flatMap((each) => each.split(",")).filter((each) => !types.includes(each));
  if (strange.length) throw Object.assign(new Error(`There is no event type ${strange.join(", ")}. Types: ${types.join(", ")}`), { status: 400 });
  const chosen = el("span", { class: "tools" });
  const empty = el("p", {}, nothing("events", false, null));
  let last = 0, stop = () => {};
  // The events of a request are one entry, which shows the newest and opens to the earlier ones.
  /** @param {HTMLElement} line @param {string | undefined} request */
  function place(line, request) {
    const known = request && [...list.children].find((each) => /** @type {HTMLElement} */ (each).dataset.request === request);
    if (request) line.dataset.request = request;
    list.prepend(line);
    if (!known) return;
    const earlier = known.querySelector("details") || el("details", {}, el("summary", {}), el("ol", { class: "history" }));
    line.append(earlier);
    /** @type {Element} */ (earlier.lastChild).prepend(known);
    /** @type {Element} */ (earlier.firstChild).textContent = `${number(/** @type {Element} */ (earlier.lastChild).children.length)} earlier of this request`;
  }
  /** @param {MessageEvent<string>} message */
  function add(message) {
    const event = JSON.parse(message.data);
    const { number: position, time, type: kind, noted: _noted, zxid: _zxid, ...fields } = event;
    last = position;
    empty.hidden = true;
    const name = ["node", "request", "image"].find((key) => kind.startsWith(key) && fields[key]);
    const line = el("li", {}, el("time", {}, precisely(time)), el("strong", {}, kind), " ", name ? link(name, fields[name]) : "",
      ` ${Object.entries(fields).filter(([key]) => key !== name).map(([key, value]) => `${key}: ${Array.isArray(value) ? [...new Set(value)].join(", ") : value}`).join("; ")}`);
    place(line, fields.request);
    while (list.children.length > MOST_EVENTS) list.lastChild?.remove();
  }
  function begin() {
    stop();
    last = 0;
    list.replaceChildren();
    empty.hidden = false;
    chosen.replaceChildren(...filters(given, ["type"], changed));
    stop = listen(() => { const query = new URLSearchParams(given); query.set("since", String(last)); return `events?${query}`; },
      Object.fromEntries(types.map((type) => [type, add])));
  }
  function changed() {
    history.replaceState(null, "", given.size ? `?${given}` : location.pathname);
    begin();
  }
  const box = el("select", { id: "choose-type", onchange: () => {
    if (box.value) given.set("type", box.value); else given.delete("type");
    changed();
  } }, el("option", { value: "" }, "all"), types.map((type) => el("option", { value: type }, type)));
  box.value = given.get("type") || "";
  begin();
  onStop(() => stop());
  fill(main, el("h1", {}, "Events"), el("p", { class: "dim" }, "As they happen; the newest is first."),
    el("div", { class: "tools" }, el("label", {}, "Type ", box), chosen), empty, list);
  return async () => {};
}
