"""Makes the site's pages from the repository: a hook of MkDocs.

Every page but the reference is a Markdown file that reads well on a plain git host, too, at the same path on the site.
The experiments' pages begin with the verdicts, the figure and the table of their committed rows, and the reference is
made of the docstrings of everything that the tables of contents name. Nothing is written twice.
"""

from __future__ import annotations

import ast
import inspect
import json
import posixpath
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

HOME = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(HOME / "suite" / "package"))

from subquad.kernels import OPERATORS  # noqa: E402 - the repository is not a package that is installed
from subquad.models import MODELS  # noqa: E402
from subquad.models.backbone import BackboneConfig  # noqa: E402
from subquad.reports.render import render, scale_to_count  # noqa: E402
from subquad.reports.render.card import card, verdict_table  # noqa: E402
from subquad.reports.render.draw import svg  # noqa: E402
from subquad.reports.render.layout import document  # noqa: E402
from subquad.reports.render.report import Report, report_of  # noqa: E402
from subquad.reports.render.rows import StoredRun, load_runs, rows_of  # noqa: E402
from subquad.suite.options import Config  # noqa: E402
from subquad.suite.registry import Entry  # noqa: E402
from subquad.suite.settings.config import ExperimentConfig, find_experiments, load_experiment  # noqa: E402
from subquad.suite.store import storage  # noqa: E402
from subquad.suite.submissions.standing import standings, with_notes, with_standings  # noqa: E402
from subquad.tasks import TASKS  # noqa: E402

EXPERIMENTS = find_experiments(HOME / "reports")
REFERENCE = HOME / "results" / "reference"
TABLES = "results/tables.md"
"""The page of every table and figure of the four papers, which stands for `reports/papers.yaml`."""
TUTORIALS = ("running", "your-mixer", "your-task", "submit")
GUIDES = ("commands", "contents", "grids", "weights", "reading", "notebook", "data", "benchmarks", "glossary")
PLACED = (*TUTORIALS, "results", "arena")
"""Pages of docs/ that are no guides."""
PAGES = ("*.md", "docs/*.md", "docs/diagrams/*.md", "kernels/*.md", "kernels/*/*.md", "reports/**/*.md", "results/*.md")
IMAGES = ("docs/*.png", "docs/*.svg", "docs/site/*.css")
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
BADGE = re.compile(r"^\[!\[[^]]*\]\([^)]*\)\]\([^)]*\)\n", re.MULTILINE)
"""A badge of the README. Its picture is another server's, which no page of the site asks for anything."""
HEADLESS = ("    options:", "      show_root_heading: false", "      show_root_toc_entry: false")
"""Options of a part of the reference whose heading is written here."""
LINK = re.compile(
    r"(?P<code>```.*?```)"
    r"|(?P<image>!?)\[(?P<text>[^][]*(?:\[[^][]*\][^][]*)*)\]\((?P<target>[^()\s]+)\)"
    r"|(?P<span>`[^`\n]+`)",
    re.DOTALL,
)
"""A link or an image of Markdown, or code, in which nothing is a link."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replaces what MkDocs found in docs/ by the pages of the whole repository, and writes the navigation."""
    theirs = [
        file for file in files if file.generated_by or file.abs_src_path is None or "docs" not in file.abs_src_path
    ]
    found = {
        path.relative_to(HOME).as_posix(): None for pattern in (*PAGES, *IMAGES) for path in sorted(HOME.glob(pattern))
    }
    ours = [File(path, str(HOME), config.site_dir, config.use_directory_urls) for path in found]
    made = {
        "reference/operators.md": _operators(),
        "reference/models.md": _models(),
        "reference/tasks.md": _tasks(),
        "results/experiments.md": _experiments(),
        TABLES: _papers(),
    }
    ours += [File.generated(config, path, content=text) for path, text in made.items()]
    ours.append(File.generated(config, "scoreboard.html", content=_scoreboard()))
    figures = ((name, _figure(name)) for name in EXPERIMENTS)
    ours += [File.generated(config, _figure_path(name), content=text) for name, text in figures if text]
    config.nav = _navigation(found)
    return Files([*theirs, *ours])


def _navigation(found: Mapping[str, Any]) -> list[Any]:
    papers: dict[str, list[str]] = {}
    for name in sorted(EXPERIMENTS, key=_natural):
        papers.setdefault(name.partition("/")[0], []).append(f"reports/{name}/README.md")
    operators: dict[str, list[str]] = {}
    for path in found:
        if match := re.fullmatch(r"kernels/(\w+)/\w+\.md", path):
            # README.md before LOG.md
            operators.setdefault(match[1], []).insert(0, path)
    others = [path for path in found if re.fullmatch(r"docs/[\w-]+\.md", path) and Path(path).stem not in PLACED]
    # the order of those that have one, and then the rest
    others.sort(key=lambda path: GUIDES.index(Path(path).stem) if Path(path).stem in GUIDES else len(GUIDES))
    return [
        {"Subquad": ["README.md"]},
        {"Tutorials": [f"docs/{name}.md" for name in TUTORIALS]},
        {"Guides": others},
        {
            "Results": [
                "docs/results.md",
                {"Arena": "docs/arena.md"},
                "results/experiments.md",
                TABLES,
                {"Columns of a row": "results/README.md"},
                {"Device time": "results/device-time.md"},
                *({paper: pages} for paper, pages in papers.items()),
                {"diagrams and examples": [path for path in found if path.startswith("docs/diagrams/")]},
            ]
        },
        {"Operators": ["kernels/README.md", *({name: pages} for name, pages in operators.items())]},
        {"Reference": ["reference/operators.md", "reference/models.md", "reference/tasks.md"]},
        {"Project": ["CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]},
    ]


def _natural(name: str) -> list[tuple[str, int]]:
    """A key that puts `table10` behind `table2`."""
    return [(word, int(number or 0)) for word, number in re.findall(r"(\D+)(\d*)", name)]


def _operators() -> str:
    """One entry for each folder of an operator."""
    folders = dict.fromkeys(target.split(".")[2] for target, _ in OPERATORS.values())
    lines = ["# Operators", "", "Equation, arguments, shapes and sources of every operator, from its docstrings."]
    for folder in folders:
        lines += ["", f"## {folder}", "", f"Derivation, limits and cost: [{folder}](../kernels/{folder}/README.md)."]
        lines += ["", f"::: subquad.kernels.{folder}", *HEADLESS]
    return "\n".join(lines) + "\n"


def _models() -> str:
    """One entry for each module of models: its equation, and the options of every name that it defines."""
    lines = ["# Models", "", "Equation, source and options of every model, from the docstrings."]
    lines += ["", "## Options of all models", "", *_options(BackboneConfig)]
    for module, names in _modules(MODELS.entries).items():
        lines += ["", f"## {', '.join(names)}", "", f"::: {module}", *HEADLESS, "      members: false"]
        for name in names:
            lines += ["", f"Options of `{name}`:", "", *_options(MODELS.load(name), BackboneConfig)]
    return "\n".join(lines) + "\n"


def _tasks() -> str:
    """One entry for each task: an instance, its source and its options."""
    lines = ["# Tasks", "", "An instance, the source and the options of every task, from the docstrings."]
    for name, entry in TASKS.entries.items():
        lines += ["", f"## {name}", "", f"::: {entry.target.replace(':', '.')}", *HEADLESS, "      members: false"]
        lines += ["", *_options(TASKS.load(name))]
    return "\n".join(lines) + "\n"


def _modules(entries: Mapping[str, Entry]) -> dict[str, list[str]]:
    """The names that each module defines."""
    modules: dict[str, list[str]] = {}
    for name, entry in entries.items():
        modules.setdefault(entry.target.partition(":")[0], []).append(name)
    return modules


def _options(config: type[Config], base: type[Config] | None = None) -> Iterator[str]:
    """A table of the options of a configuration, without those that another one has in the same way."""
    inherited = base.model_fields if base else {}
    fields = {
        key: field
        for key, field in config.model_fields.items()
        if key not in inherited or inherited[key].default != field.default
    }
    if not fields:
        yield "none of its own."
        return
    meanings = _meanings(config)
    yield "| option | default | type | meaning |"
    yield "| --- | --- | --- | --- |"
    for key, field in fields.items():
        default = "—" if field.is_required() else f"`{_shown(field.get_default(call_default_factory=True))}`"
        kind = _cell(_type(field.annotation))
        yield f"| `{key}` | {default} | {kind} | {_cell(meanings[key])} |"


def _meanings(config: type[Config]) -> dict[str, str]:
    """The docstring behind each option of a configuration, or an empty text.

    Pydantic would read them too, but in every command and not only for this site.
    """
    found = {}
    for base in reversed(config.__mro__[: config.__mro__.index(Config)]):
        (of_class,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        for option, behind in pairwise([*of_class.body, None]):
            if isinstance(option, ast.AnnAssign):
                text = getattr(getattr(behind, "value", None), "value", None)
                found[option.target.id] = text if isinstance(behind, ast.Expr) and isinstance(text, str) else ""
    return found


def _shown(value: Any) -> str:
    """A value as a grid writes it."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, default=str).strip('"')


def _type(annotation: Any) -> str:
    """`int`, `float or null`, or the words that are allowed."""
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{_shown(part)}`" for part in parts)
    if parts and get_origin(annotation) in (Union, UnionType):
        return " or ".join("null" if part is NoneType else _type(part) for part in parts)
    if parts and get_origin(annotation) is Annotated:
        return _type(parts[0])
    if get_origin(annotation) in (tuple, list):
        return f"list of {_type(parts[0])}"
    if get_origin(annotation) is dict:
        return "table"
    return {"str": "text", "bool": "true or false"}.get(annotation.__name__, annotation.__name__)


def _cell(text: str) -> str:
    """A text in a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def _papers() -> str:
    """The page of `report tables`."""
    command = [sys.executable, str(HOME / "run_suite.py"), "report", "tables", "--format", "md"]
    # its links are relative to the folder in which it is called
    folder = HOME / posixpath.dirname(TABLES)
    return subprocess.run(command, check=True, cwd=folder, stdout=subprocess.PIPE, text=True).stdout


def _scoreboard() -> str:
    """The page of `report --all` for the committed rows."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "scoreboard.html")
        report = ("report", "--all", "--results", str(REFERENCE), "--out", str(out))
        subprocess.run([sys.executable, str(HOME / "run_suite.py"), *report], check=True, stdout=subprocess.DEVNULL)
        # the scripts of the page make links into the site from this
        return out.read_text().replace('<html lang="en"', '<html lang="en" data-docs="./"', 1)


def _experiments() -> str:
    lines = ["# Experiments", "", "The [scoreboard](../scoreboard.html) has all of them on one page, with every seed."]
    lines += ["The page of an experiment has the tables of its committed rows.", ""]
    lines += ["| experiment | what it shows | rows of |", "| --- | --- | --- |"]
    for name, path in sorted(EXPERIMENTS.items(), key=lambda item: _natural(item[0])):
        stored = ", ".join(f"[{scale}](../reports/{name}/README.md#{scale})" for scale in _scales(name))
        lines.append(f"| [{name}](../reports/{name}/README.md) | {load_experiment(path).title} | {stored or '—'} |")
    return "\n".join(lines) + "\n"


@cache
def _scales(experiment: str) -> tuple[str, ...]:
    """The scales of which rows are committed."""
    return tuple(dict.fromkeys(path.parent.name for path in storage.files([REFERENCE], experiment)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to pages of the site, and puts the tables of an experiment behind its README."""
    path = page.file.src_uri
    if (HOME / path).exists() or path == TABLES:
        # comments are keys of quoted numbers; behind the last bar of a line they would be a cell of its table
        markdown = BADGE.sub("", COMMENT.sub("", markdown))
        markdown = LINK.sub(lambda match: _link(match, path, config, files), markdown)
    experiment = posixpath.dirname(path).removeprefix("reports/")
    if path.endswith("/README.md") and experiment in EXPERIMENTS:
        title, _, method = markdown.partition("\n")
        markdown = "".join([title, "\n\n", *_glance(experiment), method, *_tables(experiment)])
    return markdown


def _link(match: re.Match[str], page: str, config: MkDocsConfig, files: Files) -> str:
    target, _, anchor = (match["target"] or "").partition("#")
    if not target or "://" in target or match["image"]:
        return match[0]
    here = posixpath.dirname(page)
    place = posixpath.normpath(posixpath.join(here, target))
    if place in files.src_uris:
        return match[0]
    if place == "reports/papers.yaml":
        place = TABLES
    rows = re.fullmatch(r"results/reference/(.+)/(\w+)", place)
    if rows and rows[1] in EXPERIMENTS:
        place, anchor = f"reports/{rows[1]}/README.md", rows[2]
    elif f"{place}/README.md" in files.src_uris:
        place = f"{place}/README.md"
    elif (HOME / place).exists():
        # no page: a file of source
        if not config.repo_url:
            return match["text"]
        return f"[{match['text']}]({config.repo_url.rstrip('/')}/blob/main/{place})"
    link = posixpath.relpath(place, here or ".") + (f"#{anchor}" if anchor else "")
    return f"[{match['text']}]({link})"


@cache
def _reports(experiment: str) -> dict[str, Report]:
    """The report of each scale with committed rows, the one that is counted first."""
    config = load_experiment(EXPERIMENTS[experiment])
    runs = load_runs(rows_of(storage.files([REFERENCE], experiment)))
    scales = [scale for scale in _scales(experiment) if scale in config.scales]
    scales.sort(key=lambda scale: scale != scale_to_count(config))
    return {scale: _report(experiment, config, runs, scale) for scale in scales}


def _report(experiment: str, config: ExperimentConfig, runs: list[StoredRun], scale: str) -> Report:
    """The report at one scale; on a board, with the mixers that others have submitted."""
    found = standings(HOME / "submissions", experiment, config, scale) if config.budget else []
    runs = [*runs, *load_runs(rows_of([one.part for one in found]))] if found else runs
    board, folder = with_standings(config, found), EXPERIMENTS[experiment].parent
    return with_notes(report_of(board, folder, experiment, runs, scale=scale), found)


def _figure_path(experiment: str) -> str:
    return f"reports/{experiment}/figure.svg"


@cache
def _figure(experiment: str) -> str:
    """The figure of an experiment as SVG; empty where there is none."""
    report = next(iter(_reports(experiment).values()), None)
    return "" if report is None else svg(document(report))


def _glance(experiment: str) -> Iterator[str]:
    """The verdicts, the figure and the coloured table of an experiment, which its page begins with."""
    report = next(iter(_reports(experiment).values()), None)
    if report is None:
        return
    # a page of the site is a folder, and so is every part of the name
    home = "../" * (2 + experiment.count("/"))
    yield card(report, f"{home}scoreboard.html") + "\n\n"
    if _figure(experiment):
        yield f"![{report.title}](figure.svg)\n\n"
    yield verdict_table(report) + "\n\n"


def _tables(experiment: str) -> Iterator[str]:
    """Returns the rest of the report of each scale with committed rows, one section each."""
    reports = _reports(experiment)
    if reports:
        yield "\n\n## Committed rows\n"
    for place, (scale, report) in enumerate(reports.items()):
        found = document(report)
        yield f"\n### {scale}\n\n"
        # the table of the first scale stands on top of the page
        yield verdict_table(report) + "\n\n" if place else ""
        yield "".join(f"- {note.replace('*', chr(92) + '*')}\n" for note in found.notes)
        _, _, body = str(render(replace(found, grids=found.grids[1:], notes=()), "md")).partition("\n")
        _, _, rest = body.partition(found.where)
        yield "\n" + re.sub(r"^(#+ )", r"##\1", rest, flags=re.MULTILINE)
