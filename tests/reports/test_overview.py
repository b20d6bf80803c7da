"""The page of all experiments counts every published cell once and puts the largest gap first."""

from run_suite import REPOSITORY
from suite import storage


def reports():
    rendering = REPOSITORY.rendering()
    made = []
    for name in ("h3/table2", "mamba/table15", "quickstart"):
        _, config, path = REPOSITORY.experiment(name)
        scale = "paper" if "paper" in config.scales else None
        made.append(
            rendering.build(config, path.parent, storage.read(storage.files([REPOSITORY.reference], name)), scale=scale)
        )
    return made


def test_the_parts_of_every_line_add_up_to_its_published_cells():
    (grid,) = REPOSITORY.rendering().overview(reports()).grids
    assert grid.lines[-1][0] == "all"
    for line in grid.lines:
        published, *parts = map(int, line[2:9])
        assert sum(parts) == published
    (table2,) = [line for line in grid.lines if line[0] == "h3/table2"]
    # ten numbers in the paper; the two of `Random` are chance, which is not run
    assert table2[2] == "8"


def test_the_largest_gap_comes_first():
    (grid,) = REPOSITORY.rendering().overview(reports()).grids
    gaps = [int(line[8]) for line in grid.lines[:-1]]
    assert gaps == sorted(gaps, reverse=True)
