// ---------------------------------------------------------------- data, and what is looked up in it again and again

let data = null;
const mixerCells = new Map(); // mixer to its cells that have runs
const taskCells = new Map();
const cellsByExperiment = new Map();
const mixerNames = new Map();
const descriptions = new Map();

const experimentOf = (cell) => data.experiments[cell.experiment];
const nameOf = (row) => data.experiments[row.experiment].name;
const scaleOf = (row) => data.experiments[row.experiment].scale;
const cellsOf = (index) => cellsByExperiment.get(index) || [];
/** [chance, whether smaller is better, metric] of the column of a cell. */
const columnOf = (cell) => (Object.hasOwn(experimentOf(cell).columns, cell.column) ? experimentOf(cell).columns[cell.column] : [null, false, ""]);
const NO_RUN = { parameters: null, state: null, device: "", seconds: null };
const runOf = (cell) => (cell.runs.length ? data.runs[cell.runs[0]] : NO_RUN);
const SIGNED = " [-1, 1]"; // behind the name of a mixer whose state may have negative eigenvalues

/** The name of a mixer on the leaderboard; a mixer that differs from one there in its eigenvalues alone says so. */
function mixerName(mixer) {
  const plain = mixer.endsWith(SIGNED) ? mixer.slice(0, -SIGNED.length) : mixer;
  if (mixerNames.has(mixer)) return mixerNames.get(mixer);
  if (mixer !== plain && mixerNames.has(plain)) return mixerNames.get(plain) + SIGNED;
  return mixerNames.has(plain + SIGNED) ? `${mixerNames.get(plain + SIGNED)} [0, 1]` : mixer;
}

/** The middle value, or the mean of the two in the middle. */
function middle(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const half = sorted.length / 2;
  return sorted.length % 2 ? sorted[Math.floor(half)] : (sorted[half - 1] + sorted[half]) / 2;
}

/** A size of memory: 512 B, 16 KiB, 2.5 MiB. */
function bytes(size) {
  for (const [unit, name] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (size >= unit) return `${Number((size / unit).toPrecision(3))} ${name}`;
  }
  return `${size} B`;
}

/** What the sources say of a model, task or operator; a mixer may be a model with a setting behind its name. */
function aboutOf(kind, name) {
  const none = { summary: "", path: "", text: "" };
  return descriptions.get(`${kind} ${name}`) || descriptions.get(`${kind} ${name.replace(/ \[-1, 1\]$/, "")}`) || none;
}

function prepare(found) {
  data = found;
  for (const [kind, name, summary, path, text] of data.about) descriptions.set(`${kind} ${name}`, { name, summary, path, text });
  for (const cell of data.cells) {
    if (!cellsByExperiment.has(cell.experiment)) cellsByExperiment.set(cell.experiment, []);
    cellsByExperiment.get(cell.experiment).push(cell);
    const { model = {}, task: of = {} } = cell.runs.length ? data.settings[runOf(cell).settings] : {};
    // the sign of eigenvalues tells two mixers of one name apart
    cell.mixer = model && model.name ? model.name + (model.negative_eigenvalues === true ? SIGNED : "") : "";
    cell.task = of && of.name ? of.name : "";
    for (const [cells, name] of [[mixerCells, cell.mixer], [taskCells, cell.task]]) {
      if (!name) continue;
      if (!cells.has(name)) cells.set(name, []);
      cells.get(name).push(cell);
    }
    if (cell.mixer && nameOf(cell) === "leaderboard/parameters") mixerNames.set(cell.mixer, cell.row);
  }
}

// ---------------------------------------------------------------- addresses

const VIEWS = new Map([
  ["", home], ["experiments", experiments], ["experiment", experiment], ["cells", cells], ["claims", claims],
  ["mixers", mixers], ["mixer", mixer], ["pair", pair], ["tasks", tasks], ["task", task],
  ["cost", cost], ["kernels", kernels], ["crossover", crossover],
]);
const MENU = [["", "Questions"], ["experiments", "Experiments"], ["mixers", "Mixers"], ["tasks", "Tasks"], ["cells", "Cells"],
  ["claims", "Claims"], ["cost", "State and speed"], ["kernels", "Kernels"], ["crossover", "Crossover"]];
/** Views that stand under another entry of the menu. */
const UNDER = new Map([["experiment", "experiments"], ["mixer", "mixers"], ["pair", "mixers"], ["task", "tasks"]]);

/** The view and its parameters, from an address such as `#cells?experiment=mamba/table11&scale=paper`. */
function place() {
  const [view, query = ""] = location.hash.slice(1).split(/\?(.*)/s);
  return { view, query: new URLSearchParams(query) };
}

const params = () => place().query;

function link(view, values = {}) {
  const query = new URLSearchParams(Object.entries(values).filter(([, value]) => value !== ""));
  // slashes stay readable in an address
  return `#${view}${query.size ? `?${String(query).replaceAll("%2F", "/")}` : ""}`;
}

function go(view, values) { location.hash = link(view, values); }

/** Writes values into the address without drawing the view again. push: as a step that "back" returns from. */
function keep(values, push) {
  const { view, query } = place();
  const next = link(view, { ...Object.fromEntries(query), ...values });
  if (next !== (location.hash || "#")) history[push ? "pushState" : "replaceState"](null, "", next);
}

const docs = document.documentElement.dataset.docs;
/** A link into the documentation site where the page is part of it, and else the words alone. */
const docsLink = (path, words) => (docs === undefined ? element("code", {}, words) : element("a", { href: docs + path }, words));
const experimentLink = (row) => element("a", { href: link("experiment", { name: nameOf(row), scale: scaleOf(row) }) }, nameOf(row));
const mixerLink = (name, words = mixerName(name)) => element("a", { href: link("mixer", { name }) }, words);
const taskLink = (name) => (name ? element("a", { href: link("task", { name }) }, name) : "");
const operatorLink = (name) => (data.kernels.some((row) => row.operator === name) ? element("a", { href: link("kernels", { operator: name }) }, name) : element("code", {}, name));

function unknown(main, kind, name) {
  main.append(element("h1", {}, `There is no ${kind} “${name}” here`), element("p", {}, element("a", { href: "#" }, "to the first page")));
}

function render() {
  const main = document.getElementById("main");
  const { view } = place();
  main.replaceChildren();
  (VIEWS.get(view) || ((host) => unknown(host, "page", view)))(main);
  const title = main.querySelector("h1");
  document.title = `${title ? title.textContent : data.title} · Subquad`;
  const entry = UNDER.get(view) || view;
  for (const a of document.querySelectorAll("header nav a")) {
    if (a.getAttribute("href") === link(entry)) a.setAttribute("aria-current", "page");
    else a.removeAttribute("aria-current");
  }
}

// ---------------------------------------------------------------- search

const MOST_FOUND = 12;

/** [words to find, words to show, address] of everything that has a page. */
function searched() {
  const found = [];
  for (const name of mixerCells.keys()) found.push([`mixer ${name} ${mixerName(name)} ${aboutOf("model", name).summary}`, `mixer ${mixerName(name)}`, link("mixer", { name })]);
  for (const name of taskCells.keys()) found.push([`task ${name} ${aboutOf("task", name).summary}`, `task ${name}`, link("task", { name })]);
  for (const e of data.experiments) found.push([`experiment ${e.name} ${e.scale} ${e.title} ${e.source}`, `${e.name}, ${e.scale}: ${e.title}`, link("experiment", { name: e.name, scale: e.scale })]);
  for (const name of new Set(data.kernels.map((row) => row.operator))) found.push([`operator kernel ${name}`, `operator ${name}`, link("kernels", { operator: name })]);
  return found.map(([words, shown, href]) => [words.toLowerCase(), shown, href]);
}

function drawSearch(host) {
  const all = searched();
  const list = element("ul", { id: "found", hidden: "hidden" });
  const count = element("span", { class: "hidden", role: "status" });
  const field = element("input", {
    type: "search", placeholder: "mixer, task, table, kernel", "aria-label": "search", "aria-controls": "found",
    input: () => show(),
    keydown: (event) => {
      const first = list.querySelector("a");
      if (event.key === "Enter" && first) first.click();
      if (event.key === "Escape") { field.value = ""; show(); }
    },
  });
  function show() {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    // a name that begins with the words stands first
    const rank = ([, shown]) => (shown.toLowerCase().replace(/^(mixer|task|operator) /, "").startsWith(words[0]) ? 0 : 1);
    const found = words.length ? all.filter(([text]) => words.every((word) => text.includes(word))).sort((a, b) => rank(a) - rank(b)) : [];
    list.replaceChildren(...found.slice(0, MOST_FOUND).map(([, shown, href]) => element("li", {},
      element("a", { href, click: () => { field.value = ""; show(); } }, shown))));
    list.hidden = !found.length;
    count.textContent = words.length ? `${found.length} found` : "";
  }
  host.append(field, count, list);
}

// ---------------------------------------------------------------- beginning

async function unpacked() {
  const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

async function begin() {
  if (typeof DecompressionStream === "undefined") {
    document.getElementById("main").textContent = "This page needs a browser of 2023 or newer, which can unpack its numbers.";
    return;
  }
  prepare(await unpacked());
  document.getElementById("where").textContent = data.where;
  const nav = document.querySelector("header nav");
  nav.append(...MENU.map(([view, words]) => element("a", { href: link(view) }, words)));
  if (docs !== undefined) nav.append(element("a", { href: docs }, "Documentation"));
  drawSearch(document.querySelector("header .search"));
  render();
  addEventListener("hashchange", () => {
    render();
    if (params().get("at") === null) {
      scrollTo(0, 0);
      document.getElementById("main").focus({ preventScroll: true });
    }
  });
  performance.mark("drawn");
  document.documentElement.dataset.ready = "yes";
}

begin();
