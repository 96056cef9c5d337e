// The pages of Nodepool.

import { buttons, call, leasesPage, may, signs } from "./actions.js";
import { breadcrumb, findPage, menu, searchBox, titleOf } from "./navigation.js";
import { age, el, fill, link, links, moment, precisely, since, state } from "./dom.js";

const API = "/api/v1";
const KINDS = ["request", "label", "node", "image", "provider"];
// Column of a table -> the kind of thing that it names.
const LINKS = {
  nodes: { id: "node", labels: "label", provider: "provider", request: "request" },
  requests: { id: "request", labels: "label", nodes: "node" },
  labels: { label: "label" }, images: { image: "image" }, builds: { image: "image" }, uploads: { image: "image", provider: "provider" },
  providers: { provider: "provider" }, pools: { provider: "provider", labels: "label" },
  problems: { provider: "provider", label: "label" }, hosts: { provider: "provider", nodes: "node" },
};
// What in the cluster, when it changes, changes a page.
const CONCERNS = {
  nodes: ["node"], requests: ["request", "node", "report"], labels: ["node", "request", "component", "report"], leases: ["node", "request"], images: ["image"], builds: ["image"],
  uploads: ["image"], pools: ["component", "node", "report"], daemons: ["component", "report"], events: [], find: [], config: ["component", "report"],
};
const TIMES = new Set(["since", "created", "age", "build_request_age", "next_try", "error_time"]);
const LINES = 100;
const MOST_EVENTS = 500;
const AGAIN = 3000; // milliseconds, as the server tells browsers (retry)

const main = document.getElementById("main");
let stop = () => {};
let stale = () => {};

function tick() {
  for (const each of main.querySelectorAll("[data-since]")) each.textContent = age(Date.now() / 1000 - each.dataset.since);
}

const ask = (path) => call("GET", path);

// Events until the function that is given back is called. A browser tries again by itself when the connection breaks, but not
// after an answer such as 502 of a proxy.
function listen(address, listeners) {
  let source, timer;
  function begin() {
    source = new EventSource(`${API}/${address()}`);
    for (const [type, listener] of Object.entries(listeners)) source.addEventListener(type, listener);
    source.addEventListener("error", () => { if (source.readyState === EventSource.CLOSED) timer = setTimeout(begin, AGAIN); });
  }
  begin();
  return () => { clearTimeout(timer); source.close(); };
}

function counts(value) {
  return Object.entries(value).map(([name, count]) => `${count} ${name}`).join(", ") || "none";
}

function cell(table, key, value) {
  if (value === null || value === undefined || value === "") return [""];
  const kind = (LINKS[table] || {})[key];
  if (kind) return links(kind, [value].flat());
  if (TIMES.has(key) && typeof value === "number") return [since(value)];
  if (key === "state") return [state(String(value))];
  if (Array.isArray(value)) return [value.join(", ")];
  if (typeof value === "object") return [Object.values(value).every((each) => typeof each === "number") ? counts(value) : JSON.stringify(value)];
  if (typeof value === "boolean") return [value ? "yes" : "no"];
  return [String(value)];
}

// How a cell looks: a narrow screen scrolls rather than squeezes long texts.
function shape(key, value) {
  if (typeof value === "number" && !TIMES.has(key)) return "number";
  return typeof value === "string" && value.length > 30 ? "long" : null;
}

function fail(error) {
  fill(main,el("h1", {}, "Not available"), el("p", { class: "bad", role: "alert" }, error.message));
}

// -- tables

// A button for each filter of the address that has no box: it takes it away.
function filters(given, others, changed) {
  return [...given].filter(([key]) => !others.includes(key)).map(([key, value]) => el("button", {
    type: "button", onclick: () => { given.delete(key, value); changed(); },
  }, `${key}: ${value} \u00d7`));
}

function uploadPath(row) {
  const [image, build, provider, upload] = [row.image, row.id, row.provider, row.upload_id].map(encodeURIComponent);
  return `${image}/builds/${build}/providers/${provider}/uploads/${upload}`;
}

async function tablePage(name, title) {
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
    return load().catch(fail);
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
    body.replaceChildren(...found.rows.map((row) => el("tr", {}, columns.map(({ key }) =>
      el("td", { class: shape(key, row[key]) }, cell(name, key, row[key]))), acts ? el("td", {}, buttons("upload", uploadPath(row), load)) : null)));
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
  stop = () => clearTimeout(typed);
  await load();
  fill(main,
    el("h1", {}, title),
    el("div", { class: "tools" }, el("label", { for: "q" }, "Find "), search, choosers, chosen, before, after, json, csv),
    el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": title }, el("table", {}, caption, el("thead", {}, head), body)),
  );
  return load;
}

// -- overview

function number(title, value, detail, href) {
  return el("div", { class: "card" }, el("h2", {}, href ? el("a", { href }, title) : title),
    el("div", { class: "big" }, String(value)), el("div", { class: "dim" }, detail));
}

function meter(text, used, limit) {
  const round = (amount) => Math.round(amount * 1000) / 1000;
  const words = `${text}: ${round(used)} of ${round(limit)}, ${round(Math.max(0, limit - used))} free`;
  return el("div", {}, el("span", {}, words), el("meter", {
    min: 0, max: Math.max(limit, 1e-9), value: Math.min(used, limit), high: limit * 0.9, "aria-label": words,
  }));
}

function chart(title, rows, draw, legend) {
  const peak = Math.max(1e-9, ...rows.map(draw.peak));
  const made = el("svg", { class: "chart", viewBox: "0 0 480 120", preserveAspectRatio: "none", role: "img", "aria-label": `${title}; ${legend}` });
  made.append(el("line", { class: "axis", x1: 0, x2: 480, y1: 119, y2: 119 }), ...draw.shapes(rows, peak));
  return el("div", { class: "card" }, el("h3", {}, title), made,
    el("p", { class: "dim" }, `${legend}; highest ${peak < 1e-6 ? 0 : Math.round(peak * 100) / 100}; the last four hours`),
    el("details", {}, el("summary", {}, "As a table"), el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": title },
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

function smallTable(title, columns, rows, table) {
  return el("section", {}, el("h2", {}, title), rows.length ? el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": title },
    el("table", {}, el("thead", {}, el("tr", {}, Object.values(columns).map((text) => el("th", { scope: "col" }, text)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, Object.keys(columns).map((key) => el("td", { class: shape(key, row[key]) }, cell(table, key, row[key])))))))) :
    el("p", { class: "dim" }, "none"));
}

function providerCard(row) {
  return el("div", { class: "card" }, el("h3", {}, link("provider", row.provider)),
    el("p", {}, `${row.launcher ? `launcher ${row.launcher}` : "no launcher"}; nodes: ${row.nodes}`),
    Object.entries(row.limit).map(([resource, limit]) => meter(resource, row.used[resource] || 0, limit)),
    row.problems ? el("p", { class: "bad" }, el("a", { href: `/ui/problems?provider=${encodeURIComponent(row.provider)}` }, `${row.problems} problem${row.problems === 1 ? "" : "s"}`)) : null);
}

function poolCard(row) {
  const nodes = typeof row.max_servers === "number" ? meter("nodes", row.nodes, row.max_servers) : el("p", {}, `${row.nodes} nodes, no limit of the pool`);
  return el("div", { class: "card" }, el("h3", {}, link("provider", row.provider), ` ${row.pool}`),
    el("p", {}, `${row.paused ? "Waiting for quota" : "Accepts requests"} (launcher ${row.launcher})`), nodes);
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
  if (!rows.length) return el("p", { class: "dim" }, "none");
  const longest = Math.max(1, ...rows.map((row) => Object.values(row.states).reduce((sum, each) => sum + each, 0)));
  return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Labels" }, el("table", { class: "bars" },
    el("thead", {}, el("tr", {}, ["Label", "Nodes", "", "Waiting"].map((text) => (text ? el("th", { scope: "col" }, text) : el("td", {}))))),
    el("tbody", {}, rows.map((row) => labelRow(row, longest)))));
}

async function overview() {
  const place = el("div", {});
  fill(main,el("h1", {}, "Overview"), place);
  async function load() {
    const found = await ask("overview");
    const total = (value) => Object.values(value).reduce((sum, each) => sum + each, 0);
    const open = (found.requests.requested || 0) + (found.requests.pending || 0);
    const last = found.chart.slice(-12), ready = last.reduce((sum, row) => sum + row.ready, 0), failed = last.reduce((sum, row) => sum + row.failed, 0);
    const opened = [...place.querySelectorAll("details")].map((each) => each.open);
    fill(place,
      el("div", { class: "cards" },
        number("Nodes", total(found.nodes), counts(found.nodes), "/ui/nodes"),
        number("Requests waiting", open, counts(found.requests), "/ui/requests?state=requested,pending"),
        number("Launch success rate", ready + failed ? `${Math.round(100 * ready / (ready + failed))} %` : "-", `${ready} of ${ready + failed} in the last hour`),
        number("Problems", found.problems.length, found.problems.length ? "see the list" : "none known", "/ui/problems")),
      smallTable("Waiting", { labels: "Labels", count: "Requests", state: "State", since: "Waiting", reason: "Reason", suggestion: "Suggestion" }, found.waiting, "pools"),
      el("h2", {}, "Providers"),
      found.providers.length ? el("div", { class: "cards many" }, found.providers.map(providerCard)) : el("p", { class: "dim" }, "none"),
      el("h2", {}, "Pools"),
      found.pools.length ? el("div", { class: "cards many" }, found.pools.map(poolCard)) : el("p", { class: "dim" }, "none"),
      el("h2", {}, el("a", { href: "/ui/labels" }, "Labels")),
      labelBars(found.labels),
      el("h2", {}, "Last 4 hours"),
      el("div", { class: "cards" },
        chart("Launches", found.chart, bars("ready", "failed"), "ready below, failed on top"),
        chart("Seconds", found.chart, curves("launch", "wait"), "median launch solid, median wait of requests dashed")),
      smallTable("Problems", { provider: "Provider", label: "Label", problem: "Problem" }, found.problems, "problems"),
      smallTable("Launchers and builders", { kind: "Kind", host: "Host", state: "State", version: "Version", running: "Running", config: "Configuration" }, found.daemons, "daemons"));
    place.querySelectorAll("details").forEach((each, index) => { each.open = opened[index] || false; });
  }
  await load();
  return load;
}

// -- one thing, events, configuration

const FACTS = { request: "request", nodes: "node", labels: "label" };

// What names other things leads to them.
function fact(title, value) {
  const kind = FACTS[title];
  // "3 ready" is a number of nodes.
  if (!kind || (kind === "node" && !/^\d{10}(, \d{10})*$/.test(value))) return value;
  return links(kind, value.split(", "));
}

async function explain(kind, name) {
  const place = el("div", {});
  async function load() {
    const found = await ask(`explain/${kind}/${encodeURIComponent(name)}`);
    fill(place,
      el("p", { class: "answer" }, found.answer),
      el("div", { class: "tools" }, buttons(kind, name, load)),
      found.suggestion ? el("p", { class: "suggestion" }, `Suggestion: ${found.suggestion}`) : null,
      el("dl", {}, Object.entries(found.facts).map(([title, value]) => [el("dt", {}, title), el("dd", {}, fact(title, value))])),
      found.candidates.length ? el("h2", {}, "Candidate pools") : null,
      found.candidates.length ? el("ul", {}, found.candidates.map((each) => el("li", {}, el("strong", {}, each.name), `: ${each.verdict}`,
        each.age === null ? null : ` (for ${age(each.age)})`, each.help ? el("div", { class: "dim" }, `Suggestion: ${each.help}`) : null))) : null,
      found.problems.length ? el("h2", {}, "Problems") : null,
      found.problems.length ? el("ul", {}, found.problems.map((each) => el("li", { class: "bad" }, each))) : null,
      Object.entries(found.logs).map(([title, text]) => [el("h2", {}, title), el("pre", { tabindex: "0" }, text)]),
      el("h2", {}, "History"),
      found.history.length ? el("ol", { class: "history" }, found.history.map((event) =>
        el("li", {}, el("time", { datetime: new Date(event.time * 1000).toISOString() }, precisely(event.time)), event.text,
          event.tail ? el("pre", { tabindex: "0" }, event.tail) : null))) :
        el("p", { class: "dim" }, kind === "request" || kind === "node" ? "nothing in the last day" : "kept for requests and nodes only"),
      el("p", {}, el("a", { href: `${API}/explain/${kind}/${encodeURIComponent(name)}` }, "JSON")));
  }
  await load();
  fill(main, breadcrumb(kind, name), el("h1", {}, `${kind} ${name}`), place);
  return load;
}

async function eventsPage() {
  const given = new URLSearchParams(location.search);
  const list = el("ol", { class: "history", "aria-label": "Events", "aria-live": "off" });
  const types = Object.keys((await ask("")).event_types);
  const strange = given.getAll("type").flatMap((each) => each.split(",")).filter((each) => !types.includes(each));
  if (strange.length) throw new Error(`there is no type ${strange.join(", ")}; there are ${types.join(", ")}`);
  const chosen = el("span", { class: "tools" });
  let last = 0;
  function add(message) {
    const event = JSON.parse(message.data);
    const { number, time, type: kind, noted: _noted, ...fields } = event;
    last = number;
    const name = ["node", "request", "image"].find((key) => kind.startsWith(key) && fields[key]);
    list.prepend(el("li", {}, el("time", {}, precisely(time)), el("strong", {}, kind), " ", name ? link(name, fields[name]) : "",
      ` ${Object.entries(fields).filter(([key]) => key !== name).map(([key, value]) => `${key}: ${Array.isArray(value) ? value.join(", ") : value}`).join("; ")}`));
    while (list.children.length > MOST_EVENTS) list.lastChild.remove();
  }
  function begin() {
    stop();
    last = 0;
    list.replaceChildren();
    chosen.replaceChildren(...filters(given, ["type"], changed));
    stop = listen(() => { const query = new URLSearchParams(given); query.set("since", last); return `events?${query}`; },
      Object.fromEntries(types.map((type) => [type, add])));
  }
  function changed() {
    history.replaceState(null, "", given.size ? `?${given}` : location.pathname);
    begin();
  }
  const box = el("select", { id: "choose-type", onchange: () => {
    if (box.value) given.set("type", box.value); else given.delete("type");
    changed();
  } }, el("option", { value: "" }, "all"), types.map((type) => el("option", { value: type }, type)));
  box.value = given.get("type") || "";
  begin();
  fill(main, el("h1", {}, "Events"), el("p", { class: "dim" }, "As they happen; the newest is first."),
    el("div", { class: "tools" }, el("label", {}, "Type ", box), chosen), list);
  return async () => {};
}

function loaded(config) {
  const { name, hostname, pid, file, secure, error, stale_since: stale, warnings, not_running: left, ...inForce } = config;
  const files = [file, secure].filter((each) => each).join(" and ");
  return el("section", {}, el("h2", {}, `Launcher ${name}`), el("p", { class: "dim" }, files ? `From ${files}, process ${pid}.` : `Process ${pid}.`),
    error ? el("p", { class: "bad", role: "alert" }, stale === null ? error : `Since ${moment(stale)} the file cannot be used: ${error}`) : null,
    (warnings || []).map((text) => el("p", {}, `Warning: ${text}`)),
    Object.entries(left || {}).map(([name, why]) => el("p", { class: "bad" }, `Provider ${name} does not run: ${why}`)),
    el("details", { open: true }, el("summary", {}, "In force"), el("pre", { tabindex: "0" }, JSON.stringify(inForce, null, 2))));
}

async function configPage() {
  const place = el("div", {});
  async function load() {
    fill(place, (await ask("config")).launchers.map(loaded));
  }
  await load();
  fill(main, el("h1", {}, "Configuration"), el("p", {}, "As the launchers have it in force. What may be a secret is left out."), place);
  return load;
}

// -- which page, and when it is shown anew

async function show() {
  stop();
  stop = () => {};
  // What changes while the page is being built is fetched afterwards.
  let missed = null;
  stale = (changes) => { missed = { ...missed, ...changes }; };
  const [page, ...rest] = location.pathname.replace(/^\/ui\/?/, "").split("/");
  const name = rest.join("/") && decodeURIComponent(rest.join("/"));
  const title = titleOf(page);
  menu(page);
  document.title = `${name ? `${page} ${name}` : title || page} - Nodepool`;
  try {
    let load;
    if (KINDS.includes(page) && name) load = await explain(page, name);
    else if (name) throw new Error("404: there is no such page");
    else if (page === "") load = await overview();
    else if (page === "find") load = await findPage(main, ask);
    else if (page === "events") load = await eventsPage();
    else if (page === "leases") load = await leasesPage(main, link, since);
    else if (page === "config") load = await configPage();
    else if (title) load = await tablePage(page, title);
    else throw new Error("404: there is no such page");
    const concerns = CONCERNS[page];
    stale = (changes) => { if (!concerns || concerns.some((each) => changes[each])) load().catch(fail); };
    if (missed) stale(missed);
  } catch (error) {
    fail(error);
  }
}

const EVERYTHING = { node: 1, request: 1, image: 1, component: 1, report: 1 };
let unfollow = () => {};
function follow() {
  unfollow();
  unfollow = () => {};
  const sign = document.getElementById("live");
  if (document.hidden) return;
  unfollow = listen(() => "events?digest=1", {
    // What has changed before, while nobody told us of it, is asked for.
    open: () => { sign.textContent = "live"; stale(EVERYTHING); },
    error: () => { sign.textContent = "not connected, trying again"; },
    changed: (message) => stale(JSON.parse(message.data)),
  });
}

function go(address) {
  history.pushState(null, "", address);
  show().then(() => main.focus());
}
document.addEventListener("click", (event) => {
  const anchor = event.target.closest?.("a[href^='/ui/']");
  if (!anchor || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  go(anchor.getAttribute("href"));
});
searchBox(go);
// "Skip to content" is no other page: what has the focus there must keep it.
window.addEventListener("popstate", () => { if (!location.hash) show(); });
document.addEventListener("visibilitychange", follow);
setInterval(tick, 5000);
await signs(document.getElementById("viewer"), () => show());
show();
follow();
