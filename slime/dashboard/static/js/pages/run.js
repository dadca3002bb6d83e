// One run: what it does now, how far it is, what is wrong, and how to go on.

import { get, ofRun } from "../api.js";
import { sparkPath } from "../chart.js";
import { fill, h, svg } from "../dom.js";
import { ago, bytes, duration, moment, number } from "../format.js";

/** The page. */
export async function show({ root, run }) {
  const draw = async () => {
    const page = await get(ofRun(run.id));
    const names = Object.keys(page.headlines);
    const { series } = names.length ? await get(ofRun(run.id, "/series"), { name: names, points: 80 }) : { series: {} };
    fill(root, head(page), lights(page), tiles(page, series), alarms(page), problems(page), checkpoints(page), commands(page));
  };
  await draw();
  const clock = setInterval(() => root.querySelectorAll("[data-since]").forEach((element) => {
    element.textContent = duration(Date.now() / 1000 - Number(element.dataset.since));
  }), 1000);
  return { refresh: draw, close: () => clearInterval(clock) };
}

function head(page) {
  const total = page.num_rollout;
  const parts = [h("span", { class: `dot ${page.status}` }), h("b", {}, page.status)];
  if (page.phase) parts.push(h("span", {}, `${page.phase.name}, for `, h("span", { class: "num", "data-since": page.phase.since }, duration(Date.now() / 1000 - page.phase.since))));
  if (page.eta_s) parts.push(`about ${duration(page.eta_s)} left`);
  if (page.rollout_seconds) parts.push(`${duration(page.rollout_seconds)} a rollout`);
  if (page.started) parts.push(`started ${moment(page.started)}`);
  if (page.restarts) parts.push(`${page.restarts} restart${page.restarts > 1 ? "s" : ""}`);
  const share = total ? Math.min(1, page.rollout / total) : 0;
  return [
    h("h1", {}, page.name),
    h("p", { class: "sub mono" }, page.directory, page.host ? ` on ${page.host}` : ""),
    h("div", { class: "row", style: { marginTop: "16px" } }, h("span", { class: "num", style: { fontSize: "19px", fontWeight: 580 } }, total ? `Rollout ${page.rollout} of ${total}` : `${page.rollout} rollouts`), parts.map((part) => h("span", { class: "row", style: { gap: "7px" } }, part))),
    total ? h("div", { class: "progress", role: "progressbar", "aria-label": "Rollouts done", "aria-valuenow": page.rollout, "aria-valuemax": total }, h("div", { style: { width: `${100 * share}%` } })) : null,
  ];
}

function lights(page) {
  return h("ul", { class: "lights", "aria-label": "State" }, page.lights.map(({ name, color, text }) =>
    h("li", {}, h("span", { class: `dot ${color}`, role: "img", "aria-label": color }), h("span", {}, h("b", {}, name), " ", h("span", { class: "muted" }, text)))));
}

function tiles(page, series) {
  const names = Object.keys(page.headlines);
  if (!names.length) return h("p", { class: "empty" }, "No metric yet: the first record comes with the first rollout.");
  return h("div", { class: "tiles" }, names.map((name) => {
    const path = svg("path", { class: "spark", d: sparkPath(series[name]?.y ?? [], 200, 34) });
    return h("a", { class: "tile", href: `#/curves/${encodeURIComponent(page.id)}?find=${encodeURIComponent(name)}` },
      h("div", { class: "name" }, name), h("div", { class: "value" }, number(page.headlines[name])),
      svg("svg", { viewBox: "0 -2 200 38", preserveAspectRatio: "none", "aria-hidden": "true" }, path));
  }));
}

function alarms(page) {
  if (!page.alarm_list.length) return null;
  return [h("h2", {}, "Alarms"), page.alarm_list.toReversed().map((alarm) => h("div", { class: `alarm ${page.rollout - (alarm.step ?? 0) <= 5 && alarm.state !== "ended" ? "now" : ""}` },
    h("b", {}, alarm.name), alarm.state === "ended" ? " over" : null, h("span", { class: "muted" }, ` rollout ${number(alarm.step)}${alarm.since === undefined || alarm.since === null ? "" : `, since ${number(alarm.since)}`}`),
    h("p", {}, plain(alarm.evidence)),
    alarm.flags?.length ? h("p", { class: "small" }, "try ", [alarm.flags].flat().map((flag) => [h("code", {}, flag), " "])) : null,
    alarm.docs ? h("p", { class: "small muted" }, alarm.docs) : null))];
}

function plain(evidence) {
  if (evidence && typeof evidence === "object") return Object.entries(evidence).map(([name, value]) => `${name} ${typeof value === "number" ? number(value) : value}`).join(", ");
  return evidence ?? "";
}

function problems(page) {
  const found = [];
  if (page.end?.error) found.push(h("h2", {}, "Why it ended"), h("p", {}, page.end.error));
  if (page.error) found.push(h("details", { open: !page.end?.error }, h("summary", {}, "logs/error.txt"), h("pre", {}, page.error)));
  if (page.stall_report) found.push(h("details", {}, h("summary", {}, "stall_report.txt"), h("pre", {}, page.stall_report)));
  if (page.warnings.length) {
    found.push(h("h2", {}, "Warnings of the logs"), h("ul", { class: "small mono" }, page.warnings.map(({ log, text }) => h("li", {}, h("span", { class: "muted" }, `${log} `), text))));
  }
  return found;
}

function checkpoints(page) {
  if (!page.checkpoints.length) return null;
  return [h("h2", {}, "Checkpoints"), h("div", { class: "scroll" }, h("table", { style: { maxWidth: "560px" } },
    h("thead", {}, h("tr", {}, ["After rollout", "Written", "Size"].map((text) => h("th", { scope: "col" }, text)))),
    h("tbody", {}, page.checkpoints.toReversed().slice(0, 8).map((one) => h("tr", {}, h("td", {}, one.iteration), h("td", {}, `${moment(one.time)} · ${ago(one.time)}`), h("td", {}, bytes(one.bytes)))))))];
}

function commands(page) {
  if (!page.command) return null;
  return [
    page.resume ? [h("h2", {}, "To go on"), copied(page.resume)] : null,
    h("h2", {}, "Command"), copied(page.command),
  ];
}

function copied(text) {
  const button = h("button", { class: "plain small", type: "button", onclick: async () => {
    await navigator.clipboard.writeText(text);
    button.textContent = "copied";
  } }, "copy");
  return [h("pre", {}, text), button];
}
