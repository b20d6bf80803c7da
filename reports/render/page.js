// ---------------------------------------------------------------- health and scoreboard

const counted = data.experiments.filter((experiment) => experiment.counted);
const nameOf = (row) => data.experiments[row.experiment].name;
const scaleOf = (row) => data.experiments[row.experiment].scale;
const section = (id) => document.getElementById(id);

function drawHealth() {
  document.querySelector("h1").textContent = data.title;
  section("where").textContent = data.where;
  const line = data.health.map(([text]) => text).join("; ");
  const lists = data.health.filter(([, names]) => names.length);
  section("health").append(
    element("p", {}, element("strong", {}, "Missing data: "), line ? `${line}.` : "none."),
    lists.length ? element("details", {}, element("summary", {}, "Names"),
      element("ul", {}, ...lists.map(([text, names]) => element("li", {}, `${text}: ${names.join(", ")}`)))) : "",
  );
}

const COLORS = {
  agree: "var(--agree)", better: "var(--better)", unclear: "var(--unsure)", differ: "var(--worse)",
  "at chance": "var(--chance)", "other device": "var(--device)", "other data": "var(--data)", "not run": "var(--empty)",
};
/** Cells of few seeds have the colour of their verdict, paler. */
const colorOf = (part) => COLORS[part] || `color-mix(in srgb, ${COLORS[part.split(",")[0]]} 45%, var(--ground))`;

function bar(line) {
  const total = line.counts["in a grid"];
  const parts = data.parts.map((name) => element("span", {
    style: `width:${total ? (100 * line.counts[name]) / total : 0}%;background:${colorOf(name)}`,
    title: `${name}: ${line.counts[name]} of ${total}`,
  }));
  return element("div", { class: "bar" }, ...parts);
}

function drawScoreboard(cellTable) {
  const host = section("scoreboard");
  const number = (name) => ({
    title: name, number: true, text: (line) => String(line.counts[name] || "·"), sort: (line) => line.counts[name],
  });
  const columns = (first, last) => [
    ...first,
    number("published"), number("in a grid"),
    { title: "of these", text: () => "", draw: bar, sort: (line) => line.counts["in a grid"] },
    ...data.parts.map(number),
    ...last,
  ];
  host.append(element("ul", {}, ...data.notes.map((note) => element("li", {}, note))));
  host.append(legend(data.parts.map((name) => ({ label: name, color: colorOf(name) }))));
  const claims = { title: "claims", text: (line) => line.claims };
  if (data.folders.length > 1) {
    const reduced = { title: "claims, reduced", text: (line) => line.reduced };
    table(host, { rows: data.totals, columns: columns([{ title: "folder", text: (line) => line.name }], [claims, reduced]), words: false });
  }
  table(host, {
    rows: counted,
    choices: data.folders.length > 1 ? [{ title: "folder", of: (e) => e.folder }] : [],
    columns: columns([
      {
        title: "experiment",
        text: (e) => e.name,
        draw: (e) => element("a", { href: "#cells", click: (event) => { event.stopPropagation(); cellTable.choose("experiment", e.name); } }, e.name),
      },
      { title: "scale", text: (e) => e.scale },
    ], [claims]),
    open: (e) => element("div", {},
      element("p", {}, `${e.title}${e.source ? ` (${e.source})` : ""}`),
      element("ul", {}, ...e.notes.map((note) => element("li", {}, note)))),
  });
}

// ---------------------------------------------------------------- cells and runs

function drawCells() {
  const host = section("cells");
  host.append(element("p", { class: "muted" },
    "Every dot is a seed, the upright line is the paper's value. A click on a line shows command, settings, device and curves. " +
    "† reduced scale, ‡ fewer than three seeds, § stand-in data, ¶ runs of different operators, * the best of several values of a " +
    "setting, ‖ the same chosen on test rows, ◊ the best epoch chosen on test rows, ⌉ a value at the edge of those tried, " +
    "⇕ a timing whose samples spread by more than 5 %."));
  // what most readers look for stands first: cells with a verdict, then those with a value
  const rank = (cell) => (cell.mean === null ? 2 : cell.verdict ? 0 : 1);
  return table(host, {
    rows: [...data.cells].sort((a, b) => rank(a) - rank(b)),
    choices: [
      { title: "experiment", of: nameOf },
      { title: "verdict", of: (cell) => cell.verdict },
    ],
    columns: [
      { title: "experiment", text: nameOf },
      { title: "scale", text: scaleOf },
      { title: "row", text: (cell) => cell.row },
      { title: "column", text: (cell) => cell.column },
      { title: "paper", number: true, text: (cell) => cell.paper, sort: (cell) => cell.published },
      { title: "ours", number: true, text: (cell) => cell.ours, sort: (cell) => cell.mean },
      { title: "unit", text: (cell) => data.experiments[cell.experiment].unit },
      { title: "seeds", text: (cell) => cell.seeds, draw: dots, sort: (cell) => cell.values.length },
      { title: "verdict", text: (cell) => cell.verdict },
    ],
    open: cellDetail,
  });
}

function cellDetail(cell) {
  const node = element("div");
  if (cell.command) node.append(element("h3", {}, "Command"), element("pre", {}, cell.command));
  if (cell.chosen) node.append(element("p", {}, `best value of a setting: ${cell.chosen}`));
  if (cell.seeds) node.append(element("p", {}, `seeds: ${cell.seeds}`));
  if (cell.last) node.append(element("p", {}, `at the last epoch: ${cell.last}`));
  const runs = cell.runs.map((id) => ({ id, ...data.runs[id] }));
  if (!runs.length) return node;
  node.append(element("h3", {}, "Runs"));
  table(node, {
    rows: runs,
    words: false,
    columns: [
      { title: "run", text: (run) => run.id, draw: (run) => element("code", {}, run.id) },
      { title: "seed", number: true, text: (run) => String(run.seed), sort: (run) => run.seed },
      { title: "status", text: (run) => run.error ? `${run.status}: ${run.error}` : run.status },
      { title: "device", text: (run) => run.device },
      { title: "precision", text: (run) => run.precision },
      { title: "torch", text: (run) => run.torch },
      { title: "commit", text: (run) => run.commit },
      { title: "date", text: (run) => run.date },
    ],
  });
  node.append(element("p", {}, "Everything stored about a run: ", element("code", {}, `python run_suite.py show ${runs[0].id}`)));
  node.append(curves(runs));
  for (const index of new Set(runs.map((run) => run.settings))) {
    node.append(element("details", {}, element("summary", {}, "Settings"), settingsList(data.settings[index])));
  }
  return node;
}

/** One chart for every metric and split that the runs measured several times, a line for each run. */
function curves(runs) {
  const host = element("div", { class: "charts" });
  const names = [...new Set(runs.flatMap((run) => run.curves.map(([metric, split]) => `${metric}, ${split}`)))];
  for (const name of names) {
    const series = runs.flatMap((run, i) => run.curves
      .filter(([metric, split]) => `${metric}, ${split}` === name)
      .map(([, , points]) => ({ label: `seed ${run.seed}`, color: `hsl(${(i * 137) % 360} 60% 50%)`, points, line: true })));
    host.append(element("figure", {}, element("figcaption", {}, name),
      chart({ series, width: 320, height: 190, xLabel: "step", title: name })));
  }
  return host;
}

function settingsList(settings, prefix = "") {
  const lines = [];
  const walk = (value, key) => {
    if (value !== null && typeof value === "object" && !Array.isArray(value)) {
      for (const [name, part] of Object.entries(value)) walk(part, key ? `${key}.${name}` : name);
    } else lines.push(`${key} = ${JSON.stringify(value)}`);
  };
  walk(settings, prefix);
  return element("pre", {}, lines.join("\n"));
}

function drawClaims() {
  const host = section("claims");
  if (!data.claims.length) { host.hidden = true; return; }
  table(host, {
    rows: data.claims.map(([experiment, kind, verdict, claim, formula, source]) => ({ experiment, kind, verdict, claim, formula, source })),
    choices: [{ title: "experiment", of: nameOf }, { title: "verdict", of: (row) => row.kind }],
    columns: [
      { title: "experiment", text: nameOf },
      { title: "verdict", text: (row) => row.verdict },
      { title: "claim", text: (row) => row.claim },
      { title: "checked as", text: (row) => row.formula },
      { title: "source", text: (row) => row.source },
    ],
  });
}

// ---------------------------------------------------------------- accuracy against cost

function drawTradeoff() {
  const host = section("tradeoff");
  if (!data.tradeoff.length) { host.hidden = true; return; }
  host.append(element("p", { class: "muted" },
    "Every dot is a run. The state is what a sequence keeps between two tokens, counted at four bytes an element. Speeds compare on one device only."));
  const charts = element("div");
  const select = element("select", { change: () => show(Number(select.value)) },
    ...data.tradeoff.map((found, i) => element("option", { value: i }, `${nameOf(found)}, ${scaleOf(found)}`)));
  host.append(element("div", { class: "controls" }, element("label", {}, "experiment ", select)), charts);

  function show(i) {
    const found = data.tradeoff[i];
    const series = (place) => [...new Set(found.points.map((point) => point[0]))].map((label) => ({
      label,
      color: found.colors[label],
      points: found.points.filter((p) => p[0] === label && p[place] !== null)
        .map((p) => [p[place], p[1], `${label}: ${short(p[1])} %, ${short(p[place])}, run ${p[4]}, ${data.runs[p[4]].device}`]),
    })).filter((s) => s.points.length);
    const pictures = [["bytes of state", 2], ["training, tokens a second", 3]]
      .filter(([, place]) => series(place).length)
      .map(([xLabel, place]) => element("figure", {}, chart({
        series: series(place), logX: true, xLabel, yLabel: "test accuracy (%)", width: 520, height: 300,
        title: `accuracy against ${xLabel}`,
      })));
    charts.replaceChildren(legend(series(2)), element("div", { class: "charts" }, ...pictures));
  }

  // the experiment with most models says most
  const models = data.tradeoff.map((found) => new Set(found.points.map((point) => point[0])).size);
  select.value = String(models.indexOf(Math.max(...models)));
  show(Number(select.value));
}

// ---------------------------------------------------------------- operators

const newest = (row) => row.history[row.history.length - 1];
const shareOfFloor = ([, , , , median, , , floor]) => (median && floor ? floor / median : null);

function drawKernels() {
  const host = section("kernels");
  if (!data.kernels.length) { host.append(element("p", {}, "No benchmark has run; start one with: python run_suite.py bench")); return; }
  host.append(element("p", { class: "muted" },
    "The floor is the least time that the bytes or the matrix products need on the device; 100 % cannot be passed. " +
    "The trend shows the share over commits, with a band between the quartiles of the samples."));
  table(host, {
    rows: data.kernels,
    choices: [
      { title: "device", of: (row) => row.device },
      { title: "operator", of: (row) => row.operator },
      { title: "pass", of: (row) => row.pass },
      { title: "implementation", of: (row) => row.implementation },
    ],
    columns: [
      { title: "operator", text: (row) => row.operator },
      { title: "case", text: (row) => row.case },
      { title: "pass", text: (row) => row.pass },
      { title: "implementation", text: (row) => row.implementation },
      { title: "of floor", number: true, text: (row) => { const s = shareOfFloor(newest(row)); return s === null ? "—" : percent(s); }, sort: (row) => shareOfFloor(newest(row)) },
      { title: "median ms", number: true, text: (row) => newest(row)[4] === null ? newest(row)[2] : newest(row)[4].toPrecision(4), sort: (row) => newest(row)[4] },
      { title: "trend", text: () => "", draw: trend, sort: (row) => row.history.length },
      { title: "commits", number: true, text: (row) => String(row.history.length), sort: (row) => row.history.length },
      { title: "newest", text: (row) => newest(row)[1] },
    ],
    open: kernelDetail,
  });
}

/** Share of the floor over commits in a line of text, from 0 to 100 %. */
function trend(row) {
  const found = row.history.filter((point) => shareOfFloor(point) !== null);
  if (!found.length) return element("span");
  const width = 110, height = 22;
  const x = (i) => 4 + (width - 8) * (found.length > 1 ? i / (found.length - 1) : 0.5);
  const y = (share) => height - 2 - (height - 4) * Math.min(share, 1);
  const root = shape("svg", { width, height, role: "img", "aria-label": "share of the floor over commits" });
  root.append(shape("line", { x1: 0, x2: width, y1: y(1), y2: y(1), stroke: "var(--line)" }),
    shape("line", { x1: 0, x2: width, y1: y(0), y2: y(0), stroke: "var(--line)" }));
  const band = found.map((p, i) => [x(i), y(p[7] / p[6]), y(p[7] / p[5])]);
  const around = [...band.map((b) => [b[0], b[2]]), ...band.map((b) => [b[0], b[1]]).reverse()];
  root.append(shape("polygon", { points: around.map((p) => p.join()).join(" "), fill: "var(--better)", opacity: 0.25 }),
    shape("polyline", { points: found.map((p, i) => [x(i), y(shareOfFloor(p))].join()).join(" "), fill: "none", stroke: "var(--better)" }));
  found.forEach((p, i) => root.append(shape(
    "circle", { cx: x(i), cy: y(shareOfFloor(p)), r: 2.2, fill: "var(--better)" }, shape("title", {}, `${p[0]}: ${percent(shareOfFloor(p))}`))));
  return root;
}

function kernelDetail(row) {
  const node = element("div", {}, element("p", {}, row.device));
  table(node, {
    rows: row.history,
    words: false,
    columns: [
      { title: "commit", text: (p) => p[0] },
      { title: "date", text: (p) => p[1] },
      { title: "status", text: (p) => p[2] },
      { title: "median ms", number: true, text: (p) => p[4] === null ? "—" : p[4].toPrecision(4), sort: (p) => p[4] },
      { title: "quartiles", number: true, text: (p) => p[4] === null ? "" : `${p[5].toPrecision(4)} to ${p[6].toPrecision(4)}` },
      { title: "floor ms", number: true, text: (p) => p[7] === null ? "—" : p[7].toPrecision(4), sort: (p) => p[7] },
      { title: "of floor", number: true, text: (p) => { const s = shareOfFloor(p); return s === null ? "—" : percent(s); }, sort: shareOfFloor },
      { title: "run", text: (p) => p[3] },
    ],
  });
  node.append(element("pre", {}, `python run_suite.py bench ${row.operator}`));
  return node;
}

function drawCrossover() {
  const host = section("crossover");
  if (!data.crossover.length) { host.hidden = true; return; }
  host.append(element("p", { class: "muted" },
    "The length from which on a row is faster than the fastest attention of the same experiment on the same device, at every longer length too."));
  table(host, {
    rows: data.crossover,
    choices: [{ title: "experiment", of: (row) => row.experiment }],
    words: false,
    columns: [
      { title: "experiment", text: (row) => row.experiment },
      { title: "row", text: (row) => row.row },
      { title: "faster than attention", text: (row) => row.text, sort: (row) => row.start },
      { title: "compared with", text: (row) => row.attention },
      { title: "device", text: (row) => row.device },
    ],
    open: (row) => {
      const theirs = row.points.filter((p) => p[2] !== null).map((p) => [p[0], p[2]]);
      const series = [
        { label: row.row, color: "var(--better)", points: row.points.map((p) => [p[0], p[1]]), line: true },
        { label: "fastest attention", color: "var(--muted)", points: theirs, line: true, dashed: true },
      ].filter((s) => s.points.length);
      return element("div", {}, legend(series),
        chart({ series, logX: true, logY: true, lengths: true, xLabel: "sequence length", yLabel: row.unit, title: row.row }));
    },
  });
}

drawHealth();
drawScoreboard(drawCells());
drawClaims();
drawTradeoff();
drawKernels();
drawCrossover();
