"""`evaluate` asks tasks of lm-evaluation-harness with local data of a model that was trained here."""

import json
import math
import sys

import pytest
import torch

from subquad.models import MODELS
from subquad.suite.runner import execute
from subquad.suite.settings.resolver import Resolver
from subquad.suite.store import endings, storage
from subquad.suite.training.weights import load_model
from subquad.tasks import TASKS
from subquad.tasks.language import train_bpe
from tests.runs import one_run

pytest.importorskip("lm_eval", reason="`lm_eval` is not installed (extra `eval`)")

from subquad.suite.generate import Sampling
from subquad.suite.harness import Answers, evaluate

CPU = torch.device("cpu")
TEXT = "abcdefgh "

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{prompt}}}}"
{answer}
metadata: {{version: 1.0}}
"""
CHOICE = 'doc_to_choice: "{{choices}}"\ndoc_to_target: label\nmetric_list: [{metric: acc}]'
DRAWN = """doc_to_target: "{{answer}}"
generation_kwargs: {until: [" "], max_gen_toks: 12}
metric_list: [{metric: exact_match}]"""
SAMPLED = """doc_to_target: "{{answer}}"
repeats: 3
generation_kwargs: {until: [" "], do_sample: true}
filter_list: [{name: most, filter: [{function: majority_vote}, {function: take_first}]}]
metric_list: [{metric: exact_match}]"""


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A run on a text that repeats itself, which kept its weights, and the folder of its results."""
    folder = tmp_path_factory.mktemp("text")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUBQUAD_DATA", str(folder / "cache"))
        (folder / "text.txt").write_text(TEXT * 400)
        task = {"name": "text-file", "data": str(folder / "text.txt"), "length": 32}
        model = {"name": "mamba", "d_model": 32, "num_layers": 1}
        run = one_run(task, model, {"steps": 60, "batch_size": 8, "lr": 1e-2})
        finished = execute(run, folder / "results", CPU, keep_weights=True)
    assert finished.status == "ok", finished.error
    return run, folder / "results"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"prompt": "abcdefgh abc", "choices": ["xyz", "def"], "label": 1, "answer": "defgh"},
        {"prompt": "fgh ab", "choices": ["cde", "cda"], "label": 0, "answer": "cdefgh"},
        {"prompt": "gh abcd", "choices": ["efgh", "efga"], "label": 1, "answer": "efgh"},
    ]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, kind, answer in (
        ("next-letters", "multiple_choice", CHOICE),
        ("word-end", "generate_until", DRAWN),
        ("samples", "generate_until", SAMPLED),
        ("no-examples", "multiple_choice", CHOICE + "\nnum_fewshot: 0\nfewshot_split: test"),
    ):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data, kind=kind, answer=answer))
    return folder


def answers_of(kept):
    results = kept[1]
    (path,) = results.rglob("*.weights")
    task, model = load_model(path, Resolver(TASKS, MODELS), CPU)
    return Answers(model, task.encode, task.decode, task.spec.max_length, 2, CPU), model


@torch.no_grad()
def test_a_continuation_is_as_likely_as_the_model_says(kept):
    answers, model = answers_of(kept)
    tokens = torch.tensor([list(b"abcdefgh abcd")])
    log_p = model(tokens[:, :-1]).log_softmax(-1)[0, -2:]
    wanted = sum(float(log_p[i, byte]) for i, byte in enumerate(b"cd"))
    pairs = [("abcdefgh ab", "cd"), ("abcdefgh ab", "zz"), ("", "a"), ("abcdefgh " * 9, "abc")]
    found = list(answers.continuations(pairs))
    assert math.isclose(found[0][0], wanted, rel_tol=1e-4)
    assert [likeliest for _, likeliest in found][:2] == [True, False]
    assert found[3][1]
    # one at a time and in batches are the same
    for (total, _), pair in zip(found, pairs, strict=True):
        assert math.isclose(next(answers.continuations([pair]))[0], total, rel_tol=1e-4)


def test_a_text_is_the_sum_of_its_bytes_also_beyond_the_length_of_the_model(kept):
    answers, _ = answers_of(kept)
    short, long = answers.wholes(["abcdefgh abc", TEXT * 20])
    ((behind, _),) = answers.continuations([("\n", "abcdefgh abc")])
    assert math.isclose(short, behind, rel_tol=1e-4)
    assert math.exp(short / 12) < 0.9
    assert math.exp(long / 180) > 0.8


def test_a_prompt_keeps_half_of_the_positions_where_more_tokens_are_asked_for(kept, monkeypatch):
    answers, _ = answers_of(kept)
    prompts = []

    def generate(model, prompt, count, **options):
        prompts.append((prompt.shape[1], count))
        return torch.full((1, count), ord("a"))

    monkeypatch.setattr("subquad.suite.harness.generate", generate)
    answers.continued(TEXT * 9, [], 256, Sampling(0.0))
    answers.continued(TEXT * 9, [], 4, Sampling(0.0))
    assert prompts == [(16, 17), (28, 4)]


def test_tasks_with_local_data_are_asked_and_stored(kept, tasks, command_line, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    run, results = kept
    command = ("evaluate", run.run_id[:6], "--tasks", "next-letters,word-end", "--include", tasks, "--device", "cpu")
    done = command_line(*command, "--results", results)
    assert done.returncode == 0, done.stderr
    (path,) = (results / "evaluate").rglob("*.parquet")
    rows = {(row["task"], row["metric"]): row["value"] for row in storage.load(path).to_pylist()}
    assert rows["next-letters", "acc"] == pytest.approx(2 / 3)
    assert rows[next(key for key in rows if key[0] == "word-end" and key[1].startswith("exact_match"))] == 1.0
    assert rows["", "inference_flops"] > 0
    assert endings.ending(path).status == "ok"


def test_samples_of_one_question_are_drawn_from_seeds_of_their_own(tasks, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    seeds = []

    class Asked(Answers):
        def continued(self, context, until, max_new_tokens, sampling, seed=0):
            seeds.append((context, seed))
            return "x"

    nothing = Asked(None, lambda text: list(text.encode()), None, 32, 4, CPU)
    evaluate(nothing, ["samples"], folder=tasks)
    assert len(seeds) == len(set(seeds)) == 9
    assert len({context for context, _ in seeds}) == 3


def test_a_task_that_misspells_a_column_is_refused_in_one_line(tasks, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    text = (tasks / "word-end.yaml").read_text()
    (tmp_path / "misspelt.yaml").write_text(text.replace("{{prompt}}", "{{promt}}").replace("word-end", "misspelt"))
    nothing = Answers(None, lambda text: list(text.encode()), None, 32, 4, CPU)
    with pytest.raises(ValueError, match=r"a task cannot be asked as it is written .*'promt' is undefined"):
        evaluate(nothing, ["misspelt"], folder=tmp_path)


def test_the_slice_says_how_many_examples_a_task_had(kept, tasks, command_line, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    run, results = kept
    options = ("--include", tasks, "--device", "cpu", "--shots", "2", "--limit", "1")
    done = command_line("evaluate", run.run_id, "--tasks", "no-examples", *options, "--results", results)
    assert done.returncode == 0, done.stderr
    assert "no-examples sets its own number of examples" in done.stderr
    (path,) = (results / "evaluate" / "limited").rglob("*.parquet")
    slices = {row["slice"] for row in storage.load(path).to_pylist() if row["task"] == "no-examples"}
    assert slices == {"shots=0"}


@pytest.mark.slow
def test_what_cannot_be_asked_is_refused_in_one_line(kept, tasks, command_line, tmp_path):
    run, results = kept
    options = ("--results", results, "--device", "cpu", "--include", tasks)
    done = command_line("evaluate", run.run_id, "--tasks", "next-leters", *options)
    assert (done.returncode, "no task 'next-leters'" in done.stderr and "did you mean" in done.stderr) == (2, True)
    made = train_bpe(TEXT * 40, 260)
    made.save(str(tmp_path / "tokenizer.json"))
    done = command_line(
        "evaluate", run.run_id, "--tasks", "word-end", *options, "--tokenizer", tmp_path / "tokenizer.json"
    )
    assert (done.returncode, "has the token 259, but the model has embeddings of 0 to 255" in done.stderr) == (2, True)
    done = command_line("evaluate", run.run_id, "--tasks", "x", "--include", tmp_path / "none", "--results", results)
    assert (done.returncode, "there is no such folder" in done.stderr) == (2, True)


OUTSIDE = {
    "rows.jsonl": '{"prompt": "abc", "answer": "d"}\n',
    "words.txt": "Go on: ",
    "base.yaml": """
dataset_path: json
test_split: test
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: [" "], max_gen_toks: 4}
filter_list: [{name: first, filter: [{function: regex, regex_pattern: "(.*)"}, {function: take_first}]}]
""",
    "outside_code.py": """
from pathlib import Path
import outside_part

def question(doc):
    return Path(__file__).with_name("words.txt").read_text() + doc["prompt"]

def score(doc, results):
    return outside_part.score(results[0])
""",
    "outside_part.py": "def score(answer):\n    return {'acc': 0.0}\n",
}
MINE = """
include: ../outside/base.yaml
task: mine
dataset_kwargs: {data_files: {test: [DATA]}}
doc_to_text: !function outside_code.question
process_results: !function outside_code.score
metric_list: [{metric: acc}]
"""


@pytest.mark.parametrize(
    ("edited", "old", "new"),
    [
        ("rows.jsonl", '"d"', '"e"'),
        ("words.txt", "Go", "Go further"),
        ("base.yaml", "(.*)", "(.)"),
        ("outside_code.py", "results[0]", "results[-1]"),
        ("outside_part.py", "0.0", "10.0"),
    ],
)
def test_an_edited_file_outside_of_the_folder_is_another_evaluation(tmp_path, monkeypatch, edited, old, new):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.syspath_prepend(tmp_path / "outside")
    for name in ("outside", "tasks"):
        (tmp_path / name).mkdir()
    for name, text in OUTSIDE.items():
        (tmp_path / "outside" / name).write_text(text)
    task = tmp_path / "tasks" / "mine.yaml"
    task.write_text(MINE.replace("DATA", str(tmp_path / "outside" / "*.jsonl")))

    class Silent(Answers):
        def continued(self, context, until, max_new_tokens, sampling, seed=0):
            return "x"

    def asked():
        for name in [name for name in sys.modules if "outside_" in name]:
            del sys.modules[name]
        nothing = Silent(None, lambda text: list(text.encode()), None, 32, 4, CPU)
        return evaluate(nothing, ["mine"], folder=tmp_path / "tasks").asked

    before = asked()
    assert asked() == before
    (tmp_path / "outside" / edited).write_text(OUTSIDE[edited].replace(old, new))
    assert asked() != before
    # where the files lie is no part of it
    (tmp_path / "outside" / edited).write_text(OUTSIDE[edited])
    task.write_text(MINE.replace("DATA", str(tmp_path / "elsewhere.jsonl")))
    (tmp_path / "elsewhere.jsonl").write_text(OUTSIDE["rows.jsonl"])
    assert asked() == before
