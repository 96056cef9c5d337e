// The page of leases.

import { PURPOSE, TIME, buttons, isMine, may, question, tell } from "./actions.js";
import { call } from "./api.js";
import { command, el, fill, link, links, rich, since, state } from "./dom.js";
import { nothing } from "./empty.js";
import { age } from "./format.js";

/** @type {Field[]} */
const NEW = [
  { key: "labels", title: "Labels", type: "text", required: true, placeholder: "one for each node, with blanks between", read: (text) => text.split(/\s+/).filter((each) => each) },
  { ...TIME, value: 4 }, PURPOSE,
];

/** @param {Lease} lease */
async function connect(lease) {
  const [config, known] = await Promise.all(["config", "known_hosts"].map((form) => call("GET", `leases/${encodeURIComponent(lease.id)}/ssh?format=${form}`)));
  question(`Connect to lease ${lease.id}`, [], "Done", async () => {});
  document.querySelector("dialog h2")?.after(el("p", {}, "Save these two files in one folder; then: ", command("ssh -F ssh_config n1")),
    el("h3", {}, "ssh_config"), el("pre", { tabindex: "0" }, config), el("h3", {}, "known_hosts"), el("pre", { tabindex: "0" }, known));
}

/** @param {Lease} lease @param {Load} load */
function row(lease, load) {
  const mine = isMine(lease.owner) || may("operate");
  const left = lease.ends === null ? (lease.nodes.length ? "no end" : "") : age((Date.parse(lease.ends) - Date.now()) / 1000);
  const why = lease.why ? [lease.why.queue_position ? `position ${lease.why.queue_position} in the queue, ` : "", rich(lease.why.text)] : "";
  const tools = mine ? [buttons("lease", lease.id, load), lease.state === "held" ? el("button", { type: "button", onclick: () => connect(lease) }, "Connect") : null] : [];
  return el("tr", {}, [
    el("span", { class: "id" }, lease.id), state(lease.state), lease.owner, links("label", lease.labels),
    lease.nodes.flatMap((node, index) => [index ? ", " : "", link("node", node.id)]), since(Date.parse(lease.created) / 1000), el("span", { class: "id" }, left), lease.purpose,
    [why, el("span", { class: "tools" }, tools)],
  ].map((value) => el("td", {}, value)));
}

/** @param {View} view */
export async function leasesPage({ main }) {
  const titles = ["Lease", "State", "Owner", "Labels", "Nodes", "Age", "Ends in", "Purpose", ""];
  const body = el("tbody", {}), tools = el("div", { class: "tools" });
  async function load() {
    /** @type {Lease[]} */
    const found = (await call("GET", "leases")).leases;
    fill(body, found.length ? found.map((lease) => row(lease, load)) : el("tr", {}, el("td", { colspan: titles.length }, nothing("leases", false, null))));
    fill(tools, may("borrow") ? el("button", { type: "button", onclick: ask }, "Lease nodes") : command("nodepool lease LABEL --for 4h"));
  }
  function ask() {
    question("Lease nodes", NEW, "Lease", async (values) => {
      const lease = await call("POST", "leases", values);
      tell(`Lease ${lease.id}: ${lease.state}`);
      await load();
    });
  }
  await load();
  fill(main, el("h1", {}, "Leases"), tools, el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Leases" },
    el("table", {}, el("thead", {}, el("tr", {}, titles.map((text) => (text ? el("th", { scope: "col" }, text) : el("td", {}))))), body)));
  return load;
}
