// All runs: how each stands, and a choice of those to lay side by side.

import { get } from "../api.js";
import { fill, h } from "../dom.js";
import { ago, number } from "../format.js";

/** The page. */
export async function show({ root, runs, go }) {
  const chosen = new Set();
  const together = h("button", { type: "button", disabled: true, onclick: () => {
    const [first, ...others] = [...chosen];
    location.hash = `#/curves/${encodeURIComponent(first)}?with=${others.map(encodeURIComponent).join(",")}`;
  } }, "Compare curves");
  const choose = (ids, isOn) => {
    ids.forEach((id) => (isOn ? chosen.add(id) : chosen.delete(id)));
    together.disabled = !chosen.size;
  };
  const body = h("tbody");
  const all = h("input", { type: "checkbox", "aria-label": "Choose all runs", onchange: () => {
    choose(runs.map(({ id }) => id), all.checked);
    body.querySelectorAll("input").forEach((box) => { box.checked = all.checked; });
  } });
  const draw = (now) => fill(body, now.map((run) => row(run, { chosen, choose, go })));
  draw(runs);
  root.append(
    h("div", { class: "row spread bar" }, h("h1", {}, runs.length === 1 ? "1 run" : `${runs.length} runs`), together),
    h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", {}, all), ["Run", "Status", "Rollout", "Reward", "Alarms", "Last record"].map((text) => h("th", { scope: "col" }, text)))), body)));
  if (!runs.length) fill(root, h("p", { class: "empty" }, "There is no run in these directories yet; this page shows one as soon as it has begun."));
  return { follows: runs.map(({ id }) => id), refresh: async () => draw((await get("runs")).runs) };
}

function row(run, { chosen, choose }) {
  const box = h("input", { type: "checkbox", checked: chosen.has(run.id), "aria-label": `Choose ${run.name}`, onchange: () => choose([run.id], box.checked) });
  return h("tr", {}, h("td", {}, box),
    h("td", {}, h("a", { href: `#/run/${encodeURIComponent(run.id)}` }, run.name)),
    h("td", {}, h("span", { class: `dot ${run.status}` }), ` ${run.status}`),
    h("td", {}, run.num_rollout ? `${run.rollout} / ${run.num_rollout}` : run.rollout),
    h("td", {}, number(run.reward)), h("td", {}, run.alarms || "–"), h("td", {}, ago(run.last_time)));
}
