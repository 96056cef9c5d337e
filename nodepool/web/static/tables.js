// Tables: whole pages with filters, and small ones within other pages.

import { buttons, may } from "./actions.js";
import { API, ask } from "./api.js";
import { counts, el, fill, links, rich, since, state, until } from "./dom.js";
import { nothing } from "./empty.js";
import { bytes, duration, number, uses } from "./format.js";

// Column of a table -> the kind of thing that it names.
/** @type {{ [table: string]: { [column: string]: string } }} */
const LINKS = {
  nodes: { id: "node", labels: "label", provider: "provider", request: "request" },
  requests: { id: "request", labels: "label", nodes: "node" },
  labels: { label: "label" }, images: { image: "image", labels: "label" }, builds: { image: "image" }, uploads: { image: "image", provider: "provider" },
  providers: { provider: "provider" }, pools: { provider: "provider", labels: "label" },
  problems: { provider: "provider", label: "label" }, hosts: { provider: "provider", nodes: "node" },
};
// Type of a column, as the server declares it -> how its values are shown.
/** @type {{ [type: string]: (value: number) => Child }} */
const SHOWN = {
  time: (value) => since(value), due: (value) => until(value), seconds: duration, bytes, share: (value) => `${number(100 * value, 0)} %`,
};
// Columns with sentences, which name other things.
const TEXTS = new Set(["reason", "problem", "suggestion", "user"]);
const LINES = 100;
const narrow = matchMedia("(max-width: 600px)");

// On a narrow screen, sentences follow the first column: farther right, nobody would see them.
/** @template {Pick<Column, "key">} C @param {C[]} columns @returns {C[]} */
function arranged(columns) {
  if (!narrow.matches) return columns;
  const texts = columns.slice(1).filter(({ key }) => TEXTS.has(key));
  return [...columns.slice(0, 1), ...texts, ...columns.slice(1).filter(({ key }) => !TEXTS.has(key))];
}

/** @param {string} table @param {Pick<Column, "key" | "type">} column @param {Json} value @returns {Child[]} */
function cell(table, { key, type }, value) {
  if (value === null || value === undefined || value === "") return [""];
  const kind = LINKS[table]?.[key];
  if (kind) return links(kind, [value].flat().map(String));
  if (typeof value === "number") return [(type && SHOWN[type] || number)(value)];
  if (type === "uses" && typeof value === "string") return [uses(value)];
  if (key === "state") return [state(String(value))];
  if (Array.isArray(value)) return [value.join(", ")];
  if (typeof value === "object") return [Object.values(value).every((each) => typeof each === "number") ? counts(/** @type {Counts} */ (value)) : JSON.stringify(value)];
  if (typeof value === "boolean") return [value ? "yes" : "no"];
  return TEXTS.has(key) ? rich(String(value)) : [String(value)];
}

// How a cell looks: a narrow screen scrolls rather than squeezes long texts.
/** @param {Pick<Column, "key" | "type">} column @param {Json} value */
function shape({ type }, value) {
  if (typeof value === "number" && type !== "time" && type !== "due") return "number";
  return typeof value === "string" && value.length > 30 ? "long" : null;
}

// With `load`, which loads the page again, its rows can be acted on.
/** @param {string} title @param {Pick<Column, "key" | "title" | "type">[]} columns @param {Row[]} rows @param {string} table @param {Load | null} [load] */
export function smallTable(title, columns, rows, table, load = null) {
  columns = arranged(columns);
  return el("section", {}, el("h2", {}, el("a", { href: `/ui/${table}` }, title)), rows.length ? el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": title },
    el("table", {}, el("thead", {}, el("tr", {}, columns.map((column) => el("th", { scope: "col" }, column.title)), load ? el("td", {}) : null)),
      el("tbody", {}, rows.map((row) => el("tr", {}, columns.map((column) => el("td", { class: shape(column, row[column.key]) }, cell(table, column, row[column.key]))),
        load ? el("td", {}, actionsOf(table, row, load)) : null))))) :
    el("p", { class: "dim" }, nothing(table, false, null)));
}

// A button for each filter of the address that has no box: it takes it away.
/** @param {URLSearchParams} given @param {string[]} others @param {() => void} changed */
export function filters(given, others, changed) {
  return [...given].filter(([key]) => !others.includes(key)).map(([key, value]) => el("button", {
    type: "button", onclick: () => { given.delete(key, value); changed(); },
  }, `${key}: ${value} \u00d7`));
}

// Table -> kind of its rows that can be acted on, the name of a row, and whether anything can be done with it.
/** @type {{ [table: string]: { kind: string, name: (row: Row) => string, open: (row: Row) => boolean } }} */
const ROWS = {
  nodes: { kind: "node", name: (row) => String(row.id), open: (row) => row.state !== "deleting" },
  requests: { kind: "request", name: (row) => String(row.id), open: (row) => row.state === "requested" || row.state === "pending" },
  images: { kind: "image", name: (row) => String(row.image), open: () => true },
  builds: { kind: "build", name: buildPath, open: (row) => row.state === "ready" || row.state === "paused" },
  uploads: { kind: "upload", name: uploadPath, open: (row) => row.state === "ready" },
};

/** @param {Json} value */
const quoted = (value) => encodeURIComponent(String(value));

// The id of a build contains its image.
/** @param {Row} row */
function buildPath(row) {
  return `${quoted(row.image)}/builds/${quoted(String(row.id).slice(String(row.image).length + 1))}`;
}

/** @param {Row} row */
function uploadPath(row) {
  return `${quoted(row.image)}/builds/${quoted(row.id)}/providers/${quoted(row.provider)}/uploads/${quoted(row.upload_id)}`;
}

// Buttons, or commands, for a row.
/** @param {string} table @param {Row} row @param {Load} load */
function actionsOf(table, row, load) {
  const { kind, name, open } = ROWS[table];
  return open(row) ? el("span", { class: "tools" }, buttons(kind, name(row), load)) : null;
}

// The columns that somebody has chosen for a table; null: those shown by default.
/** @param {string} name */
const columnsKey = (name) => `nodepool-columns-${name}`;

/** @param {string} name @returns {string[] | null} */
function chosenColumns(name) {
  try {
    const keys = JSON.parse(localStorage.getItem(columnsKey(name)) || "null");
    return Array.isArray(keys) ? keys : null;
  } catch {
    return null;
  }
}

// A box for each column; what is chosen is kept in this browser.
/** @param {string} name @param {() => void} changed */
function columnChooser(name, changed) {
  const boxes = el("div", { class: "tools" });
  const made = el("details", { class: "columns", ontoggle: () => show() }, el("summary", {}, "Columns"), boxes);
  let show = () => {};
  /** @param {Column[]} all @param {string[]} shown @param {string[]} standard */
  function draw(all, shown, standard) {
    show = () => { if (!boxes.contains(document.activeElement)) fill(boxes, made.open ? boxesOf(all, shown, standard) : null); };
    show();
  }
  /** @param {Column[]} all @param {string[]} shown @param {string[]} standard */
  function boxesOf(all, shown, standard) {
    return [all.map(({ key, title }) => el("label", {}, el("input", {
      type: "checkbox", checked: shown.includes(key), value: key, onchange: () => {
        const keys = [...boxes.querySelectorAll("input")].filter((box) => box.checked).map((box) => box.value);
        if (!keys.length || String(keys) === String(standard)) localStorage.removeItem(columnsKey(name));
        else localStorage.setItem(columnsKey(name), JSON.stringify(keys));
        changed();
      },
    }), ` ${title}`)), el("button", { type: "button", onclick: () => { localStorage.removeItem(columnsKey(name)); /** @type {HTMLElement} */ (document.activeElement).blur(); changed(); } }, "Reset")];
  }
  return { made, draw };
}

/** @param {string} id @param {string} text @param {string[][]} values @param {string} value @param {(value: string) => void} chosen */
function chooser(id, text, values, value, chosen) {
  /** @type {HTMLSelectElement} */
  const box = el("select", { id, onchange: () => chosen(box.value) }, values.map(([each, title]) => el("option", { value: each }, title)));
  box.value = value;
  return el("span", {}, el("label", { for: id }, text), " ", box);
}

/** @param {View} view @param {string} name @param {string} title */
export async function tablePage({ main, onStop, failed }, name, title) {
  const given = new URLSearchParams(location.search);
  const body = el("tbody", {}), head = el("tr", {}), caption = el("caption", {}), groups = el("p", { class: "groups" });
  const search = el("input", { type: "search", id: "q", value: given.get("q") || "", autocomplete: "off" });
  const choosers = el("span", { class: "tools" }), chosen = el("span", { class: "tools" });
  const before = el("button", { type: "button", onclick: () => turn(-LINES) }, "Previous");
  const after = el("button", { type: "button", onclick: () => turn(LINES) }, "Next");
  const json = el("a", {}, "JSON"), csv = el("a", {}, "CSV");
  const chosenOnes = columnChooser(name, () => load().catch(failed));
  /** @type {Column[]} */
  let columns = [];
  let order = "";

  /** @param {{ [key: string]: string | number }} more */
  function address(more) {
    const query = new URLSearchParams(given);
    for (const [key, value] of Object.entries(more)) query.set(key, String(value));
    return `${name}?${query}`;
  }
  function changed() {
    history.replaceState(null, "", given.size ? `?${given}` : location.pathname);
    return load().catch(failed);
  }
  /** @param {number} by */
  function turn(by) {
    given.set("offset", String(Math.max(0, Number(given.get("offset") || 0) + by)));
    changed();
  }
  // Sets what is shown, from its beginning; an empty value is no choice.
  /** @param {string} key @param {string} value */
  function choose(key, value) {
    if (value) given.set(key, value); else given.delete(key);
    given.delete("offset");
    changed();
  }
  /** @param {Row[]} rows */
  function header(rows) {
    const sort = given.get("sort") || order;
    head.replaceChildren(...columns.map((column) => {
      const { key, title: text, type } = column;
      const value = rows.find((row) => typeof row[key] === "number")?.[key] ?? null;
      const sorted = sort === key || sort === `-${key}`;
      // Times are shown as ages: the latest is the lowest.
      const up = (sort === key) !== (type === "time");
      return el("th", { scope: "col", class: shape(column, value), "aria-sort": sorted ? (up ? "ascending" : "descending") : null },
        el("button", { type: "button", onclick: () => choose("sort", sort === key ? `-${key}` : key) }, text, sorted ? (up ? " \u25b2" : " \u25bc") : ""));
    }));
  }
  /** @param {Column[]} all @param {string} key */
  const titleOf = (all, key) => all.find((column) => column.key === key)?.title || key;
  // A box for each key with few values; one that is being used is left as it is.
  /** @param {Table} found @param {Column[]} all */
  function choices(found, all) {
    if (choosers.contains(document.activeElement)) return;
    const keys = Object.keys(found.choices).filter((key) => found.choices[key].length > 1 || given.has(key));
    const groupable = [...new Set([...keys, given.get("group") || ""])].filter((key) => key);
    fill(choosers, keys.map((key) => {
      const values = [...new Set([...found.choices[key], ...given.getAll(key)])];
      return chooser(`choose-${key}`, titleOf(all, key), [["", "all"], ...values.map((value) => [value, value])], given.get(key) || "", (value) => choose(key, value));
    }), groupable.length ? chooser("choose-group", "Group by", [["", "nothing"], ...groupable.map((key) => [key, titleOf(all, key)])], given.get("group") || "",
      (value) => choose("group", value)) : null);
  }
  const hides = () => [...given.keys()].some((key) => key !== "sort" && key !== "group");
  function clear() {
    for (const key of [...given.keys()]) given.delete(key);
    search.value = "";
    changed();
  }
  const actions = () => (may("operate") && ROWS[name]) || null;
  // The rows of a group follow a row with its name and size; one without a name has no value.
  /** @param {Table} found @param {Load} load */
  function rowsOf(found, load) {
    const group = given.get("group"), sizes = new Map(found.groups), acts = actions();
    /** @type {string | null} */
    let last = null;
    return found.rows.flatMap((row) => {
      const made = el("tr", {}, columns.map((column) => el("td", { class: shape(column, row[column.key]) }, cell(name, column, row[column.key]))),
        acts ? el("td", {}, actionsOf(name, row, load)) : null);
      const of = group ? String([row[group] ?? ""].flat().join(", ")) : null;
      if (of === last) return [made];
      last = of;
      return [el("tr", { class: "group" }, el("th", { scope: "rowgroup", colspan: columns.length + (acts ? 1 : 0) }, groupName(of), ` (${number(sizes.get(of || "") || 0)})`)), made];
    });
  }
  /** @param {string | null} text */
  const groupName = (text) => text || `no ${given.get("group")}`;
  /** @param {Table} found */
  function groupLinks(found) {
    const key = given.get("group") || "";
    fill(groups, found.groups.map(([text, count]) => {
      const query = new URLSearchParams(given);
      for (const each of ["group", "offset"]) query.delete(each);
      query.set(key, text);
      const shown = `${groupName(text)}: ${number(count)}`;
      // A filter by a list would need all of its values, and none finds rows without a value.
      return el("span", {}, text && !text.includes(", ") ? el("a", { href: `/ui/${name}?${query}` }, shown) : shown);
    }));
  }
  let latest = 0;
  async function load() {
    const asked = ++latest;
    /** @type {Table} */
    const found = await ask(address({ limit: LINES }));
    if (asked !== latest) return; // a later question has been asked meanwhile
    const all = [...found.columns, ...found.more], standard = found.columns.map(({ key }) => key);
    const keys = chosenColumns(name);
    columns = keys ? all.filter(({ key }) => keys.includes(key)) : found.columns;
    columns = arranged(columns.length ? columns : found.columns);
    order = found.order[0] || "";
    choices(found, all);
    chosenOnes.draw(all, columns.map(({ key }) => key), standard);
    const focused = /** @type {HTMLTableCellElement | null} */ (document.activeElement?.closest("thead th"))?.cellIndex;
    header(found.rows);
    if (focused !== undefined) head.cells[focused]?.querySelector("button")?.focus();
    if (actions()) head.append(el("td", {}));
    fill(body, found.rows.length ? rowsOf(found, load) : el("tr", {}, el("td", { colspan: columns.length }, nothing(name, hides(), clear))));
    groupLinks(found);
    const offset = Number(given.get("offset") || 0);
    caption.textContent = found.total > LINES ? `${number(offset + 1)} to ${number(offset + found.rows.length)} of ${number(found.total)}` : `${number(found.total)} ${found.total === 1 ? "row" : "rows"}`;
    before.disabled = offset === 0;
    after.disabled = offset + found.rows.length >= found.total;
    before.hidden = after.hidden = before.disabled && after.disabled;
    fill(chosen, filters(given, ["q", "sort", "group", "offset", ...Object.keys(found.choices)], changed));
    json.href = `${API}/${address({ limit: 20000 })}`;
    csv.href = `${API}/${address({ limit: 20000, format: "csv" })}`;
  }
  let typed = 0;
  search.addEventListener("input", () => {
    clearTimeout(typed);
    typed = setTimeout(() => choose("q", search.value), 250);
  });
  onStop(() => clearTimeout(typed));
  await load();
  fill(main,
    el("h1", {}, title),
    el("div", { class: "tools" }, el("label", { for: "q" }, "Find "), search, choosers, chosen, before, after, json, csv), chosenOnes.made, groups,
    el("div", { class: "wide tall", tabindex: "0", role: "region", "aria-label": title }, el("table", {}, caption, el("thead", {}, head), body)),
  );
  return load;
}
