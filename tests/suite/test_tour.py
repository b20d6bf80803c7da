"""The notebook of the examples: it is stored as it is written, and every cell of it runs."""

import ast
import json
import re

import pytest

from subquad.run_suite import HOME
from tests.processes import with_subquad

TOUR = HOME / "examples" / "tour.ipynb"


def cells(kind):
    return [cell for cell in json.loads(TOUR.read_text())["cells"] if cell["cell_type"] == kind]


def test_the_notebook_is_stored_without_outputs_and_its_cells_are_python():
    for cell in cells("code"):
        assert (cell["outputs"], cell["execution_count"], cell["metadata"]) == ([], None, {})
        # the file that a cell writes is Python, too
        ast.parse(re.sub(r"^%%writefile .*\.py\n", "", "".join(cell["source"])))
    assert len(cells("code")) <= 10


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_cell_of_the_notebook_runs(tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", with_subquad()["PYTHONPATH"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(TOUR, as_version=4)
    nbclient.NotebookClient(notebook, timeout=1000, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    (text,) = (found[1] for output in outputs if (found := re.search(r"rows: ([\d.]+)%", output.get("text", ""))))
    assert float(text) > 90
    # two runs at the second call, the others were stored
    assert len(list(tmp_path.glob("results/local/my-recall/*/*.parquet"))) == 6
    assert not [output for output in outputs if output.get("name") == "stderr"]
