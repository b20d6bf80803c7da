// ---------------------------------------------------------------- an experiment

const VERDICT_SIGNS = new Map([
  ["agrees", "✓"], ["better", "▲"], ["unclear", "?"], ["unstable", "±"], ["worse", "▼"], ["differs", "≠"],
]);

function experiment(main) {
  const name = params().get("name") || "";
  const found = data.experiments.map((e, i) => ({ e, i })).filter(({ e }) => e.name === name);
  if (!found.length) { unknown(main, "experiment", name); return; }
  const { e, i } = found.find((one) => one.e.scale === params().get("scale")) || found[0];
  main.append(
    element("h1", {}, `${e.name}: ${e.title}`),
    element("p", { class: "muted" }, [e.source && `source: ${e.source}`, `scale ${e.scale}`].filter(Boolean).join("; ")),
  );
  if (found.length > 1) {
    main.append(element("p", {}, "scales with rows: ", ...found.flatMap(({ e: one }) => [
      one.scale === e.scale ? element("strong", {}, one.scale) : element("a", { href: link("experiment", { name, scale: one.scale }) }, one.scale), " "])));
  }
  const there = cellsOf(i);
  const runs = [...new Set(there.flatMap((cell) => cell.runs))].map((at) => data.runs[at]);
  const asked = there.filter((cell) => cell.planned);
  const missing = asked.filter((cell) => cell.verdict === "not run");
  const costs = element("section", { "aria-label": "What it costs" }, element("h2", {}, "What it costs"), ...e.cost.split(/\n\s*\n/).map(prose));
  main.append(element("div", { class: "card" },
    element("p", { class: "big" }, e.counts["in a grid"] ? verdictText(e) : "No number of a paper is judged here."),
    bar(e),
    element("p", {}, e.claims ? `claims: ${e.claims}` : ""),
    element("p", {}, `${runs.length} runs stored${hoursText(runs)}; ${missing.length} of ${asked.length} cells have not been run` +
      `${missing.length && missing.every((cell) => cell.published === null) ? ", none of which the paper has a number for" : ""}.`),
    element("p", {}, e.estimate ? `The whole grid: ${e.estimate}. ` : "",
      e.cost ? element("button", { type: "button", click: () => costs.scrollIntoView() }, "what it costs") : ""),
    ...Object.entries(e.cannotRun).map(([scale, why]) => element("p", {}, `Scale ${scale} cannot run here: ${why}`)),
    element("p", {}, "method, settings and departures: ", docsLink(`reports/${e.name}/`, `reports/${e.name}/README.md`), " · ",
      element("a", { href: link("cells", { experiment: e.name, scale: e.scale }) }, "every cell with its seeds")),
  ));
  main.append(verdictMatrix(e, there));
  onTheWay(main, i);
  if (e.cost) main.append(costs);
  const said = claimRows().filter((row) => row.experiment === i);
  if (said.length) claimTable(main, "Claims of the paper", said, false);
  main.append(
    element("h2", {}, "Run it"),
    element("pre", {}, `python run_suite.py run ${e.name} --scale ${e.scale} --dry-run     # the plan, with its time and size\npython run_suite.py report ${e.name} --scale ${e.scale}`),
    element("h2", {}, "Notes"),
    element("ul", {}, ...e.notes.map((note) => element("li", {}, note))),
  );
}

/** The counts of an experiment as an answer: how many numbers agree, of those of many and of few seeds. */
function verdictText(e) {
  const few = sumOf(e, SUMS[3][1]);
  const full = sumOf(e, ["agree", "better", "unclear", "differ"]);
  const parts = [
    full && `${sumOf(e, SUMS[0][1])} of ${full} numbers with three seeds or more agree`,
    few && `${sumOf(e, ["agree, few seeds", "better, few seeds"])} of ${few} numbers with one or two seeds agree`,
    ...["at chance", "other device", "other data", "not run"].map((name) => e.counts[name] && `${e.counts[name]} ${name}`),
  ];
  return `${parts.filter(Boolean).join("; ")}.`;
}

/** A paragraph of a document, whose words in backticks are code. */
function prose(text) {
  return element("p", { class: "prose" }, ...text.split("`").map((part, i) => (i % 2 ? element("code", {}, part) : part)));
}

/** How long runs took together, on which devices; empty where no run says so. */
function hoursText(runs) {
  const timed = runs.filter((run) => run.seconds !== null);
  if (!timed.length) return "";
  const sum = timed.reduce((total, run) => total + run.seconds, 0);
  const devices = [...new Set(timed.map((run) => run.device.split(",")[0]))].filter(Boolean);
  return `, which took ${duration(sum)} together (${duration(middle(timed.map((run) => run.seconds)))} at the median) on ${devices.join(" and ") || "an unknown device"}`;
}

function duration(seconds) {
  if (seconds >= 5400) return `${short(seconds / 3600)} hours`;
  return seconds >= 90 ? `${short(seconds / 60)} minutes` : `${short(seconds)} s`;
}

/** What rows measured on the way against each cost, as charts, and the ends of their curves as a table. */
function onTheWay(main, i) {
  for (const { column, value, looks, costs } of data.onTheWay.filter((one) => one.experiment === i)) {
    main.append(element("h2", {}, `On the way: ${column}`),
      element("p", { class: "muted" }, "A thin line is a seed, a thick one the median over the seeds. The table has the ends of the curves."));
    const charts = element("div", { class: "charts" });
    const lines = [];
    for (const [label, curves] of costs) {
      const series = curves.flatMap(([row, seeds, middle]) => [
        ...(seeds.length > 1 ? seeds : []).map((points) => ({ label: row, color: looks[row][0], points, line: true, width: 0.6, dots: false })),
        ...(seeds.length > 1 ? [middle] : seeds).map((points) => ({ label: row, ...lookOf(looks[row]), points, line: true, width: 2, dots: false })),
      ]);
      charts.append(element("figure", {}, element("figcaption", {}, `against ${label}`),
        chart({ series, logX: true, logY: true, xLabel: label, yLabel: value, title: `${value} against ${label}, ${column}` })));
      for (const [row, seeds, , tie] of curves) {
        const line = lines.find((one) => one.row === row) || lines[lines.push({ row, ends: new Map(), tie: false, values: [] }) - 1];
        const ends = seeds.map((points) => points[points.length - 1]);
        line.ends.set(label, middle(ends.map(([x]) => x)));
        line.values = ends.map(([, y]) => y);
        line.tie = line.tie || tie;
      }
    }
    main.append(charts, legend(lines.map(({ row }) => ({ label: row, ...lookOf(looks[row]) }))));
    table(main, {
      caption: `${value} at the end, ${column}`,
      rows: lines,
      words: false,
      columns: [
        { title: "row", text: (line) => line.row },
        { title: "median", number: true, text: (line) => middle(line.values).toPrecision(4), sort: (line) => middle(line.values) },
        { title: "seeds", text: (line) => line.values.map((each) => each.toPrecision(4)).join(", ") },
        { title: "best, or a tie with it", text: (line) => (line.tie ? "yes" : "") },
        ...costs.map(([label]) => ({
          title: label, number: true, text: (line) => (line.ends.has(label) ? short(line.ends.get(label)) : ""), sort: (line) => line.ends.get(label) || null,
        })),
      ],
    });
  }
}

/** The table as the paper has it: ours, the paper's number below it, coloured by the verdict, which a sign repeats. */
function verdictMatrix(e, there) {
  const columns = [...new Set(there.map((cell) => cell.column))];
  const rows = [...new Set(there.map((cell) => cell.row))];
  const at = new Map(there.map((cell) => [`${cell.row}\n${cell.column}`, cell]));
  // what neighbours share stands once above them
  const heads = columns.map((column) => (column.includes(" ") ? column.slice(0, column.lastIndexOf(" ")) : ""));
  const groups = heads.map((head, i) => (head && (head === heads[i - 1] || head === heads[i + 1]) ? head : ""));
  const above = [];
  groups.forEach((group, i) => {
    if (i && group && groups[i - 1] === group) above[above.length - 1].span += 1;
    else above.push({ group, span: 1 });
  });
  const leaf = (column, i) => (groups[i] ? column.slice(groups[i].length + 1) : column);
  const one = (cell) => {
    if (!cell) return element("td");
    const kind = verdictClass(cell.verdict);
    const judged = VERDICT_SIGNS.has(cell.verdict);
    const [value, spread = ""] = (cell.ours || "").split(" ± ");
    return element("td", { class: judged ? `judged ${kind}` : "", title: [cell.verdict, cell.seeds && `${cell.seeds} seeds`, cell.values.map(short).join(", ")].filter(Boolean).join("; ") },
      element("span", { class: "ours" }, `${judged ? `${VERDICT_SIGNS.get(cell.verdict)} ` : ""}${value}`),
      spread ? element("span", { class: "theirs" }, `± ${spread}`) : "",
      cell.paper ? element("span", { class: "theirs paper" }, cell.paper) : "");
  };
  const told = `Ours with its standard deviation over seeds, and last, in italics, the ${e.reference}'s number${e.unit ? ` (${e.unit})` : ""}. ` +
      "✓ agrees, ▲ better, ? unclear, ± unstable over seeds, ▼ worse, ≠ differs, — not run.";
  // a caption of the table would be as wide as the table, and leave a phone
  return element("div", {}, element("p", { class: "muted" }, told), element("div", { class: "matrix" }, element("table", { "aria-label": told },
    element("thead", {},
      groups.some(Boolean) ? element("tr", { class: "group" }, element("td"), ...above.map(({ group, span }) => element("th", { colspan: span, scope: "colgroup" }, element("span", {}, group)))) : "",
      element("tr", {}, element("td"), ...columns.map((column, i) => element("th", { scope: "col" }, leaf(column, i))))),
    element("tbody", {}, ...rows.map((row) => {
      const cells = columns.map((column) => at.get(`${row}\n${column}`));
      const mixer = cells.find((cell) => cell && cell.mixer);
      return element("tr", {}, element("th", { scope: "row" }, mixer ? mixerLink(mixer.mixer, row) : row), ...cells.map(one));
    })))));
}

// ---------------------------------------------------------------- mixers

function mixers(main) {
  main.append(element("h1", {}, "Mixers"));
  table(main, {
    caption: "Every mixer with rows",
    address: true,
    rows: [...mixerCells.keys()].sort((a, b) => mixerName(a).localeCompare(mixerName(b))).map((name) => ({ name, cells: mixerCells.get(name) })),
    columns: [
      { title: "mixer", text: (row) => mixerName(row.name), draw: (row) => mixerLink(row.name) },
      { title: "name in a grid", text: (row) => row.name, draw: (row) => element("code", {}, row.name) },
      { title: "what it is", text: (row) => aboutOf("model", row.name).summary },
      { title: "experiments", number: true, falling: true, text: (row) => String(new Set(row.cells.map(nameOf)).size), sort: (row) => new Set(row.cells.map(nameOf)).size },
      { title: "cells with rows", number: true, falling: true, text: (row) => String(row.cells.length), sort: (row) => row.cells.length },
    ],
  });
  pairBoxes(main, [...mixerCells.keys()]);
}

function mixer(main) {
  const name = params().get("name") || "";
  const about = aboutOf("model", name);
  const own = mixerCells.get(name) || [];
  if (!own.length && !about.summary) { unknown(main, "mixer", name); return; }
  main.append(element("h1", {}, mixerName(name)), element("p", {}, about.summary));
  const facts = element("ul", { class: "facts" });
  facts.append(element("li", {}, "name in a grid: ", element("code", {}, name)));
  if (about.path) facts.append(element("li", {}, "code: ", docsLink("reference/models/", about.path)));
  const used = [...new Set(own.flatMap((cell) => cell.runs).flatMap((at) => data.operators[data.runs[at].operators]))].sort();
  if (used.length) facts.append(element("li", {}, "operators: ", ...used.flatMap((op) => [operatorLink(op), " "])));
  const sizes = own.map(runOf).filter((run) => run.parameters);
  if (sizes.length) facts.append(element("li", {}, `parameters in its runs: ${range(sizes.map((run) => run.parameters))}`));
  const states = own.map(runOf).map((run) => run.state).filter((state) => state !== null);
  if (states.length) facts.append(element("li", {}, `state in its runs: ${bytes(Math.min(...states))} to ${bytes(Math.max(...states))}`));
  const home = paperTables(own);
  if (home.length) facts.append(element("li", {}, "tables of the four papers: ", ...home.flatMap((cell) => [experimentLink(cell), " "])));
  main.append(facts);
  if (about.text) main.append(element("details", { open: "open" }, element("summary", {}, "Equation and source"), element("pre", { class: "doc" }, about.text)));
  pairBoxes(main, [...mixerCells.keys()], name, name === "kda" ? "gated-deltanet" : "kda");
  main.append(element("h2", {}, "Where it stands"));
  standing(main, own, true);
  const speed = speedCells(own);
  if (speed.length) {
    main.append(element("h2", {}, "How fast it is"));
    speedTable(main, `Times, speeds and memory of ${mixerName(name)}`, speed);
  }
}

const range = (values) => `${short(Math.min(...values))}${Math.min(...values) < Math.max(...values) ? ` to ${short(Math.max(...values))}` : ""}`;
const speedCells = (cells) => cells.filter((cell) => cell.mean !== null && experimentOf(cell).timed);
/** One cell of each experiment of a paper that has a row of this mixer. */
const paperTables = (cells) => [...new Map(cells.filter((cell) => experimentOf(cell).folder in data.papers).map((cell) => [nameOf(cell), cell])).values()];

/** The place of a cell among the rows of its column, by the median: {place, of}. */
function placeOf(cell) {
  const [, smaller] = columnOf(cell);
  const others = cellsOf(cell.experiment).filter((other) => other.column === cell.column && other.mean !== null);
  const own = middle(cell.values);
  return { place: 1 + others.filter((other) => (smaller ? middle(other.values) < own : middle(other.values) > own)).length, of: others.length };
}

function rateOf(cell) {
  return data.rates.find(([experiment, row, column]) => experiment === cell.experiment && row === cell.row && column === cell.column);
}

/** Where cells stand in the columns of their tables, with seeds, rates, state and parameters. */
function standing(host, cells, withTask) {
  const rows = cells.filter((cell) => cell.mean !== null && !experimentOf(cell).timed);
  table(host, {
    caption: "Place of the median in each column, with every seed",
    address: true,
    rows,
    key: cellKey,
    choices: [
      { title: "experiment", of: nameOf },
      { title: "scale", of: scaleOf },
      ...(withTask ? [{ title: "task", of: (cell) => cell.task }] : []),
    ],
    columns: [
      { title: "experiment", text: nameOf, draw: experimentLink },
      { title: "scale", text: scaleOf },
      withTask
        ? { title: "task", text: (cell) => cell.task, draw: (cell) => taskLink(cell.task) }
        : { title: "mixer", text: (cell) => cell.row, draw: (cell) => (cell.mixer ? mixerLink(cell.mixer, cell.row) : cell.row) },
      { title: "column", text: (cell) => cell.column + (withTask && cell.row !== mixerName(cell.mixer) ? ` (row ${cell.row})` : "") },
      { title: "place", number: true, text: (cell) => { const p = placeOf(cell); return p.of > 1 ? `${p.place} of ${p.of}` : ""; }, sort: (cell) => { const p = placeOf(cell); return p.of > 1 ? p.place / p.of : null; } },
      { title: "ours", number: true, text: (cell) => cell.ours, sort: (cell) => cell.mean },
      { title: "seeds", text: (cell) => cell.seeds, draw: dots, sort: (cell) => cell.values.length },
      { title: "paper", number: true, text: (cell) => cell.paper, sort: (cell) => cell.published },
      { title: "verdict", text: (cell) => (cell.verdict === "not run" ? "" : cell.verdict) },
      { title: "rates at which it learns", text: (cell) => { const found = rateOf(cell); return found ? found[4] : ""; } },
      { title: "state", number: true, text: (cell) => { const run = runOf(cell); return run.state === null ? "" : bytes(run.state); }, sort: (cell) => runOf(cell).state },
    ],
    open: (cell) => {
      const node = cellDetail(cell);
      const found = rateOf(cell);
      if (found) node.prepend(element("p", {}, `Runs that succeed, by rate: ${found[3].map(([value, good, runs]) => `${value}: ${good} of ${runs}`).join("; ")}`));
      return node;
    },
  });
}

function speedTable(host, caption, rows) {
  table(host, {
    caption,
    rows,
    words: rows.length > 12,
    columns: [
      { title: "experiment", text: nameOf, draw: experimentLink },
      { title: "scale", text: scaleOf },
      { title: "row", text: (cell) => cell.row },
      { title: "column", text: (cell) => cell.column },
      { title: "place", number: true, text: (cell) => { const p = placeOf(cell); return p.of > 1 ? `${p.place} of ${p.of}` : ""; }, sort: (cell) => placeOf(cell).place },
      { title: "ours", number: true, text: (cell) => cell.ours, sort: (cell) => cell.mean },
      { title: "unit", text: (cell) => experimentOf(cell).unit },
      { title: "device", text: (cell) => runOf(cell).device },
    ],
  });
}

// ---------------------------------------------------------------- a pair of mixers

/** The values of a cell by seed; null where a value is of several runs. */
function bySeed(cell) {
  const ok = cell.runs.map((at) => data.runs[at]).filter((run) => run.status === "ok");
  return ok.length === cell.values.length ? new Map(ok.map((run, i) => [run.seed, cell.values[i]])) : null;
}

/** Every column that has rows of both: {cell, other, pairs: [a - b], outcome}. */
function pairsOf(a, b) {
  const places = new Map();
  const add = (cells, side) => {
    for (const cell of cells) {
      if (cell.mean === null || experimentOf(cell).timed) continue;
      const place = `${cell.experiment}\n${cell.column}`;
      if (!places.has(place)) places.set(place, [[], []]);
      places.get(place)[side].push(cell);
    }
  };
  add(mixerCells.get(a) || [], 0);
  add(mixerCells.get(b) || [], 1);
  const found = [];
  let several = 0;
  for (const [left, right] of places.values()) {
    if (!left.length || !right.length) continue;
    // of several rows of a mixer, the one with its plain name is meant
    const plain = (cells, name) => (cells.length === 1 ? cells : cells.filter((cell) => cell.row === mixerName(name)));
    const [x, y] = [plain(left, a), plain(right, b)];
    if (x.length !== 1 || y.length !== 1) { several += 1; continue; }
    found.push(compared(x[0], y[0]));
  }
  return { found, several };
}

function compared(cell, other) {
  const [left, right] = [bySeed(cell), bySeed(other)];
  const [, smaller] = columnOf(cell);
  const seeds = left && right ? [...left.keys()].filter((seed) => right.has(seed)).sort((x, y) => x - y) : [];
  const pairs = seeds.map((seed) => (smaller ? -1 : 1) * (left.get(seed) - right.get(seed)));
  const isShare = experimentOf(cell).unit === "%";
  const enough = (value, seed) => Math.abs(value) > (isShare ? 1 : 0.01 * Math.abs(right.get(seed)));
  const all = (sign) => pairs.every((value, i) => sign * value > 0 && enough(value, seeds[i]));
  const outcome = pairs.length < 3 ? "fewer than three pairs" : all(1) ? "first" : all(-1) ? "second" : "no clear difference";
  return { cell, other, seeds, pairs, outcome };
}

/** Who is better in how many columns, and at which tasks; empty without columns. */
function outcomeText(names, found, scale) {
  if (!found.length) return "";
  const of = (kind) => found.filter((one) => one.outcome === kind);
  const tasksOf = (kind) => {
    const counts = new Map();
    for (const { cell } of of(kind)) counts.set(cell.task, (counts.get(cell.task) || 0) + 1);
    return counts.size ? ` (${[...counts].map(([task, count]) => `${task} ${count}`).join(", ")})` : "";
  };
  const few = of("fewer than three pairs").length;
  return `${scale ? "At the paper's scale" : "At smaller scales"} ${names[0]} is better in ${of("first").length} of ${found.length} columns${tasksOf("first")}, ` +
    `${names[1]} in ${of("second").length}${tasksOf("second")}; ${of("no clear difference").length} show no clear difference` +
    `${few ? ` and ${few} have fewer than three pairs of seeds` : ""}.`;
}

function pair(main) {
  const [a, b] = [params().get("a") || "", params().get("b") || ""];
  for (const name of [a, b]) if (!mixerCells.has(name)) { unknown(main, "mixer", name); return; }
  const { found, several } = pairsOf(a, b);
  const names = [mixerName(a), mixerName(b)];
  const outcome = (one) => ({ first: `${names[0]} better`, second: `${names[1]} better` })[one.outcome] || one.outcome;
  main.append(element("h1", {}, `${names[0]} against ${names[1]}`));
  pairBoxes(main, [...mixerCells.keys()], a, b);
  main.append(
    ...(found.length ? ["paper", ""].map((scale) => outcomeText(names, found.filter((one) => (scaleOf(one.cell) === "paper") === (scale === "paper")), scale))
      : ["No table has rows of both."]).filter(Boolean).map((text) => element("p", { class: "big" }, text)),
    element("p", { class: "muted" },
      "Seeds are paired: both mixers saw the same data in the same order. A column counts as better where every pair differs the same way, " +
      "by more than one point of accuracy or 1 % of another quantity. Three pairs that agree have p = 0.25 in a sign test, so look at how many columns say the same; " +
      "report EXPERIMENT --against ROW tests one table." +
      (several ? ` ${several} columns with several settings of one of the two are left out.` : "")),
    element("p", {}, mixerLink(a), " · ", mixerLink(b)),
  );
  if (!found.length) return;
  const order = ["first", "second", "no clear difference", "fewer than three pairs"];
  table(main, {
    caption: `${names[0]} and ${names[1]} in the same columns`,
    address: true,
    rows: found.sort((x, y) => order.indexOf(x.outcome) - order.indexOf(y.outcome) || (scaleOf(y.cell) === "paper") - (scaleOf(x.cell) === "paper")),
    choices: [
      { title: "better", of: outcome },
      { title: "experiment", of: (one) => nameOf(one.cell) },
      { title: "scale", of: (one) => scaleOf(one.cell) },
    ],
    columns: [
      { title: "experiment", text: (one) => nameOf(one.cell), draw: (one) => experimentLink(one.cell) },
      { title: "scale", text: (one) => scaleOf(one.cell) },
      { title: "task", text: (one) => one.cell.task, draw: (one) => taskLink(one.cell.task) },
      { title: "column", text: (one) => one.cell.column },
      { title: names[0], text: (one) => one.cell.ours, draw: (one) => dots(one.cell), sort: (one) => one.cell.mean },
      { title: names[1], text: (one) => one.other.ours, draw: (one) => dots(one.other), sort: (one) => one.other.mean },
      { title: "advantage by seed", number: true, text: (one) => one.pairs.map((value) => `${value > 0 ? "+" : ""}${short(value)}`).join(", "), sort: (one) => (one.pairs.length ? middle(one.pairs) : null) },
      { title: "better", text: outcome },
    ],
  });
  const speeds = [...speedCells(mixerCells.get(a)), ...speedCells(mixerCells.get(b))];
  const both = speeds.filter((cell) => new Set(speeds.filter((other) => other.experiment === cell.experiment && other.column === cell.column).map((other) => other.mixer)).size > 1);
  if (both.length) {
    main.append(element("h2", {}, "How fast they are"));
    speedTable(main, "Times, speeds and memory in the same columns", both.sort((x, y) => x.experiment - y.experiment || x.column.localeCompare(y.column)));
  }
}

// ---------------------------------------------------------------- tasks

function tasks(main) {
  main.append(element("h1", {}, "Tasks"));
  table(main, {
    caption: "Every task with rows",
    address: true,
    rows: [...taskCells.keys()].sort().map((name) => ({ name, cells: taskCells.get(name) })),
    columns: [
      { title: "task", text: (row) => row.name, draw: (row) => taskLink(row.name) },
      { title: "what it is", text: (row) => aboutOf("task", row.name).summary },
      { title: "mixers", number: true, falling: true, text: (row) => String(new Set(row.cells.map((cell) => cell.mixer)).size), sort: (row) => new Set(row.cells.map((cell) => cell.mixer)).size },
      { title: "cells with rows", number: true, falling: true, text: (row) => String(row.cells.length), sort: (row) => row.cells.length },
    ],
  });
}

function task(main) {
  const name = params().get("name") || "";
  const about = aboutOf("task", name);
  const own = taskCells.get(name) || [];
  if (!own.length && !about.summary) { unknown(main, "task", name); return; }
  main.append(element("h1", {}, name), element("p", {}, about.summary));
  if (about.path) main.append(element("p", {}, "code: ", docsLink("reference/tasks/", about.path)));
  if (about.text) main.append(element("details", { open: "open" }, element("summary", {}, "An instance, and the source"), element("pre", { class: "doc" }, about.text)));
  main.append(element("h2", {}, "Who solves it"));
  standing(main, own, false);
}
