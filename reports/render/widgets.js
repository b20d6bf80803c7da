"use strict";
// Elements, tables and charts of the scoreboard. All text is set as text, never as markup.

const MOST_LINES = 200; // lines of a table that are drawn at a time
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

/** An entry of a list of choices. Its value may be empty, which `fill` would leave out. */
const choiceOf = (value, words = value) => Object.assign(element("option", {}, words), { value });

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
 * columns: {title, text(row), sort(row)?, draw(row)?, number?, hint?}; draw gives an element in place of the text, and
 * sort a key, whose largest value comes first where `falling` is set.
 * choices: {title, of(row)}: a list from which one value can be chosen.
 * open(row): the element that the button of a line shows below it. key(row): its name in the address.
 * keeps(row): whether a line passes what stands outside of the table, such as a slider; `refresh` asks again.
 * onShow(rows): called with the lines that pass all filters.
 * address: keep filters, order and open lines in the address of the page, and begin with what it says.
 */
function table(host, options) {
  const { caption, rows, choices = [], open = null, key = null, words = true, keeps = null, onShow = null, address = false } = options;
  // a column that says nothing here takes no room
  const columns = options.columns.filter((column) => column.draw || rows.some((row) => column.text(row) !== ""));
  const given = address ? params() : new Map();
  const state = {
    sort: columns.findIndex((column) => column.title === (given.get("sort") || "").replace(/^-/, "")),
    descending: (given.get("sort") || "").startsWith("-"),
    words: given.get("words") || "",
    chosen: new Map(),
    limit: MOST_LINES,
    open: new Set((given.get("open") || "").split("~").filter(Boolean)),
  };
  const body = element("tbody");
  const count = element("span", { class: "count", role: "status" });
  const more = element("button", { type: "button", click: () => { state.limit += MOST_LINES; show(); } });
  const heads = columns.map((column, i) => element(
    "th",
    { class: column.number ? "" : "word", scope: "col", title: column.hint },
    element("button", { type: "button", click: () => sortBy(i, state.sort === i ? !state.descending : Boolean(column.falling)) }, column.title),
  ));
  const controls = element("div", { class: "controls" });
  if (words) {
    const field = element("input", {
      type: "search",
      placeholder: "filter by words",
      "aria-label": `filter by words: ${caption}`,
      input: (event) => { state.words = event.target.value; restart({ words: state.words }, false); },
    });
    field.value = state.words;
    controls.append(field);
  }
  for (const choice of choices) {
    const values = [...new Set(rows.map(choice.of))].filter((value) => value !== "");
    if (values.includes(given.get(choice.title))) state.chosen.set(choice.title, given.get(choice.title));
    const select = element(
      "select",
      { change: (event) => { state.chosen.set(choice.title, event.target.value); restart({ [choice.title]: event.target.value }, true); } },
      choiceOf("", "all"),
      ...values.map((value) => choiceOf(value)),
    );
    select.value = state.chosen.get(choice.title) || "";
    controls.append(element("label", {}, `${choice.title} `, select));
  }
  // cards on a phone have no titles to click on
  const order = element(
    "select",
    { change: (event) => sortBy(Number(event.target.value.slice(1)), event.target.value[0] === "-") },
    choiceOf("", "as given"),
    ...columns.flatMap((column, i) => [["+", "rising"], ["-", "falling"]].map(
      ([sign, way]) => choiceOf(sign + i, `${column.title}, ${way}`))),
  );
  const ordering = element("label", { class: "phone" }, "order ", order);
  controls.append(ordering, count);
  const frame = element(
    "table", { role: "table" },
    element("caption", {}, caption),
    element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, ...heads)),
    body,
  );
  body.setAttribute("role", "rowgroup");
  host.append(controls, element("div", { class: "wide" }, frame), more);

  function remember(changes, push) { if (address) keep(changes, push); }

  function restart(changes, push) {
    state.limit = MOST_LINES;
    remember(changes, push);
    show();
  }

  function sortBy(i, descending) {
    state.sort = i;
    state.descending = descending;
    restart({ sort: (descending ? "-" : "") + columns[i].title }, true);
  }

  function kept() {
    const asked = state.words.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter((row) => {
      if (keeps && !keeps(row)) return false;
      if (!choices.every((choice) => !state.chosen.get(choice.title) || choice.of(row) === state.chosen.get(choice.title))) {
        return false;
      }
      const text = asked.length ? columns.map((column) => column.text(row)).join(" ").toLowerCase() : "";
      return asked.every((word) => text.includes(word));
    });
    if (state.sort < 0) return found;
    const of = columns[state.sort].sort || columns[state.sort].text;
    const sign = state.descending ? -1 : 1;
    return found.sort((a, b) => compare(of(a), of(b), sign));
  }

  function show() {
    const found = kept();
    if (onShow) onShow(found);
    const shown = found.slice(0, state.limit);
    body.replaceChildren(...shown.flatMap(line));
    const all = found.length < rows.length ? ` (of ${rows.length} without a filter)` : "";
    count.textContent = `${shown.length < found.length ? `${shown.length} of ` : ""}${found.length} line${found.length === 1 ? "" : "s"}${all}`;
    controls.hidden = !words && !choices.length && !keeps && found.length === rows.length && shown.length === found.length;
    ordering.hidden = rows.length < 2;
    more.hidden = shown.length === found.length;
    more.textContent = `show ${Math.min(MOST_LINES, found.length - shown.length)} more`;
    order.value = state.sort < 0 ? "" : (state.descending ? "-" : "+") + state.sort;
    heads.forEach((head, i) => head.setAttribute(
      "aria-sort", state.sort !== i ? "none" : state.descending ? "descending" : "ascending"));
  }

  function line(row) {
    const cells = columns.map((column) => {
      const text = column.text(row);
      const names = [column.number ? "num" : "word", verdictClass(text)].filter(Boolean).join(" ");
      const content = column.draw ? column.draw(row) : text;
      return element("td", { class: names, role: "cell", "data-title": column.title }, content === null ? "" : content);
    });
    const node = element("tr", { role: "row" }, ...cells);
    if (!open) return [node];
    const name = key ? key(row) : "";
    const button = element("button", { type: "button", class: "opener", "aria-label": `details of ${columns.map((c) => c.text(row)).filter(Boolean).slice(0, 4).join(", ")}` });
    let detail = null;
    const toggle = (isOpen) => {
      button.setAttribute("aria-expanded", String(isOpen));
      if (isOpen) {
        detail = element("tr", { class: "detail", role: "row" }, element("td", { colspan: columns.length, role: "cell" }, open(row)));
        node.after(detail);
      } else if (detail) detail.remove();
      if (name) state.open[isOpen ? "add" : "delete"](name);
    };
    button.addEventListener("click", () => {
      toggle(button.getAttribute("aria-expanded") !== "true");
      if (name) remember({ open: [...state.open].join("~") }, false);
    });
    button.setAttribute("aria-expanded", "false");
    cells[0].prepend(button);
    if (name && state.open.has(name)) {
      // the line is put into the table first; whoever follows a link to it sees it
      queueMicrotask(() => {
        toggle(true);
        if (!state.seen) node.scrollIntoView({ block: "center" });
        state.seen = true;
      });
    }
    return [node];
  }

  show();
  return { refresh: show, sorted: () => (state.sort < 0 ? "" : columns[state.sort].title) };
}

/** Order of two values, those that are missing last in either direction. */
function compare(a, b, sign) {
  const missing = (value) => value === null || value === undefined || value === "";
  if (missing(a) || missing(b)) return missing(a) - missing(b);
  return sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
}

// ---------------------------------------------------------------- charts

/** The marks of rows around the origin, by the names that Python has for them. */
const MARKS = {
  o: "M-3.2 0a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0-6.4 0z",
  s: "M-2.9-2.9h5.8v5.8h-5.8z",
  D: "M0-4.1L4.1 0L0 4.1L-4.1 0z",
  "^": "M0-3.9L3.9 3.1H-3.9z",
  v: "M0 3.9L3.9-3.1H-3.9z",
  P: "M-1.3-3.9h2.6v2.6h2.6v2.6h-2.6v2.6h-2.6v-2.6h-2.6v-2.6h2.6z",
  "*": "M0-4.6L1.1-1.5L4.4-1.4L1.8.6L2.7 3.7L0 1.9L-2.7 3.7L-1.8.6L-4.4-1.4L-1.1-1.5z",
  X: "M-1.9-3.8L0-1.9L1.9-3.8L3.8-1.9L1.9 0L3.8 1.9L1.9 3.8L0 1.9L-1.9 3.8L-3.8 1.9L-1.9 0L-3.8-1.9z",
  "<": "M-3.9 0L3.1-3.9V3.9z",
  ">": "M3.9 0L-3.1-3.9V3.9z",
};
const lookOf = ([color, mark]) => ({ color, mark });

/**
 * A chart of points and lines, with logarithmic axes where asked.
 *
 * lengths: x are sequence lengths, which are ticks themselves.
 * series: {label, color, mark?, points: [[x, y, title]], line?, width?, dots?, band?: [[x, low, high]], dashed?}
 *
 * A line without dots has its mark at its end.
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
        points: path(s.points), fill: "none", stroke: s.color, "stroke-width": s.width || 1.5, "stroke-dasharray": s.dashed ? "4 3" : "",
      }, shape("title", {}, s.label)));
    }
    const dotless = s.dots === false || (s.line && s.points.length > 20);
    for (const point of !dotless ? s.points : s.mark ? s.points.slice(-1) : []) {
      root.append(shape(
        "path",
        { d: MARKS[s.mark || "o"], transform: `translate(${x.at(point[0]).toFixed(1)} ${y.at(point[1]).toFixed(1)})`, fill: s.color, "fill-opacity": 0.75 },
        shape("title", {}, point[2] || `${s.label}: ${short(point[0])}, ${short(point[1])}`),
      ));
    }
  }
  return root;
}

/** An axis over some values: the place of a value, and the values that have a tick. One with a zero is not logarithmic. */
function axis(values, log, from, to) {
  let low = Math.min(...values), high = Math.max(...values);
  if (log && low > 0) {
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

/**
 * Every seed of a cell as a dot, their range as a line, the paper's value as an upright line, chance as a dotted one.
 *
 * Where a threshold of success is known, a dot is filled if it reaches it; all are blue if every one does, orange if some do.
 */
function dots(cell, { width = 120, success = null } = {}) {
  const height = 18;
  const values = cell.published === null ? cell.values : [...cell.values, cell.published];
  // a single value has nothing that it could stand beside
  if (!cell.values.length || (success === null && values.length < 2)) return element("span");
  const isShare = experimentOf(cell).unit === "%" && Math.min(...values) >= 0 && Math.max(...values) <= 100;
  const x = axis(isShare ? [0, 100] : values, false, 4, width - 4);
  const [chance, smaller] = columnOf(cell);
  const reaches = (value) => (smaller ? value <= success : value >= success);
  const good = success === null ? [] : cell.values.filter(reaches);
  // a run without a value has not succeeded
  const color = good.length === cell.values.length && !cell.lost ? "var(--better)" : good.length ? "var(--some)" : "var(--muted)";
  const told = `${cell.values.map(short).join(", ")}${cell.published === null ? "" : `; paper ${short(cell.published)}`}`;
  const root = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": told, class: "dots" });
  const middle = height / 2;
  root.append(shape("title", {}, told), shape("line", { x1: 0, x2: width, y1: middle, y2: middle, stroke: "var(--line)" }));
  if (isShare && chance !== null) {
    root.append(shape("line", { x1: x.at(chance), x2: x.at(chance), y1: 0, y2: height, stroke: "var(--muted)", "stroke-dasharray": "2 2" }));
  }
  if (cell.published !== null) {
    root.append(shape("line", { x1: x.at(cell.published), x2: x.at(cell.published), y1: 0, y2: height, stroke: "var(--ink)", "stroke-width": 2 }));
  }
  root.append(shape("line", { x1: x.at(Math.min(...cell.values)), x2: x.at(Math.max(...cell.values)), y1: middle, y2: middle, stroke: success === null ? "var(--better)" : color, "stroke-width": 2 }));
  for (const value of cell.values) {
    const filled = success === null || reaches(value);
    root.append(shape("circle", {
      cx: x.at(value), cy: middle, r: 3.4, stroke: success === null ? "var(--better)" : color, "stroke-width": 1.3,
      fill: filled ? (success === null ? "var(--better)" : color) : "var(--ground)", "fill-opacity": filled ? 0.75 : 1,
    }));
  }
  return root;
}

function legend(series) {
  const seen = new Map(series.map((s) => [s.label, s])).values();
  return element("div", { class: "legend" }, ...[...seen].map(({ label, color, mark }) => element("span", {},
    mark ? shape("svg", { viewBox: "-5 -5 10 10" }, shape("path", { d: MARKS[mark], fill: color }))
      : element("i", { style: `background:${color}` }), label)));
}

