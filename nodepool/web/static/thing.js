// The page of one request, node, label, image or provider.

import { buttons } from "./actions.js";
import { API, ask } from "./api.js";
import { age, el, fill, links, precisely } from "./dom.js";
import { breadcrumb } from "./navigation.js";

const FACTS = { request: "request", nodes: "node", labels: "label" };

// What names other things leads to them.
function fact(title, value) {
  const kind = FACTS[title];
  // "3 ready" is a number of nodes.
  if (!kind || (kind === "node" && !/^\d{10}(, \d{10})*$/.test(value))) return value;
  return links(kind, value.split(", "));
}

export async function thingPage({ main }, kind, name) {
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
