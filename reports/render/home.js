// ---------------------------------------------------------------- the first screen: three questions

const COLORS = {
  agree: "var(--bar-agree)", better: "var(--bar-better)", unclear: "var(--bar-unclear)", differ: "var(--bar-differ)",
  "at chance": "var(--chance)", "other device": "var(--device)", "other data": "var(--data)", "not run": "var(--empty)",
};
/** Cells of few seeds have the colour of their verdict, in stripes, and those at chance lines, so that they differ in grey, too. */
const colorOf = (part) => (part === "at chance" ? `repeating-linear-gradient(${COLORS[part]} 0 2px, var(--ground) 2px 4px)` : COLORS[part]) || `repeating-linear-gradient(135deg, ${COLORS[part.split(",")[0]]} 0 3px, var(--ground) 3px 5px)`;

/** The parts of a count as a bar; nothing where the papers publish no number. */
function bar(line) {
  const total = line.counts["in a grid"];
  if (!total) return element("span");
  const parts = data.parts.filter((name) => line.counts[name]).map((name) => element("span", {
    style: `width:${(100 * line.counts[name]) / total}%;background:${colorOf(name)}`,
    title: `${name}: ${line.counts[name]} of ${total}`,
  }));
  return element("div", { class: "bar", role: "img", "aria-label": partsText(line) }, ...parts);
}

/** What the colours of bars mean, as far as these have them. */
const partsLegend = (lines) => legend(
  data.parts.filter((name) => lines.some((line) => line.counts[name])).map((name) => ({ label: name, color: colorOf(name) })));

const partsText = (line) => data.parts.filter((name) => line.counts[name]).map((name) => `${line.counts[name]} ${name}`).join(", ");

/** The words of a card, the counts that each of them adds up, and its class. */
const SUMS = [
  ["differ", ["differ"], "differs"],
  ["unclear", ["unclear"], "unclear"],
  ["one or two seeds", ["agree, few seeds", "better, few seeds", "unclear, few seeds", "differ, few seeds"], ""],
  ["not run", ["not run"], "dash"],
  ["not comparable", ["at chance", "other device", "other data"], "dash"],
];
/** How many numbers agree of those with a verdict, and how many are better: of many seeds, or else of few. */
function headline(line) {
  const full = sumOf(line, ["agree", "better", "unclear", "differ"]);
  const few = sumOf(line, SUMS[2][1]);
  const count = (name) => element("strong", {}, String(line.counts[name] || 0));
  const better = (name) => (line.counts[name] ? `, ${line.counts[name]} better` : "");
  if (full) return [count("agree"), ` of ${full} judged agree${better("better")}`];
  if (!few) return [element("strong", {}, "none"), " is judged"];
  return [count("agree, few seeds"), ` of ${few} agree${better("better, few seeds")}, few seeds`];
}

/** How many cells of few seeds agree, and how many are better. */
const fewText = (line) => {
  const found = ["agree", "better"].map((word) => [line.counts[`${word}, few seeds`], word]).filter(([count]) => count);
  return found.length ? ` (${found.map((one) => one.join(" ")).join(", ")})` : "";
};
const sumOf = (line, names) => names.reduce((total, name) => total + (line.counts[name] || 0), 0);

function home(main) {
  const questions = [["reproduce", "Does it reproduce?"], ["mixer", "Which mixer?"], ["kernel", "Which kernel changed?"]];
  const parts = new Map();
  const draws = { reproduce: drawReproduced, mixer: drawMixers, kernel: drawChanges };
  for (const [name, title] of questions) {
    const part = element("section", { "aria-label": title }, element("h2", { tabindex: "-1" }, title));
    if (draws[name](part)) parts.set(name, part);
  }
  main.append(
    element("h1", {}, data.title),
    element("p", {}, "Sequence mixers beside attention: the numbers that papers publish and ours, every mixer on the same tasks, and the speed of their kernels."),
    element("ul", { class: "questions" }, ...questions.filter(([name]) => parts.has(name)).map(
      ([name, title]) => element("li", {}, element("a", { href: link("", { at: name }) }, title)))),
    ...parts.values(),
  );
  drawHealth(main);
  const wanted = parts.get(params().get("at"));
  if (wanted) {
    wanted.scrollIntoView();
    wanted.querySelector("h2").focus({ preventScroll: true });
  }
}

function drawHealth(main) {
  const line = data.health.map(([text]) => text).join("; ");
  const lists = data.health.filter(([, names]) => names.length);
  main.append(element("section", { "aria-label": "Missing data" },
    element("h2", {}, "What is missing"),
    element("p", {}, line ? `${line}.` : "Nothing is missing."),
    lists.length ? element("details", {}, element("summary", {}, "Names"),
      element("ul", {}, ...lists.map(([text, names]) => element("li", {}, `${text}: ${names.join(", ")}`)))) : ""));
}

// ---------------------------------------------------------------- does it reproduce?

function drawReproduced(host) {
  const lines = data.totals.filter((line) => line.name in data.papers && line.counts.published);
  if (!lines.length) return false;
  host.append(
    element("p", { class: "muted" }, "Numbers of each paper that stand in a grid of this suite, each counted once, by the verdict on ours. A card leads to the paper's tables."),
    element("div", { class: "cards" }, ...lines.map((line) => {
      const name = data.papers[line.name];
      return element("a", { class: "card", href: link("experiments", { folder: line.name }) },
        element("h3", {}, name),
        element("p", { class: "big" }, ...headline(line)),
        bar(line),
        element("ul", {}, ...SUMS.filter(([text, names]) => text === "differ" || sumOf(line, names)).map(
          ([text, names, kind]) => element("li", { class: sumOf(line, names) ? kind : "dash" }, `${sumOf(line, names)} ${text}${names.length === 4 ? fewText(line) : ""}`))),
        element("p", { class: "muted" }, `${line.counts["in a grid"]} numbers in a grid, ${line.counts.published} published`));
    })),
    partsLegend(lines),
  );
  return true;
}

// ---------------------------------------------------------------- which mixer?

const MOST_PANELS = 6;

/** The experiments that have several mixers in a row each, and seeds of shares. */
function comparisons() {
  return data.experiments.map((experiment, i) => ({ experiment, i, rows: mixerRows(i) }))
    .filter(({ experiment, rows }) => experiment.unit === "%" && rows.length > 3);
}

/** The rows of a table that are a mixer each: its cells by column. */
function mixerRows(index) {
  const rows = new Map();
  for (const cell of cellsOf(index)) {
    if (!cell.mixer || cell.mean === null) continue;
    if (!rows.has(cell.row)) rows.set(cell.row, { row: cell.row, mixer: cell.mixer, cells: new Map() });
    rows.get(cell.row).cells.set(cell.column, cell);
  }
  const found = [...rows.values()];
  return new Set(found.map((row) => row.mixer)).size > 3 ? found : [];
}

function drawMixers(host) {
  const found = comparisons();
  if (!found.length) return false;
  const nameOfOne = ({ experiment }) => `${experiment.name}, ${experiment.scale}`;
  const first = found.find((one) => one.experiment.name === "leaderboard/parameters") || found[0];
  const chosen = found.find((one) => nameOfOne(one) === params().get("of")) || first;
  const select = element("select", { change: (event) => { keep({ of: event.target.value, sort: "" }, true); render(); } },
    ...found.map((one) => choiceOf(nameOfOne(one), `${nameOfOne(one)}: ${one.experiment.title}`)));
  select.value = nameOfOne(chosen);
  host.append(element("div", { class: "controls" }, element("label", {}, "comparison ", select)));
  mixerTable(host, chosen);
  pairBoxes(host, chosen.rows.map((row) => row.mixer));
  return true;
}

function mixerTable(host, { experiment, i, rows }) {
  const columns = [...new Set(cellsOf(i).map((cell) => cell.column))].filter((c) => rows.some((row) => row.cells.has(c)));
  const panels = columns.slice(0, MOST_PANELS);
  const success = experiment.success === null ? 99 : experiment.success;
  const good = (cell) => (cell ? cell.values.filter((value) => value >= success).length : 0);
  const median = (cell) => (cell ? middle(cell.values) : 0);
  // seeds that succeed count first, then the median
  const rank = (cell) => (cell ? 1000 * good(cell) + median(cell) : null);
  const ordered = [...rows].sort((a, b) => panels.reduce((sum, c) => sum + rank(b.cells.get(c)) - rank(a.cells.get(c)), 0));
  const times = decodeTimes();
  let shown = null;
  let limit = Infinity;
  const stateOf = (row) => {
    const at = shown && panels.includes(shown.sorted()) ? [shown.sorted()] : panels;
    const states = at.map((c) => row.cells.get(c)).filter(Boolean).map((cell) => runOf(cell).state).filter(Boolean);
    return states.length ? Math.max(...states) : null;
  };
  const sizes = [...new Set(rows.map(stateOf).filter(Boolean))].sort((a, b) => a - b);
  if (sizes.length > 1) {
    const stops = [1024];
    while (stops[stops.length - 1] < sizes[sizes.length - 1]) stops.push(stops[stops.length - 1] * 2);
    const kept = stops.filter((stop) => stop >= sizes[0]);
    const told = element("output", {});
    const slider = element("input", {
      type: "range", min: 0, max: kept.length - 1, step: 1, "aria-label": "largest state in KiB",
      input: () => move(true),
    });
    const move = (remembered) => {
      const last = Number(slider.value) === kept.length - 1;
      limit = last ? Infinity : kept[slider.value];
      told.textContent = last ? "any size" : bytes(limit);
      slider.setAttribute("aria-valuetext", told.textContent);
      if (remembered) keep({ state: last ? "" : String(limit / 1024) }, false);
      if (shown) shown.refresh();
    };
    const given = kept.indexOf(1024 * Number(params().get("state")));
    slider.value = String(given < 0 ? kept.length - 1 : given);
    host.append(element("div", { class: "controls" }, element("label", {}, "state at most ", slider), told));
    move(false);
  }
  host.append(element("p", { class: "muted" },
    `A dot is a seed (the best of the rates that were tried, by validation), filled if it reaches ${short(success)} %. Blue: every seed does; orange: some do. ` +
    `${panels.some((c) => experiment.columns[c] && experiment.columns[c][0] !== null) ? "The dotted line is chance. " : ""}The state is what a sequence keeps between two tokens, in float32; ` +
    "it is the one of the column by which the lines are ordered, or else the largest." +
    (columns.length > panels.length ? ` The first ${panels.length} of ${columns.length} columns are shown.` : "")));
  const answer = element("p", { role: "status" });
  host.append(answer);
  shown = table(host, {
    onShow: (found) => { answer.textContent = solvedText(panels, found, good); },
    caption: `${experiment.title} (${experiment.name}, scale ${experiment.scale})`,
    address: true,
    words: false,
    rows: ordered,
    keeps: (row) => limit === Infinity || (stateOf(row) !== null && stateOf(row) <= limit),
    columns: [
      { title: "mixer", text: (row) => row.row, draw: (row) => mixerLink(row.mixer, row.row) },
      ...panels.map((column) => ({
        title: column,
        text: (row) => (row.cells.has(column) ? row.cells.get(column).ours : ""),
        draw: (row) => (row.cells.has(column) ? dots(row.cells.get(column), { width: 150, success }) : null),
        sort: (row) => rank(row.cells.get(column)),
        falling: true,
      })),
      ...(sizes.length ? [{ title: "state", number: true, text: (row) => (stateOf(row) === null ? "" : bytes(stateOf(row))), sort: stateOf }] : []),
      ...(rows.some((row) => times.has(row.row)) ? [{
        title: "ms a token", number: true, hint: "time of a decoded token through four layers, leaderboard/speed",
        text: (row) => (times.has(row.row) ? times.get(row.row).ours : ""),
        sort: (row) => (times.has(row.row) ? times.get(row.row).mean : null),
      }] : []),
    ],
  });
  // the states were drawn before the order was known
  shown.refresh();
}

const MOST_NAMES = 6;

/** How many of some mixers solve each column with every seed, and which, where these are few. */
function solvedText(panels, rows, good) {
  const parts = panels.map((column) => {
    const there = rows.filter((row) => row.cells.has(column));
    const solved = there.filter((row) => !row.cells.get(column).lost && good(row.cells.get(column)) === row.cells.get(column).values.length);
    const names = solved.length && solved.length <= MOST_NAMES ? ` (${solved.map((row) => row.row).join(", ")})` : "";
    return `${column}: ${solved.length} of ${there.length}${names}`;
  });
  return `Solved with every seed: ${parts.join("; ")}.`;
}

/** Time of a decoded token of every row of leaderboard/speed. */
function decodeTimes() {
  const index = data.experiments.findIndex((experiment) => experiment.name === "leaderboard/speed");
  const found = cellsOf(index).filter((cell) => cell.column.endsWith("one token") && cell.mean !== null);
  return new Map(found.map((cell) => [cell.row, cell]));
}

/** Two boxes that lead to the comparison of two mixers. */
function pairBoxes(host, mixers, a = "", b = "") {
  const names = [...new Set(mixers)].sort((x, y) => mixerName(x).localeCompare(mixerName(y)));
  const box = (label, value) => {
    const select = element("select", { "aria-label": label }, ...names.map((name) => choiceOf(name, mixerName(name))));
    if (names.includes(value)) select.value = value;
    return select;
  };
  const left = box("first mixer", a || "kda");
  const right = box("second mixer", b || "gated-deltanet");
  if (left.value === right.value) right.value = names.find((name) => name !== left.value) || right.value;
  host.append(element("form", {
    class: "controls pair",
    submit: (event) => { event.preventDefault(); go("pair", { a: left.value, b: right.value }); },
  }, element("label", {}, "compare ", left), element("label", {}, "with ", right), element("button", { type: "submit" }, "paired by seed")));
}

// ---------------------------------------------------------------- which kernel changed?

/** `H100` for `NVIDIA H100 80GB HBM3, 2 runs at a time`. */
const deviceName = (device) => device.replace(/^NVIDIA /, "").split(/[ ,]/)[0];

const changeText = ({ ratio }) => `${ratio >= 1 ? "+" : "−"}${Math.abs(100 * (ratio - 1)).toFixed(1)} %`;

function drawChanges(host) {
  const changes = data.kernels.filter((row) => row.change).map((row) => ({ row, ...row.change }));
  if (!changes.length) return false;
  const of = (verdict) => changes.filter((change) => change.verdict === verdict);
  const slower = of("slower").sort((a, b) => b.ratio - a.ratio);
  const faster = of("faster").sort((a, b) => a.ratio - b.ratio);
  const unclear = of("unclear").length;
  host.append(element("p", { class: "muted" },
    `The newest measurement of each case of our kernels against that of the commit before, on the same kind of device; ${changes.length} cases have both` +
    `${unclear ? `, ${unclear} of them unclear` : ""}. ${data.changeRule}`));
  const two = element("div", { class: "two" });
  for (const [title, found] of [["Slower", slower], ["Faster", faster]]) {
    const operators = [...new Set(found.map((change) => change.row.operator))];
    const part = element("div", {}, element("h3", {}, `${title}: ${found.length}${operators.length ? ` case${found.length === 1 ? "" : "s"} of ${operators.join(", ")}` : ""}`));
    if (found.length) changeTable(part, `${title}, the ${Math.min(5, found.length)} that changed most`, found.slice(0, 5));
    two.append(part);
  }
  host.append(two);
  const same = changes.filter((change) => change.inOneRun && !isChange(change));
  if (same.length) {
    host.append(element("h3", {}, `Timed in one run, and the same: ${same.length}`), element("ul", {}, ...same.map((change) => element("li", {},
      `${change.row.operator} ${change.row.pass} ${change.row.case}, ${deviceName(change.row.device)}: ${changeText(change)}; ` +
      `${change.before[0].slice(0, 7)} → ${change.now[0].slice(0, 7)} of ${change.now[1]}; ${change.differs}`))));
  }
  host.append(element("p", {}, element("a", { href: link("kernels", { sort: "-change" }) }, "all cases, ordered by their change")));
  return true;
}

function changeTable(host, caption, rows) {
  table(host, {
    caption,
    words: false,
    rows,
    columns: [
      {
        title: "kernel", text: (c) => `${c.row.operator} ${c.row.pass}`,
        draw: (c) => element("span", {},
          element("a", { href: link("kernels", { operator: c.row.operator, open: kernelKey(c.row) }) }, `${c.row.operator} ${c.row.pass}`),
          element("small", {}, ` ${c.row.case}, ${deviceName(c.row.device)}`),
          element("small", { class: "dash" }, `; ${[
            `${c.before[0].slice(0, 7)} → ${c.now[0].slice(0, 7)} of ${c.now[1]}`,
            c.others === null ? "" : `other implementations ${changeText({ ratio: c.others })}`,
            c.differs,
          ].filter(Boolean).join("; ")}`)),
      },
      { title: "before ms", number: true, text: (c) => c.before[4].toPrecision(3), sort: (c) => c.before[4] },
      { title: "now ms", number: true, text: (c) => c.now[4].toPrecision(3), sort: (c) => c.now[4] },
      { title: "change", number: true, text: changeText, sort: (c) => c.ratio, draw: (c) => element("strong", { class: c.ratio > 1 ? "worse" : "agrees" }, changeText(c)) },
      { title: "quartiles", text: (c) => "", draw: quartiles, sort: (c) => c.ratio },
    ],
  });
}

/** The quartiles of two measurements: the one before grey and hollow, the newest one filled. */
function quartiles({ before, now }) {
  const width = 110, height = 22;
  const x = axis([before[5], before[6], now[5], now[6]], false, 5, width - 5);
  const root = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `before ${before[5]} to ${before[6]} ms, now ${now[5]} to ${now[6]} ms` });
  for (const [point, y, color] of [[before, 6, "var(--muted)"], [now, 16, now[4] > before[4] ? "var(--worse)" : "var(--agree)"]]) {
    root.append(
      shape("line", { x1: x.at(point[5]), x2: x.at(point[6]), y1: y, y2: y, stroke: color, "stroke-width": 3 }),
      shape("circle", { cx: x.at(point[4]), cy: y, r: 3.4, fill: point === before ? "var(--ground)" : color, stroke: color, "stroke-width": 1.5 }),
    );
  }
  return root;
}
