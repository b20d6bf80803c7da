"""The gate for kernels of other repositories: `bench` for operators of a plugin, and the commands of action.yml."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from subquad.suite.bench import run as bench_run
from subquad.suite.bench.base import HOME, Base, base_of
from subquad.suite.bench.run import Verdict
from subquad.suite.store import storage

pytest.importorskip("triton")

ACTION = yaml.safe_load((HOME / "action.yml").read_text())
KERNEL = HOME / "examples" / "my_kernel.py"
SLOWER = ("numel(), 1024),)](x, y, cap, x.numel(), BLOCK=1024)", "numel(), 64),)](x, y, cap, x.numel(), BLOCK=64)")
"""Sixteen times as many programs, each of which takes the interpreter as long: more than other work can hide."""
NARROWER = ("tl.load(x + o_n,", "tl.load(x + o_n * (1 + N // 1000000000),")
"""The compiler cannot know any more that neighbouring threads load neighbouring elements."""


def git(folder, *arguments):
    command = ["git", "-c", "user.email=me@example.com", "-c", "user.name=me", *arguments]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    """A repository of somebody else, with one Triton kernel on the branch `main`."""
    folder = tmp_path / "theirs"
    (folder / "bench").mkdir(parents=True)
    shutil.copyfile(KERNEL, folder / "bench" / "operators.py")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "a kernel")
    path = [*sys.path]
    yield folder
    # the next test has another module of this name
    sys.modules.pop("operators", None)
    sys.path[:] = path


def edit(repository, change):
    path = repository / "bench" / "operators.py"
    text = path.read_text()
    assert text.count(change[0]) == 1
    path.write_text(text.replace(*change))


def run_step(name, folder, **inputs):
    """Runs the command of a step of the action as GitHub does."""
    (step,) = (step for step in ACTION["runs"]["steps"] if step["name"] == name)
    assert step["shell"] == "bash"
    given = {key: str(options.get("default", "")) for key, options in ACTION["inputs"].items()} | inputs
    variables = {
        key: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda match: given[match[1]], value)
        for key, value in step["env"].items()
    }
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    github = {"GITHUB_ACTION_PATH": str(HOME), "GITHUB_STEP_SUMMARY": str(folder / "summary.md")}
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        cwd=folder,
        # without a GPU the interpreter carries out the kernel; what compiles kernels does not inherit it
        env={**os.environ, **variables, **github, "PATH": path, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_action_fails_for_a_kernel_over_budget(repository, command_line):
    bench = ("bench", "--plugin", repository / "bench" / "operators.py")
    done = command_line(*bench, "--check-budgets")
    assert done.returncode == 2
    assert "budgets.json has no budgets for Triton" in done.stderr
    assert command_line(*bench, "--update-budgets").returncode == 0
    done = command_line(*bench, "--check-budgets")
    assert done.returncode == 0, done.stdout
    assert "3 kernels for sm_80, sm_90, gfx942, 3 of them unchanged; 3 calls; 0 violations" in done.stdout
    edit(repository, NARROWER)
    edit(repository, ("torch.empty_like(x)", "torch.zeros_like(x)"))
    done = run_step("Budgets", repository, plugin="bench/operators.py")
    assert done.returncode == 1
    assert re.search(r"_soft_cap_kernel\[.* sm_90: narrowest load 2 bytes < budget 16", done.stdout)
    memset = "sm_80, sm_90, gfx942: other operations 1 > budget 0 (zeros_like 0 -> 1)"
    assert memset in done.stdout
    summary = (repository / "summary.md").read_text()
    assert "narrowest load 2 bytes" in summary
    assert summary.count("```") == 2


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_action_finds_what_became_slower_since_the_base_and_since_the_release_and_draws_it(repository):
    """Against the base alone, every step of a slow decline passes."""
    git(repository, "tag", "v1")
    edit(repository, SLOWER)
    inputs = {"plugin": "bench/operators.py", "compare": "main", "shapes": "short"}
    slower = r"N5000 bf16 fwd +triton +slower"
    done = run_step("Speed", repository, **inputs)
    assert done.returncode == 1, done.stdout
    assert re.search(slower, done.stdout)
    frame = storage.read(storage.files([repository / "subquad-results"], "kernels"))
    # the rows of both sides have the commit of the repository that holds the kernel
    times = frame[frame["metric"] == "time"]
    assert times["commit"].nunique() == 1
    assert sorted(times["dirty"]) == [False, True]
    git(repository, "commit", "-q", "-a", "-m", "a slower kernel")
    done = run_step("Release", repository, **inputs)
    assert done.returncode == 1, done.stdout
    assert re.search(slower, done.stdout)
    assert "### Speed against the last release, v1" in (repository / "summary.md").read_text()
    done = run_step("Trend", repository, **inputs)
    assert done.returncode == 0, done.stderr
    # five: two revisions in each comparison, and this one alone
    assert re.search(r"soft_cap +N5000 bfloat16 +forward +triton .* 5\n", done.stdout)
    assert (repository / "subquad-results" / "kernels" / "figure.png").exists()
    assert (repository / "summary.md").read_text().count("```") == 6


def test_without_a_release_the_action_says_so_in_one_line(repository):
    done = run_step("Release", repository, plugin="bench/operators.py", compare="main")
    assert done.returncode == 0
    line = "No tag is on or before main, so there is no release to compare the speed with.\n"
    assert done.stdout == line == (repository / "summary.md").read_text()


def test_the_steps_of_the_action_get_inputs_by_variables_alone():
    """An expression inside a command would let an input add commands of its own."""
    for step in ACTION["runs"]["steps"]:
        assert "${{" not in step["run"]
    used = re.findall(r"inputs\.(\w+)", (HOME / "action.yml").read_text())
    assert set(used) == set(ACTION["inputs"])


def test_an_installation_has_no_revisions_of_the_repository_around_it(repository, tmp_path, monkeypatch):
    monkeypatch.setattr("subquad.suite.bench.base.HOME", repository)
    (repository / "COMMIT").touch()
    with pytest.raises(ValueError, match=r"^'main': an installed Subquad has no other revisions; give the folder"):
        base_of("main", [repository], tmp_path)


def test_the_base_of_a_plugin_is_its_own_repository(repository, tmp_path, monkeypatch):
    plugin = repository / "bench" / "operators.py"
    (tmp_path / "base").mkdir()
    edit(repository, SLOWER)
    base = base_of("main", [plugin], tmp_path / "base")
    assert SLOWER[0] in (base.folder / "bench" / "operators.py").read_text()
    before = [str(HOME), "", str(repository), str(repository / "bench"), str(repository / "new"), sys.prefix]
    after = [str(HOME), "", str(base.folder), str(base.folder / "bench"), str(repository / "new"), sys.prefix]
    assert base.import_path(before) == after
    assert base_of(str(repository), [plugin], tmp_path).folder == repository
    # a folder that happens to have the name of the revision
    monkeypatch.chdir(tmp_path)
    (tmp_path / "main").mkdir()
    (tmp_path / "other").mkdir()
    assert base_of("main", [plugin], tmp_path / "other").folder == tmp_path / "other"
    assert Base.from_json(base.to_json()) == base


def test_a_base_that_cannot_be_is_refused(repository, tmp_path):
    plugin, alone = repository / "bench" / "operators.py", tmp_path / "alone.py"
    for files, words in (
        ([plugin, HOME], "several repositories"),
        ([alone], "in no git repository"),
    ):
        with pytest.raises(ValueError, match=words):
            base_of("main", files, tmp_path)
    with pytest.raises(ValueError, match="neither a git revision of the plugin's repository"):
        base_of("no-such-branch", [plugin], tmp_path)


def test_a_gate_that_can_compare_nothing_fails(repository, command_line, monkeypatch, tmp_path):
    def nothing(wanted, *arguments, **options):
        return [Verdict(case, None, "n/a: no GPU", "n/a: no GPU") for case in wanted]

    monkeypatch.setattr(bench_run, "compare_trees", nothing)
    plugin = repository / "bench" / "operators.py"
    done = command_line("bench", "--plugin", plugin, "--compare", "main", "--results", tmp_path)
    assert done.returncode == 2
    assert "nothing was compared" in done.stderr
    assert "  n/a: no GPU" in done.stdout


def test_an_operator_and_its_workload_have_one_name(tmp_path, command_line):
    plugin = tmp_path / "misnamed_operators.py"
    plugin.write_text("from subquad.kernels.norm.workloads import WORKLOAD\nOPERATORS = {'mine': WORKLOAD}\n")
    done = command_line("bench", "--plugin", plugin)
    assert done.returncode == 2
    assert "'mine' has a workload of op='norm'" in done.stderr
