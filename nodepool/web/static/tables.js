// Tables: whole pages with filters, and small ones within other pages.

import { buttons, may } from "./actions.js";
import { API, ask } from "./api.js";
import { counts, el, fill, links, since, state } from "./dom.js";
import { bytes, duration, number, uses } from "./format.js";

// Column of a table -> the kind of thing that it names.
const LINKS = {
  nodes: { id: "node", labels: "label", provider: "provider", request: "request" },
  requests: { id: "request", labels: "label", nodes: "node" },
  labels: { label: "label" }, images: { image: "image" }, builds: { image: "image" }, uploads: { image: "image", provider: "provider" },
  providers: { provider: "provider" }, pools: { provider: "provider", labels: "label" },
  problems: { provider: "provider", label: "label" }, hosts: { provider: "provider", nodes: "node" },
};
// Type of a column, as the server declares it -> how its values are shown.
const SHOWN = {
  time: (value) => since(value), seconds: duration, bytes, rate: (value) => `${bytes(value)}/s`, share: (value) => `${number(100 * value, 0)} %`,
};
const LINES = 100;

function cell(table, { key, type }, value) {
  if (value === null || value === undefined || value === "") return [""];
  const kind = (LINKS[table] || {})[key];
  if (kind) return links(kind, [value].flat());
  if (typeof value === "number") return [(SHOWN[type] || number)(value)];
  if (type === "uses" && typeof value === "string") return [uses(value)];
  if (key === "state") return [state(String(value))];
  if (Array.isArray(value)) return [value.join(", ")];
  if (typeof value === "object") return [Object.values(value).every((each) => typeof each === "number") ? counts(value) : JSON.stringify(value)];
  if (typeof value === "boolean") return [value ? "yes" : "no"];
  return [String(value)];
}

// How a cell looks: a narrow screen scrolls rather than squeezes long texts.
function shape({ type }, value) {
  if (typeof value === "number" && type !== "time") return "number";
  return typeof value === "string" && value.length > 30 ? "long" : null;
}

export function smallTable(title, columns, rows, table) {
  return el("section", {}, el("h2", {}, title), rows.length ? el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": title },
    el("table", {}, el("thead", {}, el("tr", {}, Object.values(columns).map((text) => el("th", { scope: "col" }, text)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, Object.keys(columns).map((key) => el("td", { class: shape({ key }, row[key]) }, cell(table, { key }, row[key])))))))) :
    el("p", { class: "dim" }, "none"));
}

// A button for each filter of the address that has no box: it takes it away.
export function filters(given, others, changed) {
  return [...given].filter(([key]) => !others.includes(key)).map(([key, value]) => el("button", {
    type: "button", onclick: () => { given.delete(key, value); changed(); },
  }, `${key}: ${value} \u00d7`));
}

function uploadPath(row) {
  const [image, build, provider, upload] = [row.image, row.id, row.provider, row.upload_id].map(encodeURIComponent);
  return `${image}/builds/${build}/providers/${provider}/uploads/${upload}`;
}

export async function tablePage({ main, onStop, failed }, name, title) {
  const given = new URLSearchParams(location.search);
  const body = el("tbody", {}), head = el("tr", {}), caption = el("caption", {});
  const search = el("input", { type: "search", id: "q", value: given.get("q") || "", autocomplete: "off" });
  const choosers = el("span", { class: "tools" }), chosen = el("span", { class: "tools" });
  const before = el("button", { type: "button", onclick: () => turn(-LINES) }, "Previous");
  const after = el("button", { type: "button", onclick: () => turn(LINES) }, "Next");
  const json = el("a", {}, "JSON"), csv = el("a", {}, "CSV");
  let columns = null;

  function address(more) {
    const query = new URLSearchParams(given);
    for (const [key, value] of Object.entries(more)) query.set(key, value);
    return `${name}?${query}`;
  }
  function changed() {
    history.replaceState(null, "", given.size ? `?${given}` : location.pathname);
    return load().catch(failed);
  }
  function turn(by) {
    given.set("offset", Math.max(0, Number(given.get("offset") || 0) + by));
    changed();
  }
  function sortBy(key) {
    given.set("sort", given.get("sort") === key ? `-${key}` : key);
    given.delete("offset");
    changed();
  }
  function header() {
    const sort = given.get("sort") || "";
    head.replaceChildren(...columns.map(({ key, title: text }) => el("th", {
      scope: "col", "aria-sort": sort === key ? "ascending" : sort === `-${key}` ? "descending" : null,
    }, el("button", { type: "button", onclick: () => { sortBy(key); } }, text, sort === key ? " \u25b2" : sort === `-${key}` ? " \u25bc" : ""))));
  }
  // A box for each key with few values; one that is being used is left as it is.
  function choose(choices) {
    const keys = Object.keys(choices).filter((key) => choices[key].length > 1 || given.has(key));
    if (choosers.contains(document.activeElement)) return;
    choosers.replaceChildren(...keys.map((key) => {
      const text = columns.find((column) => column.key === key)?.title || key;
      const values = [...new Set([...choices[key], ...given.getAll(key)])];
      const box = el("select", { id: `choose-${key}`, onchange: () => {
        if (box.value) given.set(key, box.value); else given.delete(key);
        given.delete("offset");
        changed();
      } }, el("option", { value: "" }, "all"), values.map((value) => el("option", { value }, value)));
      box.value = given.get(key) || "";
      return el("label", {}, `${text} `, box);
    }));
  }
  let latest = 0;
  async function load() {
    const asked = ++latest;
    const found = await ask(address({ limit: LINES }));
    if (asked !== latest) return; // a later question has been asked meanwhile
    columns = found.columns;
    choose(found.choices);
    const focused = document.activeElement?.closest("th")?.cellIndex;
    header();
    if (focused !== undefined) head.cells[focused]?.querySelector("button").focus();
    const acts = name === "uploads" && may("operate");
    if (acts) head.append(el("td", {}));
    body.replaceChildren(...found.rows.map((row) => el("tr", {}, columns.map((column) =>
      el("td", { class: shape(column, row[column.key]) }, cell(name, column, row[column.key]))), acts ? el("td", {}, buttons("upload", uploadPath(row), load)) : null)));
    if (!found.rows.length) body.append(el("tr", {}, el("td", { colspan: columns.length, class: "dim" }, "none")));
    const offset = Number(given.get("offset") || 0);
    caption.textContent = found.total > LINES ? `${offset + 1} to ${offset + found.rows.length} of ${found.total}` : `${found.total}`;
    before.disabled = offset === 0;
    after.disabled = offset + found.rows.length >= found.total;
    chosen.replaceChildren(...filters(given, ["q", "sort", "offset", ...Object.keys(found.choices)], changed));
    json.href = `${API}/${address({ limit: 20000 })}`;
    csv.href = `${API}/${address({ limit: 20000, format: "csv" })}`;
  }
  let typed;
  search.addEventListener("input", () => {
    clearTimeout(typed);
    typed = setTimeout(() => {
      if (search.value) given.set("q", search.value); else given.delete("q");
      given.delete("offset");
      changed();
    }, 250);
  });
  onStop(() => clearTimeout(typed));
  await load();
  fill(main,
    el("h1", {}, title),
    el("div", { class: "tools" }, el("label", { for: "q" }, "Find "), search, choosers, chosen, before, after, json, csv),
    el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": title }, el("table", {}, caption, el("thead", {}, head), body)),
  );
  return load;
}
