// Curves: every metric of one run or of several, over steps, time, tokens or samples.

import { get, ofRun } from "../api.js";
import { Chart, smoothed } from "../chart.js";
import { debounced, download, fill, h, select, toggle } from "../dom.js";
import { color, duration, faded, number } from "../format.js";

const KEY = ["rollout/raw_reward", "rollout/response_len/mean", "rollout/truncated_ratio", "rollout/zero_std/fraction", "train/loss", "train/pg_loss", "train/entropy_loss", "train/kl_loss", "train/ppo_kl",
  "train/pg_clipfrac", "train/grad_norm", "train/train_rollout_logprob_abs_diff", "perf/step_time", "perf/tokens_per_gpu_per_sec"];
const AXES = { step: "step", time: "time", tokens: "tokens", samples: "samples" };
const BANDS = [["p10", "p90"], ["min", "max"]];  // the first that a run has
const BOUNDS = [...BANDS.flat(), "median"];
const AT_ONCE = 12;  // panels in one request: the server answers 64 names, and a panel has at most 5

/** The page. */
export async function show({ root, run, runs, options, setOption, go }) {
  const others = (options.get("with") ?? "").split(",").map(decodeURIComponent).filter((id) => id && id !== run.id);
  const state = {
    runs: [run, ...runs.filter(({ id }) => others.includes(id))], all: runs, primary: run, setOption, go,
    axis: AXES[options.get("x")] ?? "step", weight: Number(options.get("smooth") ?? 0), isLog: options.has("log"), hasBands: !options.has("nobands"),
    find: options.get("find") ?? "", panels: new Map(), names: {}, docs: {}, counts: {}, versions: {},
  };
  const list = h("div");
  state.redraw = () => state.panels.forEach((panel) => panel.draw());
  state.rebuild = async () => { await loadNames(state); layOut(list, state); };
  await loadNames(state);
  const side = runs.length > 1 ? h("div", { class: "side" }, runChoice(state)) : null;
  root.append(h("h1", {}, "Curves"), controls(state), side ? h("div", { class: "split" }, side, list) : list);
  return {
    follows: runs.map(({ id }) => id),
    shown: () => layOut(list, state),
    refresh: (changed) => refresh(list, state, changed),
    themed: () => state.panels.forEach((panel) => panel.chart?.themed()),
    close: () => closeAll(state),
  };
}

async function loadNames(state) {
  const found = await Promise.all(state.runs.map(({ id }) => get(ofRun(id, "/metrics"))));
  state.names = {};
  state.counts = Object.fromEntries(found.map(({ metrics }, index) => [state.runs[index].id, Object.keys(metrics).length]));
  found.forEach(({ metrics }) => Object.assign(state.names, metrics));
  state.stepsPerRollout = Object.fromEntries(found.map(({ steps_per_rollout: steps }, index) => [state.runs[index].id, steps]));
  state.docs = Object.assign({}, ...found.map(({ docs }) => docs ?? {}));
  state.axes = found.every(({ axes }) => axes.includes("tokens")) ? Object.keys(AXES) : ["step", "time"];
}

function controls(state) {
  const keep = (name, value, action) => { state.setOption(name, value); action(); };
  const axes = state.axes.map((axis) => [axis, axis === "tokens" ? "tokens generated" : axis === "samples" ? "samples generated" : axis]);
  const find = h("input", { type: "search", placeholder: "find a metric  (/)", "aria-label": "Find a metric", value: state.find,
    oninput: debounced(() => { state.find = find.value; keep("find", find.value, () => layOut(state.list, state)); }, 150) });
  const weight = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.weight, "aria-label": "Smoothing",
    oninput: () => { state.weight = Number(weight.value); keep("smooth", state.weight || "", state.redraw); } });
  return h("div", { class: "row bar" }, find,
    select("over", axes, state.axis, (axis) => { state.axis = axis; keep("x", axis === "step" ? "" : axis, () => load([...state.panels.values()], state, true)); }),
    h("label", {}, "smooth", weight),
    toggle("bands: 10th to 90th percentile", state.hasBands, (isOn) => { state.hasBands = isOn; keep("nobands", isOn ? "" : "1", state.redraw); }),
    toggle("log scale", state.isLog, (isOn) => { state.isLog = isOn; keep("log", isOn ? "1" : "", state.redraw); }),
    h("span", { class: "muted small" }, "drag to zoom, double-click to reset, click a point to see its samples"));
}

function runChoice(state) {
  return [h("h3", {}, "Runs"), state.all.map((run) => {
    const swatch = h("span", { class: "swatch" });
    const paint = () => { const at = state.runs.findIndex(({ id }) => id === run.id); swatch.style.background = at < 0 ? "transparent" : color(at); };
    const box = h("input", { type: "checkbox", checked: state.runs.some(({ id }) => id === run.id), onchange: async () => {
      state.runs = box.checked ? [...state.runs, run] : state.runs.filter(({ id }) => id !== run.id);
      state.setOption("with", state.runs.map(({ id }) => id).filter((id) => id !== state.primary.id).map(encodeURIComponent).join(","));
      state.paints.forEach((again) => again());
      await state.rebuild();
    } });
    (state.paints ??= []).push(paint);
    paint();
    return h("label", {}, box, swatch, h("span", {}, run.name));
  })];
}

function groups(state) {
  const words = state.find.toLowerCase().split(/\s+/).filter(Boolean);
  const names = Object.keys(state.names).filter((name) => words.every((word) => name.toLowerCase().includes(word)));
  if (words.length) return [["Found", names, true]];
  const isBound = (name) => BOUNDS.some((bound) => name.endsWith(`/${bound}`)) && state.names[`${name.slice(0, name.lastIndexOf("/"))}/mean`];
  const key = KEY.filter((name) => names.includes(name)).concat(names.filter((name) => /^eval\/[^/-]+$/.test(name)));
  const families = {};
  names.filter((name) => !key.includes(name) && !isBound(name)).forEach((name) => (families[name.split("/")[0]] ??= []).push(name));
  return [["Key", key, true], ...Object.entries(families).map(([family, of]) => [family, of, false])].filter(([, of]) => of.length);
}

function layOut(list, state) {
  state.list = list;
  const wasOpen = new Set([...list.querySelectorAll("details[open]")].map(({ dataset }) => dataset.group));
  closeAll(state);
  state.watch = new IntersectionObserver((all) => {
    const seen = all.filter(({ isIntersecting }) => isIntersecting).map(({ target }) => state.panels.get(target.dataset.metric));
    load(seen.filter(Boolean), state, true);
  }, { rootMargin: "300px" });
  const made = groups(state).map(([group, names, isOpen]) => h("details", { class: "group", "data-group": group, open: isOpen || wasOpen.has(group) },
    h("summary", {}, group, " ", h("span", { class: "muted small" }, names.length)), h("div", { class: "panels" }, names.map((name) => panel(name, state)))));
  fill(list, made.length ? made : h("p", { class: "empty" }, Object.keys(state.names).length ? "No metric has such a name." : "No metric yet: the first record comes with the first rollout."));
  state.panels.forEach(({ element }) => state.watch.observe(element));
}

function panel(name, state) {
  const place = h("div", { class: "chart", role: "img", "aria-label": `${name}, newest value ${number(state.names[name].last)}` });
  const readout = h("span", { class: "readout" }, number(state.names[name].last));
  const doc = state.docs[name];
  const save = h("button", { class: "plain small", type: "button", title: "as CSV; with Shift as PNG", "aria-label": `Download ${name}`, onclick: (event) => saveCurves(made, event.shiftKey) }, "↓");
  const element = h("figure", { class: "panel", "data-metric": name }, h("figcaption", {},
    h("h3", { title: doc ? describe(doc) : name }, name), h("span", { class: "row", style: { gap: "8px", flexWrap: "nowrap", minWidth: 0 } }, readout, save)), place);
  const made = { name, element, place, readout, data: new Map(), draw: () => drawPanel(made, state) };
  state.panels.set(name, made);
  return element;
}

function describe({ meaning, unit, healthy, source }) {
  return [meaning, unit ? `Unit: ${unit}` : "", healthy ? `Healthy: ${healthy}` : "", source ? `Made in ${source}` : ""].filter(Boolean).join("\n");
}

/** Ask for what is new of the runs, for some panels together; for all of it when the axis is another. */
async function load(panels, state, isNew) {
  for (const made of panels) {
    if (isNew) made.data.clear();
    made.isLoaded = true;
  }
  const asked = state.runs.flatMap(({ id }) => [...Map.groupBy(panels, ({ data }) => data.get(id)?.record ?? 0)].flatMap(
    ([after, group]) => group.flatMap((_, index) => (index % AT_ONCE ? [] : [loadPart(group.slice(index, index + AT_ONCE), state, id, after)]))));
  const counts = await Promise.all(asked);
  for (const made of panels) if (state.panels.get(made.name) === made) made.draw();
  return counts;
}

/** Ask for some panels of one run; returns the run, and how many metrics it has. */
async function loadPart(panels, state, id, after) {
  const names = new Map(panels.map((made) => [made, [made.name, ...boundsOf(made.name, state)]]));
  const found = await get(ofRun(id, "/series"), { name: [...names.values()].flat(), axis: state.axis, after });
  for (const [made, own] of names) {
    const old = made.data.get(id), series = Object.fromEntries(own.map((name) => [name, found.series[name]]));
    made.data.set(id, { record: found.record, series: old ? merged(old.series, series) : series });
  }
  return [id, found.names];
}

function boundsOf(name, state) {
  return name.endsWith("/mean") ? BANDS.flat().map((bound) => name.replace(/mean$/, bound)).filter((bound) => state.names[bound]) : [];
}

function merged(old, more) {
  return Object.fromEntries(Object.entries(old).map(([name, { x, y, ...rest }]) => {
    const at = new Map(x.map((value, index) => [value, y[index]]));
    more[name]?.x.forEach((value, index) => at.set(value, more[name].y[index]));
    const xs = [...at.keys()].sort((a, b) => a - b);
    return [name, { ...rest, x: xs, y: xs.map((value) => at.get(value)) }];
  }));
}

function drawPanel(made, state) {
  if (!made.isLoaded) return;
  const curves = state.runs.flatMap(({ id, name }, index) => curvesOf(made, state, { id, label: name, color: color(index) }));
  const last = curves.findLast(({ label }) => label)?.y.at(-1);
  made.readout.textContent = number(last);
  made.chart ??= new Chart(made.place, {
    onReadout: (text) => { made.readout.textContent = text || number(last); },
    onPick: (x, line) => openSamples(made, state, x, line),
  });
  Object.assign(made.chart.options, { isLog: state.isLog && curves.every(({ y }) => y.every((value) => value === null || value > 0)), axis: state.axis === "time" ? duration : number });
  made.chart.draw(curves);
}

function curvesOf(made, state, { id, label, color: of }) {
  const found = made.data.get(id)?.series ?? {};
  const line = found[made.name];
  if (!line?.x.length) return [];
  const pairs = BANDS.map((pair) => pair.map((bound) => found[made.name.replace(/mean$/, bound)]));
  const bounds = state.hasBands && pairs.find((pair) => pair.every((line) => line?.x.length));
  const band = bounds ? bounds.map((bound) => ({ ...bound, color: of, width: 0, label: "" })) : undefined;
  const curve = { label, id, color: of, x: line.x, y: smoothed(line.y, state.weight), band, stepKey: line.step_key };
  return state.weight ? [{ ...curve, label: "", y: line.y, color: faded(of, 0.3), band: undefined, width: 1 }, curve] : [curve];
}

function openSamples(made, state, x, { id }) {
  const line = made.data.get(id)?.series[made.name];
  if (state.axis !== "step" || !line) return;
  const rollout = line.step_key === "train/step" ? Math.floor(x / state.stepsPerRollout[id]) : x;
  state.go("rollouts", id, `${line.step_key === "eval/step" ? "eval_" : ""}${String(rollout).padStart(5, "0")}`);
}

async function saveCurves(made, isPicture) {
  const name = made.name.replaceAll("/", "_");
  if (isPicture) return download(`${name}.png`, await made.chart.toBlob());
  const rows = made.chart.curves.filter(({ label }) => label).flatMap(({ label, x, y }) => x.map((value, index) => `${JSON.stringify(label)},${value},${y[index] ?? ""}`));
  download(`${name}.csv`, new Blob([`run,x,value\n${rows.join("\n")}\n`], { type: "text/csv" }));
}

/** Draw what is new; a phase that began, or a sample that was written, changes no curve. */
async function refresh(list, state, changed) {
  const isNew = ({ id }) => changed.has(id) && state.versions[id] !== changed.get(id)[0];
  if (!state.runs.some(isNew)) return;
  for (const [id, [records]] of changed) state.versions[id] = records;
  const loaded = [...state.panels.values()].filter(({ isLoaded }) => isLoaded);
  const counts = await load(loaded, state, false);
  if (loaded.length && counts.every(([id, count]) => count === state.counts[id])) return;
  const before = Object.keys(state.names).length;
  await loadNames(state);
  if (Object.keys(state.names).length !== before) layOut(list, state);
}

function closeAll(state) {
  state.watch?.disconnect();
  state.panels.forEach(({ chart }) => chart?.close());
  state.panels.clear();
}
