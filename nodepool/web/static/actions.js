// What the viewer may do. A token is kept by this tab only and is sent in a header; there is no cookie.

import { TOKEN, call } from "./api.js";
import { byId, command, el, fill } from "./dom.js";
import { shellQuoted } from "./format.js";

const ROLES = ["read", "borrow", "operate", "admin"];

/** @type {Field} */
export const TIME = { key: "for", title: "Hours", type: "number", min: 0.1, max: 87600, step: "any", value: 24, read: (text) => Number(text) * 3600 };
/** @type {Field} */
export const PURPOSE = { key: "purpose", title: "Purpose", type: "text", maxlength: 200, read: (text) => text };

// Kind of thing -> what can be done with it: the call, what is asked first, and the command that does the same.
/** @type {{ [kind: string]: Action[] }} */
const ACTIONS = {
  node: [
    { title: "Hold", role: "operate", call: (name) => ["POST", `nodes/${name}/hold`], fields: [TIME, PURPOSE], command: (name) => `nodepool hold ${name} --for 24h` },
    { title: "Delete", role: "operate", call: (name) => ["DELETE", `nodes/${name}`], force: true, command: (name) => `nodepool delete ${name}` },
  ],
  request: [{ title: "Cancel", role: "operate", call: (name) => ["DELETE", `requests/${name}`], command: (name) => `nodepool request cancel ${name}` }],
  image: [
    { title: "Build", role: "operate", call: (name) => ["POST", `images/${name}/build`], command: (name) => `nodepool image-build ${name}` },
    { title: "Pause", role: "operate", call: (name) => ["POST", `images/${name}/pause`], command: (name) => `nodepool image-pause ${name}` },
    { title: "Resume", role: "operate", call: (name) => ["POST", `images/${name}/resume`], command: (name) => `nodepool image-unpause ${name}` },
  ],
  build: [{
    title: "Delete", role: "operate", call: (name) => ["DELETE", `images/${name}`],
    command: (image, build) => `nodepool dib-image-delete ${image}-${build}`,
  }],
  upload: [{
    title: "Delete", role: "operate", call: (name) => ["DELETE", `images/${name}`],
    command: (image, build, provider, upload) => `nodepool image-delete --image ${image} --build-id ${build} --provider ${provider} --upload-id ${upload}`,
  }],
  lease: [
    { title: "Renew", role: "borrow", call: (name) => ["POST", `leases/${name}/renew`], fields: [{ ...TIME, value: 4 }], command: (name) => `nodepool lease renew ${name} --for 4h` },
    { title: "Return", role: "borrow", call: (name) => ["DELETE", `leases/${name}`], command: (name) => `nodepool lease return ${name}` },
  ],
};

/** @type {Viewer | null} */
let viewer = null;

/** @param {string} role */
export function may(role) {
  return viewer !== null && ROLES.indexOf(viewer.role) >= ROLES.indexOf(role);
}

/** @param {string} owner */
export function isMine(owner) {
  return viewer !== null && viewer.owner === owner;
}

// -- questions

/** @param {Field} field */
function field({ key, title, read: _read, ...attributes }) {
  return el("label", {}, `${title} `, el("input", { name: key, autocomplete: "off", ...attributes }));
}

// Asks, and does it when the viewer agrees; what is wrong is said in the dialog, which stays then.
/** @param {string} title @param {Field[]} fields @param {string} agree @param {(values: any, force: boolean) => Promise<unknown>} submit @param {{ force?: boolean }} [options] */
export function question(title, fields, agree, submit, { force = false } = {}) {
  const message = el("p", { class: "bad", role: "alert" });
  const forced = el("label", { hidden: true }, el("input", { type: "checkbox", name: "force" }), " although somebody has leased it");
  const button = el("button", { type: "submit" }, agree);
  const form = el("form", { onsubmit: run }, el("h2", { id: "question" }, title), fields.map(field), forced, message,
    el("div", { class: "tools" }, button, el("button", { type: "button", onclick: () => dialog.close() }, "Close")));
  /** @type {HTMLDialogElement} */
  const dialog = el("dialog", { "aria-labelledby": "question", onclose: () => dialog.remove() }, form);
  /** @param {SubmitEvent} event */
  async function run(event) {
    event.preventDefault();
    button.disabled = true;
    message.textContent = "";
    try {
      const given = new FormData(form);
      await submit(Object.fromEntries(fields.map(({ key, read }) => [key, read(String(given.get(key)))])), given.has("force"));
      dialog.close();
    } catch (problem) {
      const error = /** @type {Failure} */ (problem);
      message.textContent = error.message;
      if (force && error.code === "leased") forced.hidden = false;
    }
    button.disabled = false;
  }
  document.body.append(dialog);
  dialog.showModal();
}

/** @param {string} text */
export function tell(text) {
  byId("done").textContent = text;
}

// Buttons for what may be done; otherwise the commands that do it.
/** @param {string} kind @param {string} name @param {Load} done */
export function buttons(kind, name, done) {
  const isPath = kind === "upload" || kind === "build";
  const path = isPath ? name : encodeURIComponent(name);
  const parts = isPath ? name.split("/").filter((_part, index) => index % 2 === 0).map(decodeURIComponent) : [name];
  const shown = parts.join(" ");
  return (ACTIONS[kind] || []).map((action) => {
    if (!may(action.role)) return command(action.command(...parts.map(shellQuoted)), `${action.title}: sign in, or use this command`);
    return el("button", { type: "button", onclick: () => question(`${action.title} ${kind} ${shown}?`, action.fields || [], action.title, async (values, force) => {
      const [method, address] = action.call(path);
      await call(method, force ? `${address}?force=true` : address, method === "POST" ? values : undefined);
      tell(`${action.title} ${kind} ${shown}: accepted`);
      await done();
    }, action) }, action.title);
  });
}

// -- who it is

/** @param {string} [token] */
async function identify(token) {
  viewer = await call("GET", "me", undefined, token);
}

// Who has signed in, in the header; changed() loads the page again.
/** @param {HTMLElement} place @param {() => void} changed */
export async function signs(place, changed) {
  if (sessionStorage.getItem(TOKEN)) {
    try {
      await identify();
    } catch (problem) {
      const error = /** @type {Failure} */ (problem);
      viewer = null;
      if (error.status === 401 || error.status === 403) sessionStorage.removeItem(TOKEN);
    }
  }
  function draw() {
    fill(place, viewer === null ? el("button", { type: "button", onclick: signIn }, "Sign in") :
      [`${viewer.owner} (${viewer.role}) `, el("button", { type: "button", onclick: signOut }, "Sign out")]);
  }
  function signIn() {
    question("Sign in", [{ key: "token", title: "Token", type: "password", required: true, read: (text) => text.trim() }], "Sign in", async ({ token }) => {
      await identify(token);
      sessionStorage.setItem(TOKEN, token);
      draw();
      changed();
    });
  }
  function signOut() {
    sessionStorage.removeItem(TOKEN);
    viewer = null;
    draw();
    changed();
  }
  draw();
}
