// Runs side by side: flags that differ, newest metrics, and answers to the same problems.

import { get } from "../api.js";
import { fill, h, toggle } from "../dom.js";
import { color, number } from "../format.js";

/** The page. */
export async function show({ root, run, runs, options, setOption }) {
  const given = (options.get("with") ?? "").split(",").map(decodeURIComponent).filter(Boolean);
  const others = given.length ? given : runs.filter(({ id }) => id !== run.id).slice(0, 1).map(({ id }) => id);
  const state = { ids: [run.id, ...others.filter((id) => id !== run.id)], all: runs, primary: run, setOption };
  root.append(h("h1", {}, "Compare"));
  if (runs.length < 2) {
    root.append(h("p", { class: "empty" }, "There is one run in these directories. `slime view DIR DIR...` shows several; so does a directory that holds them."));
    return {};
  }
  const body = h("div");
  const draw = async () => {
    const page = await get("compare", { runs: state.ids.join(",") });
    fill(body, page.runs.length < 2 ? h("p", { class: "empty" }, "Choose another run.") : [legend(page), flags(page), metrics(page), problems(page)]);
  };
  root.append(h("div", { class: "split" }, h("div", { class: "side" }, choice(state, draw)), body));
  await draw();
  return { follows: state.ids, refresh: draw };
}

function choice(state, draw) {
  return [h("h3", {}, "Runs"), state.all.map((run) => {
    const box = h("input", { type: "checkbox", checked: state.ids.includes(run.id), disabled: run.id === state.primary.id, onchange: async () => {
      state.ids = box.checked ? [...state.ids, run.id].slice(0, 12) : state.ids.filter((id) => id !== run.id);
      state.setOption("with", state.ids.slice(1).map(encodeURIComponent).join(","));
      await draw();
    } });
    return h("label", {}, box, run.name);
  })];
}

function legend(page) {
  const [first, ...others] = page.runs;
  return h("p", { class: "row" }, page.runs.map(({ id, name }, index) => h("a", { class: "row", style: { gap: "6px" }, href: `#/run/${encodeURIComponent(id)}` }, h("span", { class: "swatch", style: { background: color(index) } }), name)),
    h("a", { href: `#/curves/${encodeURIComponent(first.id)}?with=${others.map(({ id }) => encodeURIComponent(id)).join(",")}` }, "curves together →"));
}

function table(page, title, rows) {
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, [title, ...page.runs.map(({ name }) => name)].map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, rows)));
}

function flags(page) {
  const names = Object.keys(page.flags);
  if (!page.has_flags.every(Boolean)) return [h("h2", {}, "Flags"), h("p", { class: "muted" }, "Not every one of these runs has written down its flags (run_events.jsonl).")];
  const rows = names.map((name) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, `--${name.replaceAll("_", "-")}`)), page.flags[name].map((value) => h("td", { class: "mono" }, text(value)))));
  return [h("h2", {}, `${names.length} flags differ`), names.length ? table(page, "Flag", rows) : h("p", { class: "muted" }, "The runs have the same flags.")];
}

function text(value) {
  if (value === null || value === undefined) return "–";
  return (typeof value === "string" ? value : JSON.stringify(value)).slice(0, 300);
}

function metrics(page) {
  const all = Object.entries(page.metrics).filter(([, values]) => values.some((value) => value !== null));
  const body = h("div");
  const isKey = ([name]) => /^eval\/[^/-]+$|raw_reward|response_len\/mean|truncated_ratio|entropy|grad_norm|step_time|kl|tokens_per_gpu/.test(name);
  const draw = (isWhole) => fill(body, table(page, "Metric", (isWhole ? all : all.filter(isKey)).map(([name, values]) => h("tr", {}, h("th", { scope: "row" }, name), values.map((value) => h("td", {}, number(value)))))));
  draw(false);
  return [h("div", { class: "row spread" }, h("h2", {}, "Newest metrics"), toggle("all metrics", false, draw)), body];
}

function problems(page) {
  if (!page.problems.length) return [h("h2", {}, "The same problems"), h("p", { class: "muted" }, "The newest evaluations of these runs have no problem in common: evaluations are kept in rollouts/ (--keep-rollouts), and --log-eval-samples N writes down answers.")];
  const rows = page.problems.slice(0, 100).map(({ set, prompt, label, marks }) => h("tr", {}, h("td", { class: "clip", title: prompt }, h("span", { class: "muted" }, `${set} `), prompt, label ? h("span", { class: "muted" }, ` → ${label}`) : ""),
    marks.map((mark, index) => h("td", {}, mark.row === undefined ? h("span", { title: mark.response }, number(mark.reward)) : h("a", { href: `#/sample/${encodeURIComponent(page.runs[index].id)}/${mark.file}/${mark.row}` }, number(mark.reward))))));
  return [h("h2", {}, `${number(page.num_problems)} problems in common, the most different first`), table(page, "Problem", rows)];
}
