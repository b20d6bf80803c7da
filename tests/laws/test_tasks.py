"""Laws that every registered task must obey."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from suite.contracts import IGNORE, Segment
from tasks import TASKS
from tests.laws.instances import INSTANCES, STORED, digest, everything, split


def build(case, **changes):
    name, options = INSTANCES[case]
    return TASKS.load(name)(**{**options, **changes})


def ordinary(rows, trigger):
    """The token behind the first trigger of each row."""
    place = (rows == trigger).argmax(1)
    return rows[np.arange(len(rows)), place + 1]


def solve(task, segment):
    """Answers [R, P] computed from inputs and positions alone; -1 where the next token is not determined."""
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
            context = tokens[: positions[row, 0]]
            answers[row] = context[context != 0]
    else:
        raise NotImplementedError(f"write an oracle for {task.name}")
    return answers


def test_every_task_that_draws_its_rows_is_tested():
    # the other tasks have one fixed set of rows and are tested in files of their own
    drawn = {name for name in TASKS if "data" not in TASKS.load(name).model_fields}
    assert {name for name, _ in INSTANCES.values()} == drawn
    assert set(STORED) == set(TASKS) - drawn


@pytest.mark.parametrize("case", INSTANCES)
def test_same_seed_gives_the_same_bytes_and_another_seed_others(case):
    assert digest(everything(build(case))) == digest(everything(build(case)))
    for name in ("train", "valid", "test"):
        assert digest(split(build(case), name, 0)) != digest(split(build(case), name, 1))


@pytest.mark.parametrize("case", INSTANCES)
def test_global_generators_do_not_move_the_data(case):
    before = digest(everything(build(case)))
    torch.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002 - the global generator is what is tested
    torch.nn.Linear(64, 64)
    np.random.rand(100)  # noqa: NPY002
    task = build(case)
    segments = []
    for name in ("train", "valid", "test"):
        torch.nn.Linear(64, 64)
        segments += split(task, name)
        torch.rand(3)
    assert digest(segments) == before
    expected = torch.Generator().manual_seed(7)
    torch.manual_seed(7)
    everything(task)
    assert torch.equal(torch.rand(5), torch.rand(5, generator=expected)), "the task drew from the global generator"


@pytest.mark.parametrize("case", INSTANCES)
def test_splits_are_drawn_apart_and_hardly_overlap(case):
    task = build(case)
    train = {tuple(row.tolist()) for segment in split(task, "train") for row in segment.inputs}
    for name in ("valid", "test"):
        rows = [tuple(row.tolist()) for segment in split(task, name) for row in segment.inputs]
        assert sum(row in train for row in rows) <= 0.01 * len(rows)
    assert digest(split(task, "valid")) != digest(split(task, "test"))


@pytest.mark.parametrize("case", INSTANCES)
def test_policy_paper_validates_on_test_and_changes_nothing_else(case):
    clean, paper = build(case), build(case, split_policy="paper")
    assert digest(split(paper, "valid")) == digest(split(paper, "test")) == digest(split(clean, "test"))
    assert digest(split(paper, "train")) == digest(split(clean, "train"))


@pytest.mark.parametrize("case", INSTANCES)
def test_segments_are_well_formed(case):
    task = build(case)
    spec = task.spec
    assert spec.input == "tokens"
    assert spec.readout == "token"
    lengths = set()
    for segment in everything(task):
        assert isinstance(segment, Segment)
        rows, length = segment.inputs.shape
        lengths.add(length)
        assert f"length={length}" in segment.slice or task.name != "mqar"
        assert segment.positions.shape == segment.targets.shape
        assert len(segment.targets) == rows == len(segment)
        assert {segment.inputs.dtype, segment.targets.dtype, segment.positions.dtype} <= {torch.int16, torch.int32}
        assert segment.inputs.min() >= 0
        assert segment.inputs.max() < spec.vocab_size
        assert ((segment.targets >= 0) | (segment.targets == IGNORE)).all()
        assert segment.targets.max() < spec.num_classes
        assert segment.positions.min() >= 0
        assert segment.positions.max() < length
        assert (segment.positions.diff(dim=1) > 0).all()
        assert len(segment.targets.unique()) > 1, "one constant answer would solve the task"
    assert max(lengths) == spec.max_length
    for segment in split(task, "test"):
        assert len({s.slice for s in split(task, "test")}) == len(split(task, "test"))
        assert segment.slice.startswith("length=")


@pytest.mark.parametrize("case", INSTANCES)
def test_the_oracle_of_the_task_is_always_right(case):
    task = build(case)
    for name in ("train", "valid", "test"):
        for segment in split(task, name):
            answers, targets = solve(task, segment), segment.targets.numpy()
            known = answers >= 0
            assert known.any(axis=1).all(), "a row without a solvable label"
            assert (answers == targets)[known].all()
            # positions without a determined answer exist only where every next token is labelled
            if not known.all():
                assert name == "train"
                assert task.train_loss == "all-tokens"
                assert (segment.targets[:, :-1] == segment.inputs[:, 1:]).all()
            scored = torch.nn.functional.one_hot(torch.from_numpy(np.maximum(answers, 0)), task.spec.num_classes)
            labels = torch.where(torch.from_numpy(known), segment.targets, IGNORE)
            correct, count = task.score(30.0 * scored, labels)["accuracy"]
            assert correct == count == known.sum()
            constant = torch.zeros(*labels.shape, task.spec.num_classes)
            correct, count = task.score(constant, labels)["accuracy"]
            assert correct < 0.5 * count, "a constant answer is right half the time"


@pytest.mark.parametrize("case", [case for case in INSTANCES if build(case).fresh])
def test_a_block_depends_neither_on_order_nor_on_block_size(case):
    task = build(case)
    whole = task.block(0, 0, 3000)
    for field in ("inputs", "targets", "positions"):
        parts = [getattr(task.block(0, index, 1000), field) for index in (2, 0, 1)]
        assert torch.equal(torch.cat([parts[1], parts[2], parts[0]]), getattr(whole, field))
        assert torch.equal(getattr(task.block(0, 300, 7), field), getattr(whole, field)[2100:2107])
    assert len({row.numpy().tobytes() for row in whole.inputs}) > 2990, "the stream repeats itself"
    with pytest.raises(ValueError, match="block"):
        list(task.segments("train", 0))


@pytest.mark.parametrize("case", [case for case in INSTANCES if not build(case).fresh])
def test_a_finite_task_has_no_blocks(case):
    with pytest.raises(ValueError, match="segments"):
        build(case).block(0, 0, 8)


@pytest.mark.parametrize("case", INSTANCES)
def test_a_resolved_configuration_builds_the_same_task(case):
    task = build(case)
    again = type(task)(**task.model_dump(mode="json"))
    assert again == task
    assert hash(again) == hash(task)
    assert again.fingerprint() == "generated"
    assert again.stand_in == ""
    assert digest(split(again, "test")) == digest(split(task, "test"))


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
    code = "import sys, tasks; list(tasks.TASKS); assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(p for p in sys.path if p)})
