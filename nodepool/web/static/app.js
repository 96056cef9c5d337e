// Which page is shown, and when it is loaded again.

import { signs } from "./actions.js";
import { listen } from "./api.js";
import { configPage } from "./config.js";
import { byId, fill } from "./dom.js";
import { passes, problem } from "./empty.js";
import { eventsPage } from "./events.js";
import { age } from "./format.js";
import { leasesPage } from "./leases.js";
import { findPage, menu, searchBox, titleOf } from "./navigation.js";
import { overview } from "./overview.js";
import { tablePage } from "./tables.js";
import { thingPage } from "./thing.js";
import { usagePage } from "./usage.js";

const KINDS = ["request", "label", "node", "image", "provider", "fleet"];
// What in the cluster, when it changes, changes a page.
/** @type {{ [page: string]: string[] }} */
const CONCERNS = {
  nodes: ["node"], requests: ["request", "node", "report"], labels: ["node", "request", "component", "report"], leases: ["node", "request"], images: ["image"], builds: ["image"],
  uploads: ["image"], pools: ["component", "node", "report"], daemons: ["component", "report"], events: [], find: [], config: ["component", "report"], usage: ["node"],
};

const main = byId("main");
const RETRY = 3000; // milliseconds
// Milliseconds: texts of explanations contain ages.
const AGES = 20000;
const unknown = () => Object.assign(new Error(`There is no page ${location.pathname}`), { status: 404 });
let stop = () => {};
/** @type {(changes: Changes) => void} */
let stale = () => {};
// What a page gets: its place, how it registers its end, and what shows an error.
/** @type {View} */
const view = { main, onStop: (function_) => { stop = function_; }, failed: fail };

function tick() {
  for (const each of /** @type {NodeListOf<HTMLElement>} */ (main.querySelectorAll("[data-since]"))) each.textContent = age(Date.now() / 1000 - Number(each.dataset.since));
}

function place() {
  const [page, ...rest] = location.pathname.replace(/^\/ui\/?/, "").split("/");
  return { page, name: rest.join("/") && decodeURIComponent(rest.join("/")) };
}

// Shows what is wrong; the page is loaded again if that passes.
/** @param {any} error */
function fail(error) {
  const { page, name } = place();
  stop();
  stop = () => {};
  stale = () => {};
  fill(main, problem(error, page, name));
  if (!passes(error)) return;
  const timer = setTimeout(show, RETRY);
  stop = () => clearTimeout(timer);
}

async function show() {
  stop();
  stop = () => {};
  // What changes while the page is being built is fetched afterwards.
  /** @type {Changes | null} */
  let missed = null;
  stale = (changes) => { missed = { ...missed, ...changes }; };
  const { page, name } = place();
  const title = titleOf(page);
  menu(page);
  document.title = `${name ? `${page} ${name}` : title || page} - Nodepool`;
  try {
    let load;
    if (KINDS.includes(page) && name) load = await thingPage(view, page, name);
    else if (name) throw unknown();
    else if (page === "") load = await overview(view);
    else if (page === "find") load = await findPage(view);
    else if (page === "events") load = await eventsPage(view);
    else if (page === "leases") load = await leasesPage(view);
    else if (page === "usage") load = await usagePage(view);
    else if (page === "config") load = await configPage(view);
    else if (title) load = await tablePage(view, page, title);
    else throw unknown();
    if (KINDS.includes(page)) {
      const end = stop;
      const timer = setInterval(() => { if (!document.hidden) load().catch(fail); }, AGES);
      stop = () => { clearInterval(timer); end(); };
    }
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
  const sign = byId("live");
  if (document.hidden) return;
  unfollow = listen(() => "events?digest=1", {
    // What has changed before, while nobody told us of it, is asked for.
    open: () => { sign.textContent = "live"; stale(EVERYTHING); },
    error: () => { sign.textContent = "not connected, trying again"; },
    changed: (message) => stale(JSON.parse(message.data)),
  });
}

/** @param {string} address */
function go(address) {
  history.pushState(null, "", address);
  show().then(() => main.focus());
}
document.addEventListener("click", (event) => {
  const anchor = /** @type {Element} */ (event.target).closest?.("a[href^='/ui/']");
  const address = anchor?.getAttribute("href");
  if (!address || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  go(address);
});
searchBox(go);
// "Skip to content" is no other page: what has the focus there must keep it.
window.addEventListener("popstate", () => { if (!location.hash) show(); });
document.addEventListener("visibilitychange", follow);
setInterval(tick, 5000);
await signs(byId("viewer"), () => show());
show();
follow();
