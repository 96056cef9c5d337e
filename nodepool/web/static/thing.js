// The page of one request, node, label, image or provider.

import { buttons } from "./actions.js";
import { API, ask } from "./api.js";
import { command, el, fill, joined, link, rich, since } from "./dom.js";
import { age, duration, moment, precisely } from "./format.js";
import { breadcrumb } from "./navigation.js";
import { smallTable } from "./tables.js";

// Title of a fact -> the kind of thing that it names.
/** @type {{ [title: string]: string }} */
const FACTS = { request: "request", nodes: "node", labels: "label", "backing node": "node", "nodes on it": "node", provider: "provider", image: "image" };
// Kind of thing -> tables with its rows.
/** @type {{ [kind: string]: [string, string][] }} */
const RELATED = {
  label: [["Nodes", "nodes?labels"], ["Waiting requests", "requests?state=requested,pending&labels"]],
  provider: [["Nodes", "nodes?provider"], ["Pools", "pools?provider"], ["Hosts", "hosts?provider"], ["Uploads", "uploads?provider"]],
};
// Tables of the page of an image, and their columns there.
/** @type {[string, string, string[]][]} */
const OF_IMAGE = [
  ["Builds", "builds", ["id", "state", "builder", "formats", "age", "reason"]],
  ["Uploads", "uploads", ["provider", "state", "external_name", "age", "reason"]],
];
const COMMANDS = new Set(["log in"]);
// Requests in these states are open: the time since the last step is shown.
const OPEN = new Set(["requested", "accepted", "launch started", "nodes ready", "in use"]);

// What names other things leads to them.
/** @param {string} title @param {string} value @returns {Child} */
function fact(title, value) {
  if (COMMANDS.has(title)) return command(value);
  const kind = FACTS[title];
  // "3 ready" is a number of nodes.
  if (!kind || value.startsWith("none") || (kind === "node" && !/^\d{10}(, \d{10})*$/.test(value))) return rich(value);
  return joined(value.split(", ").map((each) => {
    const [, one, times] = /^(.*?)( x\d+)?$/.exec(each) || [];
    return [link(kind, one), times || null];
  }));
}

/** @param {Step[]} steps */
function timeline(steps) {
  if (!steps.length) return null;
  const last = steps[steps.length - 1];
  return [el("h2", {}, "Timeline"), el("ol", { class: "steps", "aria-label": "Timeline" }, steps.map(({ step, time, took }) =>
    el("li", { class: step === "failed" || step === "canceled" ? "ended" : null }, el("strong", {}, step), took === null ? null : ` after ${duration(took)}`,
      el("time", { class: "dim", datetime: new Date(time * 1000).toISOString() }, moment(time)))),
    OPEN.has(last.step) ? el("li", { class: "now" }, el("strong", {}, "now"), " after ", since(last.time)) : null)];
}

/** @param {string} kind @param {Explanation} found */
function candidates(kind, found) {
  if (!found.candidates.length) return null;
  return [el("h2", {}, kind === "provider" ? "Pools" : "Candidate pools"), el("ul", {}, found.candidates.map((each) => el("li", {}, el("strong", {}, each.name), ": ", rich(each.verdict),
    each.age === null ? null : ` (for ${age(each.age)})`, each.help ? el("div", { class: "dim" }, "Suggestion: ", rich(each.help)) : null)))];
}

/** @param {string} kind @param {Explanation} found */
function histories(kind, found) {
  if (kind !== "request" && kind !== "node") return null;
  return [el("h2", {}, "History"), found.history.length ? el("ol", { class: "history" }, found.history.map((event) =>
    el("li", {}, el("time", { datetime: new Date(event.time * 1000).toISOString() }, precisely(event.time)), rich(event.text),
      event.tail ? el("pre", { tabindex: "0" }, event.tail) : null))) :
    el("p", { class: "dim" }, "No event of the last day. Each step of a request and a launch appears here within 5 seconds.")];
}

/** @param {View} view @param {string} kind @param {string} name */
export async function thingPage({ main }, kind, name) {
  const place = el("div", {});
  async function load() {
    /** @type {Explanation} */
    const found = await ask(`explain/${kind}/${encodeURIComponent(name)}`);
    /** @type {Table[]} */
    const tables = await Promise.all(kind === "image" ? OF_IMAGE.map(([, table]) => ask(`${table}?image=${encodeURIComponent(name)}`)) : []);
    const opened = [...place.querySelectorAll("details")].map((each) => each.open);
    fill(place,
      el("p", { class: "answer" }, rich(found.answer)),
      found.suggestion ? el("p", { class: "suggestion" }, "Suggestion: ", rich(found.suggestion)) : null,
      found.gone ? null : el("div", { class: "tools" }, buttons(kind, name, load)),
      found.problems.length ? el("h2", {}, "Problems") : null,
      found.problems.length ? el("ul", {}, found.problems.map((each) => el("li", { class: "bad" }, rich(each)))) : null,
      // The builds of an image are in a table.
      el("dl", {}, Object.entries(found.facts).filter(([title]) => kind !== "image" || !title.startsWith("build ")).map(([title, value]) => [el("dt", {}, title), el("dd", {}, fact(title, value))])),
      timeline(found.timeline),
      candidates(kind, found),
      Object.entries(found.logs).map(([title, text]) => el("details", { open: true }, el("summary", {}, title), el("pre", { tabindex: "0" }, text))),
      tables.map(({ columns, rows }, index) => {
        const [title, table, keys] = OF_IMAGE[index];
        return smallTable(title, columns.filter(({ key }) => keys.includes(key)), rows, table, load);
      }),
      histories(kind, found),
      RELATED[kind] ? el("p", {}, joined(RELATED[kind].map(([title, query]) => el("a", { href: `/ui/${query}=${encodeURIComponent(name)}` }, `${title} of ${name}`)))) : null,
      el("p", {}, el("a", { href: `${API}/explain/${kind}/${encodeURIComponent(name)}` }, "JSON")));
    place.querySelectorAll("details").forEach((each, index) => { if (index in opened) each.open = opened[index]; });
  }
  await load();
  fill(main, breadcrumb(kind, name), el("h1", {}, `${kind} ${name}`), place);
  return load;
}
