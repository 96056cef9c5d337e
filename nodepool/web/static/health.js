// The health line on top of the overview, and the waiting requests by cause.

import { counts, el, link, links, rich, since } from "./dom.js";
import { number } from "./format.js";
import { list } from "./refresh.js";

const SIGNS = { green: "\u2713", amber: "!", red: "\u2715" };
// Requests of one cause that are linked one by one.
const MOST = 50;

/** @param {Level} level */
function sign(level) {
  return el("span", { class: `sign ${level}`, "aria-hidden": "true" }, SIGNS[level]);
}

// Red and amber have a sign and a word, too: a color alone is no information.
/** @param {Health} health */
export function healthLine(health) {
  return el("section", { class: `health ${health.level}`, "aria-label": "Health" },
    el("p", {}, sign(health.level), el("strong", {}, health.word)),
    health.problems.length ? el("ul", {}, health.problems.map((each) => el("li", {}, sign(each.level),
      el("a", { href: `/ui/${each.kind}${each.name ? `/${encodeURIComponent(each.name)}` : ""}` }, each.text)))) : null,
    health.more ? el("p", {}, el("a", { href: "/ui/problems" }, `${health.more} more`)) : null);
}

/** @param {CauseRow} row */
function causeRow(row) {
  const rest = row.count - row.ids.length;
  return el("details", { class: `cause${row.problem ? " problem" : ""}` },
    el("summary", {}, el("strong", { class: "number" }, number(row.count)), " ", row.count === 1 ? "request" : "requests", ": ", row.cause,
      el("span", { class: "dim" }, " longest ", since(row.oldest))),
    row.reason === row.cause ? null : el("p", {}, rich(row.reason)),
    row.suggestion ? el("p", { class: "suggestion" }, "Suggestion: ", rich(row.suggestion)) : null,
    el("dl", {},
      el("dt", {}, "Labels"), el("dd", {}, Object.entries(row.label_counts).map(([name, count], index) => [index ? ", " : null, link("label", name), ` \u00d7${count}`])),
      Object.keys(row.tenants).length ? [el("dt", {}, "Tenants"), el("dd", {}, counts(row.tenants))] : null,
      el("dt", {}, "Requests"), el("dd", {}, links("request", row.ids.slice(0, MOST)), rest > 0 ? [" and ", el("a", { href: "/ui/requests?state=requested,pending" }, `${rest} more`)] : null)));
}

// The waiting requests; show() gets the rows.
export function waiting() {
  const rows = list((/** @type {CauseRow} */ row) => row.key, causeRow);
  const nothing = el("p", { class: "dim" }, "No request is waiting. Requests of Zuul, of leases and for min-ready appear here with their cause.");
  return {
    place: el("section", {}, el("h2", {}, "Waiting requests by cause"), nothing, rows.place),
    /** @param {CauseRow[]} found */
    show(found) {
      nothing.toggleAttribute("hidden", found.length > 0);
      rows.show(found);
    },
  };
}
