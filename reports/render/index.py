"""Every table and figure of the four papers on one page: its experiment, what runs here, and what has rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import model_validator

from reports.render.document import DASH, Document, Grid
from suite.options import Config, parse, read_yaml
from suite.registry import nearest
from suite.settings.config import ExperimentConfig

HEADER = ("paper", "item", "what it shows", "experiment", "runs here at", "cannot run here", "rows stored")


class Item(Config):
    """One table or figure of a paper, or several that belong together."""

    item: str
    """Its name in the paper: `Table 3`, `Figures 6 and Table 13`."""
    shows: str
    experiments: tuple[str, ...] = ()
    """The experiments that measure it or list its numbers."""
    documents: tuple[str, ...] = ()
    """Documents and tests that stand for a diagram, as paths from the repository's root."""

    @model_validator(mode="after")
    def _stands_somewhere(self) -> Item:
        if not (self.experiments or self.documents):
            raise ValueError(f"{self.item}: name its experiments or its documents")
        return self


class Papers(Config):
    """The file `reports/papers.yaml`: every paper to its tables and figures, in the order of the paper."""

    papers: dict[str, tuple[Item, ...]]


def read_papers(path: Path, experiments: Iterable[str]) -> dict[str, tuple[Item, ...]]:
    """The tables and figures of every paper. ValueError for an experiment that is none of `experiments`."""
    papers = parse(Papers, {"papers": read_yaml(path.read_text())}, str(path)).papers
    known = tuple(experiments)
    for items in papers.values():
        for name in (name for item in items for name in item.experiments):
            if name not in known:
                raise ValueError(f"{path}: unknown experiment {name!r}{nearest(name, known)}")
    return papers


def index(
    papers: Mapping[str, tuple[Item, ...]],
    configs: Mapping[str, ExperimentConfig],
    stored: Mapping[str, Iterable[str]],
    *,
    home: str | None = None,
) -> Document:
    """One line for each table or figure.

    configs: the grid of every experiment. stored: experiment to the scales that have rows.
    home: path from the page to the repository's root, for links in Markdown; None: no links.
    """
    lines = [_line(paper, item, configs, stored, home) for paper, items in papers.items() for item in items]
    counts = {
        "can run here at some scale": sum(line[4] != DASH for line in lines),
        "have rows": sum(line[6] != DASH for line in lines),
        "are diagrams or examples, which a document or a test stands for": sum(
            not item.experiments for items in papers.values() for item in items
        ),
    }
    notes = (
        f"{len(lines)} tables and figures, of which " + ", ".join(f"{n} {words}" for words, n in counts.items()) + ".",
        "`report EXPERIMENT` shows the paper's numbers beside ours, and why a scale cannot run here.",
        "Scales other than `paper` are smaller protocols that the grid declares.",
    )
    grid = Grid("", HEADER, tuple(lines), len(HEADER), ((),) * len(lines))
    return Document(
        "tables",
        "Every table and figure of the four papers",
        "made by `python run_suite.py report tables`; an experiment is a folder below reports/",
        (grid,),
        notes,
        (),
        lambda: None,
    )


def _line(
    paper: str,
    item: Item,
    configs: Mapping[str, ExperimentConfig],
    stored: Mapping[str, Iterable[str]],
    home: str | None,
) -> tuple[str, ...]:
    def scales(found: Mapping[str, Iterable[str]]) -> str:
        """The scales of each experiment; the name of an experiment stands only where there are several."""
        texts = [(name, ", ".join(found[name])) for name in item.experiments]
        alone = len(texts) == 1
        return (
            "; ".join(text if alone else f"{name.rpartition('/')[2]}: {text}" for name, text in texts if text) or DASH
        )

    def linked(path: str, name: str) -> str:
        return name if home is None else f"[{name}]({home}/{path})"

    places = [linked(f"reports/{name}/", name) for name in item.experiments]
    places += [linked(path, Path(path).name) for path in item.documents]
    return (
        paper,
        item.item,
        item.shows,
        ", ".join(places),
        scales({name: configs[name].runnable for name in item.experiments}),
        scales({name: tuple(configs[name].cannot_run) for name in item.experiments}),
        scales({name: tuple(stored.get(name, ())) for name in item.experiments}),
    )
