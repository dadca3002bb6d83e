// One sample: the conversation, its parts, and its tokens coloured by what is known of each.

import { get, ofRun } from "../api.js";
import { fill, h, select } from "../dom.js";
import { duration, number } from "../format.js";

const COUNT = 2000;
const COLOURINGS = {
  loss_mask: { text: "trained or not", needs: ["loss_mask"], of: (at) => at("loss_mask"), range: [0, 1] },
  rollout_log_probs: { text: "log-prob of the engine", needs: ["rollout_log_probs"], of: (at) => at("rollout_log_probs"), range: [-5, 0] },
  log_probs: { text: "log-prob of the trainer", needs: ["log_probs"], of: (at) => at("log_probs"), range: [-5, 0] },
  gap: { text: "trainer − engine", needs: ["log_probs", "rollout_log_probs"], of: (at) => minus(at("log_probs"), at("rollout_log_probs")), isSigned: true },
  ref: { text: "trainer − reference", needs: ["log_probs", "ref_log_probs"], of: (at) => minus(at("log_probs"), at("ref_log_probs")), isSigned: true },
  entropy: { text: "entropy", needs: ["entropy"], of: (at) => at("entropy") },
  advantages: { text: "advantage", needs: ["advantages"], of: (at) => at("advantages"), isSigned: true },
  values: { text: "value of the critic", needs: ["values"], of: (at) => at("values"), isSigned: true },
};
const minus = (a, b) => (a === null || b === null ? null : a - b);

/** The page. */
export async function show({ root, run, rest, options, setOption, go }) {
  const [name, row] = rest;
  const path = ofRun(run.id, `/rollouts/${encodeURIComponent(name)}/${Number(row)}`);
  const begin = performance.now();
  const sample = await get(path);
  const state = { root, run, name, row: Number(row), path, sample, go, setOption, colouring: options.get("colour") ?? "", tokens: h("div"), at: -1 };
  fill(root, head(state), facts(sample), images(sample), sample.messages ? conversation(state) : plainTexts(state), state.tokens);
  root.dataset.milliseconds = Math.round(performance.now() - begin);
  await loadTokens(state, 0);
  return { onKey: (event) => onKey(event, state) };
}

function head(state) {
  const { sample, run, name, row } = state;
  const step = (to, text, key) => h("button", { type: "button", disabled: to < 0 || to >= sample.num_rows, title: `(${key})`, onclick: () => move(state, to) }, text);
  const others = sample.group_rows.filter((other) => other !== row);
  return [
    h("div", { class: "row spread" }, h("h1", {}, `Sample ${row}`), h("div", { class: "row" }, step(row - 1, "‹ before", "k"), step(row + 1, "next ›", "j"))),
    h("p", { class: "sub" }, h("a", { href: `#/rollouts/${encodeURIComponent(run.id)}/${name}` }, name.startsWith("eval_") ? `evaluation at step ${Number(name.slice(5))}` : `rollout ${Number(name)}`),
      others.length ? [" · ", h("a", { href: `#/rollouts/${encodeURIComponent(run.id)}/${name}?group_index=${sample.group_index}` }, `group ${sample.group_index}`), ": ", others.slice(0, 16).map((other) => [h("a", { href: `#/sample/${encodeURIComponent(run.id)}/${name}/${other}` }, other), " "])] : ""),
  ];
}

function move(state, to) {
  if (to >= 0 && to < state.sample.num_rows) state.go("sample", state.run.id, state.name, to);
}

function facts(sample) {
  const times = sample.times && typeof sample.times === "object" ? sample.times : {};
  const known = [
    ["reward", sample.reward_is_trusted ? number(sample.reward) : `${number(sample.reward)}, not trusted`], ["ended", sample.end_reason], ["status", sample.removed ? `${sample.status}, removed` : sample.status], ["tokens", `${number(sample.prompt_length)} + ${number(sample.response_length)}`],
    ["turns", sample.num_turns], ["label", sample.label], ["data set", sample.dataset], ["weights", [...new Set(sample.weight_versions ?? [])].join(", ")], ["images", sample.images || null],
    ["took", times.end ? duration(times.end - times.begin) : null], ["in tools", times.tool_s ? duration(times.tool_s) : null], ["in the reward", times.reward_s ? duration(times.reward_s) : null],
    ["index", sample.index],
  ].filter(([, value]) => value !== null && value !== undefined && value !== "");
  const parts = [["Parts of the reward", sample.reward_parts], ["Metadata", sample.metadata]].filter(([, value]) => value && (typeof value !== "object" || Object.keys(value).length));
  return [
    h("dl", { class: "facts" }, known.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value).slice(0, 400))))),
    parts.map(([name, value]) => h("details", {}, h("summary", {}, name), h("pre", {}, typeof value === "string" ? value : JSON.stringify(value, null, 1)))),
  ];
}

function images({ thumbnails, images: count }) {
  if (!thumbnails?.length) return null;
  const more = (count ?? 0) - thumbnails.length;
  return h("div", { class: "images" }, thumbnails.map((uri, index) => h("img", { src: uri, alt: `image ${index + 1} of the prompt` })),
    more > 0 ? h("span", { class: "muted small" }, `and ${more} more`) : null);
}

/** A long text: its beginning, and a button that brings more. */
function longText(state, field, { text, length }) {
  const body = h("div", { class: "text" }, ...withThinking(text));
  let shown = text.length;
  if (shown >= length) return body;
  const more = h("button", { type: "button", class: "plain small", onclick: async () => {
    const found = await get(`${state.path}/text`, { text: field, start: shown });
    body.append(found.text);
    shown += found.text.length;
    if (shown >= length || !found.text.length) more.remove();
    else more.textContent = `show more (${number(length - shown)} characters left)`;
  } }, `show more (${number(length - shown)} characters left)`);
  return [body, more];
}

function withThinking(text) {
  const match = /^([\s\S]*?)<think>([\s\S]*?)(<\/think>|$)([\s\S]*)$/.exec(text);
  if (!match) return [text];
  return [match[1], h("details", { class: "thinking" }, h("summary", {}, `thinking, ${number(match[2].length)} characters`), match[2].trim()), match[4].trimStart()];
}

function conversation(state) {
  const { messages, tools, response } = state.sample;
  const turns = messages.map((message, index) => turn(message.name ? `${message.role} ${message.name}` : message.role, message.role, [
    message.reasoning ? h("details", { class: "thinking" }, h("summary", {}, "thinking"), message.reasoning.text) : null,
    longText(state, `message:${index}`, message.content),
    message.tool_calls ? h("pre", { "aria-label": "tool calls" }, message.tool_calls) : null]));
  const isWhole = messages.at(-1)?.role === "assistant";
  return h("section", { "aria-label": "Conversation" }, tools ? h("details", {}, h("summary", {}, `Tools`), h("pre", {}, JSON.stringify(tools, null, 1).slice(0, 20000))) : null,
    turns, isWhole ? null : turn("response", "assistant", longText(state, "response", response)));
}

function plainTexts(state) {
  return h("section", { "aria-label": "Prompt and response" }, turn("prompt", "user", longText(state, "prompt", state.sample.prompt)), turn("response", "assistant", longText(state, "response", state.sample.response)));
}

function turn(title, role, body) {
  return h("article", { class: `turn ${["user", "assistant", "tool", "system"].includes(role) ? role : "other"}` }, h("h3", {}, title), body);
}

// ---- tokens

async function loadTokens(state, start) {
  const found = await get(`${state.path}/tokens`, { start, count: COUNT });
  state.part = found;
  const known = Object.entries(COLOURINGS).filter(([, { needs }]) => needs.every((name) => found.values[name]));
  if (!known.some(([name]) => name === state.colouring)) state.colouring = known.some(([name]) => name === "rollout_log_probs") ? "rollout_log_probs" : known[0]?.[0] ?? "";
  state.readout = h("p", { class: "readout num small", role: "status" }, "hover or use ← → to read a token's values");
  state.strip = h("div", { class: "tokens mono", tabIndex: 0, "aria-label": "Tokens", onmousemove: (event) => event.target.dataset?.at && readOut(state, Number(event.target.dataset.at)) });
  const choose = known.length ? select("coloured by", known.map(([name, { text }]) => [name, text]), state.colouring, (name) => { state.colouring = name; state.setOption("colour", name); paint(state); }) : null;
  fill(state.tokens, h("div", { class: "row spread" }, h("h2", {}, "Tokens"), choose, tokenPager(state)),
    found.texts ? null : h("p", { class: "small muted" }, "These are token ids: the tokenizer.json of this run's --hf-checkpoint cannot be read here."), legend(state), state.readout, state.strip);
  paint(state);
}

function tokenPager(state) {
  const { start, total } = state.part;
  if (total <= COUNT) return h("span", { class: "muted small" }, `${number(total)} tokens`);
  return h("span", { class: "row" }, h("button", { type: "button", disabled: !start, onclick: () => loadTokens(state, Math.max(0, start - COUNT)) }, "‹"),
    h("span", { class: "muted small num" }, `${number(start)} to ${number(Math.min(total, start + COUNT))} of ${number(total)}`),
    h("button", { type: "button", disabled: start + COUNT >= total, onclick: () => loadTokens(state, start + COUNT) }, "›"));
}

function legend(state) {
  state.scale = h("span", { class: "row small muted scale" });
  return state.scale;
}

function valuesOf(state, colouring) {
  const { ids, values } = state.part;
  return ids.map((_, index) => colouring.of((name) => values[name]?.[index] ?? null));
}

function paint(state) {
  const colouring = COLOURINGS[state.colouring];
  const { ids, texts, start, prompt_length: prompt, values: known } = state.part;
  const values = colouring ? valuesOf(state, colouring) : ids.map(() => null);
  const [low, high] = rangeOf(colouring, values);
  fill(state.strip, ids.map((id, index) => {
    const text = texts ? texts[index] : String(id);
    const isPrompt = start + index < prompt, isUntrained = !isPrompt && known.loss_mask?.[index] === 0;
    const token = h("span", { class: `token ${isPrompt ? "prompt" : isUntrained ? "untrained" : ""} ${texts ? "" : "id"}`, "data-at": index }, visible(text));
    if (values[index] !== null) token.style.background = shade(values[index], low, high, colouring.isSigned);
    return text.includes("\n") && texts ? [token, h("br")] : token;
  }));
  fill(state.scale, colouring ? [number(low), h("span", { class: colouring.isSigned ? "ramp signed" : "ramp" }), number(high), "· grey: prompt, underlined: not trained"] : "");
  state.at = -1;
}

function rangeOf(colouring, values) {
  const kept = values.filter((value) => value !== null);
  if (!colouring || !kept.length) return [0, 1];
  if (colouring.range) return colouring.range;
  const most = kept.reduce((found, value) => Math.max(found, Math.abs(value)), 0) || 1;
  return colouring.isSigned ? [-most, most] : [0, most];
}

/** A colour: from nothing to strong, or from red over nothing to green. */
function shade(value, low, high, isSigned) {
  const share = Math.max(0, Math.min(1, (value - low) / (high - low)));
  if (isSigned) return `hsl(${share < 0.5 ? 8 : 150} 70% 50% / ${(Math.abs(share - 0.5) * 1.3).toFixed(2)})`;
  return `hsl(205 75% 50% / ${(0.65 * (low < 0 ? 1 - share : share)).toFixed(2)})`;
}

function visible(text) {
  return text === "" ? "∅" : text.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
}

function readOut(state, index) {
  const { ids, texts, start, values } = state.part;
  if (index < 0 || index >= ids.length) return;
  state.strip.children[0] && state.strip.querySelector(".token.at")?.classList.remove("at");
  const token = state.strip.querySelector(`[data-at="${index}"]`);
  token?.classList.add("at");
  state.at = index;
  const known = Object.entries(values).filter(([, column]) => column[index] !== null && column[index] !== undefined).map(([name, column]) => `${name} ${number(column[index])}`);
  const gap = minus(values.log_probs?.[index] ?? null, values.rollout_log_probs?.[index] ?? null);
  if (gap !== null) known.push(`trainer − engine ${number(gap)}`);
  state.readout.textContent = [`token ${start + index}`, `id ${ids[index]}`, texts ? JSON.stringify(texts[index]) : "", ...known].filter(Boolean).join(" · ");
  return token;
}

function onKey(event, state) {
  if (event.key === "j") move(state, state.row + 1);
  else if (event.key === "k") move(state, state.row - 1);
  else if (event.key === "u") state.go("rollouts", state.run.id, state.name);
  else if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
    event.preventDefault();
    readOut(state, Math.max(0, state.at + (event.key === "ArrowRight" ? 1 : -1)))?.scrollIntoView({ block: "nearest" });
  }
}
