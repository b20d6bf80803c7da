"use strict";
// Draws the scoreboard from the numbers in the element `data`. All text is set as text, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const MOST_LINES = 200; // lines of a table that are drawn at first
const VERDICTS = ["agrees", "better", "unclear", "unstable", "worse", "differs", "not run"];

// ---------------------------------------------------------------- elements

/** An element with attributes and children; a child is an element or a text. */
function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for the shapes of a chart. */
function shape(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== "" && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** A number in few digits, large ones with the prefix K, M or G. */
function short(value) {
  for (const [size, name] of [[1e9, "G"], [1e6, "M"], [1e4, "K"]]) {
    if (Math.abs(value) >= size) return Number((value / (name === "K" ? 1e3 : size)).toPrecision(3)) + name;
  }
  return String(Number(value.toPrecision(3)));
}

/** A sequence length, with K of 1024: 2048, 16K, 1M. */
function lengthName(length) {
  for (const [size, name] of [[2 ** 20, "M"], [2 ** 10, "K"]]) {
    if (length >= 8192 && length % size === 0) return length / size + name;
  }
  return String(length);
}

const verdictClass = (text) => VERDICTS.concat("holds", "fails", "void").find((name) => text.startsWith(name)) || "";
const percent = (share) => `${(100 * share).toFixed(0)} %`;

// ---------------------------------------------------------------- tables

/**
 * A table that sorts by a click on a title and filters by words and by choices.
 *
 * columns: {title, text(row), sort(row)?, draw(row)?, number?}; draw gives an element in place of the text.
 * choices: {title, of(row)}: a list from which one value can be chosen.
 * open(row): the element that a click on a line shows below it.
 */
function table(host, { columns, rows, choices = [], open = null, words = true }) {
  const state = { sort: null, descending: false, words: "", chosen: {}, all: false };
  const body = element("tbody");
  const count = element("span", { class: "muted" });
  const more = element("button", { click: () => { state.all = true; show(); } }, "show all");
  const heads = columns.map((column, i) => element(
    "th",
    { class: column.number ? "" : "word", scope: "col" },
    element("button", { click: () => sortBy(i) }, column.title),
  ));
  const controls = element("div", { class: "controls" });
  if (words) {
    controls.append(element("input", {
      type: "search",
      placeholder: "filter by words",
      "aria-label": "filter by words",
      input: (event) => { state.words = event.target.value.toLowerCase(); show(); },
    }));
  }
  const selects = {};
  for (const choice of choices) {
    const values = [...new Set(rows.map(choice.of))].filter((value) => value !== "");
    selects[choice.title] = element(
      "select",
      { change: (event) => { state.chosen[choice.title] = event.target.value; show(); } },
      element("option", { value: "" }, "all"),
      ...values.map((value) => element("option", { value }, value)),
    );
    controls.append(element("label", {}, `${choice.title} `, selects[choice.title]));
  }
  controls.append(count, more);
  const frame = element("table", {}, element("thead", {}, element("tr", {}, ...heads)), body);
  host.append(controls, element("div", { class: "wide" }, frame));

  function sortBy(i) {
    state.descending = state.sort === i && !state.descending;
    state.sort = i;
    show();
  }

  function kept() {
    const words = state.words.split(/\s+/).filter(Boolean);
    const found = rows.filter((row) => {
      if (!choices.every((choice) => !state.chosen[choice.title] || choice.of(row) === state.chosen[choice.title])) {
        return false;
      }
      const text = words.length ? columns.map((column) => column.text(row)).join(" ").toLowerCase() : "";
      return words.every((word) => text.includes(word));
    });
    if (state.sort === null) return found;
    const key = columns[state.sort].sort || columns[state.sort].text;
    const sign = state.descending ? -1 : 1;
    return found.sort((a, b) => compare(key(a), key(b), sign));
  }

  function show() {
    const found = kept();
    const shown = state.all ? found : found.slice(0, MOST_LINES);
    body.replaceChildren(...shown.map(line));
    count.textContent = shown.length < found.length ? `${shown.length} of ${found.length} lines` : `${found.length} lines`;
    controls.hidden = !words && !choices.length && shown.length === found.length;
    more.hidden = shown.length === found.length;
    heads.forEach((head, i) => head.setAttribute(
      "aria-sort", state.sort !== i ? "none" : state.descending ? "descending" : "ascending"));
  }

  function line(row) {
    const cells = columns.map((column) => {
      const text = column.text(row);
      const names = [column.number ? "num" : "word", verdictClass(text)].filter(Boolean).join(" ");
      return element("td", { class: names }, column.draw ? column.draw(row) : text);
    });
    const node = element("tr", {}, ...cells);
    if (open) {
      const toggle = () => {
        const next = node.nextElementSibling;
        const opened = next && next.classList.contains("detail");
        node.setAttribute("aria-expanded", String(!opened));
        if (opened) next.remove();
        else node.after(element("tr", { class: "detail" }, element("td", { colspan: columns.length }, open(row))));
      };
      fill(node, {
        class: "opens",
        tabindex: "0",
        "aria-expanded": "false",
        click: toggle,
        keydown: (event) => { if (event.key === "Enter") toggle(); },
      }, []);
    }
    return node;
  }

  show();
  return {
    choose(title, value) {
      state.chosen[title] = value;
      selects[title].value = value;
      show();
    },
  };
}

/** Order of two values, those that are missing last in either direction. */
function compare(a, b, sign) {
  const missing = (value) => value === null || value === undefined || value === "";
  if (missing(a) || missing(b)) return missing(a) - missing(b);
  return sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
}

// ---------------------------------------------------------------- charts

/**
 * A chart of points and lines, with logarithmic axes where asked.
 *
 * lengths: x are sequence lengths, which are ticks themselves.
 * series: {label, color, points: [[x, y, title]], line?, band?: [[x, low, high]], dashed?}
 */
function chart({ series, width = 420, height = 250, xLabel = "", yLabel = "", logX = false, logY = false, lengths = false, title = "" }) {
  const left = 58, right = 12, top = 10, bottom = 38;
  const xs = series.flatMap((s) => s.points.map((p) => p[0]));
  const ys = series.flatMap((s) => [...s.points.map((p) => p[1]), ...(s.band || []).flatMap((b) => [b[1], b[2]])]);
  const x = axis(xs, logX, left, width - right);
  const y = axis(ys, logY, height - bottom, top);
  const name = lengths ? lengthName : short;
  if (lengths) {
    const found = [...new Set(xs)].sort((a, b) => b - a);
    x.ticks = found.filter((_, i) => i % Math.ceil(found.length / 8) === 0);
  }
  const root = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  for (const tick of x.ticks) {
    root.append(
      shape("line", { x1: x.at(tick), x2: x.at(tick), y1: top, y2: height - bottom, stroke: "var(--line)" }),
      shape("text", { x: x.at(tick), y: height - bottom + 14, "text-anchor": "middle" }, name(tick)),
    );
  }
  for (const tick of y.ticks) {
    root.append(
      shape("line", { x1: left, x2: width - right, y1: y.at(tick), y2: y.at(tick), stroke: "var(--line)" }),
      shape("text", { x: left - 5, y: y.at(tick) + 4, "text-anchor": "end" }, short(tick)),
    );
  }
  root.append(
    shape("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, xLabel),
    shape("text", { transform: `translate(12 ${(top + height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, yLabel),
  );
  for (const s of series) {
    const path = (points) => points.map((p) => `${x.at(p[0]).toFixed(1)},${y.at(p[1]).toFixed(1)}`).join(" ");
    if (s.band) {
      const around = [...s.band.map((b) => [b[0], b[2]]), ...s.band.map((b) => [b[0], b[1]]).reverse()];
      root.append(shape("polygon", { points: path(around), fill: s.color, opacity: 0.25 }));
    }
    if (s.line) {
      root.append(shape("polyline", {
        points: path(s.points), fill: "none", stroke: s.color, "stroke-width": 1.5, "stroke-dasharray": s.dashed ? "4 3" : "",
      }));
    }
    for (const point of s.line && s.points.length > 20 ? [] : s.points) {
      root.append(shape(
        "circle",
        { cx: x.at(point[0]), cy: y.at(point[1]), r: 3.2, fill: s.color, "fill-opacity": 0.75 },
        shape("title", {}, point[2] || `${s.label}: ${short(point[0])}, ${short(point[1])}`),
      ));
    }
  }
  return root;
}

/** An axis over some values: the place of a value, and the values that have a tick. */
function axis(values, log, from, to) {
  let low = Math.min(...values), high = Math.max(...values);
  if (log) {
    if (low === high) { low /= 2; high *= 2; }
    const room = (high / low) ** 0.04;
    low /= room;
    high *= room;
    const place = (value) => from + (to - from) * (Math.log(value / low) / Math.log(high / low));
    return { at: place, ticks: logTicks(low, high) };
  }
  if (low === high) { low -= Math.abs(low) / 10 || 1; high += Math.abs(high) / 10 || 1; }
  const room = (high - low) / 20;
  low -= room;
  high += room;
  const place = (value) => from + (to - from) * ((value - low) / (high - low));
  return { at: place, ticks: linearTicks(low, high) };
}

function linearTicks(low, high) {
  const step = niceStep((high - low) / 4);
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) ticks.push(Number(tick.toPrecision(10)));
  return ticks;
}

function logTicks(low, high) {
  for (const steps of [[1, 2, 5], [1, 3], [1]]) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
      for (const step of steps) {
        const tick = step * 10 ** power;
        if (tick >= low && tick <= high) ticks.push(tick);
      }
    }
    if (ticks.length > 1 && ticks.length <= 7) return ticks;
  }
  return linearTicks(low, high);
}

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 2.5, 5, 10].find((step) => step * power >= rough);
}

/** Every seed of a cell as a dot, and the paper's value as an upright line. */
function dots(cell) {
  const width = 120, height = 16;
  const values = cell.published === null ? cell.values : [...cell.values, cell.published];
  // a single value has nothing that it could stand beside
  if (!cell.values.length || values.length < 2) return element("span");
  const isShare = data.experiments[cell.experiment].unit === "%" && Math.min(...values) >= 0 && Math.max(...values) <= 100;
  const x = axis(isShare ? [0, 100] : values, false, 4, width - 4);
  const root = shape("svg", { width, height, role: "img", "aria-label": `${cell.values.length} seeds` });
  root.append(shape("line", { x1: 0, x2: width, y1: height / 2, y2: height / 2, stroke: "var(--line)" }));
  if (cell.published !== null) {
    root.append(shape("line", { x1: x.at(cell.published), x2: x.at(cell.published), y1: 0, y2: height, stroke: "var(--ink)", "stroke-width": 2 }));
  }
  for (const value of cell.values) {
    root.append(shape(
      "circle", { cx: x.at(value), cy: height / 2, r: 3.2, fill: "var(--better)", "fill-opacity": 0.7 }, shape("title", {}, short(value))));
  }
  return root;
}

function legend(series) {
  const seen = [...new Map(series.map((s) => [s.label, s.color]))];
  return element("div", { class: "legend" }, ...seen.map(
    ([label, color]) => element("span", {}, element("i", { style: `background:${color}` }), label)));
}

