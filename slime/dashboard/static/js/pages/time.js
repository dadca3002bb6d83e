// Where the time goes: phases and GPUs on one axis, parts of each rollout, samples of one, and what engines report.

import { get, ofRun } from "../api.js";
import { Chart } from "../chart.js";
import { fill, h, select, svg } from "../dom.js";
import { color, duration, number } from "../format.js";

const NAMES = { rollout: "generate", generate: "generate", train: "train", actor_train: "train", log_probs: "log-probs", ref_log_probs: "reference", teacher_log_probs: "teacher", critic_values: "critic values", critic_train: "critic", update_weights: "weight sync", sync: "weight sync", save: "save", save_model: "save", eval: "evaluate", start: "start", other: "other" };
const ORDER = ["generate", "train", "log-probs", "reference", "weight sync", "evaluate", "save", "start", "critic", "critic values", "teacher", "other"];
const WINDOWS = [5, 20, 100, 1000];
const LANE = 30, WIDTH = 1000;

const nameOf = (part) => NAMES[part] ?? part;
const colorOf = (part) => (nameOf(part) === "other" ? "var(--faint)" : color(Math.max(0, ORDER.indexOf(nameOf(part)))));

/** The page. */
export async function show({ root, run, options, setOption, go }) {
  const state = { run, root, go, setOption, window: Number(options.get("last") ?? 20), charts: [] };
  const body = h("div");
  root.append(h("h1", {}, "Time"), body);
  const draw = async () => {
    state.charts.splice(0).forEach((chart) => chart.close());
    const page = await get(ofRun(run.id, "/time"));
    fill(body, lanes(page, state), steps(page), engines(page, state));
    await samples(body, state);
  };
  await draw();
  return { refresh: draw, shown: () => state.charts.forEach((chart) => chart.show()), themed: () => state.charts.forEach(({ themed }) => themed()), close: () => state.charts.forEach((chart) => chart.close()) };
}

function lanes(page, state) {
  const all = Object.values(page.lanes).flat();
  if (!all.length) return h("p", { class: "empty" }, "No phase has been timed yet.");
  const last = Math.max(...all.map(({ rollout }) => rollout ?? 0));
  const shown = Object.entries(page.lanes).map(([name, spans]) => [name, spans.filter(({ rollout }) => rollout === null || rollout > last - state.window)]).filter(([, spans]) => spans.length);
  const now = Date.now() / 1000;
  const spans = shown.flatMap(([, of]) => of);
  const begin = Math.min(...spans.map((span) => span.begin)), end = Math.max(...spans.map((span) => span.end ?? now));
  const used = [...new Set(spans.map(({ name }) => nameOf(name)))].sort((a, b) => ORDER.indexOf(a) - ORDER.indexOf(b));
  const idle = Object.entries(page.idle).filter(([, share]) => share !== null).map(([who, share]) => `${who} idle ${Math.round(100 * share)}%`).join(" · ");
  return [
    h("div", { class: "row spread bar" }, h("p", { class: "muted" }, idle || " "), select("last", WINDOWS.map((count) => [count, `${count} rollouts`]), state.window, (count) => { state.window = Number(count); state.setOption("last", count); state.root.querySelector(".gantt-block").replaceWith(lanesBlock(page, state)); })),
    lanesBlock(page, state, { shown, begin, end, used, now }),
  ];
}

function lanesBlock(page, state, known) {
  if (!known) return h("div", { class: "gantt-block" }, lanes(page, state)[1]);
  const { shown, begin, end, used, now } = known;
  return h("div", { class: "gantt-block" }, legend(used), shown.map(([name, spans]) => h("div", { class: "lane" }, h("span", { class: "muted small" }, name, page.gpus[name] ? [h("br"), `${page.gpus[name]} GPU${page.gpus[name] > 1 ? "s" : ""}`] : ""), gantt(spans, { begin, end, now, go: (rollout) => state.go("rollouts", state.run.id, String(rollout).padStart(5, "0")) }))), ruler(begin, end));
}

function legend(names) {
  return h("p", { class: "row small muted" }, names.map((name) => h("span", { class: "keyed" }, h("span", { class: "swatch", style: { background: colorOf(name) } }), name)));
}

function gantt(spans, { begin, end, now, go }) {
  const x = (time) => (WIDTH * (time - begin)) / (end - begin || 1);
  return svg("svg", { viewBox: `0 0 ${WIDTH} ${LANE}`, preserveAspectRatio: "none", role: "img", "aria-label": `${spans.length} spans` }, spans.map((span) => {
    const to = span.end ?? now;
    const text = `${nameOf(span.name)}${span.rollout === null || span.rollout === undefined ? "" : `, rollout ${span.rollout}`}: ${duration(to - span.begin)}`;
    const box = svg("rect", { x: x(span.begin), y: 2, width: Math.max(0.8, x(to) - x(span.begin)), height: LANE - 4, fill: colorOf(span.name), class: span.end ? "span" : "span open" }, svg("title", {}, document.createTextNode(text)));
    box.addEventListener("click", () => Number.isInteger(span.rollout) && go(span.rollout));
    return box;
  }));
}

function ruler(begin, end) {
  return h("div", { class: "lane" }, h("span"), h("div", { class: "row spread small muted num" }, [0, 0.25, 0.5, 0.75, 1].map((share) => h("span", {}, duration(share * (end - begin))))));
}

function steps(page) {
  const parts = Object.keys(page.steps).filter((part) => part !== "step");
  if (!parts.length) return null;
  const xs = [...new Set(parts.flatMap((part) => page.steps[part].x))].sort((a, b) => a - b).slice(-80);
  const at = Object.fromEntries(parts.map((part) => [part, new Map(page.steps[part].x.map((x, index) => [x, Math.max(0, page.steps[part].y[index] ?? 0)]))]));
  const totals = xs.map((x) => parts.reduce((sum, part) => sum + (at[part].get(x) ?? 0), 0));
  const usual = totals.toSorted((a, b) => a - b)[Math.floor(totals.length / 2)] || 1;
  const most = Math.min(Math.max(...totals), 4 * usual); // the first rollout may hold the whole start
  const width = WIDTH / xs.length, height = 180;
  const bars = xs.flatMap((x, index) => {
    let top = height;
    return parts.map((part) => {
      const size = (height * (at[part].get(x) ?? 0)) / most;
      top -= size;
      return svg("rect", { x: index * width + width * 0.08, y: top, width: width * 0.84, height: Math.max(0, size), fill: colorOf(part) }, svg("title", {}, document.createTextNode(`rollout ${x}, ${nameOf(part)}: ${duration(at[part].get(x) ?? 0)} of ${duration(totals[index])}`)));
    });
  });
  return [h("h2", {}, "Parts of each rollout"), legend(parts.map(nameOf)), svg("svg", { class: "bars", viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": "Seconds of each part of the rollouts" }, bars),
    h("div", { class: "row spread small muted num" }, h("span", {}, `rollout ${xs[0]}`), h("span", {}, `up to ${duration(most)}`), h("span", {}, `rollout ${xs.at(-1)}`))];
}

function engines(page, state) {
  const names = page.engine_metrics.slice(0, 12);
  if (!names.length) return [h("h2", {}, "Engines"), h("p", { class: "muted" }, "No metric of an engine is recorded in metrics.jsonl: what engines run and queue now is at their /metrics.")];
  return [h("h2", {}, "Engines"), h("div", { class: "panels" }, names.map((name, index) => {
    const place = h("div", { class: "chart" });
    const readout = h("span", { class: "readout" });
    const chart = new Chart(place, { height: 150, onReadout: (text) => { readout.textContent = text; } });
    const draw = async () => {
      const { series } = await get(ofRun(state.run.id, "/series"), { name });
      if (place.isConnected) chart.draw([{ label: name, color: color(index), ...series[name] }]);
    };
    state.charts.push({ show: draw, themed: () => chart.themed(), close: () => chart.close() });
    requestAnimationFrame(draw);
    return h("figure", { class: "panel" }, h("figcaption", {}, h("h3", {}, name), readout), place);
  }))];
}

async function samples(body, state) {
  const files = (await get(ofRun(state.run.id, "/rollouts"))).filter(({ is_eval: isEval }) => !isEval);
  if (!files.length) return body.append(h("h2", {}, "Samples"), h("p", { class: "muted" }, "Samples have lanes where the run records its rollouts (--keep-rollouts)."));
  const name = files.some((file) => file.name === state.file) ? state.file : files[0].name;
  const { lanes: rows, of } = await get(ofRun(state.run.id, `/rollouts/${name}/times`));
  const choose = select("of", files.map((file) => [file.name, `rollout ${file.rollout}`]), name, async (chosen) => { state.file = chosen; block.remove(); await samples(body, state); });
  const block = h("section", {}, h("div", { class: "row spread" }, h("h2", {}, "Samples"), choose), rows.length ? swim(rows, name, state) : h("p", { class: "muted" }, "This rollout says not when its samples were generated."),
    rows.length && rows.length < of ? h("p", { class: "small muted" }, `${rows.length} of ${number(of)} samples, spread over the rollout`) : null);
  body.append(block);
}

function swim(rows, name, state) {
  const begin = Math.min(...rows.map((row) => row.begin)), end = Math.max(...rows.map((row) => row.end));
  const x = (time) => (WIDTH * (time - begin)) / (end - begin || 1), step = Math.max(1.5, Math.min(9, 600 / rows.length));
  const lane = (row, index) => {
    const y = index * step, size = Math.max(1, step - 0.6);
    const bar = (from, to, fill, text) => svg("rect", { x: x(from), y, width: Math.max(0.6, x(to) - x(from)), height: size, fill }, svg("title", {}, document.createTextNode(text)));
    const tools = row.spans.filter(([span]) => /tool|reward|sandbox/.test(String(span))).map(([span, from, to]) => bar(from, to, "var(--amber)", `sample ${row.row}, ${span}: ${duration(to - from)}`));
    const judged = !tools.length && row.reward_s ? [bar(row.end - row.reward_s, row.end, "var(--amber)", `sample ${row.row}, reward: ${duration(row.reward_s)}`)] : [];
    const group = svg("g", { class: "span" }, bar(row.begin, row.end, "var(--accent)", `sample ${row.row}: ${duration(row.end - row.begin)}, reward ${number(row.reward)}${row.tool_s ? `, in tools ${duration(row.tool_s)}` : ""}`), ...tools, ...judged);
    group.addEventListener("click", () => state.go("sample", state.run.id, name, row.row));
    return group;
  };
  return [h("p", { class: "row small muted" }, h("span", { class: "swatch", style: { background: "var(--accent)" } }), "generation", h("span", { class: "swatch", style: { background: "var(--amber)" } }), "tools and rewards"),
    svg("svg", { class: "swim", viewBox: `0 0 ${WIDTH} ${rows.length * step}`, preserveAspectRatio: "none", role: "img", "aria-label": `${rows.length} samples over ${duration(end - begin)}` }, rows.map(lane)), ruler(begin, end)];
}
