// The page of the configuration.

import { ask } from "./api.js";
import { el, fill, moment } from "./dom.js";

function loaded(config) {
  const { name, hostname, pid, file, secure, error, stale_since: stale, warnings, not_running: left, ...inForce } = config;
  const files = [file, secure].filter((each) => each).join(" and ");
  return el("section", {}, el("h2", {}, `Launcher ${name}`), el("p", { class: "dim" }, files ? `From ${files}, process ${pid}.` : `Process ${pid}.`),
    error ? el("p", { class: "bad", role: "alert" }, stale === null ? error : `Since ${moment(stale)} the file cannot be used: ${error}`) : null,
    (warnings || []).map((text) => el("p", {}, `Warning: ${text}`)),
    Object.entries(left || {}).map(([name, why]) => el("p", { class: "bad" }, `Provider ${name} does not run: ${why}`)),
    el("details", { open: true }, el("summary", {}, "In force"), el("pre", { tabindex: "0" }, JSON.stringify(inForce, null, 2))));
}

export async function configPage({ main }) {
  const place = el("div", {});
  async function load() {
    fill(place, (await ask("config")).launchers.map(loaded));
  }
  await load();
  fill(main, el("h1", {}, "Configuration"), el("p", {}, "As the launchers have it in force. What may be a secret is left out."), place);
  return load;
}
