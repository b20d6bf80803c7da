"""`generate` continues prompts with the weights that a run kept."""

import json

import pytest
import torch

from subquad.models import MODELS
from subquad.suite.generate import generate
from subquad.suite.runner import execute
from subquad.suite.settings.resolver import Resolver
from subquad.suite.store.weights import save_weights
from subquad.suite.training.trainer import Trainer
from subquad.suite.training.weights import load_model
from subquad.tasks import TASKS
from tests.runs import one_run
from tests.suite.toy import interrupted

CPU = torch.device("cpu")


def one(task, model="mamba", steps=30, **options):
    train = {"steps": steps, "batch_size": 8, "lr": 1e-2}
    return one_run(task, {"name": model, "d_model": 32, "num_layers": 1, **options}, train)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A run on a text that repeats itself, which kept its weights, and the folder of its results."""
    folder = tmp_path_factory.mktemp("text")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUBQUAD_DATA", str(folder / "cache"))
        (folder / "text.txt").write_text("abcdefgh " * 400)
        run = one({"name": "text-file", "data": str(folder / "text.txt"), "length": 32}, steps=60)
        finished = execute(run, folder / "results", CPU, keep_weights=True)
    assert finished.status == "ok", finished.error
    return run, folder / "results"


def test_a_text_is_continued(kept, command_line):
    run, results = kept
    greedy = ("--temperature", 0, "--max-new-tokens", 12, "--results", results, "--device", "cpu")
    done = command_line("generate", run.run_id[:6], "--prompt", "abcdefgh ab", *greedy)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "abcdefgh abcdefgh abcde\n"
    stopped = command_line("generate", run.run_id, "--prompt", "abcd", "--stop", "f", *greedy)
    assert stopped.stdout == "abcdef\n"
    several = command_line("generate", run.run_id, "--prompt", "gh ab", "--prompt", "efgh abcd", "--stop", " ", *greedy)
    assert several.stdout == "gh abcdefgh \nefgh abcdefgh \n"


def test_a_stop_is_the_whole_text_and_not_its_last_token(kept, command_line):
    run, results = kept
    greedy = ("--temperature", 0, "--max-new-tokens", 12, "--results", results, "--device", "cpu")
    for stop, wanted in (("fgh", "abcdefgh"), ("zf", "abcdefgh abcdefg")):
        done = command_line("generate", run.run_id, "--prompt", "abcd", "--stop", stop, *greedy)
        assert done.stdout == f"{wanted}\n"
    ids = ("--ids", "--prompt", "97 98", "--stop", "100 101", "--stop", "102 100")
    assert command_line("generate", run.run_id, *ids, *greedy).stdout.split() == ["97", "98", "99", "100", "101"]
    ids = ("--prompt", "ab", "--prompt", "efg", "--stop", "h a")
    assert command_line("generate", run.run_id, *ids, *greedy).stdout == "abcdefgh a\nefgh a\n"


def test_the_kept_weights_are_those_that_were_tested(kept):
    (path,) = kept[1].rglob("*.weights")
    _, model = load_model(path, Resolver(TASKS, MODELS), CPU)
    prompt = torch.tensor([list(b"abcdefgh abc")])
    assert bytes(generate(model, prompt, 5, temperature=0)[0].tolist()) == b"defgh"


def test_a_checkpoint_of_an_interrupted_run_continues_token_ids(tmp_path, command_line):
    run = one({"name": "induction-heads", "length": 8, "num_train": 40, "num_test": 8})
    path = tmp_path / "a.checkpoint"
    with interrupted(4) as stop:
        Trainer(run, CPU, checkpoint=path, stop=stop)()
    done = command_line("generate", path, "--prompt", "3 1,2", "--max-new-tokens", 4, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert len(words) == 2 + 4
    assert all(0 <= int(word) < run.task.spec.vocab_size for word in words[2:])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere.weights", "--prompt", "a"), ["nowhere.weights", "no such file"]),
        (("ffffffff", "--prompt", "a"), ["no stored run begins with 'ffffffff'"]),
        (("RUN", "--prompt", "a", "--top-p", "2"), ["top_p must lie in (0, 1], got 2.0"]),
        (("RUN", "--ids", "--prompt", " "), ["--prompt: empty"]),
        (("RUN", "--ids", "--prompt", "a b"), ["--prompt 'a b'", "token ids"]),
        (("RUN", "--ids", "--prompt", "1", "--stop", " "), ["--stop: empty"]),
        (("RUN", "--ids", "--prompt", "1", "--stop", "f"), ["--stop 'f': expected token ids"]),
        (("RUN", "--ids", "--prompt", "1", "--stop", "999"), ["--stop '999': token 999 is not in the vocabulary"]),
        (("RUN", "--ids", "--prompt", "1 999"), ["token 999 is not in the vocabulary of 0 to 255"]),
    ],
)
def test_what_cannot_be_continued_is_one_line_and_exit_code_2(kept, command_line, arguments, words):
    run, results = kept
    arguments = [run.run_id if word == "RUN" else word for word in arguments]
    done = command_line("generate", *arguments, "--results", results, "--device", "cpu")
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.strip().splitlines()
    for word in words:
        assert word in line


def test_a_run_without_weights_says_how_to_keep_them(kept, command_line, tmp_path):
    run, results = kept
    (rows,) = results.rglob("*.parquet")
    (tmp_path / rows.name).write_bytes(rows.read_bytes())
    done = command_line("generate", run.run_id, "--prompt", "a", "--results", tmp_path)
    assert done.returncode == 2
    assert "kept no weights" in done.stderr
    assert "--keep-weights" in done.stderr


def test_weights_of_an_older_version_and_other_files_are_refused(kept, command_line, tmp_path):
    (path,) = kept[1].rglob("*.weights")
    stored = torch.load(path, weights_only=True)
    config = json.loads(stored["config"])
    config["model"]["version"] = 0
    torch.save({**stored, "config": json.dumps(config)}, tmp_path / "old.weights")
    done = command_line("generate", tmp_path / "old.weights", "--prompt", "a", "--device", "cpu")
    assert (done.returncode, "mamba was at version 0 and is at" in done.stderr) == (2, True)
    (tmp_path / "other.weights").write_text("nothing")
    done = command_line("generate", tmp_path / "other.weights", "--prompt", "a", "--device", "cpu")
    assert (done.returncode, "holds no weights" in done.stderr) == (2, True)


def test_more_tokens_than_a_model_has_positions_for_are_refused(tmp_path, command_line):
    run = one({"name": "induction-heads", "length": 8}, model="attention")
    save_weights(tmp_path / "a.weights", run.resolved, run.model.build(run.task.spec).state_dict())
    done = command_line("generate", tmp_path / "a.weights", "--prompt", "1 2 3", "--device", "cpu")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --max-new-tokens 128: the model has no positions for so many")
    most = done.stderr.split()[-1]
    for count, code in ((most, 0), (str(int(most) + 1), 2)):
        words = ("--prompt", "1 2 3", "--max-new-tokens", count, "--device", "cpu")
        assert command_line("generate", tmp_path / "a.weights", *words).returncode == code
    long = command_line("generate", tmp_path / "a.weights", "--prompt", "1 " * 99, "--max-new-tokens", "1")
    assert (long.returncode, long.stdout) == (2, "")
    assert "The prompt has 99 tokens" in long.stderr


def test_a_model_that_gives_one_label_continues_nothing(tmp_path, command_line):
    rows = {"num_train": 20, "num_valid": 4, "num_test": 4}
    run = one({"name": "lra-listops", "max_length": 40, "min_length": 20, **rows})
    path = tmp_path / "a.checkpoint"
    with interrupted(2) as stop:
        Trainer(run, CPU, checkpoint=path, stop=stop)()
    done = command_line("generate", path, "--prompt", "1 2", "--device", "cpu")
    assert (done.returncode, "does not predict the next token" in done.stderr) == (2, True)
