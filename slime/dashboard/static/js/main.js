// Which page is shown: the address says it, `#/PAGE/RUN/more?options`, so every view can be sent to somebody.

import { follow, get } from "./api.js";
import { fill, h, isTyping } from "./dom.js";
import * as compare from "./pages/compare.js";
import * as curves from "./pages/curves.js";
import * as evaluation from "./pages/evaluation.js";
import * as rollouts from "./pages/rollouts.js";
import * as run from "./pages/run.js";
import * as runs from "./pages/runs.js";
import * as sample from "./pages/sample.js";
import * as time from "./pages/time.js";

const PAGES = { run, curves, rollouts, sample, time, compare, evaluation, runs };
const TABS = [["run", "Run"], ["curves", "Curves"], ["rollouts", "Rollouts"], ["time", "Time"], ["compare", "Compare"], ["evaluation", "Evaluation"]];
const MAIN = document.getElementById("main");
let page = null, stop = () => {}, known = [], shown = 0;

/** The address in parts. */
function place() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, id, ...rest] = path.split("/").map(decodeURIComponent);
  return { name, id, rest, options: new URLSearchParams(query) };
}

/** Show what the address says. */
async function show() {
  const order = ++shown;
  stop();
  page?.close?.();
  page = null;
  MAIN.setAttribute("aria-busy", "true");
  try {
    known = (await get("runs")).runs;
    if (order !== shown) return;
    await open(place(), order);
  } catch (error) {
    fill(MAIN, h("p", { class: "empty", role: "alert" }, String(error.message ?? error)));
  } finally {
    if (order === shown) MAIN.removeAttribute("aria-busy");
  }
}

async function open(where, order) {
  if (!where.name && known.length === 1) where = { ...where, name: "run", id: known[0].id };
  if (!PAGES[where.name]) where = { ...where, name: "runs", id: undefined };
  const current = where.id ? known.find(({ id }) => id === where.id) : where.name === "runs" ? undefined : known[0];
  drawHeader(where.name, current);
  if (where.id && !current) return fill(MAIN, h("p", { class: "empty", role: "alert" }, `There is no run ${where.id} in these directories: it was moved or removed. `, h("a", { href: "#/runs" }, "All runs")));
  if (!current && where.name !== "runs") return fill(MAIN, h("p", { class: "empty" }, "There is no run in these directories yet."));
  document.title = `${current ? `${current.name} · ` : ""}${where.name} · slime`;
  const root = h("div");
  const context = { root, run: current, runs: known, rest: where.rest, options: where.options, setOption, go };
  const made = await PAGES[where.name].show(context);
  if (order !== shown) return made?.close?.();
  page = made;
  fill(MAIN, root);
  page?.shown?.();
  listen(page?.follows ?? (current ? [current.id] : known.map(({ id }) => id)));
}

function drawHeader(name, current) {
  const box = document.getElementById("run");
  fill(box, h("option", { value: "" }, known.length === 1 ? "1 run" : `all ${known.length} runs`),
    known.map(({ id, name: text }) => h("option", { value: id, selected: id === current?.id }, text)));
  box.onchange = () => go(box.value ? (name === "runs" || name === "sample" ? "run" : name) : "runs", box.value);
  const at = current ?? known[0];
  const tab = name === "sample" ? "rollouts" : name;
  fill(document.getElementById("pages"), at ? TABS.map(([of, text]) =>
    h("a", { href: address(of, at.id), "aria-current": of === tab ? "page" : undefined }, text)) : []);
  document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
}

/** Make an address. */
function address(name, ...rest) {
  return `#/${[name, ...rest].filter((part) => part !== undefined && part !== "").map(encodeURIComponent).join("/")}`;
}

function go(name, ...rest) {
  location.hash = address(name, ...rest);
}

/** Keep an option in the address without showing the page anew. */
function setOption(name, value) {
  const { name: at, id, rest, options } = place();
  if (value === undefined || value === "" || value === null) options.delete(name);
  else options.set(name, value);
  const query = options.toString();
  history.replaceState(null, "", `${address(at, id, ...rest)}${query ? `?${query}` : ""}`);
}

function listen(ids) {
  const live = document.getElementById("live");
  let waiting = null;
  const changed = new Map();
  const end = follow(ids.slice(0, 100), (id, version) => {
    const { name } = known.find((run) => run.id === id) ?? { name: id };
    live.className = version ? "on" : "";
    live.textContent = version ? "live" : `${name} was moved or removed`;
    if (!version) return;
    changed.set(id, version);
    waiting ??= setTimeout(() => {
      waiting = null;
      const now = new Map(changed);
      changed.clear();
      Promise.resolve(page?.refresh?.(now)).catch((error) => { live.textContent = error.message; });
    }, 300);
  }, (isConnected) => {
    live.className = isConnected ? "on" : "";
    live.textContent = isConnected ? "live" : "not connected";
  });
  stop = () => { clearTimeout(waiting); end(); };
}

function switchTheme() {
  const isDark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = isDark ? "light" : "dark";
  localStorage.setItem("theme", document.documentElement.dataset.theme);
  page?.themed?.();
}

function onKey(event) {
  if (isTyping(event)) return;
  const number = Number(event.key);
  const { id } = place();
  if (number >= 1 && number <= TABS.length) go(TABS[number - 1][0], id ?? known[0]?.id);
  else if (event.key === "/") { event.preventDefault(); document.querySelector("main input[type=search]")?.focus(); }
  else page?.onKey?.(event);
}

const theme = localStorage.getItem("theme");
if (theme) document.documentElement.dataset.theme = theme;
document.getElementById("theme").addEventListener("click", switchTheme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page?.themed?.());
addEventListener("keydown", onKey);
addEventListener("hashchange", show);
show();
