// What a page says when it has nothing to show: what would be there, when, and what to do.

import { el, joined, rich } from "./dom.js";
import { GROUPS } from "./navigation.js";

// Table -> what appears there and when; the page of the manual that explains it.
/** @type {{ [table: string]: [string, string] }} */
const TEXTS = {
  nodes: ["No nodes. They appear when a request is served, or when a label has `min-ready`. Try `nodepool request create LABEL --wait`.", "operation/nodes"],
  requests: ["No requests. Zuul, a lease or `nodepool request create LABEL` submits them.", "operation/requests"],
  labels: ["No labels. They appear when a launcher has loaded a configuration with `labels` and a provider that offers them. Check the file with `nodepool config-validate`.", "configuration"],
  leases: ["No leases. Somebody who leases nodes is listed here: `nodepool lease LABEL --for 4h`.", "operation/leases"],
  images: ["No disk images. They appear when a configuration has `diskimages`, whether built or not.", "operation/images"],
  builds: ["No builds. A running builder builds each configured image, or on request: `nodepool image-build IMAGE`.", "operation/images"],
  uploads: ["No uploads. A builder uploads each build to the providers that have the image in `diskimages`.", "operation/images"],
  providers: ["No providers. They appear when a launcher runs and its configuration has `providers`.", "configuration"],
  pools: ["No pools. Each pool of a running provider registers here.", "configuration"],
  hosts: ["No hosts. They appear when a provider uses the driver `static`, `nodemanager` or another driver that has hosts.", "nodemanager"],
  tenants: ["No limits of tenants. They appear when a configuration has `tenant-resource-limits`.", "configuration"],
  daemons: ["No daemons. Launchers and builders register here while they run: `systemctl status nodepool-launcher`.", "operation/index"],
  problems: ["No problems. Failing drivers, hosts, builds and launches are listed here until they work again.", "operation/alerts"],
  events: ["No events yet. Each change of a node, request or image appears here as it happens.", "operation/observe"],
};

// The text for a table without rows; with a filter it says that rows may be hidden.
/** @param {string} table @param {boolean} filtered @param {(() => void) | null} clear @returns {Child} */
export function nothing(table, filtered, clear) {
  if (filtered) return el("span", { role: "status" }, "Nothing matches the filters. ", el("button", { type: "button", onclick: clear }, "Clear filters"));
  const [text, page] = TEXTS[table] || ["Nothing here."];
  return el("span", { role: "status" }, rich(text), page ? el("span", { class: "dim" }, ` Manual: ${page}`) : null);
}

// Temporary errors: the page loads again.
/** @param {Failure} error */
export const passes = (error) => !error.status || error.status >= 500;

// What is wrong, and where to go from there.
/** @param {Failure} error @param {string} page @param {string} name @returns {Child[]} */
export function problem(error, page, name) {
  const said = el("p", { class: "bad", role: "alert" }, error.status ? rich(error.message) : "The launcher does not answer.");
  if (!error.status) return [el("h1", {}, "Not available"), said, el("p", {}, rich("This page loads again as soon as it answers. On its host: `systemctl status nodepool-launcher`"))];
  if (error.status >= 500) return [el("h1", {}, "Not available"), said, el("p", {}, "This page tries again every 3 seconds.")];
  if (error.status === 401 || error.status === 403) return [el("h1", {}, "Not permitted"), said, el("p", {}, rich("Sign in with a token that may do this. An administrator creates one with `nodepool token create NAME --role read`."))];
  if (error.status !== 404) return [el("h1", {}, "Not available"), said];
  const others = name ? [] : similar(page);
  return [el("h1", {}, "Not found"), said,
    name ? el("p", {}, el("a", { href: `/ui/find?q=${encodeURIComponent(name)}` }, `Search for ${name}`), ", or see ", el("a", { href: `/ui/${page}s` }, `all ${page}s`), ".") : null,
    others.length ? el("p", {}, "Did you mean ", joined(others.map(([path, title]) => el("a", { href: `/ui/${path}` }, title))), "?") : null,
    name ? null : el("p", {}, "All pages are in the menu; the search box (press ", el("kbd", {}, "/"), ") finds ids, labels, images, providers, hosts and tenants.")];
}

// Pages whose names are like that of a page that does not exist.
/** @param {string} page */
export function similar(page) {
  const names = GROUPS.flatMap(([, pages]) => pages).filter(([path]) => path);
  const start = page.slice(0, 3).toLowerCase();
  return names.filter(([path, title]) => start && (path.includes(page.toLowerCase()) || path.startsWith(start) || title.toLowerCase().startsWith(start)));
}
