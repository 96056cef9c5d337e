// Charts of the last hours, drawn by uPlot, which is loaded when the rest of the page is shown.

import { ask } from "./api.js";
import { el, fill } from "./dom.js";
import { duration, moment, number } from "./format.js";

const HOURS = [1, 4, 24], EVERY = 60000, HEIGHT = 220;
/** @type {{ [state: string]: string }} */
const STATES = { ready: "--ready", building: "--building", "in-use": "--in-use", used: "--in-use", hold: "--focus", deleting: "--deleting", failed: "--failed", aborted: "--failed" };
const COLORS = ["--building", "--in-use", "--deleting", "--ready", "--link", "--focus", "--failed", "--other"];
/** @param {(value: number) => string} format @returns {Chart['format']} */
const some = (format) => (value) => (value === null || value === undefined ? "--" : format(value));
const WHOLE = some((value) => number(value)), DURATION = some(duration);
// Ticks of an axis of seconds, and how they are written: one unit is enough.
const STEPS = [0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
/** @param {number} seconds */
function tickOf(seconds) {
  if (seconds < 60) return `${Math.round(seconds * 10) / 10} s`;
  return seconds < 7200 ? `${Math.round(seconds / 6) / 10} min` : `${Math.round(seconds / 360) / 10} h`;
}

/** @type {Promise<PlotLibrary> | null} */
let library = null;
/** @returns {Promise<PlotLibrary>} */
function uplot() {
  library ||= new Promise((resolve, reject) => {
    document.head.append(el("link", { rel: "stylesheet", href: "/ui/static/uplot.css" }));
    document.head.append(el("script", { src: "/ui/static/uplot.js", onload: () => resolve(/** @type {any} */ (globalThis).uPlot), onerror: () => reject(new Error("uplot.js cannot be loaded")) }));
  });
  return library;
}

/** @param {string} name */
function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** @param {number} seconds */
function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
}

// What is drawn: title, series {name, values, color, dash}, and what is said if there is nothing.
/** @param {Trends} found @returns {Chart[]} */
function kinds(found) {
  const states = Object.keys(found.nodes).sort((one, other) => Object.keys(STATES).indexOf(one) - Object.keys(STATES).indexOf(other));
  const begun = found.sampled.indexOf(true);
  const unsampled = begun < 0 ? "This launcher takes the first sample within a minute of its start." : null;
  return [
    { title: "Nodes by state", stacked: true, format: WHOLE, nothing: unsampled || "No node existed in this time.",
      series: states.map((name) => ({ name, values: found.nodes[name], color: STATES[name] || "--other" })) },
    { title: "Waiting requests by cause", stacked: true, format: WHOLE, nothing: unsampled || "No request was waiting in this time.",
      series: Object.keys(found.waiting).map((name, index) => ({ name, values: found.waiting[name], color: COLORS[index % COLORS.length] })) },
    { title: "Wait of requests", format: DURATION, nothing: "No request was fulfilled in this time.",
      series: [{ name: "median", values: found.wait, color: "--in-use" }, { name: "95 % within", values: found.wait_p95, color: "--failed", dash: [6, 4] }] },
    { title: "Launches per 5 min", stacked: true, bars: true, format: WHOLE, nothing: "No launch ended in this time.",
      series: [{ name: "ready", values: found.ready, color: "--ready" }, { name: "failed", values: found.failed, color: "--failed" }] },
  ];
}

// Sums from below: the first series is the lowest.
/** @param {Series[]} series */
function stacked(series) {
  /** @type {Values[]} */
  const sums = [];
  for (const { values } of series) sums.push(values.map((value, index) => (value === null ? null : value + (sums.at(-1)?.[index] || 0))));
  return sums;
}

/** @param {PlotLibrary} uPlot @param {HTMLElement} place @param {Chart} kind @param {number[]} times @param {number} from @param {number} to */
function draw(uPlot, place, kind, times, from, to) {
  const { series, format } = kind;
  const raw = series.map((each) => each.values);
  // The highest sum is drawn first, and the others over it.
  const drawn = kind.stacked ? stacked(series).reverse() : raw;
  const order = kind.stacked ? [...series.keys()].reverse() : [...series.keys()];
  const text = color("--text"), grid = { stroke: color("--line"), width: 1 };
  const axis = { stroke: text, grid, ticks: grid };
  return new uPlot({
    width: Math.max(200, place.clientWidth), height: HEIGHT,
    cursor: { sync: { key: "overview" }, drag: { x: false, y: false } },
    legend: { live: true },
    // The latest values, until somebody points at others.
    hooks: { ready: [(plot) => plot.setLegend({ idx: times.length - 1 })] },
    scales: { x: { time: true, range: () => [from, to] }, y: { range: (_plot, _low, high) => [0, high > 0 ? high * 1.05 : 1] } },
    axes: [
      { ...axis, values: (_plot, ticks) => ticks.map(clock) },
      format === WHOLE ? { ...axis, size: 60, values: (_plot, ticks) => ticks.map((tick) => (tick % 1 ? "" : format(tick))) } :
        { ...axis, size: 60, incrs: STEPS, values: (_plot, ticks) => ticks.map(tickOf) },
    ],
    series: [
      { label: "Time", value: (_plot, value) => (value === null ? "--" : clock(value)) },
      ...order.map(/** @returns {PlotSeries} */ (number) => ({
        label: series[number].name, stroke: color(series[number].color), width: kind.stacked ? 1 : 2, dash: series[number].dash,
        fill: kind.stacked ? color(series[number].color) : undefined,
        paths: kind.bars ? uPlot.paths.bars({ size: [0.8, 40] }) : undefined,
        points: { show: !kind.bars && series[number].values.filter((each) => each !== null).length < 30, size: 5 },
        value: (_plot, _value, _series, index) => (index === null ? "--" : format(raw[number][index])),
      })),
    ],
  }, [times, ...drawn], place);
}

/** @param {Chart} kind @param {number[]} times */
function table(kind, times) {
  const region = el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": kind.title });
  const made = /** @type {HTMLDetailsElement} */ (el("details", { "data-key": `table ${kind.title}`, ontoggle: () => {
    if (!made.open || region.firstChild) return;
    const rows = times.map((time, index) => ({ time, values: kind.series.map((each) => each.values[index]) })).filter(({ values }) => values.some((value) => value));
    fill(region, el("table", {}, el("thead", {}, el("tr", {}, ["From", ...kind.series.map((each) => each.name)].map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, rows.map(({ time, values }) => el("tr", {}, el("th", { scope: "row" }, moment(time)), values.map((value) => el("td", { class: "number" }, kind.format(value))))))));
  } }, el("summary", {}, "As a table"), region));
  return made;
}

// Fills the place with charts; returns what ends them.
/** @param {HTMLElement} place */
export function chartsOf(place) {
  let hours = 4, ended = false;
  /** @type {Plot[]} */
  let plots = [];
  /** @type {Trends | null} */
  let found = null;
  const grid = el("div", { class: "cards charts" }), error = el("p", { class: "bad", role: "alert" });
  const buttons = HOURS.map((each) => el("button", { type: "button", "aria-pressed": String(each === hours), onclick: () => {
    hours = each;
    buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(HOURS[index] === hours)));
    show().catch(fail);
  } }, `${each} h`));
  fill(place, el("h2", {}, "Last hours"), el("div", { class: "tools", role: "group", "aria-label": "Time range" }, buttons), error, grid);

  /** @param {Error} problem */
  function fail(problem) {
    error.textContent = problem.message;
  }
  async function show() {
    const uPlot = await uplot();
    if (ended || !found) return;
    const opened = new Set([...grid.querySelectorAll("details[open]")].map((each) => each.getAttribute("data-key")));
    for (const plot of plots) plot.destroy();
    plots = [];
    const to = found.time[found.time.length - 1] + 300, from = to - hours * 3600, first = found.time.findIndex((time) => time >= from);
    const times = found.time.slice(first);
    const shown = kinds(found).map((kind) => ({ ...kind, series: kind.series.map((each) => ({ ...each, values: each.values.slice(first) })) }));
    const holders = shown.map(() => el("div", { class: "plot" }));
    fill(grid, shown.map((kind, index) => el("div", { class: "card" }, el("h3", {}, kind.title), holders[index])));
    shown.forEach((kind, index) => {
      if (!kind.series.some((each) => each.values.some((value) => value))) {
        fill(holders[index], el("p", { class: "dim" }, kind.nothing));
        return;
      }
      plots.push(draw(uPlot, holders[index], kind, times, from, to));
      holders[index].after(table(kind, times));
    });
    for (const each of grid.querySelectorAll("details")) each.open = opened.has(each.getAttribute("data-key"));
  }
  async function load() {
    found = await ask("trends");
    error.textContent = "";
    await show();
  }
  const again = () => { load().catch(fail); };
  const redraw = () => { show().catch(fail); };
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  let waiting = 0;
  const resized = () => { clearTimeout(waiting); waiting = setTimeout(redraw, 200); };
  const timer = setInterval(() => { if (!document.hidden) again(); }, EVERY);
  scheme.addEventListener("change", redraw);
  addEventListener("resize", resized);
  again();
  return () => {
    ended = true;
    clearInterval(timer);
    clearTimeout(waiting);
    scheme.removeEventListener("change", redraw);
    removeEventListener("resize", resized);
    for (const plot of plots) plot.destroy();
  };
}
