// The page of the configuration: as the files have it, by provider.

import { ask } from "./api.js";
import { el, fill, rich } from "./dom.js";
import { moment } from "./format.js";
import { yaml } from "./yaml.js";

/** @type {["labels" | "diskimages" | "tenant-resource-limits", string][]} */
const SECTIONS = [["labels", "Labels"], ["diskimages", "Disk images"], ["tenant-resource-limits", "Limits of tenants"]];

/** @param {string} launcher @param {string} title @param {Json} value @param {boolean} open */
function part(launcher, title, value, open) {
  return el("details", { open, "data-part": `${launcher} ${title}` }, el("summary", {}, title), el("pre", { tabindex: "0" }, yaml(value)));
}

/** @param {LoadedConfig} config @param {number} number */
function loaded(config, number) {
  const { name, pid, file, secure, error, stale_since: stale, warnings, not_running: left, providers, in_force_since: since, changes } = config;
  const files = [file, secure].filter((each) => each).join(" and ");
  return el("section", {}, el("h2", {}, `Launcher ${name}`), el("p", { class: "dim" }, files ? `From ${files}, process ${pid}` : `Process ${pid}`, since ? `, in force since ${moment(since)}.` : "."),
    Array.isArray(changes) && changes.length ? el("details", { "data-part": `${name} changes` }, el("summary", {}, "Changes to the previous configuration"), el("ul", {}, changes.map((each) => el("li", {}, String(each))))) : null,
    error ? el("p", { class: "bad", role: "alert" }, stale === null ? error : `The file has not been usable since ${moment(stale)}, so the previous configuration is in force: ${error}`) : null,
    (warnings || []).map((text) => el("p", {}, "Warning: ", rich(text))),
    Object.entries(left || {}).map(([provider, why]) => el("p", { class: "bad" }, `Provider ${provider} does not run: ${why}`)),
    Object.entries(providers || {}).map(([provider, value]) => part(name, `Provider ${provider}`, value, number === 0)),
    SECTIONS.map(([key, title]) => Object.keys(config[key] || {}).length ? part(name, title, config[key] || {}, false) : null));
}

/** @param {View} view */
export async function configPage({ main }) {
  const place = el("div", {});
  async function load() {
    const opened = new Map([...place.querySelectorAll("details")].map((each) => [each.dataset.part, each.open]));
    fill(place, (await ask("config")).launchers.map(loaded));
    for (const each of place.querySelectorAll("details")) each.open = opened.get(each.dataset.part) ?? each.open;
  }
  await load();
  fill(main, el("h1", {}, "Configuration"),
    el("p", {}, rich("The configuration in force. Values that may be secrets are shown as (redacted). After a change, check the files with `nodepool config-validate`")), place);
  return load;
}
