// The overview.

import { ask } from "./api.js";
import { merged, poolCard, providerCard } from "./cards.js";
import { counts, el, fill, link, moment } from "./dom.js";
import { healthLine, waiting } from "./health.js";
import { smallTable } from "./tables.js";

function empty(text, command, rest) {
  return el("p", { class: "dim" }, text, el("code", {}, command), rest);
}

function number(title, value, detail, href) {
  return el("div", { class: "card" }, el("h2", {}, href ? el("a", { href }, title) : title),
    el("div", { class: "big" }, String(value)), el("div", { class: "dim" }, detail));
}

function chart(title, rows, draw, legend) {
  const peak = Math.max(1e-9, ...rows.map(draw.peak));
  const made = el("svg", { class: "chart", viewBox: "0 0 480 120", preserveAspectRatio: "none", role: "img", "aria-label": `${title}; ${legend}` });
  made.append(el("line", { class: "axis", x1: 0, x2: 480, y1: 119, y2: 119 }), ...draw.shapes(rows, peak));
  return el("div", { class: "card" }, el("h3", {}, title), made,
    el("p", { class: "dim" }, `${legend}; highest ${peak < 1e-6 ? 0 : Math.round(peak * 100) / 100}; the last four hours`),
    el("details", { "data-key": title }, el("summary", {}, "As a table"), el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": title },
      el("table", {}, el("thead", {}, el("tr", {}, ["From", ...draw.keys].map((key) => el("th", { scope: "col" }, key)))),
        el("tbody", {}, rows.filter((row) => draw.keys.some((key) => row[key])).map((row) => el("tr", {},
          el("th", { scope: "row" }, moment(row.time)), draw.keys.map((key) => el("td", { class: "number" }, String(row[key] ?? ""))))))))));
}

function bars(...keys) {
  return {
    keys,
    peak: (row) => keys.reduce((sum, key) => sum + row[key], 0),
    shapes: (rows, peak) => rows.flatMap((row, index) => {
      let top = 119;
      return keys.map((key) => {
        const height = 115 * row[key] / peak;
        top -= height;
        return el("rect", { class: key, x: 10 * index + 1, y: top, width: 8, height });
      });
    }),
  };
}

function curves(...keys) {
  return {
    keys,
    peak: (row) => Math.max(...keys.map((key) => row[key] || 0)),
    shapes: (rows, peak) => keys.map((key) => {
      let pen = "M";
      const steps = rows.map((row, index) => {
        if (row[key] === null) { pen = "M"; return ""; }
        const step = `${pen}${10 * index + 5} ${119 - 115 * row[key] / peak}`;
        // A point by itself is seen, too.
        const dot = pen === "M" ? "h5" : "";
        pen = "L";
        return step + dot;
      });
      return el("path", { class: key, d: steps.join(" ") });
    }),
  };
}

// The longest bar is that of the label with the most nodes; what a piece stands for is said in the text.
function labelRow(row, longest) {
  const bar = el("svg", { class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": `${row.label}: ${counts(row.states)}` });
  let x = 0;
  for (const [state, count] of Object.entries(row.states)) {
    const width = 100 * count / longest;
    bar.append(el("rect", { class: /^[a-z-]+$/.test(state) ? state : null, x, y: 0, width, height: 10 }));
    x += width;
  }
  const wanted = row.min_ready ? `; ${row.min_ready} kept ready` : "";
  return el("tr", {}, el("th", { scope: "row" }, link("label", row.label)), el("td", {}, bar),
    el("td", {}, `${counts(row.states)}${wanted}`), el("td", { class: "number" }, String(row.waiting)));
}

function labelBars(rows) {
  if (!rows.length) return empty("No label. Labels appear here when a pool of a running launcher offers them; see ", "nodepool label-list", ".");
  const longest = Math.max(1, ...rows.map((row) => Object.values(row.states).reduce((sum, each) => sum + each, 0)));
  return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Labels" }, el("table", { class: "bars" },
    el("thead", {}, el("tr", {}, ["Label", "Nodes", "", "Waiting"].map((text) => (text ? el("th", { scope: "col" }, text) : el("td", {}))))),
    el("tbody", {}, rows.map((row) => labelRow(row, longest)))));
}

export async function overview({ main }) {
  const place = el("div", {});
  fill(main, el("h1", {}, "Overview"), place);
  async function load() {
    const found = await ask("overview");
    const total = (value) => Object.values(value).reduce((sum, each) => sum + each, 0);
    const open = (found.requests.requested || 0) + (found.requests.pending || 0);
    const last = found.chart.slice(-12), ready = last.reduce((sum, row) => sum + row.ready, 0), failed = last.reduce((sum, row) => sum + row.failed, 0);
    const opened = new Set([...place.querySelectorAll("details[open]")].map((each) => each.dataset.key));
    fill(place,
      healthLine(found.health),
      el("div", { class: "cards" },
        number("Nodes", total(found.nodes), counts(found.nodes), "/ui/nodes"),
        number("Requests waiting", open, counts(found.requests), "/ui/requests?state=requested,pending"),
        number("Launch success rate", ready + failed ? `${Math.round(100 * ready / (ready + failed))} %` : "-", `${ready} of ${ready + failed} in the last hour`)),
      waiting(found.waiting),
      el("h2", {}, "Providers"),
      found.providers.length ? el("div", { class: "cards many" }, merged(found.providers).map(providerCard)) : empty("No provider. Providers appear here when a launcher with a section providers in its configuration runs; see ", "nodepool config-validate", "."),
      el("h2", {}, "Pools"),
      found.pools.length ? el("div", { class: "cards many" }, found.pools.map(poolCard)) : empty("No pool. Pools appear here when a launcher has registered them; ", "/ready", " of the launcher says what it waits for."),
      el("h2", {}, el("a", { href: "/ui/labels" }, "Labels")),
      labelBars(found.labels),
      el("h2", {}, "Last 4 hours"),
      el("div", { class: "cards" },
        chart("Launches", found.chart, bars("ready", "failed"), "ready below, failed on top"),
        chart("Seconds", found.chart, curves("launch", "wait"), "median launch solid, median wait of requests dashed")),
      smallTable("Problems", { provider: "Provider", label: "Label", problem: "Problem" }, found.problems, "problems"),
      smallTable("Launchers and builders", { kind: "Kind", host: "Host", state: "State", version: "Version", running: "Running", config: "Configuration" }, found.daemons, "daemons"));
    for (const each of place.querySelectorAll("details")) each.open = opened.has(each.dataset.key);
  }
  await load();
  return load;
}
