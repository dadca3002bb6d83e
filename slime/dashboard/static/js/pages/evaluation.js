// Evaluations: each set over the steps with error bars, and every problem of one set: which are right, and which flip.

import { get, ofRun } from "../api.js";
import { Chart } from "../chart.js";
import { fill, h, select, toggle } from "../dom.js";
import { color, number } from "../format.js";

const RIGHT = 0.5;

/** The page. */
export async function show({ root, run, options, setOption }) {
  const state = { run, setOption, set: options.get("set") ?? "", onlyFlips: options.has("flips"), charts: [] };
  const body = h("div");
  root.append(h("h1", {}, "Evaluation"), body);
  state.draw = async () => {
    state.page = await get(ofRun(run.id, "/evaluation"), { set: state.set });
    close(state);
    if (!Object.keys(state.page.sets).length) return fill(body, h("p", { class: "empty" }, "No evaluation yet: --eval-interval N with --eval-prompt-data NAME PATH (or --eval-config) makes one every N rollouts."));
    fill(body, curves(state), heatMap(state));
    state.charts.forEach(({ draw }) => draw());
  };
  await state.draw();
  return { refresh: state.draw, shown: () => state.charts.forEach(({ draw }) => draw()), themed: () => state.charts.forEach(({ chart }) => chart.themed()), close: () => close(state) };
}

function close(state) {
  state.charts.splice(0).forEach(({ chart }) => chart.close());
}

function curves(state) {
  return h("div", { class: "panels" }, Object.entries(state.page.sets).map(([name, { x, y, error }], index) => {
    const place = h("div", { class: "chart" });
    const last = `${number(y.at(-1))}${error.at(-1) === null ? "" : ` ± ${number(error.at(-1))}`}`;
    const readout = h("span", { class: "readout" }, last);
    const chart = new Chart(place, { height: 200, onReadout: (text) => { readout.textContent = text || last; } });
    const of = color(index);
    const side = (sign) => ({ label: "", color: of, width: 0, x, y: y.map((value, at) => (value === null ? null : value + sign * (error[at] ?? 0))) });
    state.charts.push({ chart, draw: () => place.isConnected && chart.draw([{ label: name, color: of, x, y, width: 2, band: error.some((value) => value !== null) ? [side(-1), side(1)] : undefined }]) });
    return h("figure", { class: "panel" }, h("figcaption", {}, h("h3", {}, name), readout), place);
  }));
}

function heatMap(state) {
  const { problems, steps, sets } = state.page;
  const chooseSet = select("set", Object.keys(sets), state.page.set, async (set) => { state.set = set; state.setOption("set", set); await state.draw(); });
  if (!problems.length) return [h("div", { class: "row spread" }, h("h2", {}, "Problems"), chooseSet), h("p", { class: "muted" }, "Single problems are known where evaluations are kept in rollouts/ (--keep-rollouts), or with --log-eval-samples N.")];
  const last = steps.length - 1;
  const flip = ({ marks }) => (last < 1 || !marks[last] || !marks[last - 1] ? 0 : (marks[last].reward >= RIGHT) - (marks[last - 1].reward >= RIGHT));
  const flips = problems.map(flip);
  const counted = (sign) => flips.filter((value) => value === sign).length;
  const shown = problems.filter((problem, index) => !state.onlyFlips || flips[index]);
  const only = toggle("only flips", state.onlyFlips, (isOn) => { state.onlyFlips = isOn; state.setOption("flips", isOn ? "1" : ""); state.draw(); });
  return [
    h("div", { class: "row spread" }, h("h2", {}, "Problems"), h("div", { class: "row" }, only, chooseSet)),
    h("p", { class: "muted" }, last < 1 ? "One evaluation: flips show from the second on." : `since the evaluation before: ${counted(1)} became right, ${counted(-1)} became wrong`),
    h("div", { class: "scroll" }, h("table", { class: "heat" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Problem"), steps.map((step) => h("th", { scope: "col" }, step)))), h("tbody", {}, shown.map((problem) => heatRow(problem, state, flip(problem)))))),
  ];
}

function heatRow({ prompt, label, marks }, state, flip) {
  const sign = flip > 0 ? h("span", { class: "flip right", title: "became right" }, "▲ ") : flip < 0 ? h("span", { class: "flip wrong", title: "became wrong" }, "▼ ") : null;
  return h("tr", {}, h("th", { scope: "row", class: "clip", title: `${prompt} → ${label}` }, sign, prompt, label && label !== "None" ? h("span", { class: "muted" }, ` → ${label}`) : ""), marks.map((mark, index) => {
    if (!mark) return h("td", {});
    const text = `step ${state.page.steps[index]}: reward ${number(mark.reward)} of ${mark.count} answers`;
    const cell = mark.row === undefined ? h("span", { title: mark.response }, number(mark.reward)) : h("a", { href: `#/sample/${encodeURIComponent(state.run.id)}/${mark.file}/${mark.row}`, title: text, "aria-label": text }, number(mark.reward));
    return h("td", { style: { background: `hsl(${Math.round(8 + 142 * Math.max(0, Math.min(1, mark.reward)))} 60% 50% / .28)` } }, cell);
  }));
}
