// The menu, the search box, and the page of what was found.

import { ask } from "./api.js";
import { byId, el, fill, link, links } from "./dom.js";

/** @type {[string, [string, string][]][]} */
export const GROUPS = [
  ["Now", [["", "Overview"], ["problems", "Problems"], ["events", "Events"]]],
  ["Work", [["requests", "Requests"], ["leases", "Leases"], ["nodes", "Nodes"], ["labels", "Labels"], ["usage", "Usage"]]],
  ["Images", [["images", "Images"], ["builds", "Builds"], ["uploads", "Uploads"]]],
  ["Infrastructure", [["providers", "Providers"], ["pools", "Pools"], ["hosts", "Hosts"], ["tenants", "Tenants"],
    ["daemons", "Daemons"], ["config", "Configuration"]]],
];
const TITLES = new Map(GROUPS.flatMap(([, pages]) => pages));
// Table -> the column by which a row is known, and the kind of page that it has.
/** @type {{ [table: string]: [string, string | null] }} */
const FOUND = {
  nodes: ["id", "node"], requests: ["id", "request"], labels: ["label", "label"], images: ["image", "image"], providers: ["provider", "provider"],
  hosts: ["host", null], tenants: ["tenant", null],
};
const MOST = 20;

/** @param {string} page */
export const titleOf = (page) => TITLES.get(page);

/** @param {string} current */
export function menu(current) {
  fill(byId("nav"), GROUPS.map(([group, pages]) => el("li", {}, el("span", { class: "group" }, group),
    el("ul", { "aria-label": group }, pages.map(([path, title]) =>
      el("li", {}, el("a", { href: `/ui/${path}`, "aria-current": path === current ? "page" : null }, title)))))));
}

// Where somebody is: the table of what the page shows.
/** @param {string} page @param {string} name */
export function breadcrumb(page, name) {
  const table = Object.keys(FOUND).find((each) => FOUND[each][1] === page);
  return name && table ? el("p", { class: "crumbs" }, el("a", { href: `/ui/${table}` }, titleOf(table)), ` \u203a ${name}`) : null;
}

// The box: `/` leads there; `go` shows the page of an address.
/** @param {(address: string) => void} go */
export function searchBox(go) {
  const form = byId("search");
  const box = /** @type {HTMLInputElement} */ (form.querySelector("input"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = box.value.trim();
    if (text) go(/^\d{10}$/.test(text) ? `/ui/node/${text}` : /^\d{3}-\d{10}$/.test(text) ? `/ui/request/${text}` : `/ui/find?q=${encodeURIComponent(text)}`);
  });
  const narrow = matchMedia("(max-width: 600px)");
  const fold = () => { /** @type {HTMLDetailsElement} */ (byId("menu")).open = !narrow.matches; };
  narrow.addEventListener("change", fold);
  fold();
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || /** @type {Element} */ (event.target).closest?.("input, select, textarea, dialog")) return;
    event.preventDefault();
    box.focus();
    box.select();
  });
}

/** @param {string} table @param {string} text @param {Table} found */
function answers(table, text, found) {
  const [key, kind] = FOUND[table];
  const names = [...new Set(found.rows.flatMap((row) => (row[key] ? [String(row[key])] : [])))];
  if (!names.length) return null;
  const query = `q=${encodeURIComponent(text)}`;
  const shown = kind ? links(kind, names.slice(0, MOST)) : names.slice(0, MOST).flatMap((name, index) =>
    [index ? ", " : "", el("a", { href: `/ui/${table}?q=${encodeURIComponent(name)}` }, name)]);
  return el("section", {}, el("h2", {}, el("a", { href: `/ui/${table}?${query}` }, `${titleOf(table)}: ${found.total}`)), el("p", {}, shown));
}

// Tables whose rows have the text; what has exactly this name is offered first.
/** @param {View} view */
export async function findPage({ main }) {
  const text = new URLSearchParams(location.search).get("q") || "";
  const tables = Object.keys(FOUND);
  /** @type {Table[]} */
  const found = await Promise.all(tables.map((table) => ask(`${table}?${new URLSearchParams({ q: text, limit: "200" })}`)));
  const exact = tables.flatMap((table, index) => {
    const [key, kind] = FOUND[table];
    return kind && found[index].rows.some((row) => row[key] === text) ? [el("li", {}, `${kind} `, link(kind, text))] : [];
  });
  const sections = tables.map((table, index) => answers(table, text, found[index])).filter((each) => each);
  fill(main, el("h1", {}, `Search: ${text}`), exact.length ? el("ul", { "aria-label": "Exactly this name" }, exact) : null, sections,
    sections.length ? null : el("p", {}, "Nothing has this id or name. Requests and nodes of the last day that no longer exist are found by their complete id."));
  return async () => {};
}
