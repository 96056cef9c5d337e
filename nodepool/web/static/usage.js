// The page of usage: what each group has used in the last hours.

import { ask } from "./api.js";
import { el, fill } from "./dom.js";
import { bytes, duration, number } from "./format.js";
import { part } from "./refresh.js";

const HOURS = [1, 4, 24];
/** @type {[string, string][]} */
const PIECES = [["used_hours", "in-use"], ["idle_hours", "ready"], ["launch_hours", "building"]];
const TITLES = ["", "Used, idle, launching", "Hours", "Nodes", "Wait p50, p95", "Memory p50, p95 of the limit", "Kills", "Cost", "Idle cost"];

/** @param {UsageRow} row @param {string} key */
const value = (row, key) => Number(row[key] || 0);

/** @param {string} text @param {[string, number][]} pieces class and share of the width, in percent */
function bar(text, pieces) {
  const drawn = el("svg", { class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": text });
  let x = 0;
  for (const [name, width] of pieces) {
    drawn.append(el("rect", { class: name, x, y: 0, width, height: 10 }));
    x += width;
  }
  return drawn;
}

/** @param {UsageRow} row @param {(value: number) => string} format @param {string[]} keys */
const some = (row, format, ...keys) => keys.map((key) => (row[key] === null ? "--" : format(value(row, key)))).join(", ");

// What half of the nodes used, and what 95 % of them did, of the limit.
/** @param {UsageRow} row @returns {Child[]} */
function memory(row) {
  if (row.memory_p95 === null) return ["--"];
  const text = `${some(row, bytes, "memory_p50", "memory_p95")} of ${some(row, bytes, "memory_limit")}`;
  const most = value(row, "memory_limit") || value(row, "memory_p95") || 1;
  const [half, high] = ["memory_p50", "memory_p95"].map((key) => Math.min(100, 100 * value(row, key) / most));
  return [bar(text, [["in-use", half], ["building", Math.max(0, high - half)]]), text];
}

/** @param {UsageRow} row @param {string} by @param {number} longest */
function line(row, by, longest) {
  const name = String(row[by] ?? "(none)");
  const hours = PIECES.map(([key]) => number(value(row, key))).join(", ");
  const cells = [
    hours, number(value(row, "nodes")), some(row, duration, "wait_p50", "wait_p95"), memory(row), some(row, number, "kills"), some(row, number, "cost"), some(row, number, "idle_cost"),
  ];
  return el("tr", {}, el("th", { scope: "row" }, name),
    el("td", {}, bar(`${name}: ${hours} hours`, PIECES.map(([key, state]) => [state, 100 * value(row, key) / longest]))), cells.map((cell) => el("td", {}, cell)));
}

/** @param {Usage} found */
function table({ by, rows }) {
  if (!rows.length) return el("p", { class: "dim" }, "No node existed in this time.");
  const total = (/** @type {UsageRow} */ row) => PIECES.reduce((sum, [key]) => sum + value(row, key), 0);
  const groups = rows.filter((row) => row[by] !== "(all)");
  const longest = Math.max(1e-9, ...groups.map(total));
  return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Usage" }, el("table", { class: "bars" },
    el("thead", {}, el("tr", {}, TITLES.map((text) => (text ? el("th", { scope: "col" }, text) : el("td", {}))))),
    el("tbody", {}, rows.map((row) => line(row, by, row[by] === "(all)" ? Math.max(longest, total(row)) : longest)))));
}

/** @param {string} by @param {number} hours */
const address = (by, hours) => `/ui/usage?${new URLSearchParams({ by, hours: String(hours) })}`;

/** @param {View} view */
export async function usagePage({ main }) {
  const given = new URLSearchParams(location.search);
  const by = given.get("by") || "label", hours = Number(given.get("hours")) || 24;
  const shown = part();
  /** @type {string[]} */
  let groups = [];
  async function load() {
    /** @type {Usage} */
    const found = await ask(`usage?${new URLSearchParams({ by, since: String(Math.round(3600 * hours)) })}`);
    groups = found.groups;
    shown.show(found, table);
  }
  await load();
  const choice = (/** @type {string} */ text, /** @type {string} */ href, /** @type {boolean} */ current) => el("a", { href, "aria-current": current ? "page" : null }, text);
  fill(main, el("h1", {}, "Usage"),
    el("nav", { class: "tools", "aria-label": "Group by" }, "By", groups.map((each) => choice(each, address(each, hours), each === by))),
    el("nav", { class: "tools", "aria-label": "Time" }, "Nodes of the last", HOURS.map((each) => choice(`${each} h`, address(by, each), each === hours))),
    shown.place);
  return load;
}
