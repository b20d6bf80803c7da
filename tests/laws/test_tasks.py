"""Laws that every registered task must obey."""

import contextlib
import subprocess
import sys
from itertools import groupby

import numpy as np
import pytest
import torch

from subquad.reports.render.selection import validates_on_test
from subquad.suite.contracts import IGNORE
from subquad.suite.laws import tasks as task_laws
from subquad.suite.laws.tasks import split
from subquad.tasks import TASKS
from tests.laws.instances import INSTANCES, STORED, instances, task_of
from tests.laws.versions import empty_folder

NOISY = {"brain-activity", "seizures"}
"""Tasks whose labels nobody can be sure of; their own tests say how much of a label the rows tell."""


def build(case, **changes):
    return TASKS.load(task_of(case))(**{**INSTANCES[case], **changes})


def ordinary(rows, trigger):
    """The token behind the first trigger of each row."""
    place = (rows == trigger).argmax(1)
    return rows[np.arange(len(rows)), place + 1]


def recalled(tokens, num_facts):
    """Maps each token to its successors: a run of keys and the values behind it are a fact, which may come again."""
    facts, answers, key, end = {}, [-1] * len(tokens), (), 0
    for is_key, run in groupby(tokens, lambda token: token < num_facts // 2):
        run = tuple(run)
        end += len(run)
        if is_key:
            key = run
            known = facts.get(key, ())[: len(tokens) - end + 1]
            answers[end - 1 : end - 1 + len(known)] = known
        else:
            # tokens from num_facts on are noise or padding
            facts[key] = tuple(token for token in run if token < num_facts)
    return answers


def solve(task, segment):
    """Answers [R, P] computed from inputs and positions alone; -1 where the next token is not determined."""
    if hasattr(task, "solve"):
        return np.asarray(task.solve(segment))
    inputs, positions = segment.inputs.numpy(), segment.positions.numpy()
    answers = np.full(positions.shape, -1)
    if task.name in ("induction-heads", "induction-heads-extrapolation"):
        trigger = inputs[0, -1]
        answers[:, -1] = ordinary(inputs, trigger)
    elif task.name == "associative-recall":
        for row, tokens in enumerate(inputs):
            facts = dict(zip(tokens[:-2:2].tolist(), tokens[1:-2:2].tolist(), strict=True))
            answers[row, -1] = facts[int(tokens[-1])]
    elif task.name == "mqar":
        num_pairs = positions.shape[1]
        for row, tokens in enumerate(inputs):
            facts = dict(zip(tokens[: 2 * num_pairs : 2], tokens[1 : 2 * num_pairs : 2], strict=True))
            answers[row] = [facts[tokens[place]] for place in positions[row]]
    elif task.name == "selective-copying":
        for row, tokens in enumerate(inputs):
            context = tokens[: positions[row, 0] - (task.marker == "before")]
            answers[row] = context[context != 0]
    elif task.name == "in-context-recall":
        for row, tokens in enumerate(inputs.tolist()):
            answers[row] = recalled(tokens, task.vocab_size - task.num_noise)
    elif task.name == "fuzzy-in-context-recall":
        for row, tokens in enumerate(inputs.tolist()):
            answers[row] = recalled(tokens, task.vocab_size - 1)
    else:
        raise NotImplementedError(f"write an oracle for {task.name}")
    return answers


def test_every_task_that_draws_its_rows_is_tested():
    # the other tasks have one fixed set of rows and are tested in files of their own
    drawn = {name for name in TASKS if "data" not in TASKS.load(name).model_fields}
    assert set(map(task_of, INSTANCES)) == drawn
    assert {build(case).fingerprint() for case in INSTANCES} == {task_laws.GENERATED}
    assert set(STORED) == set(TASKS) - drawn


@pytest.mark.parametrize("case", INSTANCES)
def test_a_task_obeys_the_laws(case):
    for law in task_laws.LAWS:
        # a task that has no method `solve` has its oracle in this file
        with contextlib.suppress(task_laws.NotApplicable):
            law(build(case))


@pytest.mark.parametrize("name", STORED)
def test_a_task_of_files_obeys_the_laws_that_hold_for_a_handful_of_rows(name):
    laws = (
        task_laws.rows_follow_the_seed,
        task_laws.global_generators_are_left_alone,
        task_laws.settings_build_the_task_again,
        task_laws.metrics_are_sums,
    )
    with empty_folder() as folder:
        for _, task in instances(name, folder):
            for law in laws:
                law(task)


@pytest.mark.parametrize("case", INSTANCES)
def test_slices_name_the_length(case):
    for segment in split(build(case), "test"):
        assert f"length={segment.inputs.shape[1]}" in segment.slice or not case.startswith("mqar")
        assert segment.slice.startswith("length=")
        signal = build(case).spec.input == "signal"
        assert segment.inputs.dtype in ({torch.float32} if signal else {torch.int16, torch.int32})
        parts = [part for part in (segment.targets, segment.positions) if part is not None]
        assert {part.dtype for part in parts} <= {torch.int16, torch.int32}


@pytest.mark.parametrize("case", [case for case in INSTANCES if task_of(case) not in NOISY])
def test_the_oracle_of_the_task_is_always_right(case):
    task = build(case)
    for name in ("train", "valid", "test"):
        for segment in split(task, name):
            answers, targets = solve(task, segment), segment.targets.numpy()
            labelled = targets != IGNORE
            known = (answers >= 0) & labelled
            assert known.any(axis=1).all(), "a row without a solvable label"
            assert (answers == targets)[known].all()
            # positions without a determined answer exist only where every next token is labelled
            if not known[labelled].all():
                assert name == "train"
                assert task.train_loss == "all-tokens"
                assert (segment.targets[:, :-1] == segment.inputs[:, 1:]).all()
            scored = torch.nn.functional.one_hot(torch.from_numpy(np.maximum(answers, 0)), task.spec.num_classes)
            labels = torch.where(torch.from_numpy(known), segment.targets, IGNORE)
            correct, count = task.score(30.0 * scored, labels)["accuracy"]
            assert correct == count == known.sum()
            constant = torch.zeros(*labels.shape, task.spec.num_classes)
            correct, count = task.score(constant, labels)["accuracy"]
            # half where an element of order two is repeated: every other product is the identity
            half = correct == 0.5 * count and segment.slice.endswith("order=2")
            assert correct < 0.5 * count or half, "a constant answer is right half the time"


@pytest.mark.parametrize("case", INSTANCES)
def test_a_task_has_either_a_training_split_or_blocks(case):
    task = build(case)
    if task.fresh:
        with pytest.raises(ValueError, match="block"):
            list(task.segments("train", 0))
    else:
        with pytest.raises(ValueError, match="segments"):
            task.block(0, 0, 8)


@pytest.mark.parametrize("name", list(TASKS))
def test_an_unknown_option_or_split_is_an_error(name):
    with pytest.raises(ValueError, match="no_such_option"):
        TASKS.load(name)(no_such_option=1)
    with pytest.raises(ValueError, match="train, valid, test"):
        next(iter(TASKS.load(name)().segments("validation", 0)))


@pytest.mark.parametrize("name", list(TASKS))
def test_defaults_build_and_state_what_they_are(name):
    task = TASKS.load(name)()
    assert task.name == name
    assert task.version >= 1
    assert task.spec.max_length > 1
    assert task.split_policy == "clean"
    assert "input" in task.__doc__
    assert "target" in task.__doc__
    assert "Source:" in task.__doc__ or "published protocols" in task.__doc__


def test_metrics_are_sums_over_labelled_positions():
    task = build("mqar/zoology-fig2")
    logits = torch.randn(3, 4, 10, generator=torch.Generator().manual_seed(0))
    targets = torch.randint(0, 10, (3, 4), generator=torch.Generator().manual_seed(1))
    targets[1, 2:] = IGNORE
    kept = targets != IGNORE
    log_p = logits.double().log_softmax(-1)
    expected_loss = -sum(log_p[b, p, targets[b, p]] for b in range(3) for p in range(4) if kept[b, p])
    expected_hits = sum(int(logits[b, p].argmax() == targets[b, p]) for b in range(3) for p in range(4) if kept[b, p])
    metrics = task.score(logits, targets.to(torch.int16))
    assert metrics["loss"][0].item() == pytest.approx(expected_loss.item(), rel=1e-6)
    assert metrics["accuracy"][0].item() == expected_hits
    assert metrics["loss"][1].item() == metrics["accuracy"][1].item() == 10
    pairs = [task.score(logits[b], targets[b]) for b in range(3)]
    for metric in ("loss", "accuracy"):
        for part in (0, 1):
            assert sum(pair[metric][part] for pair in pairs).item() == pytest.approx(metrics[metric][part].item())
    nothing = task.score(logits, torch.full_like(targets, IGNORE))
    assert nothing["loss"][0] == nothing["loss"][1] == nothing["accuracy"][0] == 0


def test_listing_tasks_needs_neither_torch_nor_numpy():
    code = "import sys; from subquad.tasks import TASKS; list(TASKS); assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(p for p in sys.path if p)})


@pytest.mark.parametrize("name", list(TASKS))
def test_reports_know_which_tasks_validate_on_test(name):
    """A number that was chosen on the test rows must be marked, and one that was not must not be."""
    with empty_folder() as folder:
        _, task = next(instances(name, folder))
        clean, paper = (
            _rows_of(task_laws.changed(task, split_policy=policy), "valid") for policy in ("clean", "paper")
        )
        test = _rows_of(task_laws.changed(task, split_policy="paper"), "test")
    settings = {"task": {"name": name, "split_policy": "paper"}}
    # rows of a made-up file may be the same in every split
    assert validates_on_test(settings) == (paper == test and paper != clean)
    assert not validates_on_test({"task": {"name": name, "split_policy": "clean"}})


def _rows_of(task, name):
    return [(segment.inputs.tolist(), segment.targets.tolist()) for segment in split(task, name)]
