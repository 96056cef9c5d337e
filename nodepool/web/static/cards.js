// Cards of providers and pools: the scarcest limit first, in real units.

import { el, link } from "./dom.js";
import { number, use } from "./format.js";

const RED = 1, AMBER = 0.9;

// What is used of a limit, as a fraction; a limit of 0 that is used is more than full.
/** @param {number} used @param {number} limit */
function share(used, limit) {
  return limit > 0 ? used / limit : 2;
}

// [resource, used, limit], the scarcest first, without those that are 0 and unused.
/** @param {Counts} used @param {Counts} limits */
export function scarcest(used, limits) {
  return Object.entries(limits).map(([resource, limit]) => /** @type {[string, number, number]} */ ([resource, used[resource] || 0, limit]))
    .filter(([, amount, limit]) => amount || limit)
    .sort((one, other) => share(other[1], other[2]) - share(one[1], one[2]));
}

/** @param {[string, number, number]} use of a resource */
function meter([resource, used, limit]) {
  const part = share(used, limit);
  const level = part >= RED ? "red" : part >= AMBER ? "amber" : "green";
  const word = part >= RED ? ", full" : `, ${Math.round(100 * part)} %`;
  const words = `${use(resource, used, limit)}${word}`;
  return el("div", { class: `meter ${level}` }, el("span", {}, words),
    el("meter", { min: 0, max: Math.max(limit, 1e-9), value: Math.min(used, limit), "aria-label": words }));
}

/** @param {number} count @param {string} noun */
function plural(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}

/** @param {Provider} row */
function problems(row) {
  if (!row.problems) return null;
  return el("p", { class: "bad" }, el("a", { href: `/ui/problems?provider=${encodeURIComponent(row.provider)}` }, plural(row.problems, "problem")));
}

// A provider without limits has the slots of its hosts.
/** @param {Provider} row @param {boolean} hasLimits */
function slots(row, hasLimits) {
  const nodes = Object.values(row.states).reduce((sum, each) => sum + each, 0);
  const parts = [];
  if (!hasLimits && nodes) parts.push(plural(nodes, row.driver === "static" || row.driver === "metastatic" ? "slot" : "node"));
  if (row.hosts) parts.push(`${row.hosts - row.hosts_down} of ${plural(row.hosts, "host")} usable`);
  if (!parts.length) return null;
  return el("p", { class: row.hosts_down ? "bad" : null }, row.hosts_down ? el("a", { href: `/ui/problems?provider=${encodeURIComponent(row.provider)}` }, parts.join(", ")) : parts.join(", "));
}

// One row per provider: several launchers report the same one.
/** @param {Provider[]} rows @returns {MergedProvider[]} */
export function merged(rows) {
  /** @type {Map<string, MergedProvider>} */
  const found = new Map();
  for (const row of rows) {
    const known = found.get(row.provider);
    if (!known) found.set(row.provider, { ...row, launchers: row.launcher ? [row.launcher] : [] });
    else {
      known.launchers.push(row.launcher);
      if (!Object.keys(known.limit).length) Object.assign(known, { limit: row.limit, used: row.used });
    }
  }
  return [...found.values()];
}

/** @param {MergedProvider} row */
export function providerCard(row) {
  const limits = scarcest(row.used, row.limit);
  const runs = !row.driver?.startsWith("not running");
  return el("div", { class: "card" }, el("h3", {}, link("provider", row.provider)), runs ? null : el("p", { class: "bad" }, row.driver),
    el("p", { class: "dim" }, runs ? `${row.driver || "unknown driver"}, ` : "", row.launchers.length ? `launcher ${row.launchers.join(", ")}` : "no launcher", `; nodes: ${row.nodes}`),
    slots(row, limits.length > 0), limits.map(meter), problems(row));
}

/** @param {Pool} row */
export function poolCard(row) {
  const state = row.paused ? el("p", { class: "full" }, row.full) : el("p", {}, "Accepts requests");
  const nodes = typeof row.max_servers === "number" ? meter(["nodes", row.nodes, row.max_servers]) : el("p", {}, `${plural(row.nodes, "node")}, no limit of the pool`);
  return el("div", { class: "card" }, el("h3", {}, link("provider", row.provider), ` ${row.pool}`), state,
    nodes, el("p", { class: "dim" }, `launcher ${row.launcher}`));
}
