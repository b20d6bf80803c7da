// ---------------------------------------------------------------- experiments

function experiments(main) {
  main.append(element("h1", {}, "Experiments"));
  const number = (title, names) => ({
    title, number: true, falling: true, text: (line) => String(sumOf(line, names) || "·"), sort: (line) => sumOf(line, names),
  });
  const columns = (first, last) => [
    ...first,
    number("published", ["published"]), number("in a grid", ["in a grid"]),
    { title: "of these", text: partsText, draw: bar, sort: (line) => line.counts["in a grid"] },
    ...SUMS.map(([title, names]) => number(title, names)),
    ...last,
  ];
  // what no claim does is not said
  const said = (text) => text.split(" · ").filter((part) => !part.startsWith("0 ")).join(" · ");
  const claimed = { title: "claims", text: (line) => said(line.claims), draw: (line) => element("small", { class: "claims" }, said(line.claims)) };
  const counted = data.experiments.filter((experiment) => experiment.counted);
  const hasRows = new Set(data.cells.filter((cell) => cell.runs.length).map(nameOf));
  const listed = (host, caption, rows, address) => table(host, {
    caption,
    address,
    rows,
    words: address,
    choices: address && data.folders.length > 1 ? [{ title: "folder", of: (e) => e.folder }] : [],
    columns: columns([
      {
        title: "experiment", text: (e) => `${e.name} ${e.title}`, sort: (e) => e.name,
        draw: (e) => element("span", { class: "long" },
          element("a", { href: link("experiment", { name: e.name, scale: e.scale }) }, e.name), element("small", {}, ` ${e.title}`)),
      },
      { title: "scale", text: (e) => e.scale },
    ], [claimed]),
  });
  main.append(partsLegend(data.experiments));
  // those with a verdict first, as they say most
  const judged = (e) => (sumOf(e, ["in a grid"]) > sumOf(e, ["not run"]) ? 0 : 1);
  listed(main, "Experiments with rows", counted.filter((e) => hasRows.has(e.name)).sort((a, b) => judged(a) - judged(b)), true);
  const empty = counted.filter((e) => !hasRows.has(e.name));
  if (empty.length) {
    const folded = element("details", {}, element("summary", {}, `${empty.length} experiments without rows`));
    listed(folded, "Experiments without rows", empty, false);
    main.append(folded);
  }
  if (data.folders.length > 1) {
    const reduced = { title: "claims, reduced", text: (line) => said(line.reduced), draw: (line) => element("small", { class: "claims" }, said(line.reduced)) };
    table(main, {
      caption: "Sums of each folder", rows: data.totals, words: false,
      columns: columns([{ title: "folder", text: (line) => line.name }], [claimed, reduced]),
    });
  }
  main.append(element("ul", {}, ...data.notes.map((note) => element("li", {}, note))));
}

// ---------------------------------------------------------------- cells and runs

function cells(main) {
  main.append(element("h1", {}, "Cells of the tables"), element("p", { class: "muted" },
    "Every dot is a seed, the upright line is the paper's value. The button of a line shows command, settings, device and curves. " +
    "† reduced scale, ‡ fewer than three seeds, § stand-in data, ¶ runs of different operators or devices, * the best of several values of a " +
    "setting, ‖ the same chosen on test rows, ◊ the best epoch chosen on test rows, ⌉ a value at the edge of those tried, " +
    "⇕ a timing whose samples spread by more than 5 %."));
  // what most readers look for stands first: cells with a verdict, then those with a value
  const rank = (cell) => (cell.mean === null ? 2 : cell.verdict ? 0 : 1);
  cellTable(main, "Cells of the tables of all experiments", [...data.cells].sort((a, b) => rank(a) - rank(b)), true);
}

/** The address of a cell within a table. */
const cellKey = (cell) => `${nameOf(cell)}|${scaleOf(cell)}|${cell.row}|${cell.column}`;

function cellTable(host, caption, rows, address) {
  table(host, {
    caption,
    address,
    rows,
    key: cellKey,
    choices: [
      { title: "experiment", of: nameOf },
      { title: "scale", of: scaleOf },
      { title: "verdict", of: (cell) => cell.verdict },
    ],
    columns: [
      { title: "experiment", text: nameOf, draw: experimentLink },
      { title: "scale", text: scaleOf },
      { title: "row", text: (cell) => cell.row, draw: (cell) => (cell.mixer ? mixerLink(cell.mixer, cell.row) : cell.row) },
      { title: "column", text: (cell) => cell.column },
      { title: "paper", number: true, text: (cell) => cell.paper, sort: (cell) => cell.published },
      { title: "ours", number: true, text: (cell) => cell.ours, sort: (cell) => cell.mean },
      { title: "unit", text: (cell) => experimentOf(cell).unit },
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
  const runs = cell.runs.map((at) => data.runs[at]);
  if (!runs.length) return node;
  node.append(element("h3", {}, "Runs"));
  table(node, {
    caption: "Runs of this cell",
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
      .map(([, , at, values]) => ({
        label: `seed ${run.seed}`, color: `hsl(${(i * 137) % 360} 60% 50%)`, points: data.steps[at].map((x, k) => [x, values[k]]), line: true,
      })));
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

function claims(main) {
  main.append(element("h1", {}, "Claims of the papers"));
  if (!data.claims.length) { main.append(element("p", {}, "No experiment here has a claim.")); return; }
  claimTable(main, "Claims and whether our rows bear them out", claimRows(), true);
}

function claimRows() {
  return data.claims.map(([experiment, kind, verdict, claim, formula, source]) => ({ experiment, kind, verdict, claim, formula, source }));
}

/** address: of all experiments, to be filtered; else those of one, as they stand. */
function claimTable(host, caption, rows, address) {
  table(host, {
    caption,
    address,
    rows,
    words: address,
    choices: address ? [{ title: "experiment", of: nameOf }, { title: "verdict", of: (row) => row.kind }] : [],
    columns: [
      ...(address ? [{ title: "experiment", text: nameOf, draw: experimentLink }] : []),
      { title: "verdict", text: (row) => row.verdict },
      { title: "claim", text: (row) => row.claim },
      { title: "checked as", text: (row) => row.formula },
      { title: "source", text: (row) => row.source },
    ],
  });
}

// ---------------------------------------------------------------- accuracy against cost

function cost(host) {
  host.append(element("h1", {}, "Accuracy against size of the state and speed"));
  if (!data.tradeoff.length) { host.append(element("p", {}, "No run here has recorded the size of its state.")); return; }
  host.append(element("p", { class: "muted" },
    "Every dot is a run. The state is what a sequence keeps between two tokens, counted at four bytes an element. Speeds compare on one device only."));
  const charts = element("div");
  const label = (found) => `${nameOf(found)}, ${scaleOf(found)}`;
  const select = element("select", { change: () => { keep({ of: label(data.tradeoff[select.value]), column: "" }, true); show(Number(select.value)); } },
    ...data.tradeoff.map((found, i) => element("option", { value: i }, label(found))));
  host.append(element("div", { class: "controls" }, element("label", {}, "experiment ", select)), charts);

  function show(i) {
    const found = data.tradeoff[i];
    const columnOfRun = new Map(cellsOf(found.experiment).flatMap((cell) => cell.runs.map((at) => [at, cell.column])).reverse());
    const columns = [...new Set(found.points.map((point) => columnOfRun.get(point[4])))];
    const column = columns.includes(params().get("column")) ? params().get("column") : columns[0];
    const which = element("select", { change: () => { keep({ column: which.value }, true); show(i); } }, ...columns.map((name) => choiceOf(name)));
    which.value = column;
    const points = found.points.filter((point) => columnOfRun.get(point[4]) === column);
    const series = (place) => [...new Set(points.map((point) => point[0]))].map((label) => ({
      label,
      ...lookOf(found.looks[label]),
      points: points.filter((p) => p[0] === label && p[place] !== null)
        .map((p) => [p[place], p[1], `${label}: ${short(p[1])} %, ${short(p[place])}, run ${data.runs[p[4]].id}, ${data.runs[p[4]].device}`]),
    })).filter((s) => s.points.length);
    const pictures = [["bytes of state", 2], ["training, tokens a second", 3]]
      .filter(([, place]) => series(place).length)
      .map(([xLabel, place]) => element("figure", {}, chart({
        series: series(place), logX: true, xLabel, yLabel: "test accuracy (%)", width: 520, height: 300,
        title: `accuracy against ${xLabel}`,
      })));
    charts.replaceChildren(element("label", { class: "controls" }, "column ", which), legend(series(2)), element("div", { class: "charts" }, ...pictures));
  }

  // the leaderboard, or else the experiment with most models, says most
  const models = data.tradeoff.map((found) => new Set(found.points.map((point) => point[0])).size + (nameOf(found) === "leaderboard/parameters" && scaleOf(found) === "paper" ? 1000 : 0));
  const given = data.tradeoff.findIndex((found) => label(found) === params().get("of"));
  select.value = String(given < 0 ? models.indexOf(Math.max(...models)) : given);
  show(Number(select.value));
}

// ---------------------------------------------------------------- operators

const newest = (row) => row.history[row.history.length - 1];
const shareOfFloor = ([, , , , median, , , floor]) => (median && floor ? floor / median : null);

const isChange = ({ verdict }) => verdict === "slower" || verdict === "faster";
const kernelKey = (row) => [row.device, row.operator, row.case, row.pass, row.implementation].join("|");

function kernels(host) {
  host.append(element("h1", {}, "Operators: share of the floor"));
  if (!data.kernels.length) { host.append(element("p", {}, "No benchmark has run; start one with: python run_suite.py bench")); return; }
  host.append(element("p", { class: "muted" },
    "The floor is the least time that the bytes or the matrix products need on the device. The change is that of the newest " +
    `median of our kernels against that of the commit before, in brackets where it is neither slower nor faster. ${data.changeRule} ` +
    "The trend shows the share over commits, with a band between the quartiles of the samples."));
  table(host, {
    caption: "Newest measurement of every case",
    address: true,
    key: kernelKey,
    rows: data.kernels,
    choices: [
      { title: "device", of: (row) => row.device },
      { title: "operator", of: (row) => row.operator },
      { title: "pass", of: (row) => row.pass },
      { title: "implementation", of: (row) => row.implementation },
    ],
    columns: [
      { title: "operator", text: (row) => row.operator, draw: (row) => row.operator },
      { title: "device", text: (row) => deviceName(row.device) },
      { title: "case", text: (row) => row.case },
      { title: "pass", text: (row) => row.pass },
      { title: "implementation", text: (row) => row.implementation },
      { title: "of floor", number: true, text: (row) => { const s = shareOfFloor(newest(row)); return s === null ? "—" : percent(s); }, sort: (row) => shareOfFloor(newest(row)) },
      { title: "median ms", number: true, text: (row) => newest(row)[4] === null ? newest(row)[2] : newest(row)[4].toPrecision(4), sort: (row) => newest(row)[4] },
      {
        title: "change", number: true, falling: true,
        text: ({ change }) => (!change ? "" : isChange(change) ? changeText(change) : `(${changeText(change)})`),
        sort: ({ change }) => (!change ? null : isChange(change) ? change.ratio - 1 : 0),
      },
      { title: "trend", text: () => "", draw: trend, sort: (row) => row.history.length },
      { title: "commits", number: true, text: (row) => String(row.history.length), sort: (row) => row.history.length },
      { title: "newest", number: true, text: (row) => newest(row)[1] },
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
    caption: "Measurements at each commit, oldest first",
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
  const { path } = aboutOf("operator", row.operator);
  const folder = path.slice(0, path.lastIndexOf("/"));
  if (path) node.append(element("p", {}, "equation, limits and log: ", docsLink(`${folder}/`, `${folder}/README.md`)));
  node.append(element("pre", {}, `python run_suite.py bench ${row.operator}`));
  return node;
}

function crossover(host) {
  host.append(element("h1", {}, "Crossover with attention"));
  if (!data.crossover.length) { host.append(element("p", {}, "No experiment here times attention beside other mixers.")); return; }
  host.append(element("p", { class: "muted" },
    "The length from which on a row is faster than the fastest attention of the same experiment on the same device, at every longer length too."));
  table(host, {
    caption: "From which length on a row is faster than attention",
    address: true,
    rows: data.crossover,
    key: (row) => `${row.experiment}|${row.row}|${row.device}`,
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
