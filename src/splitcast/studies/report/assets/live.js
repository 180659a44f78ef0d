"use strict";
/* The page while runs go on: asks for the document again when the server says that there is something new. */

const now = el("section", { class: "card wide", id: "now", "aria-label": "Now" });
byId("main").prepend(now);

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const s = Math.round(seconds);
  return s < 60 ? `${s} s` : s < 3600 ? `${Math.floor(s / 60)} min ${s % 60} s` : `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}
function drawNow() {
  const { runs, sites } = data.live;
  const states = el("table", { class: "words" });
  fillTable(states, ["run", "state", "round", "rounds/s", "time left", "sites that fail"], runs.map((run) => [run.name,
    el("td", {}, el("span", { class: `state ${run.state}` }, run.state)), `${run.round} of ${run.rounds}`,
    run.rounds_per_s === null ? "–" : number(run.rounds_per_s), duration(run.left_s), Object.entries(run.failures).map(([site, reason]) => `${site}: ${reason}`).join("; ") || "–"]));
  const parts = [el("h2", {}, "Now"), el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "State of the runs" }, states)];
  if (sites.length) {
    const table = el("table", { class: "words" });
    const state = ({ connected, trouble }) => (connected ? (trouble ? "fails" : "connected") : "not there");
    fillTable(table, ["site", "state", "certificate ends in"], sites.map((site) => [site.name,
      el("td", {}, el("span", { class: `state ${state(site) === "connected" ? "training" : "lost"}`, title: site.trouble }, state(site))),
      site.days === null ? "–" : `${site.days} days`]));
    parts.push(el("h3", {}, "Sites"), el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "State of the sites" }, table));
  }
  renew(now, parts);
}
const shape = (content) => JSON.stringify(content.runs.map((run) => [run.name, Object.keys(run.columns)]));

async function refresh() {
  const answer = await fetch("data.json");
  const content = answer.ok ? await answer.text() : "";
  if (!content) return;
  const fresh = JSON.parse(content);
  const same = shape(fresh) === shape(data);
  if (!same) { location.reload(); return; }  // other runs, or other quantities: other controls
  Object.assign(data, fresh);
  drawNow();
  draw();
}
drawNow();
const events = new EventSource("events");
let seen = null;
events.addEventListener("message", (event) => { if (seen !== null && seen !== event.data) refresh(); seen = event.data; });
events.addEventListener("error", () => { now.dataset.lost = "true"; });
events.addEventListener("open", () => { delete now.dataset.lost; });
