"""Installations: a wheel brings grids in one package and fetches its rows, an editable one points at the checkout."""

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from subquad.run_suite import HOME
from subquad.suite.packaging import FILES, FOLDERS, check, make
from tests.file_server import serving

LISTED = ("pyproject.toml", "LICENSE", *FILES, *FOLDERS)
ROWS = "results/reference/h3/table2"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the checkout, in which a build may leave its files, as a repository with one commit."""
    folder = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "-zco", "--exclude-standard", *LISTED, ROWS], cwd=HOME, capture_output=True, text=True
    )
    names = listed.stdout.split("\0")[:-1]
    if not names:
        pytest.skip("no git checkout")
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((HOME / name).read_bytes())
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@t"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)
    return folder


def pip(*arguments, cwd):
    command = [sys.executable, "-m", "pip", *map(str, arguments), "--no-deps", "--no-index", "--quiet"]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def release(source, tmp_path_factory):
    """Source archive, wheel and archive of rows, and a server that has the last of these."""
    with pytest.MonkeyPatch.context() as patch, serving(b"") as server:
        patch.setenv("SUBQUAD_REPOSITORY_URL", f"http://127.0.0.1:{server.server_port}/owner/subquad")
        files = make(source, tmp_path_factory.mktemp("release") / "dist")
        server.content = files[-1].read_bytes()
        yield files, server


@pytest.mark.slow
def test_a_wheel_works_beside_modules_of_its_folders_names(source, release, tmp_path):
    (_, wheel, _), server = release
    site, work = tmp_path / "site", tmp_path / "work"
    pip("install", wheel, "--target", site, cwd=tmp_path)
    assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} <= {"subquad", "bin"}
    (metadata,) = site.glob("*.dist-info/METADATA")
    assert f"](http://127.0.0.1:{server.server_port}/owner/subquad/blob/v" in metadata.read_text()
    # modules of a user that have the names of our folders, and a plugin that imports them
    for name in ("suite", "tasks", "models", "kernels", "reports"):
        (work / name).mkdir(parents=True)
        (work / name / "__init__.py").write_text(f"OWNER = 'user of {name}'\n")
    (work / "plugin.py").write_text(
        "import kernels, models, reports, suite, tasks\n"
        "from subquad.models.gla import GLAConfig\n"
        "assert all('user' in module.OWNER for module in (kernels, models, reports, suite, tasks))\n"
        "MODELS = {'mine': GLAConfig}\n"
    )

    def call(*arguments):
        environment = {
            **os.environ,
            "PYTHONPATH": str(site),
            "OMP_NUM_THREADS": "1",
            "SUBQUAD_DATA": str(tmp_path / "cache"),
        }
        command = [sys.executable, "-P", *arguments]
        return subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)

    few = ("train.steps=2", "train.eval_every=2", "train.batch_size=4", "task.num_train=8", "task.num_test=8")
    settings = [word for setting in few for word in ("--set", setting)]
    only = ("--only", "model.name=gla", "--only", "model.d_model=8", "--plugin", "plugin.py")
    ran = call(site / "bin" / "subquad", "run", "quickstart", *only, *settings, "--device", "cpu")
    assert ran.returncode == 0, ran.stderr
    assert "now: subquad report quickstart" in ran.stdout
    refused = call(site / "bin" / "subquad", "report", "h3/table2")
    assert (refused.returncode, "`subquad results pull` fetches them" in refused.stderr) == (2, True)
    assert call(site / "bin" / "subquad", "results", "pull").returncode == 0
    assert server.asked == [None]
    assert "paper" in call(site / "bin" / "subquad", "report", "h3/table2").stdout
    code = (
        "import json, subquad.suite\n"
        "rows = subquad.results('quickstart')\n"
        "print(json.dumps([subquad.suite.__file__, rows['commit'][0], bool(rows['dirty'][0])]))"
    )
    done = call("-c", code)
    assert done.returncode == 0, done.stderr
    file, commit, dirty = json.loads(done.stdout)
    assert Path(file).is_relative_to(site / "subquad")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=source, capture_output=True, text=True).stdout.strip()
    assert (commit, dirty) == (head, False)


SCRIPT = """
import torch
from subquad import load, results, run
from subquad import runs  # wrong
from subquad.kernels.gated_linear_attention import gated_linear_attention
from subquad.models.parts.mixer import Mixer

reveal_type(run("quickstart", only={"model.name": ["gla"]}, seeds=2))
reveal_type(results("quickstart"))
reveal_type(load("0373a9").model)
x = torch.zeros(1, 2, 1, 4)
reveal_type(gated_linear_attention(x, x, x))

class Mine(Mixer):
    def state_size(self, length: int) -> int:
        return 0

run(3)  # wrong
run("quickstart", seed=2)  # wrong
results("quickstart", only=["gla"])  # wrong
load("0373a9").network  # wrong
gated_linear_attention(x, x)  # wrong
Mine().state_size("long")  # wrong
"""


@pytest.mark.slow
def test_the_types_of_an_installation_are_those_that_a_users_mypy_sees(release, tmp_path):
    (_, wheel, _), _ = release
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv" / "lib").glob("*/site-packages")
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    pip("install", wheel, "--target", site, cwd=tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    # to read those parts of torch and others of which neither the script nor we use anything would take a third longer
    (skipped,) = tomllib.loads((HOME / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    unread = "".join(f"[mypy-{module}]\nfollow_imports = skip\n" for module in skipped["module"])
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nstrict = true\n{unread}")
    options = ["--python-executable", python, "--cache-dir", tmp_path / "cache", "--no-error-summary"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    command = [sys.executable, "-P", "-m", "mypy", *map(str, options), "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    types = [line.partition('type is "')[2].rstrip('"') for line in lines if "Revealed type" in line]
    frame, model = "pandas.core.frame.DataFrame", "subquad.suite.model.Model"
    assert types[:3] == [frame, frame, model], done.stdout + done.stderr
    assert "torch._tensor.Tensor" in types[3]
    wrong = [number for number, line in enumerate(SCRIPT.splitlines(), start=1) if line.endswith("# wrong")]
    assert [int(line.split(":")[1]) for line in lines if " error: " in line] == wrong, done.stdout


@pytest.mark.slow
def test_a_release_is_of_one_version_and_one_commit(source, release, tmp_path):
    (archive, wheel, rows), _ = release
    version = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]["version"]
    assert [path.name for path in (archive, wheel)] == [
        f"subquad-{version}.tar.gz",
        f"subquad-{version}-py3-none-any.whl",
    ]
    # the wheel is built from the source archive alone, which has what it takes
    with zipfile.ZipFile(wheel) as file, tarfile.open(archive) as tar:
        inside = {name.removeprefix("subquad/") for name in file.namelist()}
        outside = {name.partition("/")[2].removeprefix("suite/package/subquad/") for name in tar.getnames()}
        assert {name for name in inside if not name.startswith("subquad-")} <= outside
        assert "py.typed" in inside
        assert not any(name.endswith(".parquet") for name in inside | outside)
    check(archive, wheel, rows)
    content = rows.read_bytes()
    for wrong in (content[:-1], bytes([content[0] ^ 1]) + content[1:]):
        other = tmp_path / rows.name
        other.write_bytes(wrong)
        with pytest.raises(SystemExit, match="names other rows than"):
            check(archive, wheel, other)


@pytest.mark.slow
def test_an_editable_installation_points_at_the_checkout(source, tmp_path):
    code = f"from setuptools import build_meta; print(build_meta.build_editable({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        (finder,) = (name for name in names if name.endswith("_finder.py"))
        assert str(source / "suite" / "package" / "subquad") in file.read(finder).decode()
    assert not any(name.startswith("subquad/") for name in names)


@pytest.mark.slow
def test_a_wheel_without_grids_is_refused(source, tmp_path):
    package = ("suite/__init__.py", "suite/packaging.py", "suite/package/subquad/__init__.py")
    for name in ("pyproject.toml", "README.md", "LICENSE", "run_suite.py", *package):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes((source / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-build-isolation", "--no-deps", "--no-index"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "a wheel is built from a checkout" in done.stderr
