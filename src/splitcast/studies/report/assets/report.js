"use strict";
/* Draws the page from the document that splitcast put into it. State is one object; every control changes it and
   calls draw(). Text of runs reaches the page as text only, never as HTML. */

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const quiet = matchMedia("(prefers-reduced-motion: reduce)").matches;

const X = {
  rounds: { label: "rounds", axis: "communication rounds" },
  mb: { label: "MB", axis: "data on the air so far (MB)" },
  seconds: { label: "seconds", axis: "simulated time so far (s)" },
};
const JUDGED = data.measures[data.headline]; // what the runs are judged by
const LINES = {
  learning: {
    ...Object.fromEntries(Object.entries(data.measures).map(([column, { label, unit, scale }]) => [column,
      { label, axis: `${label}${unit && ` (${unit})`}`, scale, unit, linear: unit === "%" }])),
    loss: { label: "training loss", axis: "training loss" },
  },
  cost: {
    round_s: { label: "seconds", axis: "simulated time of the round (s)", unit: "s", zero: true },
    wall_s: { label: "measured seconds", axis: "measured time of the round (s)", unit: "s", zero: true },
    round_mb: { label: "MB", axis: "data of the round (MB)", unit: "MB", zero: true },
    joules: { label: "joules", axis: "energy of all clients in the round (J)", unit: "J", zero: true },
    late: { label: "late", axis: "clients left out by the deadline", zero: true },
  },
  drift: { drift: { label: "drift", axis: "mean distance from their average", zero: true } },
  gamma: {
    gamma: { label: "Γ", axis: "Γ: squared gradient error", zero: true },
    dropped: { label: "energy missed", axis: "share of energy missed (%)", scale: 100, unit: "%", zero: true },
    rank: { label: "rank", axis: "directions broadcast", zero: true },
  },
};
const NOTES = {
  cost: "Moving the cut costs bytes and seconds in the round that moves it.",
  cuts: "Blocks of the model on the clients. Each bar is as long as the run went on the chosen axis.",
  drift: "Clients that are never averaged move apart; 0 means that all halves are equal after the round.",
  gamma: "Measured where the server sends a basis instead of all gradients (sfl-gb): Γ = Σ ρⁿ ‖sⁿ − receivedⁿ‖².",
};
const KINDS = {
  "up.smashed": ["smashed data ↑", "#0072B2"], "up.labels": ["labels ↑", "#882255"],
  "up.model": ["client models ↑", "#56B4E9"], "up.migration": ["moved blocks ↑", "#7F8FE0"],
  "down.gradient": ["gradients ↓", "#D55E00"], "down.basis": ["basis ↓", "#E69F00"],
  "down.coefficients": ["coefficients ↓", "#CC79A7"], "down.model": ["averaged model ↓", "#F0C95A"],
  "down.migration": ["moved blocks ↓", "#B08D57"],
};
const PARTS = {
  compute: ["compute", "#0072B2"], uplink: ["uplink", "#56B4E9"], server: ["server", "#009E73"],
  downlink: ["downlink", "#E69F00"], backward: ["backward", "#D55E00"],
  waiting: ["waiting for others", "--waiting"], absent: ["not taking part", "--absent"],
};
const JOULES = { compute: ["computing", "#0072B2"], air: ["sending", "#56B4E9"] };
const SPENDS = { seconds: ["seconds", "simulated time per round (s)", "s"], joules: ["joules", "energy per round (J)", "J"] };
const DARK = ["#4aa5e0", "#f08134", "#2cc79b", "#e39bc6", "#f0b840", "#8fd0f5", "#e6e8ec", "#c6c66c"];
const DASHES = ["solid", [7, 4], [7, 3, 2, 3], [2, 3], [12, 3], [5, 2, 2, 2], [1, 2], [4, 8]];
const SYMBOLS = ["circle", "rect", "triangle", "diamond", "path://M0,0H10L5,9Z", "path://M3,0H7V3H10V7H7V10H3V7H0V3H3Z",
  "path://M2,0L5,3L8,0L10,2L7,5L10,8L8,10L5,7L2,10L0,8L3,5L0,2Z", "path://M5,0L6.5,3.5L10,3.8L7.3,6.2L8.1,10L5,8L1.9,10L2.7,6.2L0,3.8L3.5,3.5Z"];

const state = {
  x: "rounds", logx: false, logy: false, hidden: new Set(), bytes: "total", client: 0, spends: "seconds", target: data.target,
  metric: Object.fromEntries(Object.keys(LINES).map((chart) => [chart, available(chart)[0]])),
};
const charts = {};

/* ---- small helpers ---- */

function available(chart) {
  return Object.keys(LINES[chart]).filter((key) => data.runs.some((run) => run.columns[key]));
}
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(2);
  return value.toLocaleString("en", { maximumSignificantDigits: Math.max(digits, Math.trunc(Math.abs(value)).toString().length) });
}
const tick = (value) => (value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential() : value.toLocaleString("en", { maximumSignificantDigits: 6 }));
const figure = (value) => (JUDGED.unit === "%" ? (100 * value).toFixed(1) : number(value));
const judged = (value) => (value === null ? "–" : `${figure(value)} ${JUDGED.unit}`.trim());
const aim = (target) => (JUDGED.unit === "%" ? `${number(100 * target)} %` : `${number(target)} ${JUDGED.unit || JUDGED.name}`);
const last = (list) => list[list.length - 1];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const paint = (colour) => (colour.startsWith("--") ? css(colour) : colour);
const isDark = () => document.documentElement.dataset.theme === "dark";
const colourOf = (index) => (isDark() ? DARK : data.colours)[data.runs[index].colour];
const markOf = (list, index) => list[data.runs[index].mark]; // of figures too: a scheme looks the same everywhere
const titled = (run) => (run.n > 1 ? `${run.name}, mean of ${run.n}` : run.name);
const shown = () => data.runs.map((run, index) => ({ run, index })).filter(({ index }) => !state.hidden.has(index));
const narrow = () => window.innerWidth < 560;

function swatch(index) {
  const dash = markOf(DASHES, index);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  line.setAttribute("width", 24); line.setAttribute("height", 8); line.setAttribute("aria-hidden", "true");
  const stroke = document.createElementNS("http://www.w3.org/2000/svg", "line");
  for (const [key, value] of Object.entries({ x1: 0, x2: 24, y1: 4, y2: 4, stroke: colourOf(index), "stroke-width": 3,
    "stroke-dasharray": dash === "solid" ? "none" : dash.join(" ") })) stroke.setAttribute(key, value);
  line.append(stroke);
  return line;
}
function choices(holder, options, current, choose) {
  holder.replaceChildren(...Object.entries(options).map(([key, label]) => el("button", {
    type: "button", "aria-pressed": String(key === String(current())), "data-value": key,
    onclick: () => { choose(key); draw(); },
  }, label)));
}
function press(holder, current) {
  for (const button of holder.querySelectorAll("button")) {
    button.setAttribute("aria-pressed", String(button.dataset.value === String(current)));
  }
}
function fillTable(table, heads, rows) {
  table.replaceChildren(
    el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, ...rows.map(([first, ...rest]) => el("tr", {}, el("th", { scope: "row" }, ...[first].flat()),
      ...rest.map((cell) => (cell instanceof Node ? cell : el("td", {}, String(cell))))))),
  );
}
function legend(holder, items) {
  holder.replaceChildren(...items.map(([label, colour]) => {
    const box = el("i", { "aria-hidden": "true" });
    box.style.background = paint(colour);
    return el("li", {}, box, label);
  }));
}
function tip(title, rows, foot) {
  return el("div", { class: "tip" }, el("b", {}, title),
    ...rows.map(([mark, label, value]) => {
      const dot = el("i", {});
      dot.style.cssText = `display:inline-block;width:.7em;height:.7em;border-radius:50%;margin-right:.4em;background:${mark}`;
      return el("div", {}, el("span", {}, dot, label), el("b", {}, value));
    }), foot ? el("em", {}, foot) : null);
}

/* ---- the frame of a chart: heading, choices, plot, legend, numbers as a table ---- */

function frame(name) {
  const section = document.querySelector(`[data-chart="${name}"]`);
  const heading = section.querySelector("h2");
  heading.id = `h-${name}`;
  section.setAttribute("aria-labelledby", heading.id);
  const pick = el("div", { class: name === "clients" ? "group" : "group segmented", role: "group", "aria-label": `${heading.textContent}: what to show` });
  const note = el("p", { class: "note" }, NOTES[name] || "");
  const plot = el("div", { class: "plot", role: "img" });
  const holder = el("div", { class: name === "clients" ? "tall" : "" }, plot);
  const keys = el("ul", { class: "legend" });
  const table = el("table");
  const numbers = el("details", { ontoggle: () => numbers.open && charts[name].fill() }, el("summary", {}, "Numbers as a table"),
    el("div", { class: "scroll high", tabindex: "0", role: "region", "aria-label": `Numbers: ${heading.textContent}` }, table));
  const head = el("div", { class: "head" });
  heading.replaceWith(head);
  head.append(heading, pick);
  section.append(note, keys, holder, numbers);
  const chart = echarts.init(plot, null, { renderer: "svg" });
  charts[name] = { chart, plot, pick, note, keys, table, numbers, fill: () => {} };
  return charts[name];
}
function common() {
  return {
    animation: !quiet, animationDuration: 250, animationDurationUpdate: 250,
    textStyle: { fontFamily: getComputedStyle(document.body).fontFamily },
    grid: { left: 12, right: 22, top: 30, bottom: 34, containLabel: true, outerBoundsMode: "none" },
    tooltip: { confine: true, backgroundColor: css("--card"), borderColor: css("--line"), textStyle: { color: css("--ink") } },
  };
}
function axis(more) {
  return {
    axisLine: { lineStyle: { color: css("--line") } }, axisTick: { lineStyle: { color: css("--line") } },
    axisLabel: { color: css("--soft"), fontSize: 12, hideOverlap: true, ...more.axisLabel },
    nameTextStyle: { color: css("--soft"), fontSize: 12, ...more.nameTextStyle },
    splitLine: { lineStyle: { color: css("--grid") } },
    ...Object.fromEntries(Object.entries(more).filter(([key]) => !["axisLabel", "nameTextStyle"].includes(key))),
  };
}
const xAxis = (more) => axis({ name: X[state.x].axis, nameLocation: "middle", nameGap: 30, splitNumber: narrow() ? 3 : 5, max: state.x === "rounds" ? "dataMax" : undefined,
  axisLabel: { formatter: tick, margin: 10 }, ...more });
function show(name, option, label) {
  const { chart, plot, numbers, fill } = charts[name];
  chart.setOption({ ...common(), ...option }, true);
  chart.resize();
  plot.setAttribute("aria-label", label);
  if (numbers.open) fill();
}

/* ---- charts ---- */

function drawLines(name) {
  const metric = state.metric[name];
  const view = charts[name];
  if (!metric) {
    view.plot.className = "plot empty";
    view.plot.removeAttribute("role");
    view.plot.textContent = "None of these runs measured it.";
    view.numbers.hidden = true;
    return;
  }
  press(view.pick, metric);
  const about = LINES[name][metric];
  const scale = about.scale || 1;
  const runs = shown().filter(({ run }) => run.columns[metric]);
  const logy = state.logy && !about.linear;
  const series = runs.map(({ run, index }) => {
    const points = run.columns[metric].map((y, k) => [run.columns[state.x][k], y === null ? null : scale * y, k])
      .filter(([x, y]) => y !== null && (!logy || y > 0) && (!state.logx || x > 0));
    return {
      type: "line", name: titled(run), data: points, color: colourOf(index), symbol: markOf(SYMBOLS, index), symbolSize: narrow() ? 4 : 6,
      showSymbol: points.length <= 60, lineStyle: { width: 2, type: markOf(DASHES, index) }, emphasis: { disabled: true },
    };
  });
  const bands = runs.filter(({ run }) => run.edges).flatMap(({ run, index }) => {
    const { low, high } = run.edges[metric];
    const between = (edge) => low.map((y, k) => [run.columns[state.x][k], y === null ? null : edge(y, high[k]), k])
      .filter(([x], k) => low[k] !== null && (!logy || low[k] > 0) && (!state.logx || x > 0));
    const layer = { type: "line", stack: `band ${index}`, stackStrategy: "all", symbol: "none", silent: true, color: colourOf(index), lineStyle: { width: 0 }, emphasis: { disabled: true } };
    return [{ ...layer, data: between((a) => scale * a) }, { ...layer, data: between((a, b) => scale * (b - a)), areaStyle: { opacity: 0.16 } }];
  });
  const format = (y) => number(y) + (about.unit ? ` ${about.unit}` : "");
  const option = {
    xAxis: xAxis({ type: state.logx ? "log" : "value", splitLine: { show: false } }),
    yAxis: axis({ type: logy ? "log" : "value", scale: !about.zero, name: about.axis, nameLocation: "end", nameTextStyle: { align: "left", padding: [0, 0, 0, -8] },
      axisLabel: { formatter: tick } }),
    series: [...series, ...bands],
  };
  option.tooltip = { ...common().tooltip, trigger: "axis", axisPointer: { type: "line" }, formatter: (all) => {
    const items = all.filter((item) => item.seriesIndex < series.length); // bands say nothing
    if (!items.length) return "";
    const first = runs[items[0].seriesIndex].run.columns;
    const title = state.x === "rounds" ? `round ${number(items[0].value[0])}` : `${number(items[0].value[0])} ${state.x === "mb" ? "MB" : "s"}`;
    const k = items[0].value[2];
    const foot = items.length === 1 ? `round ${first.rounds[k]}, ${number(first.mb[k])} MB, ${number(first.seconds[k])} s` : "";
    const spread = (item) => {
      const { run } = runs[item.seriesIndex];
      const at = item.value[2];
      return run.edges ? ` (${number(scale * run.edges[metric].low[at])} to ${number(scale * run.edges[metric].high[at])})` : "";
    };
    return tip(title, items.map((item) => [item.color, item.seriesName, format(item.value[1]) + spread(item)]), foot);
  } };
  view.fill = () => fillTable(view.table, ["run", "round", "MB so far", "s so far", about.axis],
    runs.flatMap(({ run }) => run.columns[metric].map((y, k) => [run.name, run.columns.rounds[k], number(run.columns.mb[k]),
      number(run.columns.seconds[k]), y]).filter((row) => row[4] !== null).map((row) => [...row.slice(0, 4), number(scale * row[4])])));
  show(name, option, `${about.axis} against ${X[state.x].axis}. ` + series.map((s) => `${s.name} ends at ${s.data.length ? format(last(s.data)[1]) : "nothing"}`).join("; "));
}

/* The end of a long name goes, and so many of the words that all runs begin with as hide where they differ. */
function short(name, most) {
  const all = data.runs.map((run) => run.name);
  let from = 0;
  const label = (text) => (text.length - from <= most ? text.slice(from) : `${text.slice(from, from + most - 1)}…`);
  for (const word of all[0].match(/[^-_\/ ]*[-_\/ ]?/g)) {
    if (new Set(all.map(label)).size === all.length || !all.every((text) => text.startsWith(word, from))) break;
    from += word.length;
  }
  return label(name);
}
function names(runs) {
  return axis({ type: "category", inverse: true, data: runs.map(({ run }) => short(run.name, narrow() ? 11 : 20)), splitLine: { show: false },
    axisTick: { show: false }, axisLabel: { color: css("--ink"), interval: 0 } });
}
function barHeight(name, bars) {
  charts[name].plot.style.height = `${96 + Math.max(2, bars) * (bars > 40 ? 22 : 34)}px`;
}

const RAMP = ["#3b4f8a", "#2a788e", "#22a884", "#7ad151", "#e5d52a"];
function cutColour(cut, most) {
  const at = most < 2 ? 0 : ((cut - 1) / (most - 1)) * (RAMP.length - 1);
  const low = Math.min(Math.floor(at), RAMP.length - 2);
  const channel = (hex, k) => parseInt(hex.slice(1 + 2 * k, 3 + 2 * k), 16);
  const mixed = [0, 1, 2].map((k) => Math.round(channel(RAMP[low], k) + (at - low) * (channel(RAMP[low + 1], k) - channel(RAMP[low], k))));
  const ink = 0.3 * mixed[0] + 0.59 * mixed[1] + 0.11 * mixed[2] > 140 ? "#10151c" : "#ffffff";
  return [`rgb(${mixed.join(",")})`, ink];
}
function drawCuts() {
  const runs = shown();
  const view = charts.cuts;
  const most = Math.max(...data.runs.flatMap((run) => run.cuts.map((part) => part.cut)));
  const seen = [...new Set(runs.flatMap(({ run }) => run.cuts.map((part) => part.cut)))].sort((a, b) => a - b);
  const whole = new Set(data.runs.filter((run) => run.whole_model).flatMap((run) => run.cuts.map((part) => part.cut)));
  const called = (cut) => (whole.has(cut) ? "whole model" : `cut ${cut}`);
  legend(view.keys, seen.map((cut) => [called(cut), cutColour(cut, most)[0]]));
  const span = (run, part) => {
    const column = run.columns[state.x];
    const start = part.first ? column[part.first - 1] : state.x === "rounds" ? column[0] - 1 : 0;
    return column[part.last] - start;
  };
  const reach = Math.max(...runs.map(({ run }) => last(run.columns[state.x])), 1e-9);
  const depth = Math.max(0, ...runs.map(({ run }) => run.cuts.length));
  const series = Array.from({ length: depth }, (_, k) => ({
    type: "bar", stack: "cuts", barMaxWidth: 20, emphasis: { disabled: true },
    data: runs.map(({ run }) => {
      const part = run.cuts[k];
      if (!part) return null;
      const [fill, ink] = cutColour(part.cut, most);
      const wide = span(run, part) / reach;
      return { value: span(run, part), part, itemStyle: { color: fill },
        label: { show: wide > 0.045, formatter: wide > 0.3 ? called(part.cut) : wide > 0.14 ? `cut ${part.cut}` : String(part.cut), color: ink, fontSize: 11 } };
    }),
  }));
  view.fill = () => fillTable(view.table, ["run", "cut", "from round", "to round", "MB", "s"], runs.flatMap(({ run }) => run.cuts.map((part) => {
    const between = (column) => number(column[part.last] - (part.first ? column[part.first - 1] : 0));
    return [run.name, part.cut, run.columns.rounds[part.first], run.columns.rounds[part.last], between(run.columns.mb), between(run.columns.seconds)];
  })));
  barHeight("cuts", runs.length);
  show("cuts", {
    grid: { ...common().grid, top: 8 },
    xAxis: xAxis({ type: "value" }),
    yAxis: names(runs), series,
    tooltip: { ...common().tooltip, trigger: "item", formatter: (item) => {
      const { run } = runs[item.dataIndex];
      const { part } = item.data;
      const [from, to] = [run.columns.rounds[part.first], run.columns.rounds[part.last]];
      return tip(run.name, [[item.color, called(part.cut), from === to ? `round ${from}` : `rounds ${from}–${to}`]]);
    } },
  }, runs.map(({ run }) => `${run.name}: ${run.cuts.length === 1 ? `${called(run.cuts[0].cut)} throughout` : `${run.cuts.length - 1} moves`}`).join("; "));
}

const BYTES = { total: "total", round: "per round", share: "share" };
function drawBytes() {
  const runs = shown();
  const view = charts.bytes;
  press(view.pick, state.bytes);
  const kinds = Object.keys(KINDS).concat(data.runs.flatMap((run) => Object.keys(run.kinds)))
    .filter((kind, k, all) => all.indexOf(kind) === k && runs.some(({ run }) => run.kinds[kind]));
  const named = (kind) => KINDS[kind] || [kind, "#8a8f98"];
  legend(view.keys, kinds.map(named));
  const total = (run) => Object.values(run.kinds).reduce((sum, bytes) => sum + bytes, 0);
  const value = (run, kind) => {
    const bytes = run.kinds[kind] || 0;
    if (state.bytes === "share") return (100 * bytes) / (total(run) || 1);
    return bytes / 1e6 / (state.bytes === "round" ? run.columns.rounds.length : 1);
  };
  const unit = state.bytes === "share" ? "%" : "MB";
  const axisName = { total: "data on the air, whole run (MB)", round: "data on the air, mean round (MB)", share: "share of the data on the air (%)" }[state.bytes];
  view.fill = () => fillTable(view.table, ["run", ...kinds.map((kind) => `${named(kind)[0]} (${unit})`), `total (${unit})`],
    runs.map(({ run }) => [run.name, ...kinds.map((kind) => number(value(run, kind))), number(kinds.reduce((sum, kind) => sum + value(run, kind), 0))]));
  barHeight("bytes", runs.length);
  show("bytes", {
    grid: { ...common().grid, top: 8, right: 40 },
    xAxis: xAxis({ type: "value", name: axisName, max: state.bytes === "share" ? 100 : undefined }),
    yAxis: names(runs),
    series: kinds.map((kind) => ({ type: "bar", stack: "bytes", name: named(kind)[0], color: named(kind)[1], barMaxWidth: 20, emphasis: { disabled: true },
      data: runs.map(({ run }) => value(run, kind)),
      label: { show: kind === last(kinds) && state.bytes !== "share", position: "right", color: css("--soft"), fontSize: 12,
        formatter: (item) => number(kinds.reduce((sum, each) => sum + value(runs[item.dataIndex].run, each), 0)) } })),
    tooltip: { ...common().tooltip, trigger: "axis", axisPointer: { type: "shadow" }, formatter: (items) => {
      const rows = items.filter((item) => item.value > 0).map((item) => [item.color, item.seriesName, `${number(item.value)} ${unit}`]);
      const { run } = runs[items[0].dataIndex];
      return tip(run.name, rows, `${number(total(run) / 1e6)} MB in all`);
    } },
  }, `${axisName}. ` + runs.map(({ run }) => `${run.name}: ${number(total(run) / 1e6)} MB`).join("; "));
}

function drawClients() {
  const view = charts.clients;
  press(view.pick, state.client);
  press(view.spends, state.spends);
  const run = data.runs[state.client];
  const found = run.clients;
  const worst = Object.entries(found.held_up).sort((a, b) => b[1].rounds - a[1].rounds)[0];
  const story = worst ? `Client ${worst[0]} held up ${worst[1].rounds} of ${run.columns.rounds.length} rounds, mostly with ${worst[1].part}. ` : "";
  const known = Boolean(found.parts_s);
  view.note.textContent = story + (known
    ? `Mean round${run.n > 1 ? ` of seed ${run.config["train.seed"][0]}` : ""}, every client${found.rounds < run.columns.rounds.length ? `, over ${found.rounds} rounds evenly spaced` : ""}; worked out again from the configuration, ${found.mismatch < 1e-9 ? "exactly as recorded" : `within ${number(100 * found.mismatch, 2)} % of the record`}.`
    : `The time of the other clients is not known: ${found.missing}.`);
  if (run.measured) {
    const parts = Object.entries(run.measured.parts_s).map(([part, seconds]) => `${part} ${number(seconds)} s`).join(", ");
    view.note.textContent += ` Measured on real sites, mean round: ${parts}; sites failed ${run.measured.failures} times.`;
  }
  view.plot.hidden = view.numbers.hidden = view.keys.hidden = view.spends.hidden = !known;
  if (!known) return;
  const count = found.parts_s.compute.length;
  const [, axisName, unit] = SPENDS[state.spends];
  const joules = { compute: found.joules.map((j, n) => j - found.air_j[n]), air: found.air_j };
  const [looks, values] = state.spends === "joules" ? [JOULES, joules] : [PARTS, found.parts_s];
  const parts = Object.keys(looks).filter((part) => values[part].some((value) => value > 0));
  legend(view.keys, parts.map((part) => looks[part]));
  const clients = Array.from({ length: count }, (_, n) => n);
  const held = (n) => found.held_up[n]?.rounds || 0;
  const holds = (n) => [run.whole_model ? "all" : found.holds[n].cut, number(found.holds[n].parameters), number(found.holds[n].memory_mb)];
  const own = (n, k) => (found.busy_s[n] ? number(found.busy_s[n][k]) : "–");
  view.fill = () => fillTable(view.table, ["client", "cut", "parameters held", "memory (MB)", ...parts.map((part) => `${looks[part][0]} (${unit})`),
    "its own median (s)", "its own p95 (s)", "joules (J)", "rounds held up"],
  clients.map((n) => [`client ${n}`, ...holds(n), ...parts.map((part) => number(values[part][n])), own(n, 0), own(n, 1), number(found.joules[n]), held(n)]));
  view.plot.style.height = `${80 + count * (count > 20 ? 20 : 26)}px`;
  show("clients", {
    grid: { ...common().grid, top: 8 },
    xAxis: xAxis({ type: "value", name: axisName, max: undefined }),
    yAxis: axis({ type: "category", inverse: true, data: clients.map((n) => `client ${n}`), splitLine: { show: false }, axisTick: { show: false },
      axisLabel: { color: css("--ink"), interval: 0 } }),
    series: parts.map((part) => ({ type: "bar", stack: "parts", name: looks[part][0], color: paint(looks[part][1]), barMaxWidth: 16, emphasis: { disabled: true },
      data: values[part] })),
    tooltip: { ...common().tooltip, trigger: "axis", axisPointer: { type: "shadow" }, formatter: (items) =>
      tip(`${run.name}, client ${items[0].dataIndex}`, items.filter((item) => item.value > 0).map((item) => [item.color, item.seriesName, `${number(item.value)} ${unit}`]),
        `its own: median ${own(items[0].dataIndex, 0)} s, 95 % within ${own(items[0].dataIndex, 1)} s; held up ${held(items[0].dataIndex)} of ${run.columns.rounds.length} rounds`) },
  }, `${SPENDS[state.spends][0]} of a mean round of ${run.name} for each of ${count} clients. ${story}`);
}

/* ---- numbers ---- */

function reached(run) {
  const sign = JUDGED.lower ? -1 : 1;
  const hits = (run.members || [run.columns]).map(({ [data.headline]: values, rounds, mb, seconds }) => {
    const k = values && state.target !== null ? values.findIndex((value) => value !== null && sign * (value - state.target) >= -1e-12) : -1;
    return k < 0 ? null : { rounds: rounds[k], mb: mb[k], seconds: seconds[k] };
  });
  if (hits.includes(null)) return null; // of several seeds all must get there
  return Object.fromEntries(["rounds", "mb", "seconds"].map((key) => [key, hits.reduce((sum, hit) => sum + hit[key], 0) / hits.length]));
}
const totals = (run) => ({ mb: last(run.columns.mb), seconds: last(run.columns.seconds), drift: last((run.columns.drift || []).filter((value) => value !== null)) ?? null, hit: reached(run) });

function card(label, figure, unit, text) {
  return el("div", { class: "card" }, el("p", {}, label), el("p", { class: "figure" }, figure, " ", el("small", {}, unit)), el("p", {}, text));
}
function drawCards() {
  const runs = shown().map(({ run }) => ({ run, ...totals(run) }));
  const holder = byId("cards");
  if (runs.length === 1) {
    const [{ run, mb, seconds, drift }] = runs;
    const done = run.columns.rounds.length;
    const cut = last(run.cuts).cut;
    holder.replaceChildren(
      card(`test ${JUDGED.name}`, run.value === null ? "–" : figure(run.value), JUDGED.unit, run.value === null ? "not tested yet" : `best ${judged(run.best)}`),
      card("data on the air", number(mb), "MB", `${number(mb / done)} MB per round`),
      card("simulated time", number(seconds), "s", `round: median ${number(run.round_s[0])} s, 95 % within ${number(run.round_s[1])} s, mean ${number(seconds / done)} s`),
      card("rounds", `${done}`, run.finished ? "" : `of ${run.planned_rounds}`, run.finished ? "finished" : "unfinished"),
      card("cut", run.whole_model ? "none" : `${cut}`, "", run.whole_model ? "the whole model is on the clients" : run.cuts.length > 1 ? `now; moved ${run.cuts.length - 1} times` : "throughout"),
      card("drift", number(drift, 3), "", "after the last round"),
    );
    return;
  }
  const best = (value, sign) => runs.filter((row) => value(row) !== null && value(row) !== undefined).sort((a, b) => sign * (value(a) - value(b)))[0];
  const cards = [];
  const add = (label, value, sign, figure, unit) => {
    const row = best(value, sign);
    if (row) cards.push(card(label, figure(value(row)), unit, row.run.name));
  };
  add(`${JUDGED.lower ? "lowest" : "highest"} ${JUDGED.name}`, (row) => row.run.value, JUDGED.lower ? 1 : -1, figure, JUDGED.unit);
  const goal = state.target === null ? "" : ` to ${aim(state.target)}`;
  add(`least data${goal}`, (row) => row.hit?.mb, 1, number, "MB");
  add(`least time${goal}`, (row) => row.hit?.seconds, 1, number, "s");
  add(`fewest rounds${goal}`, (row) => row.hit?.rounds, 1, number, "rounds");
  add("least data per round", (row) => row.mb / row.run.columns.rounds.length, 1, number, "MB");
  holder.replaceChildren(...cards);
}
function drawTable() {
  const rows = shown().map(({ run, index }) => ({ run, index, ...totals(run) }));
  const goal = state.target === null ? "target" : aim(state.target);
  const sign = JUDGED.lower ? 1 : -1;
  const columns = [
    [JUDGED.name, (row) => row.run.value, judged, sign], ["best", (row) => row.run.best, judged, sign],
    ["rounds", (row) => row.run.columns.rounds.length, number, 0], ["MB", (row) => row.mb, number, 1], ["s", (row) => row.seconds, number, 1],
    [`rounds to ${goal}`, (row) => row.hit?.rounds ?? null, (v) => (v === null ? "never" : number(v)), 1],
    [`MB to ${goal}`, (row) => row.hit?.mb ?? null, (v) => (v === null ? "never" : number(v)), 1],
    [`s to ${goal}`, (row) => row.hit?.seconds ?? null, (v) => (v === null ? "never" : number(v)), 1],
    ["drift", (row) => row.drift, (v) => number(v, 3), 0],
    ["median round s", (row) => row.run.round_s[0], number, 1], ["p95 round s", (row) => row.run.round_s[1], number, 1],
    ["outage", (row) => row.run.outage, (v) => (v === null ? "–" : `${number(100 * v, 3)} %`), 1],
    ["J", (row) => row.run.joules, number, 1], ["client MB", (row) => row.run.memory_mb, number, 1],
  ].filter(([head, value]) => !["outage", "J", "client MB"].includes(head) || rows.some((row) => value(row) !== null));
  const bests = columns.map(([, value, , sign]) => {
    const values = rows.map(value).filter((v) => v !== null);
    return sign && rows.length > 1 && values.length ? Math[sign < 0 ? "max" : "min"](...values) : null;
  });
  const spread = ({ run }) => `${figure(run.value)} ± ${number(JUDGED.scale * run.half, 2)} ${JUDGED.unit}`.trim();
  fillTable(byId("table"), ["run", ...columns.map(([head]) => head)], rows.map((row) => [
    [swatch(row.index), el("span", { title: row.run.name }, short(row.run.name, narrow() ? 14 : 48)), row.run.finished ? "" : el("span", { class: "badge" }, "unfinished"),
      row.run.n > 1 ? el("span", { class: "badge", title: "mean of so many seeds; ± is half a 95 % confidence interval" }, `n = ${row.run.n}`) : ""],
    ...columns.map(([, value, format], k) => el("td", { class: bests[k] !== null && value(row) === bests[k] ? "best" : false }, k === 0 && row.run.half ? spread(row) : format(value(row)))),
  ]));
}

function drawSamples() {
  const runs = shown().filter(({ run }) => run.samples.length);
  byId("samples").hidden = !runs.length;
  byId("written").replaceChildren(...runs.flatMap(({ run }) => [
    data.runs.length > 1 ? el("h3", {}, run.name) : "",
    ...run.samples.map((sample) => el("dl", { class: "sample" }, el("dt", {}, sample.client), el("dd", { class: "opening" }, sample.opening),
      ...[["as written", "text"], ["before", "before"], ["after", "after"]].flatMap(([label, key]) => [el("dt", {}, label), el("dd", {}, sample[key])]))),
  ]));
}

function drawAttacked() {
  const runs = shown().filter(({ run }) => run.attacked);
  byId("attacked").hidden = !runs.length;
  byId("leaks").replaceChildren(...runs.flatMap(({ run: { name, attacked } }) => {
    const table = el("table");
    const told = el("table");
    fillTable(told, ["labels or tokens", "right"], attacked.labels.map(([how, share]) => [how, `${(100 * share).toFixed(1)} %`]));
    fillTable(table, ["attack", "client half", "SSIM", "PSNR (dB)", "MSE", "recognised"], attacked.rows.map((row) => [
      row.attack, row.half, row.ssim.toFixed(3), row.psnr.toFixed(1), number(row.mse, 3), `${(100 * row.recognised).toFixed(0)} %`]));
    return [
      el("h3", {}, `${data.runs.length > 1 ? `${name}: ` : ""}cut ${attacked.cut}, ${attacked.codec}, ${attacked.samples} samples`),
      el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Attacks on ${name}` }, attacked.rows.length ? table : "", attacked.labels.length ? told : ""),
      attacked.picture ? el("img", { class: "reconstructions", src: attacked.picture, alt: `Originals in the first row, and below them what each attack on ${name} reconstructed` }) : "",
    ];
  }));
}

/* ---- configuration and commands: drawn once ---- */

const text = (value) => (Array.isArray(value) ? value.map(text).join(", ") || "–" : value === "" ? "–" : String(value));
function drawConfig() {
  const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
  const keys = Object.keys(data.defaults);
  const differs = keys.filter((key) => data.runs.some((run) => !same(run.config[key], data.runs[0].config[key])));
  const changed = keys.filter((key) => !differs.includes(key) && !same(data.runs[0].config[key], data.defaults[key]));
  const rest = keys.filter((key) => !differs.includes(key) && !changed.includes(key));
  const table = (heads, rows) => { const made = el("table", { class: "words" }); fillTable(made, heads, rows); return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": heads.join(", ") }, made); };
  const holder = byId("config");
  if (differs.length) holder.append(el("h3", {}, "Differs between the runs"),
    table(["key", ...data.runs.map((run) => run.name)], differs.map((key) => [key, ...data.runs.map((run) => text(run.config[key]))])));
  if (changed.length) holder.append(el("h3", {}, "Set, the same in all runs"),
    table(["key", "value", "default"], changed.map((key) => [key, text(data.runs[0].config[key]), text(data.defaults[key])])));
  holder.append(el("details", {}, el("summary", {}, `${rest.length} values at their defaults`), table(["key", "value"], rest.map((key) => [key, text(data.runs[0].config[key])]))));
  const gammas = data.runs.filter((run) => run.gamma_per_cut.length);
  if (gammas.length) holder.append(el("h3", {}, "Γ per cut, measured at the start for the policy"),
    table(["run", ...gammas[0].gamma_per_cut.map((_, k) => `cut ${k + 1}`)], gammas.map((run) => [run.name, ...run.gamma_per_cut.map((value) => number(value))])));
  const versions = [...new Set(data.runs.flatMap((run) => Object.keys(run.versions)))];
  holder.append(el("h3", {}, "Environment"), table(["run", "state", ...versions, "wall clock (s)", "folder"], data.runs.map((run) => [run.name,
    run.finished ? "finished" : `unfinished, ${run.columns.rounds.length} of ${run.planned_rounds} rounds`,
    ...versions.map((key) => run.versions[key] || "–"), number(run.wall_seconds), run.folder])));
}
function command(words) {
  const code = el("pre", { tabindex: "0" }, words);
  const button = el("button", { type: "button", onclick: async () => {
    try {
      await navigator.clipboard.writeText(words);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  } }, "Copy");
  return el("div", { class: "command" }, code, button);
}
function drawAgain() {
  for (const run of data.runs) {
    byId("again").append(el("h3", {}, run.name),
      run.own.length ? el("p", { class: "note" }, `Trained from Python with ${run.own.join(" and ")} of its own: the command alone does not repeat it.`) : "",
      command(run.command),
      run.recorded_command ? el("details", {}, el("summary", {}, "Command line as recorded"), el("pre", { class: "recorded", tabindex: "0" }, run.recorded_command)) : "",
      el("details", {}, el("summary", {}, "config.toml"), el("pre", { tabindex: "0" }, run.toml)));
  }
}

/* ---- controls ---- */

function suggestLog() {
  const ends = data.runs.map((run) => last(run.columns[state.x]));
  state.logx = state.x !== "rounds" && Math.max(...ends) > 8 * Math.min(...ends);
}
function renew(holder, children) {  // who stands on one of the children by keyboard stays there
  const held = [...holder.children].indexOf(document.activeElement);
  holder.replaceChildren(...children);
  if (held >= 0 && holder.children[held]) holder.children[held].focus({ preventScroll: true });
}
function drawControls() {
  renew(byId("runs"), data.runs.map((run, index) => el("button", {
    type: "button", class: "chip", "aria-pressed": String(!state.hidden.has(index)), "data-run": run.name, title: run.title,
    onclick: () => {
      if (!state.hidden.delete(index)) state.hidden.add(index);
      draw();
    },
  }, swatch(index), el("span", {}, run.n > 1 ? `${run.name} ×${run.n}` : run.name))));
  press(byId("x"), state.x);
  for (const key of ["logx", "logy"]) byId(key).setAttribute("aria-pressed", String(state[key]));
  byId("theme").setAttribute("aria-pressed", String(isDark()));
}
function draw() {
  drawControls();
  drawCards();
  drawTable();
  drawSamples();
  drawAttacked();
  Object.keys(LINES).forEach(drawLines);
  drawCuts();
  drawBytes();
  drawClients();
}
function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
}

function start() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = false;
  setTheme(system.matches);
  system.addEventListener("change", () => { if (!chosen) { setTheme(system.matches); draw(); } });
  byId("theme").addEventListener("click", () => { chosen = true; setTheme(!isDark()); draw(); });
  for (const key of ["logx", "logy"]) byId(key).addEventListener("click", () => { state[key] = !state[key]; draw(); });
  choices(byId("x"), Object.fromEntries(Object.entries(X).map(([key, { label }]) => [key, label])), () => state.x, (key) => { state.x = key; suggestLog(); });
  const target = byId("target");
  if (state.target === null) target.disabled = true;
  else target.value = +(JUDGED.scale * state.target).toPrecision(6);
  if (JUDGED.unit !== "%") {
    for (const bound of ["min", "max"]) target.removeAttribute(bound);
    target.step = "any";
  }
  byId("judged").textContent = JUDGED.name;
  byId("judged-unit").textContent = JUDGED.unit;
  target.addEventListener("input", () => { if (target.value !== "") { state.target = Number(target.value) / JUDGED.scale; drawCards(); drawTable(); } });

  for (const name of ["learning", "cost", "cuts", "bytes", "clients", "drift", "gamma"]) frame(name);
  for (const name of Object.keys(LINES)) {
    const keys = available(name);
    const options = Object.fromEntries(keys.map((key) => [key, LINES[name][key].label]));
    if (keys.length > 1) choices(charts[name].pick, options, () => state.metric[name], (key) => { state.metric[name] = key; });
    else charts[name].pick.remove();
  }
  charts.cuts.pick.remove();
  choices(charts.bytes.pick, BYTES, () => state.bytes, (key) => { state.bytes = key; });
  if (data.runs.length > 1) {
    choices(charts.clients.pick, Object.fromEntries(data.runs.map((run, index) => [index, run.name])), () => state.client, (key) => { state.client = Number(key); });
  } else charts.clients.pick.remove();
  charts.clients.spends = el("div", { class: "group segmented", role: "group", "aria-label": "Each client: seconds or joules" });
  charts.clients.plot.closest("section").querySelector(".head").append(charts.clients.spends);
  choices(charts.clients.spends, Object.fromEntries(Object.entries(SPENDS).map(([key, [label]]) => [key, label])), () => state.spends, (key) => { state.spends = key; });
  drawConfig();
  drawAgain();
  draw();
  let waiting;
  window.addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(draw, 120); });
}
start();
