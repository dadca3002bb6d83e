// The samples of a rollout: a list to filter, sort and search, rewards as a histogram, and a group side by side.

import { get, ofRun } from "../api.js";
import { debounced, fill, h, select, toggle } from "../dom.js";
import { bytes, number } from "../format.js";

const COLUMNS = [["row", "", ""], ["reward", "Reward", "reward"], ["prompt_preview", "Prompt", ""], ["response_preview", "Response", ""], ["response_length", "Tokens", "response_length"],
  ["num_turns", "Turns", "num_turns"], ["status", "Status", ""], ["end_reason", "Ended", ""], ["reward_is_trusted", "Trusted", ""], ["group_index", "Group", "group_index"]];
const COUNT = 50;
const KEPT = ["q", "status", "end_reason", "reward_is_trusted", "dataset", "group_index", "low", "high", "flat", "sort", "desc", "start"];

/** The page. */
export async function show({ root, run, rest, options, setOption, go }) {
  const files = await get(ofRun(run.id, "/rollouts"));
  if (!files.length) {
    root.append(h("h1", {}, "Rollouts"), h("p", { class: "empty" }, "No samples are recorded in this run's rollouts/. A run writes them unless it has --keep-rollouts none; runs of older versions wrote none."));
    return { refresh: async () => { if ((await get(ofRun(run.id, "/rollouts"))).length) go("rollouts", run.id); } };
  }
  const name = rest[0] ?? (files.find((file) => !file.is_eval) ?? files[0]).name;
  const state = { run, name, files, root, go, at: 0, setOption, query: Object.fromEntries(KEPT.map((key) => [key, options.get(key) ?? ""])) };
  state.list = h("div", { "aria-live": "polite" });
  state.heading = h("div");
  root.append(h("div", { class: "row spread" }, h("h1", {}, state.name.startsWith("eval_") ? `Evaluation at step ${Number(name.slice(5))}` : `Rollout ${Number(name)}`), chooseFile(state)), controls(state), state.heading, state.list);
  await load(state);
  return { onKey: (event) => onKey(event, state), refresh: () => refreshFiles(state) };
}

async function refreshFiles(state) {
  state.files = await get(ofRun(state.run.id, "/rollouts"));
  state.root.querySelector(".files")?.replaceWith(chooseFile(state));
}

function chooseFile(state) {
  const at = state.files.findIndex(({ name }) => name === state.name);
  const open = (index) => state.files[index] && state.go("rollouts", state.run.id, state.files[index].name);
  const options = state.files.map((file) => [file.name, `${file.is_eval ? "evaluation" : "rollout"} ${file.rollout} (${bytes(file.bytes)})`]);
  return h("div", { class: "row files" },
    h("button", { type: "button", "aria-label": "Older", title: "older ([)", disabled: at < 0 || at + 1 >= state.files.length, onclick: () => open(at + 1) }, "‹"),
    select("", at < 0 ? [[state.name, state.name], ...options] : options, state.name, (name) => state.go("rollouts", state.run.id, name)),
    h("button", { type: "button", "aria-label": "Newer", title: "newer (])", disabled: at <= 0, onclick: () => open(at - 1) }, "›"));
}

function controls(state) {
  const search = h("input", { type: "search", placeholder: "search prompts and responses  (/)", "aria-label": "Search prompts and responses", value: state.query.q, size: 28,
    oninput: debounced(() => change(state, { q: search.value }), 300) });
  return h("div", { class: "row bar", style: { marginTop: "10px" } }, search,
    h("button", { type: "button", onclick: () => change(state, { sort: "reward", desc: "1" }) }, "best"),
    h("button", { type: "button", onclick: () => change(state, { sort: "reward", desc: "" }) }, "worst"),
    h("button", { type: "button", onclick: () => change(state, { sort: "response_length", desc: "1" }) }, "longest"),
    toggle("groups without spread", Boolean(state.query.flat), (isOn) => change(state, { flat: isOn ? "1" : "" })),
    h("span", { class: "row choices" }));
}

/** Filter or sort anew, from the first row on. */
function change(state, changed) {
  Object.assign(state.query, { start: "" }, changed);
  Object.entries(state.query).forEach(([key, value]) => state.setOption(key, value));
  state.at = 0;
  return load(state);
}

async function load(state) {
  const order = state.order = (state.order ?? 0) + 1;
  const begin = performance.now();
  try {
    const { start, ...query } = state.query;
    const found = await get(ofRun(state.run.id, `/rollouts/${encodeURIComponent(state.name)}`), { ...query, start: start || 0, count: COUNT });
    if (order !== state.order) return;
    state.found = found;
    fill(state.root.querySelector(".choices"), choices(state));
    fill(state.heading, heading(state));
    fill(state.list, state.query.group_index ? await sideBySide(state) : null, table(state), pager(state));
    state.root.dataset.milliseconds = Math.round(performance.now() - begin);
  } catch (error) {
    fill(state.list, h("p", { class: "empty", role: "alert" }, error.message));
  }
}

function choices(state) {
  const of = (name, label, counts) => Object.keys(counts).length > 1 || state.query[name] ? select(label, [["", "all"], ...Object.entries(counts).map(([value, count]) => [value, `${value} (${count})`])], state.query[name], (value) => change(state, { [name]: value })) : null;
  const chips = [["group_index", `group ${state.query.group_index}`], ["low", `reward ${number(Number(state.query.low))} to ${number(Number(state.query.high))}`]].filter(([name]) => state.query[name] !== "")
    .map(([name, text]) => h("button", { type: "button", "aria-pressed": "true", title: "remove this filter", onclick: () => change(state, name === "low" ? { low: "", high: "" } : { [name]: "" }) }, `${text} ×`));
  return [of("status", "status", state.found.statuses), of("end_reason", "ended", state.found.end_reasons), of("reward_is_trusted", "trusted reward", state.found.trusted), of("dataset", "data set", state.found.datasets), chips];
}

function heading(state) {
  const { total, found, groups, flat_groups: flat, has_trainer_columns: has } = state.found;
  const text = [`${number(found)} of ${number(total)} samples`, groups ? `${number(groups)} groups, ${number(flat)} without spread` : "", has ? "" : "no columns of the trainer yet"].filter(Boolean).join(" · ");
  return h("div", { class: "row spread", style: { alignItems: "end", marginBottom: "12px" } }, h("p", { class: "muted", "data-found": found }, text), histogram(state));
}

function histogram(state) {
  const { values, edges, counts } = state.found.histogram;
  if (!counts?.length) return null;
  const most = Math.max(...counts);
  const bounds = counts.map((_, index) => (values ? [values[index], values[index]] : [edges[index], edges[index + 1]]));
  return h("div", { class: "histogram", role: "group", "aria-label": "Rewards; a bar filters" }, counts.map((count, index) => {
    const [low, high] = bounds[index];
    const text = `${count} with reward ${number(low)}${low === high ? "" : ` to ${number(high)}`}`;
    return h("button", { type: "button", title: text, "aria-label": text, onclick: () => change(state, { low: String(low), high: String(high) }) },
      h("span", { style: { height: `${Math.max(count ? 2 : 0, Math.round((58 * count) / most))}px` } }), h("small", {}, values || index % 6 === 0 ? number(low) : " "));
  }));
}

function table(state) {
  const sort = (key) => change(state, { sort: key, desc: state.query.sort === key && !state.query.desc ? "1" : "" });
  const order = (key) => (state.query.sort === key ? (state.query.desc ? "descending" : "ascending") : undefined);
  const head = COLUMNS.map(([name, text, key]) => h("th", { scope: "col", class: `c-${name}`, "aria-sort": key ? order(key) : undefined }, key ? h("button", { type: "button", onclick: () => sort(key) }, text) : text));
  return h("div", { class: "scroll" }, h("table", { class: "samples" }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, state.found.rows.map((row, index) => rowOf(state, row, index)))));
}

function rowOf(state, row, index) {
  const open = () => state.go("sample", state.run.id, state.name, row.row);
  const group = row.group_index === null ? "–" : h("button", { class: "plain", type: "button", title: "this group side by side", onclick: (event) => { event.stopPropagation(); change(state, { group_index: String(row.group_index) }); } }, row.group_index);
  const cells = { row: h("a", { href: `#/sample/${encodeURIComponent(state.run.id)}/${state.name}/${row.row}` }, row.row), reward: number(row.reward), group_index: group, status: row.removed ? `${row.status}, removed` : row.status, reward_is_trusted: row.reward_is_trusted ? "yes" : "no" };
  return h("tr", { class: `open ${index === state.at ? "at" : ""}`, onclick: open }, COLUMNS.map(([name]) =>
    h("td", { class: `c-${name} ${name.endsWith("preview") ? "clip" : ""}`, title: name.endsWith("preview") ? row[name] ?? "" : undefined }, cells[name] ?? row[name] ?? "–")));
}

/** The responses of one group next to each other. */
async function sideBySide(state) {
  const rows = state.found.rows.slice(0, 8);
  const samples = await Promise.all(rows.map(({ row }) => get(ofRun(state.run.id, `/rollouts/${state.name}/${row}`))));
  if (!samples.length) return null;
  return [h("h2", {}, "Side by side"), h("p", { class: "small muted" }, samples[0].prompt.text.slice(0, 300)), h("div", { class: "beside" }, samples.map((sample) =>
    h("article", {}, h("h3", {}, h("a", { href: `#/sample/${encodeURIComponent(state.run.id)}/${state.name}/${sample.row}` }, `sample ${sample.row}`), ` · reward ${number(sample.reward)} · ${sample.response_length} tokens`),
      h("p", { class: "text" }, sample.response.text.slice(0, 1500), sample.response.length > 1500 ? " …" : ""))))];
}

function pager(state) {
  const start = Number(state.query.start || 0), { found } = state.found;
  const to = (first) => { state.query.start = String(first); state.setOption("start", state.query.start); state.at = 0; return load(state); };
  if (found <= COUNT) return null;
  return h("div", { class: "row bar", style: { marginTop: "14px" } },
    h("button", { type: "button", disabled: start === 0, onclick: () => to(Math.max(0, start - COUNT)) }, "‹ before"),
    h("span", { class: "muted num" }, `${number(start + 1)} to ${number(Math.min(found, start + COUNT))} of ${number(found)}`),
    h("button", { type: "button", disabled: start + COUNT >= found, onclick: () => to(start + COUNT) }, "next ›"));
}

function onKey(event, state) {
  const rows = [...state.list.querySelectorAll("table.samples tbody tr")];
  const step = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[event.key];
  const file = { "[": 1, "]": -1 }[event.key];
  if (step && rows.length) {
    event.preventDefault();
    rows[state.at]?.classList.remove("at");
    state.at = Math.max(0, Math.min(rows.length - 1, state.at + step));
    rows[state.at].classList.add("at");
    rows[state.at].scrollIntoView({ block: "nearest" });
  } else if (file) {
    const next = state.files[state.files.findIndex(({ name }) => name === state.name) + file];
    if (next) state.go("rollouts", state.run.id, next.name);
  } else if (event.key === "Enter" && event.target.tagName !== "BUTTON" && event.target.tagName !== "A") rows[state.at]?.click();
}
