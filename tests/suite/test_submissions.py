"""A mixer is submitted, checked, repeated and shown; whatever a stranger could send wrong is named."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from subquad.run_suite import HOME, REPOSITORY
from subquad.suite import environment
from subquad.suite.commands import main
from subquad.suite.commands import submissions as commands
from subquad.suite.commands.planning import resolved_runs
from subquad.suite.identity import file_digest
from subquad.suite.laws.models import LAWS as MODEL_LAWS
from subquad.suite.runner import execute
from subquad.suite.store import parts, storage
from subquad.suite.submissions import rerun
from subquad.suite.submissions.change import taken_from
from subquad.suite.submissions.folder import MANIFEST, import_faults, part_of, read_manifest
from subquad.suite.submissions.rows import faults_of, stored_in
from subquad.suite.submissions.standing import BY_US, DIFFERS, SUBMITTED, standings
from tests.suite.toy import make_run

EXAMPLE = HOME / "examples" / "my_mixer.py"
BOARD = """
title: a board that takes seconds
baseline:
  task: {vocab_size: 32, length: 16, num_kv_pairs: 2}
  model: {num_layers: 1, d_model: 16, channel_mixer: none, init_std: 0.1}
  train: {steps: 4, batch_size: 8, eval_batch_size: 20, eval_every: 2}
sweep:
  model: [{model.name: gla, model.d_model: 16}, {model.name: plugins}]
  task:
    - {task.name: mqar, task.num_train: 64, task.num_test: 20}
  train.lr: [1.0e-3, 1.0e-2]
seeds: [0, 1]
budget: {of: num_parameters, value: 1700, within: 0.1, task: mqar}
select: {best_of: [train.lr], by: accuracy, split: valid}
table:
  rows: {GLA: {model.name: gla}}
  columns: {recall: {task.name: mqar}}
"""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A repository with one small board, and the folder of a submission to it."""
    home = tmp_path_factory.mktemp("door")
    (home / "reports" / "small").mkdir(parents=True)
    (home / "reports" / "small" / "grid.yaml").write_text(BOARD)
    (home / "reference").mkdir()
    plugin = home / "own" / "sent_mixer.py"
    plugin.parent.mkdir()
    plugin.write_text(EXAMPLE.read_text().replace('"my-mixer"', '"sent-mixer"'))
    repository = replace(
        REPOSITORY, reports=home / "reports", reference=home / "reference", submissions=home / "submissions"
    )
    arguments = ("submit", plugin, "--board", "small", "--set", "model.num_heads=4", "--jobs", 1)
    with pytest.MonkeyPatch.context() as patch:
        # so that a test passes in a checkout with changes, too
        patch.setenv("SUBQUAD_COMMIT", COMMIT)
        environment.commit.cache_clear()
        with pytest.raises(SystemExit) as end:
            main(
                repository,
                [*map(str, arguments), "--results", str(home / "results"), "--out", str(home / "submissions")],
            )
    environment.commit.cache_clear()
    assert end.value.code in (0, None)
    return repository, home / "submissions" / "sent-mixer"


@pytest.fixture
def copied(place, tmp_path, monkeypatch):
    """A copy of the submission that a test may spoil. Laws are tried by the one test that lets all of a check run."""
    # the package has the command of this name in place of its module
    monkeypatch.setattr(sys.modules["subquad.suite.commands.check"], "check_model", lambda *arguments: 0)
    repository, folder = place
    shutil.copytree(folder, tmp_path / "submissions" / folder.name)
    forget()
    yield replace(repository, submissions=tmp_path / "submissions"), tmp_path / "submissions" / folder.name
    forget()


def forget():
    """Lets the plugin be imported from another folder."""
    sys.modules.pop("sent_mixer", None)
    sys.path[:] = [folder for folder in sys.path if "sent-mixer" not in folder and "door" not in folder]


def test_a_submission_goes_the_whole_way(place, command_line, monkeypatch, tmp_path):
    repository, folder = place
    manifest = read_manifest(folder)
    entry = manifest.boards["small"]
    assert (entry.options, entry.num_runs, entry.commits) == ({"model.num_heads": 4}, 4, (COMMIT,))
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST, "rows", "sent_mixer.py"]
    forget()
    checked = command_line("submissions", "check", folder, repository=repository)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"obeys all {len(MODEL_LAWS)} laws" in checked.stdout
    assert "again up to its first evaluation: to the last digit" in checked.stdout
    shown = command_line("report", "small", repository=repository).stdout
    assert "sent-mixer (submitted)" in shown
    assert "sent-mixer: rows of its author, which nobody has repeated" in shown

    shutil.copytree(folder, tmp_path / "submissions" / folder.name)
    forget()
    monkeypatch.setenv("SUBQUAD_COMMIT", COMMIT)
    environment.commit.cache_clear()
    own = tmp_path / "submissions" / folder.name
    done = command_line("submissions", "repeat", own, "--seed", 1, "--results", tmp_path / "r", repository=repository)
    environment.commit.cache_clear()
    assert done.returncode == 0, done.stdout + done.stderr
    repository = replace(repository, submissions=tmp_path / "submissions")
    for format in ("terminal", "md", "html"):
        out = tmp_path / f"report.{format}"
        command_line("report", "small", "--format", format, "--out", out, repository=repository)
        if format != "terminal":
            assert "sent-mixer (repeated by us)" in out.read_text(), format
    assert "seed 1" in (tmp_path / "report.md").read_text()
    # the page of a user's own rows has nobody else's
    own_rows = folder.parents[1] / "results"
    assert "submitted" not in command_line("report", "small", "--results", own_rows, repository=repository).stdout


def test_a_submission_stands_beside_committed_rows(copied, command_line, tmp_path):
    repository, _ = copied
    repository = replace(repository, reference=tmp_path / "reference")
    choice = {"scale": None, "only": ["model.name=gla"], "overrides": None, "seeds": None, "data": None}
    for run in resolved_runs(repository, "small", **choice)[1]:
        execute(run, repository.reference, rerun.torch.device("cpu"))
    for options in ((), ("--results", repository.reference), ("--scale", "paper", "--format", "md")):
        done = command_line("report", "small", *options, repository=repository)
        (ours,) = (line for line in done.stdout.splitlines() if line.strip("| ").startswith("GLA ") and "(" not in line)
        assert "—" not in ours
        assert "sent-mixer (submitted)" in done.stdout, options
    own = command_line("export", "small", "--results", repository.reference, repository=repository)
    assert "sent-mixer" not in own.stdout


def manifest_of(folder, **changes):
    """Changes what a manifest says of the board, or of the plugin."""
    values = json.loads((folder / MANIFEST).read_text())
    for key, value in changes.items():
        (values if key in values else values["boards"]["small"])[key] = value
    (folder / MANIFEST).write_text(json.dumps(values))


def rows_changed(folder, change):
    """Writes the part again with other rows, and its new name and digest into the manifest, as a forger would."""
    path = part_of(folder, "small", read_manifest(folder).boards["small"])
    rows = [change(row) for row in pq.read_table(path).to_pylist()]
    table = storage.pa.Table.from_pylist([row for row in rows if row], storage.SCHEMA)
    path.unlink()
    written = parts.write(parts.Part(path.parent, table, ()))
    manifest_of(folder, part=written.name, part_sha256=file_digest(written))


def edited(folder):
    plugin = folder / "sent_mixer.py"
    plugin.write_text(plugin.read_text() + "\n# another revision\n")
    manifest_of(folder, plugin_sha256=file_digest(plugin))


def losses_changed(row):
    is_trained = row["split"] == "train" and row["metric"] == "loss"
    return {**row, "value": row["value"] * 1.001} if is_trained else row


SPOILED = {
    "a file beside": (lambda folder: (folder / "setup.sh").write_text("x"), "setup.sh: a submission has a manifest"),
    "a link": (lambda folder: (folder / "rows" / "x").symlink_to("/etc"), "rows/x: a link or no regular file"),
    "an edited plugin": (
        lambda folder: (folder / "sent_mixer.py").write_text("MODELS = {}"),
        "sent_mixer.py: its SHA-256 is not the one in manifest.json",
    ),
    "another revision": (edited, "4 runs of another revision of the plugin (sent_mixer sha256 "),
    "another scale": (lambda folder: manifest_of(folder, scale="huge"), "rows/small/huge/"),
    "another option": (
        lambda folder: manifest_of(folder, options={"model.num_heads": 2}),
        "no run of the board; the nearest one differs in model.num_heads is 4 and there 2",
    ),
    "an option of the protocol": (
        lambda folder: manifest_of(folder, options={"model.num_heads": 4, "model.num_layers": 2}),
        "only options of the model can be changed, and not model.num_layers",
    ),
    "a claimed size": (lambda folder: manifest_of(folder, num_parameters=1), "the manifest says Size(num_parameters=1"),
    "a claimed device": (
        lambda folder: manifest_of(folder, devices=["NVIDIA H200"]),
        "devices is ('NVIDIA H200',) in the manifest and (",
    ),
    "no seed": (
        lambda folder: rows_changed(folder, lambda row: row if row["seed"] == 0 else None),
        "2 runs of 4 missing: mqar at rate 0.001, seed 1, mqar at rate 0.01, seed 1",
    ),
    "an accuracy of two": (
        lambda folder: rows_changed(folder, lambda row: {**row, "value": 2.0} if row["metric"] == "accuracy" else row),
        "accuracy",
    ),
    "uncommitted changes": (
        lambda folder: rows_changed(folder, lambda row: {**row, "dirty": True}),
        "4 runs with uncommitted changes of Subquad",
    ),
    "a failed run": (
        lambda folder: rows_changed(
            folder, lambda row: {**row, "status": "failed", "error": "no luck"} if row["metric"] == "run" else row
        ),
        "4 runs failed, such as ",
    ),
    "better losses": (
        lambda folder: rows_changed(folder, losses_changed),
        "loss on train after 2 steps is ",
    ),
    "an import": (
        lambda folder: [
            (folder / "sent_mixer.py").write_text("import einops"),
            manifest_of(folder, plugin_sha256=file_digest(folder / "sent_mixer.py")),
        ],
        "sent_mixer.py imports einops, which the check does not have",
    ),
    "a name of ours": (
        lambda folder: [
            (folder / "sent_mixer.py").write_text("MODELS = {'gla': int}"),
            manifest_of(folder, plugin_sha256=file_digest(folder / "sent_mixer.py")),
        ],
        "there is a model 'gla' already",
    ),
    "a manifest without an end": (
        lambda folder: [(folder / MANIFEST).unlink(), (folder / MANIFEST).symlink_to("/dev/zero")],
        "manifest.json: missing, or no regular file",
    ),
    "a manifest of a megabyte": (
        lambda folder: (folder / MANIFEST).write_text(" " * 2**20),
        "manifest.json: has 1,048,576 bytes, at most 262,144 are allowed",
    ),
    "no JSON": (lambda folder: (folder / MANIFEST).write_text("{"), "manifest.json: no JSON"),
    "an unknown field": (lambda folder: manifest_of(folder, verified=True), "verified: unknown key"),
    "a way out": (lambda folder: manifest_of(folder, part="../../../../x.parquet"), "part: "),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_check_names_what_is_wrong(case, copied, command_line):
    repository, folder = copied
    spoil, words = SPOILED[case]
    spoil(folder)
    done = command_line("submissions", "check", folder, repository=repository)
    assert done.returncode == 1, done.stdout + done.stderr
    assert words in done.stdout


@pytest.mark.parametrize(("enough", "code"), [(0.0, 0), (1.0, 1)])
def test_a_rate_that_needs_no_run_is_not_missing(copied, command_line, tmp_path, enough, code):
    """`run` tries no further rate where all seeds of one are good enough."""
    repository, folder = copied
    (tmp_path / "reports" / "small").mkdir(parents=True)
    grid = BOARD.replace("split: valid}", f"split: valid, enough: {enough}}}")
    (tmp_path / "reports" / "small" / "grid.yaml").write_text(grid)
    rows_changed(folder, lambda row: row if json.loads(row["config"])["train"]["lr"] == 1e-3 else None)
    manifest_of(folder, num_runs=2)
    repository = replace(repository, reports=tmp_path / "reports")
    done = command_line("submissions", "check", folder, repository=repository)
    assert done.returncode == code, done.stdout
    assert ("2 runs of 4 missing" in done.stdout) == bool(code)


def test_another_machine_may_round_differently_and_no_more(copied, command_line):
    repository, folder = copied
    manifest_of(folder, processor="of another maker")
    rows_changed(folder, losses_changed)
    done = command_line("submissions", "check", folder, repository=repository)
    assert done.returncode == 0, done.stdout
    assert "training loss to 5%, on another machine" in done.stdout
    forget()
    rows_changed(folder, lambda row: {**row, "value": 0.9 * row["value"]} if row["metric"] == "loss" else row)
    done = command_line("submissions", "check", folder, repository=repository)
    assert done.returncode == 1
    assert "more than 5% apart" in done.stdout


def test_a_first_evaluation_is_the_beginning_of_the_run(tmp_path):
    run = make_run(train={"steps": 6, "epochs": None, "eval_every": 2})
    execute(run, tmp_path, rerun.torch.device("cpu"))
    rows = storage.load(storage.result_path(tmp_path, run.experiment, run.scale, run.run_id)).to_pylist()
    again = rerun.first_evaluation(run, 1, REPOSITORY.recorder())
    assert {row["step"] for row in again} == {2}
    assert {row["split"] for row in again} == {"train", "valid"}
    assert not list(rerun.faults(rows, again, exact=True))
    (first, *_) = again
    assert list(rerun.faults(rows, [{**first, "data_digest": "other"}], exact=False)) == [
        "its data were others: the column data_digest differs; were they of another version of the task?"
    ]


@pytest.mark.parametrize(
    ("ours", "state"), [(None, SUBMITTED), (0.0, BY_US), (0.009, BY_US), (0.011, DIFFERS), (-0.011, DIFFERS)]
)
def test_a_repeat_agrees_within_the_seeds_and_a_point(copied, ours, state):
    repository, folder = copied
    part = part_of(folder, "small", read_manifest(folder).boards["small"])
    runs = stored_in(part)
    rates = {run.run_id: run.settings["train"]["lr"] for run in runs}
    # the seeds of another rate say nothing about this one
    values = {run.run_id: 0.2 + 0.1 * run.settings["seed"] + 0.5 * (rates[run.run_id] > 0.005) for run in runs}
    rows_changed(folder, lambda row: {**row, "value": values[row["run_id"]]} if of_score(row) else row)
    if ours is not None:
        (run_id, *_) = (run.run_id for run in runs if rates[run.run_id] < 0.005)
        value = 0.3 + ours if ours >= 0 else 0.2 + ours
        rows = pq.read_table(next(part.parent.iterdir())).to_pylist()
        mine = [{**row, "value": value} if of_score(row) else row for row in rows if row["run_id"] == run_id]
        table = storage.pa.Table.from_pylist(mine, storage.SCHEMA)
        parts.write(parts.Part(folder / "repeated" / "small" / "paper", table, ()))
    config = repository.experiment("small").config
    (standing,) = standings(repository.submissions, "small", config, "paper")
    assert standing.state == state


def of_score(row):
    return (row["metric"], row["split"], row["slice"]) == ("accuracy", "test", "")


IMPORTS = [
    ("import torch.nn as nn\nfrom subquad.kernels.norm import norm\nimport math, json", ""),
    ("def f():\n    import helper", "imports helper, which lies beside it; a submission is one file"),
    ("from parts.gate import Gate", "imports parts, which lies beside it"),
    ("from . import gate", "imports relative to itself"),
    ("import flash_attn", "imports flash_attn, which the check does not have; it has subquad, torch, numpy, triton"),
    ("import (", ""),
]


@pytest.mark.parametrize(("text", "words"), IMPORTS)
def test_imports_that_a_check_cannot_carry_out_are_named(tmp_path, text, words):
    (tmp_path / "helper.py").touch()
    (tmp_path / "parts").mkdir()
    (tmp_path / "mine.py").write_text(text)
    found = list(import_faults(tmp_path / "mine.py"))
    assert len(found) == bool(words)
    assert not words or words in found[0]


@pytest.fixture
def checkout(place, tmp_path):
    """A repository of git, and a function that commits files to a branch of it."""

    def git(*arguments):
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        subprocess.run(command, check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    (tmp_path / "README.md").write_text("ours")
    git("add", "-A")
    git("commit", "-qm", "ours")

    def committed(change):
        git("checkout", "-q", "-b", "theirs")
        folder = tmp_path / "submissions" / "sent-mixer"
        shutil.copytree(place[1], folder, ignore=shutil.ignore_patterns("__pycache__"))
        change(folder)
        git("add", "-A")
        git("commit", "-qm", "theirs")
        git("checkout", "-q", "main")
        # later changes of main do not count as theirs
        (tmp_path / "README.md").write_text("ours, later")
        git("commit", "-qam", "later")
        return tmp_path

    return committed


def hidden(folder):
    (folder / ".gitattributes").write_text("more.py export-ignore\n.gitattributes export-ignore\n")
    (folder / "more.py").write_text("x")


CHANGES = {
    "a file of ours": (
        lambda folder: (folder.parents[1] / "README.md").write_text("theirs"),
        "theirs also changes README.md; a submission changes submissions/<name>/ alone",
    ),
    "two folders": (
        lambda folder: shutil.copytree(folder, folder.with_name("other-mixer")),
        r"changes 2 folders below submissions \(other-mixer, sent-mixer\); send one",
    ),
    "a repeat": (
        lambda folder: [(folder / "repeated").mkdir(), (folder / "repeated" / "part.parquet").touch()],
        "submissions/sent-mixer/repeated is for rows of a maintainer",
    ),
    "a link": (lambda folder: (folder / "x").symlink_to("/etc/passwd"), "x: is a link or a submodule"),
    "hidden files": (hidden, "belongs to no submission; remove it"),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "has no manifest.json"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_of_more_than_its_own_folder_is_refused(case, checkout, tmp_path_factory):
    change, words = CHANGES[case]
    with pytest.raises(ValueError, match=words):
        taken_from(checkout(change), "submissions", "theirs", tmp_path_factory.mktemp("taken"))


def test_a_submission_is_taken_from_a_revision_as_it_was_written(checkout, place, tmp_path_factory):
    found = taken_from(checkout(lambda folder: None), "submissions", "theirs", tmp_path_factory.mktemp("taken"))
    assert read_manifest(found) == read_manifest(place[1])
    with pytest.raises(ValueError, match="this checkout has no such commit"):
        taken_from(found, "submissions", "--upload-pack=x", found)


def test_files_are_checked_before_anything_is_imported(copied, command_line, monkeypatch):
    repository, folder = copied
    (folder / "sent_mixer.py").write_text("raise SystemExit('imported')")
    monkeypatch.setattr(commands, "_loaded", lambda *arguments: pytest.fail("the plugin was imported"))
    assert command_line("submissions", "check", folder, repository=repository).returncode == 1


def test_runs_of_the_board_are_told_by_their_ids():
    runs = [make_run(seed=seed) for seed in (0, 1)]
    assert list(faults_of([], runs, runs, "me")) == [
        "2 runs of 2 missing: parity at rate 0.01, seed 0, parity at rate 0.01, seed 1"
    ]


REFUSED = [
    (("--board", "speed"), "--board speed: no such board"),
    (("--board", "parameters", "--scale", "tiny"), "has the scales paper, small, cpu"),
    (("--board", "parameters", "--set", "train.lr=1"), "--set train.lr: leaderboard/parameters compares mixers"),
    (("--board", "state", "--set", "model.d_model=32"), "and not model.num_layers, model.d_model"),
    (("--board", "parameters", "--set", "model.d_model=wide"), "error: --set model.d_model="),
    (("--board", "parameters", "--set", "model.d_model=84,96"), "error: --set model.d_model="),
    (("--board", "parameters", "--model", "mine"), "--model mine: MODELS has no such name"),
    (
        ("--board", "parameters"),
        "has 38,532 parameters on mqar, and leaderboard/parameters asks for 65,536, give or take 10%; "
        "--set model.d_model=84",
    ),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_what_cannot_be_submitted_is_refused_before_anything_is_trained(command_line, tmp_path, options, words):
    done = command_line("submit", EXAMPLE, *options, "--dry-run", "--results", tmp_path, "--out", tmp_path)
    assert done.returncode == 2, done.stdout
    assert words in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_dry_run_says_what_runs_and_what_ours_took(command_line, tmp_path):
    options = ("--board", "parameters", "--set", "model.d_model=84", "--results", tmp_path, "--out", tmp_path)
    done = command_line("submit", EXAMPLE, *options, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "my-mixer: 64,012 parameters, a state of 7,056 numbers: within the budget" in done.stdout
    assert "27 runs, 27 to do, on " in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_refused_before_the_laws_take_a_minute(command_line, monkeypatch, tmp_path):
    monkeypatch.setenv("SUBQUAD_COMMIT", COMMIT)
    environment.commit.cache_clear()
    (tmp_path / "file").touch()
    options = ("--board", "parameters", "--scale", "cpu", "--set", "model.d_model=84", "--results", tmp_path)
    done = command_line("submit", EXAMPLE, *options, "--out", tmp_path / "file")
    environment.commit.cache_clear()
    assert (done.returncode, len(done.stdout.splitlines())) == (2, 1), done.stdout
    assert f"--out {tmp_path / 'file'}: cannot be written" in done.stderr


def test_a_tree_with_changes_makes_no_submission(command_line, monkeypatch, tmp_path):
    monkeypatch.setenv("SUBQUAD_COMMIT", f"{COMMIT}-dirty")
    environment.commit.cache_clear()
    options = ("--board", "parameters", "--set", "model.d_model=84", "--results", tmp_path, "--out", tmp_path)
    done = command_line("submit", EXAMPLE, *options)
    environment.commit.cache_clear()
    assert done.returncode == 2
    assert "files of Subquad differ from its commit" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_submission_that_cannot_be_read_does_not_stop_a_report(copied, command_line):
    repository, folder = copied
    (folder / MANIFEST).write_text("{")
    done = command_line("report", "small", repository=repository)
    assert done.returncode == 0
    assert "manifest.json: no JSON" in done.stderr
    assert "sent-mixer" not in done.stdout


def test_a_folder_of_another_mixer_stays(copied, command_line, tmp_path):
    repository, folder = copied
    plugin = tmp_path / "sent_mixer.py"
    plugin.write_text((folder / "sent_mixer.py").read_text() + "\n")
    before = file_digest(folder / MANIFEST)
    forget()
    done = command_line("submit", plugin, "--board", "small", "--out", folder.parent, repository=repository)
    sys.path.remove(str(tmp_path))
    assert done.returncode == 2
    assert "has another sent-mixer than" in done.stderr
    assert file_digest(folder / MANIFEST) == before


EXAMPLE_FOLDER = HOME / "submissions" / "my-mixer"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_committed_example_goes_the_whole_way(command_line, monkeypatch, tmp_path):
    """If it fails because a board or a version has changed, `submit` makes the example again (docs/submit.md)."""

    def forget_example():
        sys.modules.pop("my_mixer", None)
        sys.path[:] = [folder for folder in sys.path if folder not in (str(EXAMPLE.parent), str(EXAMPLE_FOLDER))]

    # an earlier test in this process may have imported the file of examples
    forget_example()
    checked = command_line("submissions", "check", EXAMPLE_FOLDER)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    monkeypatch.setenv("SUBQUAD_COMMIT", COMMIT)
    environment.commit.cache_clear()
    forget_example()
    folder = tmp_path / "submissions" / "my-mixer"
    shutil.copytree(EXAMPLE_FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    repeated = command_line("submissions", "repeat", folder, "--device", "cpu", "--results", tmp_path / "results")
    environment.commit.cache_clear()
    assert "the board says: my-mixer (" in repeated.stdout, repeated.stdout + repeated.stderr
    repository = replace(REPOSITORY, submissions=tmp_path / "submissions")
    shown = command_line("report", "leaderboard/parameters", "--scale", "cpu", repository=repository).stdout
    # a processor that rounds differently may end more than a point away
    assert "my-mixer (repeated by us)" in shown or "my-mixer (our repeat differs)" in shown
    assert "my-mixer: rows of its author; we have repeated on " in shown
