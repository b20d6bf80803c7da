"""Weights of a run with `task.vocabulary=file` know the tokenizer that they were trained with by its content."""

import shutil

import pytest
import torch

from subquad.models import MODELS
from subquad.suite.options import parse
from subquad.suite.runner import execute
from subquad.suite.settings.config import ExperimentConfig
from subquad.suite.settings.grid import expand
from subquad.suite.settings.resolver import Resolver
from subquad.suite.store.weights import save_weights, tokenizer_of
from subquad.suite.training.trainer import Trainer
from subquad.tasks import TASKS
from subquad.tasks.language import train_bpe
from tests.runs import one_run
from tests.suite.toy import interrupted

pytest.importorskip("tokenizers", reason="`tokenizers` is not installed (extra `data`)")

CPU = torch.device("cpu")
MODEL = {"name": "mamba", "d_model": 16, "num_layers": 1}
TRAIN = {"steps": 1, "batch_size": 8, "lr": 1e-2}


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUBQUAD_DATA", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def task(tmp_path):
    """Options of a task on a text, with a tokenizer that was trained on it, and another one of the same size."""
    (tmp_path / "text.txt").write_text("abcdefgh " * 200)
    train_bpe("abcdefgh " * 200, 260).save(str(tmp_path / "own.json"))
    train_bpe("hgfedcba " * 200, 260).save(str(tmp_path / "other.json"))
    place = tmp_path / "tokenizer.json"
    shutil.copy(tmp_path / "own.json", place)
    options = {"vocabulary": "file", "vocab_size": 260, "tokenizer": str(place), "length": 16}
    return {"name": "text-file", "data": str(tmp_path / "text.txt"), **options}


def run_from(task, start):
    train = {**TRAIN, "init_from": start}
    grid = {"title": "a start", "baseline": {"task": task, "model": MODEL, "train": train}}
    return expand("toy/test", parse(ExperimentConfig, grid, "a start"), Resolver(TASKS, MODELS))[-1]


def kept(task, folder):
    run = one_run(task, MODEL, TRAIN)
    finished = execute(run, folder, CPU, keep_weights=True)
    assert finished.status == "ok", finished.error
    (path,) = folder.rglob(f"{run.run_id}.weights")
    return path


def test_another_tokenizer_is_refused_and_a_copy_of_the_own_one_may_be_named(task, tmp_path, command_line):
    path = kept(task, tmp_path / "results")
    command = ("generate", path, "--prompt", "abc", "--temperature", 0, "--max-new-tokens", 4, "--device", "cpu")
    before = command_line(*command)
    assert (before.returncode, before.stderr) == (0, "")
    for change in (
        lambda: shutil.copy(tmp_path / "other.json", task["tokenizer"]),
        (tmp_path / "tokenizer.json").unlink,
    ):
        change()
        done = command_line(*command)
        (line,) = done.stderr.strip().splitlines()
        assert (done.returncode, done.stdout) == (2, "")
        assert all(word in line for word in ("tokenizer.json", "name a copy of it with --tokenizer"))
        copied = command_line(*command, "--tokenizer", tmp_path / "own.json")
        assert (copied.returncode, copied.stdout, copied.stderr) == (0, before.stdout, "")
        # no text is needed for these
        assert command_line(*command[:2], "--ids", "--prompt", "1 2", *command[4:]).returncode == 0
    wrong = command_line(*command, "--tokenizer", tmp_path / "other.json")
    assert (wrong.returncode, "is not the tokenizer that it was trained with" in wrong.stderr) == (2, True)


def test_evaluate_refuses_another_tokenizer(task, tmp_path, command_line):
    pytest.importorskip("lm_eval", reason="`lm_eval` is not installed (extra `eval`)")
    path = kept(task, tmp_path / "results")
    shutil.copy(tmp_path / "other.json", task["tokenizer"])
    for named in ((), ("--tokenizer", tmp_path / "other.json")):
        done = command_line("evaluate", path, "--tasks", "boolq", "--results", tmp_path, "--device", "cpu", *named)
        assert (done.returncode, "is not the tokenizer that it was trained with" in done.stderr) == (2, True)


def test_a_notebook_refuses_another_tokenizer_and_loads_a_model_without_one(task, tmp_path):
    from subquad import load

    path = kept(task, tmp_path / "results")
    shutil.copy(tmp_path / "other.json", task["tokenizer"])
    with pytest.raises(ValueError, match="is not the tokenizer that it was trained with"):
        load(path, device="cpu")
    assert load(path, device="cpu", tokenizer=tmp_path / "own.json").task.encode("abc ") != []
    (tmp_path / "tokenizer.json").unlink()
    assert load(path, device="cpu").model is not None


def test_weights_that_keep_no_digest_are_loaded_with_a_note(task, tmp_path, command_line):
    run = one_run(task, MODEL, TRAIN)
    save_weights(tmp_path / "old.weights", run.resolved, run.model.build(run.task.spec).state_dict())
    done = command_line("generate", tmp_path / "old.weights", "--prompt", "abc", "--device", "cpu")
    assert done.returncode == 0
    assert done.stderr.startswith(f"note: {tmp_path / 'old.weights'} keeps no digest of its tokenizer")


def test_a_checkpoint_keeps_the_tokenizer_that_the_run_was_planned_with(task, tmp_path):
    run = one_run(task, MODEL, {**TRAIN, "steps": 9})
    planned = run.tokenizer
    with interrupted(2) as stop:
        Trainer(run, CPU, checkpoint=tmp_path / "a.checkpoint", stop=stop)()
    shutil.copy(tmp_path / "other.json", task["tokenizer"])
    assert tokenizer_of(tmp_path / "a.checkpoint") == planned != one_run(task, MODEL, TRAIN).tokenizer


def test_a_run_whose_tokenizer_changed_after_the_plan_is_not_stored_as_the_planned_one(task, tmp_path):
    run = one_run(task, MODEL, TRAIN)
    shutil.copy(tmp_path / "other.json", task["tokenizer"])
    finished = execute(run, tmp_path / "results", CPU, keep_weights=True)
    assert (finished.status, "changed since the run was planned" in finished.error) == ("failed", True)


def test_a_run_does_not_start_with_the_embedding_of_another_vocabulary(task, tmp_path):
    path = kept(task, tmp_path / "results")
    other = {**task, "tokenizer": str(tmp_path / "other.json")}
    own = {**task, "tokenizer": str(tmp_path / "own.json")}
    of_the_data = {key: value for key, value in task.items() if key != "tokenizer"} | {"vocabulary": "bpe"}
    assert run_from(own, str(path)).start == path
    assert run_from({**other, "vocab_size": 261}, str(path)).start == path
    assert run_from(own, {"task.length": 8}).base is not None
    for wrong, start in ((other, str(path)), (of_the_data, str(path)), (own, {"task.tokenizer": other["tokenizer"]})):
        with pytest.raises(ValueError, match=r"train\.init_from: .*another vocabulary of 260"):
            run_from(wrong, start)
    # byte pairs are made of the data
    made = kept(of_the_data, tmp_path / "of the data")
    assert run_from(of_the_data, str(made)).start == made
    (tmp_path / "text.txt").write_text("hgfedcba " * 200)
    with pytest.raises(ValueError, match="another vocabulary of 260"):
        run_from(of_the_data, str(made))


def test_a_checkpoint_that_was_imported_starts_a_run_with_its_tokenizer_only(task, tmp_path):
    imported = {"name": "text-file", "version": 1, "vocabulary": "bpe", "vocab_size": 260, "length": 16}
    run = one_run(task, MODEL, TRAIN)
    path = tmp_path / "imported.weights"
    weights = run.model.build(run.task.spec).state_dict()
    save_weights(path, {"task": imported, "model": run.resolved["model"]}, weights)
    assert run_from(task, str(path)).start == path
    of_the_data = {key: value for key, value in task.items() if key != "tokenizer"} | {"vocabulary": "bpe"}
    with pytest.raises(ValueError, match="another vocabulary of 260"):
        run_from(of_the_data, str(path))
