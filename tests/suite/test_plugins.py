"""Models, tasks and operators from files and packages outside the repository."""

import dataclasses
import json
import pickle
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from subquad.run_suite import REPOSITORY
from subquad.suite.commands.planning import resolved_runs
from subquad.suite.executors.local import run_all
from subquad.suite.executors.processes import children
from subquad.suite.executors.team import Team
from subquad.suite.identity import files_digest
from subquad.suite.laws.models import LAWS as MODEL_LAWS
from subquad.suite.plugins import load_plugin, load_plugins
from subquad.suite.runner import execute
from subquad.suite.settings.config import ExperimentConfig, name_plugins
from subquad.suite.store import storage
from tests.processes import until
from tests.suite.test_workers import Recording, has_ended

HOME = Path(__file__).resolve().parents[2]
EXAMPLE = HOME / "examples" / "my_mixer.py"
EXAMPLE_TASK = HOME / "examples" / "my_task.py"
GRID = """
title: a grid of my own
baseline:
  task: {name: mqar, vocab_size: 32, length: 16, num_kv_pairs: 2, num_train: 64, num_test: 20}
  model: {num_layers: 1, d_model: 16, channel_mixer: none}
  train: {steps: 2, batch_size: 8, eval_batch_size: 20, lr: 1.0e-3, eval_every: 2}
sweep:
  model.name: [linear-attention, plugins]
"""


@pytest.fixture
def plugin(tmp_path, request):
    """Writes a plugin whose module nobody else has."""
    name = f"plugin_{abs(hash(request.node.nodeid)) % 10**8}"

    def write(text, name=name):
        path = tmp_path / f"{name}.py"
        path.write_text(textwrap.dedent(text))
        return path

    yield write
    sys.modules.pop(name, None)
    sys.path[:] = [folder for folder in sys.path if folder != str(tmp_path)]


@pytest.fixture
def grid(tmp_path):
    (tmp_path / "my-grid").mkdir()
    (tmp_path / "my-grid" / "grid.yaml").write_text(GRID)
    return tmp_path / "my-grid"


MODEL = """
    from subquad.models.linear_attention import LinearAttentionConfig

    class Mine(LinearAttentionConfig):
        \"\"\"A model of mine.\"\"\"

    MODELS = {NAME: Mine}
"""


def test_names_of_a_plugin_stand_beside_those_of_the_suite(plugin):
    path = plugin(MODEL.replace("NAME", "'mine'"))
    repository = REPOSITORY.with_plugins([str(path)])
    assert set(repository.models) == {*REPOSITORY.models, "mine"}
    assert repository.models.entries["mine"].summary == "A model of mine."
    assert repository.models.load("mine").__name__ == "Mine"
    assert "mine" not in REPOSITORY.models


def test_a_name_that_is_taken_is_an_error(plugin, command_line):
    done = command_line("list", "--plugin", plugin(MODEL.replace("NAME", "'gla'")))
    assert done.returncode == 2
    assert "there is a model 'gla' already" in done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nonexistent_module_of_nobody", ["cannot be imported", "ModuleNotFoundError", ".py:1"]),
        ("from kernels.none import x", ["ModuleNotFoundError", "; Subquad's own is subquad.kernels"]),
        ("import sys\nsys.exit(3)", ["cannot be imported: SystemExit: 3", ".py:2)"]),
        ("MODEL = {}", ["it defines none of MODELS, TASKS, OPERATORS"]),
        ("MODELS = [1]", ["MODELS must be a dictionary", "list"]),
        ("MODELS = {3: int}", ["a name must be a word, got 3"]),
        (
            "def make():\n    class Mine: pass\n    return Mine\nMODELS = {'mine': make()}",
            ["MODELS['mine']: worker processes cannot import make.<locals>.Mine; define the class at the top"],
        ),
    ],
)
def test_what_is_no_plugin_is_refused(plugin, command_line, text, words):
    done = command_line("list", "--plugin", plugin(text))
    assert done.returncode == 2
    assert all(word in done.stderr for word in words), done.stderr


def test_files_that_cannot_be_modules_are_refused(plugin, command_line, tmp_path):
    for path, words in (
        (tmp_path / "none.py", "no such file"),
        (plugin("MODELS = {", "unclosed"), "unclosed.py, line 1)\n"),
        ("nonexistent_package.part", "no module of this name"),
        (plugin("MODELS = {}", "my-mixer"), "rename the file"),
        (plugin("MODELS = {}", "models"), "another module 'models'"),
    ):
        done = command_line("list", "--plugin", path)
        assert done.returncode == 2
        assert words in done.stderr


def test_another_text_is_another_identity_once_it_is_imported(plugin):
    path = plugin(MODEL.replace("NAME", "'mine'"))
    first = load_plugin(str(path)).identity
    path.write_text(path.read_text() + "\n# changed\n")
    with pytest.raises(ValueError, match="its file has changed since it was imported; restart Python"):
        load_plugin(str(path))
    del sys.modules[path.stem]
    second = load_plugin(str(path)).identity
    assert first != second
    assert first.split()[:2] == second.split()[:2] == [path.stem, "sha256"]


def test_a_plugin_that_a_worker_imports_in_another_form_is_refused(plugin, grid, tmp_path):
    path = plugin(MODEL.replace("NAME", "'mine'"))
    choice = {"scale": None, "only": ["model.name=mine"], "overrides": None, "seeds": None, "data": None}
    _, (run,) = resolved_runs(REPOSITORY.with_plugins([str(path)]), str(grid), **choice)
    sent, before = pickle.dumps(run), path.read_text()

    def carried_out(text):
        """Returns how the run ends in a process that imports the plugin now."""
        del sys.modules[path.stem]
        path.write_text(text)
        return execute(pickle.loads(sent), tmp_path / "results", torch.device("cpu"))

    finished = carried_out(before + "\n# changed\n")
    assert finished.status == "failed"
    assert finished.error == f"the plugin {path.stem} has changed since the run was planned; give the command again"
    assert carried_out(before).status == "ok"
    # an edit after the import does not change what the process computes
    path.write_text(before + "\n# changed later\n")
    assert execute(run, tmp_path / "results", torch.device("cpu")).status == "ok"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("MODELS = {", "SyntaxError: '{' was never closed (NAME.py, line 1)"),
        ("MODELS = {}\nraise SystemExit(3)", "SystemExit: 3 (NAME.py:2)"),
    ],
)
def test_a_plugin_that_a_worker_cannot_import_is_named_with_the_error(plugin, grid, tmp_path, text, reason):
    path = plugin(MODEL.replace("NAME", "'mine'"))
    choice = {"scale": None, "only": ["model.name=mine"], "overrides": None, "seeds": "2", "data": None}
    _, runs = resolved_runs(REPOSITORY.with_plugins([str(path)]), str(grid), **choice)
    path.write_text(text)
    display = Recording()
    ended = run_all(runs, tmp_path / "results", torch.device("cpu"), display, jobs=2)
    reason = f"the plugin {path.stem} cannot be imported any more: {reason.replace('NAME', path.stem)}"
    assert [finished.error for finished in ended] == [
        f"failed ({reason}; mend the file and give the command again)"
    ] * 2
    assert display.repeats == []


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "raise KeyError('planted')",
            "cannot be imported any more: KeyError: 'planted' (NAME.py:9); mend the file and",
        ),
        pytest.param(
            "open(__file__, 'a').write('# changed')", "has changed since the run was planned;", marks=pytest.mark.slow
        ),
    ],
)
def test_a_process_beside_the_first_names_a_plugin_that_it_cannot_import(plugin, grid, tmp_path, code, reason):
    one = f"import multiprocessing\nif multiprocessing.current_process().name == 'process 1': {code}\n"
    path = plugin(textwrap.dedent(MODEL.replace("NAME", "'mine'")) + one)
    choice = {"scale": None, "only": ["model.name=mine"], "overrides": None, "seeds": None, "data": None}
    _, (run,) = resolved_runs(REPOSITORY.with_plugins([str(path)]), str(grid), **choice)
    (ended,) = run_all([run], tmp_path / "results", torch.device("cpu"), Recording(), team=Team(2))
    reason = f"the plugin {path.stem} {reason.replace('NAME', path.stem)} give the command again"
    assert ended.error == f"failed (process 1 of 2: {reason})"


def test_the_digest_of_files_has_their_names_and_contents(tmp_path):
    def digest():
        return files_digest(tmp_path.rglob("*"), tmp_path)

    (tmp_path / "a").write_text("one")
    digests = [digest()]
    (tmp_path / "folder").mkdir()
    assert digest() == digests[0]
    (tmp_path / "a").rename(tmp_path / "b")
    digests.append(digest())
    (tmp_path / "b").write_text("two")
    digests.append(digest())
    (tmp_path / "folder" / "c").touch()
    digests.append(digest())
    assert len(set(digests)) == len(digests)


def test_the_word_plugins_stands_for_their_names():
    config = ExperimentConfig(
        title="t",
        baseline={"task": {"name": "t"}},
        sweep={"model.name": ["a", "plugins"], "models": [{"model.name": "plugins", "model.d_model": 8}]},
        scales={"x": {"sweep": {"task.name": ["plugins"]}}},
    )
    named = name_plugins(config, {"model.name": ["b", "c"], "task.name": []})
    assert named.sweep == {
        "model.name": ["a", "b", "c"],
        "models": [{"model.name": "b", "model.d_model": 8}, {"model.name": "c", "model.d_model": 8}],
    }
    assert named.scales == {"x": {"sweep": {"task.name": []}}}


def test_a_grid_in_any_folder_runs_a_plugin(grid, plugin, command_line, tmp_path):
    path = plugin(MODEL.replace("NAME", "'mine'"))
    results = ("--results", tmp_path / "results")
    done = command_line("run", grid, "--plugin", path, *results)
    assert done.returncode == 0, done.stderr
    files = sorted((tmp_path / "results" / "my-grid" / "paper").glob("*.parquet"))
    configs = [json.loads(storage.read([file])["config"][0]) for file in files]
    assert {config["model"]["name"]: config.get("plugins") for config in configs} == {
        "linear-attention": None,
        "mine": {"model": load_plugin(str(path)).identity},
    }
    done = command_line("report", grid, "--plugin", path, *results)
    assert "\nmine " in done.stdout
    # without the plugin its run is no point of the grid
    assert "left out: 1 run with model.name: mine" in command_line("report", grid, *results).stdout
    assert "already stored" in command_line("run", grid, "--plugin", path, *results).stdout


@pytest.mark.slow
def test_worker_processes_load_the_plugin(grid, plugin, command_line, tmp_path):
    path = plugin(MODEL.replace("NAME", "'mine'"))
    done = command_line("run", grid, "--plugin", path, "--jobs", 2, "--results", tmp_path / "results")
    assert done.returncode == 0, done.stderr
    assert "done: 2 runs" in done.stdout


HANGING = """
    import subprocess
    from subquad.models.linear_attention import LinearAttentionConfig

    class Hanging(LinearAttentionConfig):
        \"\"\"A model whose construction waits for a process that never ends.\"\"\"

        def build(self, spec):
            subprocess.run(["sleep", "1000000"])

    MODELS = {"mine": Hanging}
"""


@pytest.mark.slow
def test_a_plugin_that_hangs_fails_and_the_grid_goes_on(grid, plugin, command_line, tmp_path):
    # longer than a loaded machine takes to import torch, which is no sign of life either
    options = (
        "--plugin",
        plugin(HANGING),
        "--executor-options",
        "hang_minutes=0.5",
        "--jobs",
        2,
        "--results",
        tmp_path / "results",
    )
    done = command_line("run", grid, *options)
    assert done.returncode == 1, done.stderr
    assert "no sign of life for 0.5 minutes, and its last one was: preparing data and model, step 0" in done.stdout
    assert re.search("^ok +linear-attention", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_sigterm_ends_a_grid_that_hangs(grid, plugin, tmp_path):
    options = ("--plugin", plugin(HANGING), "--only", "model.name=mine", "--results", tmp_path / "results")
    command = [sys.executable, HOME / "run_suite.py", "run", grid, *options]
    command_line = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    started = []

    def waits():
        started[:] = descendants(command_line.pid)
        return any(name == "sleep" for name in map(name_of, started))

    assert until(waits, seconds=200)
    command_line.terminate()
    # it takes less than ten seconds where nothing else runs, and with the grace of another signal a minute
    printed, _ = command_line.communicate(timeout=50)
    assert command_line.returncode == 130
    assert "Traceback" not in printed
    assert "the same command continues the grid" in printed
    assert not list(tmp_path.rglob("*.claim"))
    assert until(lambda: all(map(has_ended, started)), seconds=30)


def descendants(pid):
    return [found for child in children(pid) for found in (child, *descendants(child))]


def name_of(pid):
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def test_several_grids_run_in_one_call(grid, command_line, tmp_path):
    other = tmp_path / "other-grid"
    other.mkdir()
    (other / "grid.yaml").write_text(GRID.replace("d_model: 16", "d_model: 8"))
    options = ("--seeds", "3,7", "--set", "train.lr=1e-3", "--results", tmp_path / "results")
    done = command_line("run", grid, other, grid, *options)
    assert done.returncode == 0, done.stderr
    shown = f"--by train.lr --results {tmp_path / 'results'}"
    reports = "; ".join(f"python run_suite.py report {one} {shown}" for one in (grid, other))
    assert f"done: 4 runs; now: {reports}\n" in done.stdout
    frames = [storage.read([file]) for file in (tmp_path / "results").rglob("*.parquet")]
    assert sorted((frame["experiment"][0], int(frame["seed"][0])) for frame in frames) == [
        *(("my-grid", 3), ("my-grid", 7)),
        *(("other-grid", 3), ("other-grid", 7)),
    ]


def test_an_axis_of_plugins_alone_needs_one(grid, command_line):
    (grid / "grid.yaml").write_text(GRID.replace("linear-attention, plugins", "plugins"))
    done = command_line("run", grid, "--dry-run")
    assert done.returncode == 2
    assert "give --plugin" in done.stderr


def test_a_folder_with_the_name_of_an_experiment_is_refused(tmp_path, command_line):
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart" / "grid.yaml").write_text(GRID)
    done = command_line("run", tmp_path / "quickstart", "--dry-run")
    assert done.returncode == 2
    assert "rename the folder" in done.stderr


def test_the_path_of_an_experiment_is_its_name():
    assert REPOSITORY.experiment(str(HOME / "reports" / "h3" / "table2")).name == "h3/table2"


def test_the_example_obeys_the_laws(command_line):
    done = command_line("check", "model", "my-mixer", "--plugin", EXAMPLE)
    assert done.returncode == 0, done.stdout
    assert f"my-mixer obeys all {len(MODEL_LAWS)} laws" in done.stdout
    assert len(EXAMPLE.read_text().splitlines()) < 60


def test_the_example_of_a_task_obeys_the_laws(command_line):
    done = command_line("check", "task", "flip-flop", "--plugin", EXAMPLE_TASK, "--set", "task.num_train=1000")
    assert done.returncode == 0, done.stdout
    assert "flip-flop obeys all 11 laws" in done.stdout
    assert "n/a     A row of an endless stream" in done.stdout
    assert "digest of its rows at seed 0: 0acfb5dbd8f97d6f" in done.stdout
    assert len(EXAMPLE_TASK.read_text().splitlines()) < 60


def test_a_broken_law_of_a_task_is_named(plugin, command_line):
    path = plugin(
        """
        from subquad.tasks.induction_heads import InductionHeads

        class Leaking(InductionHeads):
            def segments(self, split, seed):
                return super().segments("train", seed)

        TASKS = {"leaking": Leaking}
        """
    )
    done = command_line("check", "task", "leaking", "--plugin", path, "--set", "num_train=100")
    assert done.returncode == 1
    assert "broken  Validation and test rows are drawn apart" in done.stdout
    assert "100.0 % of the rows of valid are training rows, too" in done.stdout
    assert "ok      The resolved settings" in done.stdout


def test_a_broken_law_is_named(plugin, command_line):
    path = plugin(
        """
        from subquad.models.linear_attention import LinearAttention, LinearAttentionConfig

        class Reversed(LinearAttention):
            def forward(self, x):
                return super().forward(x.flip(1)).flip(1)

        class Mine(LinearAttentionConfig):
            def mixer(self, layer, spec):
                return Reversed(self)

        MODELS = {"reversed": Mine}
        """
    )
    done = command_line("check", "model", "reversed", "--plugin", path)
    assert done.returncode == 1
    assert "broken  Later tokens do not change earlier outputs" in done.stdout
    assert "ok      Every trainable parameter has a finite gradient" in done.stdout


def test_a_broken_first_law_is_all_that_is_tried_and_prints_are_apart(plugin, command_line):
    path = plugin(
        """
        import sys
        from subquad.models.linear_attention import LinearAttention, LinearAttentionConfig

        class Ending(LinearAttention):
            def forward(self, x):
                print("in the mixer")
                sys.exit(0)

        class Mine(LinearAttentionConfig):
            def mixer(self, layer, spec):
                return Ending(self)

        class Unbuilt(LinearAttentionConfig):
            def mixer(self, layer, spec):
                return Ending()

        MODELS = {"ending": Mine, "unbuilt": Unbuilt}
        """
    )
    done = command_line("check", "model", "ending", "--plugin", path)
    assert done.returncode == 1
    assert done.stdout.count("\n") == 3
    assert "raised  Outputs are finite" in done.stdout
    assert "SystemExit: 0" in done.stdout
    assert "ending breaks the first law, without which the others mean nothing" in done.stdout
    assert done.stderr == "in the mixer\n"
    done = command_line("check", "model", "unbuilt", "--plugin", path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: model unbuilt cannot be built: TypeError: ")
    assert done.stderr.count("\n") == 1


def test_a_name_for_a_class_without_options_is_refused(plugin, grid, command_line):
    path = plugin("import subquad.models.linear_attention as l\nMODELS = {'mine': l.LinearAttention}")
    done = command_line("run", grid, "--plugin", path, "--only", "model.name=mine", "--dry-run")
    assert done.returncode == 2
    assert "model mine: the name must stand for a class of options (a Config), not for LinearAttention" in done.stderr


def test_a_task_without_a_version_is_refused_before_any_run(plugin, grid, command_line):
    path = plugin(
        """
        from subquad.tasks.base import TaskBase

        class Mine(TaskBase):
            name = "mine"

        TASKS = {"mine": Mine}
        """
    )
    text = (grid / "grid.yaml").read_text()
    (grid / "grid.yaml").write_text(re.sub("task: .*", "task: {name: mine}", text))
    done = command_line("run", grid, "--plugin", path, "--dry-run")
    assert done.returncode == 2
    assert "task mine: it has no version; write `version: ClassVar[int] = 1` into its class" in done.stderr


def test_a_failed_run_names_the_command_that_says_why(plugin, grid, command_line, tmp_path):
    path = plugin(
        """
        from subquad.models.linear_attention import LinearAttention, LinearAttentionConfig

        class Narrow(LinearAttention):
            def forward(self, x):
                return super().forward(x)[..., 1:]

        class Mine(LinearAttentionConfig):
            def mixer(self, layer, spec):
                return Narrow(self)

        MODELS = {"mine": Mine}
        """
    )
    done = command_line("run", grid, "--plugin", path, "--only", "model.name=mine", "--results", tmp_path)
    assert done.returncode == 1
    (command,) = re.findall(r"their rows say why \(`(show .*)`\)", done.stdout)
    assert "Narrow.forward must return [B, T, D]" in command_line(*command.split()).stdout


def test_an_operator_of_a_plugin_is_timed(plugin, command_line, tmp_path):
    path = plugin(
        """
        import dataclasses
        from subquad.kernels.causal_conv1d.workloads import WORKLOAD as CONV

        OPERATORS = {"my_conv": dataclasses.replace(CONV, op="my_conv")}
        """
    )
    repository = REPOSITORY.with_plugins([str(path)])
    assert dataclasses.is_dataclass(repository.operators.load("my_conv"))


def test_an_experiment_named_twice_is_run_once(command_line, grid):
    done = command_line("run", grid, f"{grid}/../{grid.name}", "--dry-run")
    assert done.returncode == 0
    assert done.stdout.count("to do") == command_line("run", grid, "--dry-run").stdout.count("to do")


def test_an_installed_package_offers_its_plugin_by_an_entry_point(tmp_path, monkeypatch, command_line):
    site = tmp_path / "site-packages"
    about = site / "offered-1.2.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: offered\nVersion: 1.2\n")
    (about / "RECORD").write_text("offered_mixer.py,,\n")
    (about / "entry_points.txt").write_text("[subquad.plugins]\nmixers = offered_mixer\n")
    source = "from subquad.models.retnet import RetNetConfig\n\nMODELS = {'offered': RetNetConfig}\n"
    (site / "offered_mixer.py").write_text(source)
    monkeypatch.syspath_prepend(site)
    (offered,) = load_plugins([])
    assert offered.identity == "offered 1.2"
    assert offered.entries["model"]["offered"].load().__name__ == "RetNetConfig"
    assert "\nmodel\toffered\t" in command_line("list").stdout
    sys.modules.pop("offered_mixer")


@pytest.mark.parametrize(("name", "reason"), [("other", "share the run"), ("copy/my-grid", "both are named 'my-grid'")])
def test_grids_that_share_runs_or_a_name_are_refused(command_line, grid, tmp_path, name, reason):
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / "grid.yaml").write_text((grid / "grid.yaml").read_text())
    done = command_line("run", grid, tmp_path / name, "--dry-run")
    assert done.returncode == 2
    assert reason in done.stderr


def test_weights_of_a_changed_plugin_are_refused(plugin, grid, command_line, tmp_path):
    text = MODEL.replace("NAME", "'mine'")
    path = plugin(text)
    done = command_line(
        "run", grid, "--plugin", path, "--only", "model.name=mine", "--keep-weights", "--results", tmp_path
    )
    assert done.returncode == 0
    (weights,) = tmp_path.rglob("*.weights")
    path.write_text(path.read_text() + "# changed\n")
    # this state is that of a new process
    del sys.modules[path.stem]
    done = command_line("generate", weights, "--plugin", path, "--prompt", "1 2")
    assert done.returncode == 2
    assert "was defined by" in done.stderr


def test_nodes_of_a_cluster_need_a_plugin_that_they_can_import(plugin, grid, command_line):
    options = ("--executor", "slurm", "--executor-options", "cluster=local")
    done = command_line("run", grid, *options, "--plugin", plugin(MODEL.replace("NAME", "'mine'")))
    assert done.returncode == 2
    assert "the nodes cannot import the plugin" in done.stderr
    assert (
        "cannot import" not in command_line("run", grid, *options, "--dry-run", "--plugin", "examples.my_mixer").stderr
    )
