// The overview.

import { ask } from "./api.js";
import { merged, poolCard, providerCard } from "./cards.js";
import { chartsOf } from "./charts.js";
import { counts, el, fill, link } from "./dom.js";
import { nothing } from "./empty.js";
import { number } from "./format.js";
import { healthLine, waiting } from "./health.js";
import { part } from "./refresh.js";
import { smallTable } from "./tables.js";

/** @param {string} table */
const empty = (table) => el("p", { class: "dim" }, nothing(table, false, null));

/** @param {string} title @param {number | string} value @param {string} detail @param {string} [href] */
function figure(title, value, detail, href) {
  return el("div", { class: "card" }, el("h2", {}, href ? el("a", { href }, title) : title),
    el("div", { class: "big" }, typeof value === "number" ? number(value) : value), el("div", { class: "dim" }, detail));
}

// The longest bar is that of the label with the most nodes; what a piece stands for is said in the text.
/** @param {Label} row @param {number} longest */
function labelRow(row, longest) {
  const bar = el("svg", { class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": `${row.label}: ${counts(row.states)}` });
  let x = 0;
  for (const [state, count] of Object.entries(row.states)) {
    const width = 100 * count / longest;
    bar.append(el("rect", { class: /^[a-z-]+$/.test(state) ? state : null, x, y: 0, width, height: 10 }));
    x += width;
  }
  const wanted = row.min_ready ? `; min-ready ${row.min_ready}` : "";
  return el("tr", {}, el("th", { scope: "row" }, link("label", row.label)), el("td", {}, bar),
    el("td", {}, `${counts(row.states)}${wanted}`), el("td", { class: "number" }, String(row.waiting)));
}

/** @param {Label[]} rows */
function labelBars(rows) {
  if (!rows.length) return empty("labels");
  const longest = Math.max(1, ...rows.map((row) => Object.values(row.states).reduce((sum, each) => sum + each, 0)));
  return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Labels" }, el("table", { class: "bars" },
    el("thead", {}, el("tr", {}, ["Label", "Nodes", "", "Waiting"].map((text) => (text ? el("th", { scope: "col", class: text === "Waiting" ? "number" : null }, text) : el("td", {}))))),
    el("tbody", {}, rows.map((row) => labelRow(row, longest)))));
}

const PROBLEMS = [{ key: "severity", title: "Severity" }, { key: "since", title: "Age", type: "time" }, { key: "provider", title: "Provider" }, { key: "label", title: "Label" }, { key: "problem", title: "Problem" }];
const DAEMONS = [
  { key: "kind", title: "Kind" }, { key: "host", title: "Host" }, { key: "state", title: "State" }, { key: "version", title: "Version" },
  { key: "running", title: "Running" }, { key: "config", title: "Configuration" },
];

/** @param {Pick<Overview, 'nodes' | 'requests' | 'launches'>} numbers */
function figures({ nodes, requests, launches: { ready, failed } }) {
  const total = (/** @type {Counts} */ value) => Object.values(value).reduce((sum, each) => sum + each, 0);
  return [
    figure("Nodes", total(nodes), counts(nodes), "/ui/nodes"),
    figure("Requests waiting", (requests.requested || 0) + (requests.pending || 0), counts(requests), "/ui/requests?state=requested,pending"),
    figure("Launch success rate", ready + failed ? `${Math.round(100 * ready / (ready + failed))} %` : "--", ready + failed ? `${ready} of ${ready + failed} in the last hour` : "no launch ended in the last hour"),
  ];
}

/** @param {Provider[]} rows */
function providers(rows) {
  return rows.length ? el("div", { class: "cards many" }, merged(rows).map(providerCard)) :
    empty("providers");
}

/** @param {Pool[]} rows */
function pools(rows) {
  return rows.length ? el("div", { class: "cards many" }, rows.map(poolCard)) :
    empty("pools");
}

/** @param {View} view */
export async function overview({ main, onStop }) {
  const health = part(), numbers = part("div", { class: "cards" }), causes = waiting(), charts = el("section", {});
  const [provided, pooled, labeled, problems, daemons] = [part(), part(), part(), part(), part()];
  async function load() {
    /** @type {Overview} */
    const found = await ask("overview");
    health.show(found.health, healthLine);
    numbers.show({ nodes: found.nodes, requests: found.requests, launches: found.launches }, figures);
    // The page counts the time itself.
    causes.show(found.waiting.map((row) => ({ ...row, since: null })));
    // Without the numbers of calls, which change all the time and are not shown.
    provided.show(found.providers.map((row) => ({ ...row, calls: null })), providers);
    pooled.show(found.pools, pools);
    labeled.show(found.labels, labelBars);
    problems.show(found.problems, (rows) => smallTable("Problems", PROBLEMS, rows, "problems"));
    daemons.show(found.daemons, (rows) => smallTable("Launchers and builders", DAEMONS, rows, "daemons"));
  }
  await load();
  fill(main, el("h1", {}, "Overview"), health.place, numbers.place, causes.place, charts,
    el("h2", {}, "Providers"), provided.place, el("h2", {}, "Pools"), pooled.place,
    el("h2", {}, el("a", { href: "/ui/labels" }, "Labels")), labeled.place, problems.place, daemons.place);
  // The charts are less urgent than the first view.
  onStop(chartsOf(charts));
  return load;
}
