// What pages are made of. Everything that comes from the cluster is set as text, never as markup.

export function el(name, attributes, ...children) {
  const made = document.createElementNS(SVG.has(name) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml", name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, value);
  }
  fill(made, ...children);
  return made;
}
const SVG = new Set(["svg", "rect", "path", "line", "title"]);

export function fill(place, ...children) {
  place.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
}

export function age(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor(whole / 60) % 60} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor(whole / 3600) % 24} h`;
}

export function moment(seconds) {
  if (!(Math.abs(seconds) < 8e12)) return String(seconds);
  return new Date(seconds * 1000).toLocaleString(undefined, { dateStyle: "short", timeStyle: "medium" });
}

// With thousandths: what happens to a node is a matter of them.
export function precisely(seconds) {
  if (!(Math.abs(seconds) < 8e12)) return String(seconds);
  const parts = { year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit", fractionalSecondDigits: 3 };
  return new Date(seconds * 1000).toLocaleString(undefined, parts);
}

export function since(seconds) {
  // No date that a browser knows: a record may have any number.
  if (Math.abs(seconds) > 8e12) return String(seconds);
  const made = el("time", { datetime: new Date(seconds * 1000).toISOString(), title: moment(seconds), "data-since": seconds });
  made.textContent = age(Date.now() / 1000 - seconds);
  return made;
}

export function link(kind, name) {
  const id = kind === "node" || kind === "request";
  return el("a", { href: `/ui/${kind}/${encodeURIComponent(name)}`, class: id ? "id" : null }, String(name));
}

export function state(text) {
  return el("span", { class: `state ${/^[a-z-]+$/.test(text) ? text : ""}` }, String(text));
}

export function joined(parts) {
  return parts.flatMap((part, index) => (index ? [", ", part] : [part]));
}

// Each once, with how often it is there.
export function links(kind, names) {
  const found = new Map();
  for (const name of names) found.set(name, (found.get(name) || 0) + 1);
  return joined([...found].map(([name, times]) => (times > 1 ? [link(kind, name), ` \u00d7${times}`] : link(kind, name))));
}

export function counts(value) {
  return Object.entries(value).map(([name, count]) => `${count} ${name}`).join(", ") || "none";
}
