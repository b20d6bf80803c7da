"""Laws that every task must obey, as functions that `check task NAME` and the tests call.

Each takes a task, reads its splits, and raises AssertionError where the law is broken; `NotApplicable` says why a law
says nothing about this task. Together they hold that the rows come from the seed alone, that no split leaks into
another, that inputs and labels are what the task's `spec` says, and that the metrics score right answers as right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from subquad.suite.contracts import IGNORE, PreparedTask, Segment
from subquad.suite.metrics import smaller_is_better

SPLITS = ("train", "valid", "test")
FRESH_ROWS = 200
"""Rows that are read of an endless training stream."""
LEAKAGE = 0.01
"""Share of the rows of a split that may also be training rows, because two random streams may draw the same."""
GENERATED = "generated"
"""Fingerprint of a task that draws its rows instead of reading files."""


class NotApplicable(Exception):
    """The reason why a law says nothing about a task."""


def split(task: Any, name: str, seed: int = 0) -> list[Segment]:
    """The segments of a split; for the endless training stream of a fresh task, its first rows."""
    endless = name == "train" and task.fresh
    return [task.block(seed, 0, FRESH_ROWS)] if endless else list(task.segments(name, seed))


def everything(task: Any) -> list[Segment]:
    """The segments of all three splits."""
    return [segment for name in SPLITS for segment in split(task, name)]


def digest(segments: list[Segment], *, signals: bool = False) -> str:
    """SHA-256 over the slice names and over the integer tensors, their dtypes and shapes.

    signals: over floating tensors, too. Their last digits may depend on the machine, so a record has none of them.
    """
    total = hashlib.sha256()
    for segment in segments:
        total.update(segment.slice.encode())
        for tensor in (segment.inputs, segment.targets, segment.positions):
            if tensor is not None and (signals or not tensor.is_floating_point()):
                total.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
                total.update(tensor.contiguous().numpy().tobytes())
    return total.hexdigest()


def _content(segments: list[Segment]) -> str:
    """Equal for equal segments."""
    return digest(segments, signals=True)


def changed(task: Any, **options: Any) -> Any:
    """The same task with other options."""
    return type(task)(**{**task.model_dump(mode="json"), **options})


def _draws(task: Any) -> bool:
    """Whether a task draws its rows anew for every seed, instead of keeping them in files."""
    return task.fingerprint() == GENERATED and not isinstance(task, PreparedTask)


def _rows(segments: list[Segment]) -> list[bytes]:
    return [row.numpy().tobytes() for segment in segments for row in segment.inputs]


def rows_follow_the_seed(task: Any) -> None:
    """The same seed gives the same rows, and where rows are drawn, another seed gives others."""
    assert _content(everything(task)) == _content(everything(task)), "two readings of one seed differ"
    for name in SPLITS if _draws(task) else ():
        same = _content(split(task, name, 0)) == _content(split(task, name, 1))
        assert not same, f"seeds 0 and 1 give the same rows of {name}"


def global_generators_are_left_alone(task: Any) -> None:
    """The rows come from streams of the task's own: global generators neither move them nor are moved by them."""
    before = _content(everything(task))
    kept = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002 - the global generator is what is judged
    try:
        torch.manual_seed(7)
        np.random.seed(7)  # noqa: NPY002
        moved = _content(everything(task)) != before
        drew = not torch.equal(torch.rand(5), torch.rand(5, generator=torch.Generator().manual_seed(7)))
        drew |= np.random.random() != np.random.RandomState(7).random_sample()  # noqa: NPY002
    finally:
        torch.set_rng_state(kept[0])
        np.random.set_state(kept[1])  # noqa: NPY002
    assert not moved, "torch.manual_seed and numpy.random.seed change the rows"
    assert not drew, "the task draws from the global generators of torch or numpy"


def splits_are_apart(task: Any) -> None:
    """Validation and test rows are drawn apart from each other, and hardly any of them is a training row."""
    clean = changed(task, split_policy="clean")
    train = set(_rows(split(clean, "train")))
    for name in ("valid", "test"):
        rows = _rows(split(clean, name))
        share = sum(row in train for row in rows) / len(rows)
        assert share <= LEAKAGE, f"{100 * share:.1f} % of the rows of {name} are training rows, too"
    assert _content(split(clean, "valid")) != _content(split(clean, "test")), "valid and test have the same rows"


def policy_paper_validates_on_test(task: Any) -> None:
    """The split policy `paper` validates on the test rows and changes nothing else."""
    if not _draws(task):
        raise NotApplicable("its rows are kept in files, which a source may divide in a way of its own")
    clean, paper = changed(task, split_policy="clean"), changed(task, split_policy="paper")
    for name, source in (("train", "train"), ("valid", "test"), ("test", "test")):
        same = _content(split(paper, name)) == _content(split(clean, source))
        assert same, f"under `paper`, {name} does not have the {source} rows of `clean`"


def segments_are_well_formed(task: Any) -> None:
    """Inputs, labels and positions have the shapes, types and ranges that `spec` announces."""
    spec, longest = task.spec, 0
    for segment in everything(task):
        longest = max(longest, segment.inputs.shape[1] // spec.towers)
        assert not (reason := spec.misfit(segment)), reason
        if spec.input == "signal":
            assert segment.inputs.shape[2:] == (spec.channels,), f"a signal must be [R, T, {spec.channels}]"
            assert torch.isfinite(segment.inputs).all(), "a signal has NaN or infinity"
        labels = segment.targets[segment.targets != IGNORE].unique().tolist()
        assert len(labels) > 1, "one constant answer would solve the task"
    assert longest == spec.max_length, f"the longest sequence has {longest} positions, spec says {spec.max_length}"
    names = [segment.slice for segment in split(task, "test")]
    assert len(set(names)) == len(names), f"two segments of the test split have one slice name: {names}"


def labels_fit_the_readout(task: Any) -> None:
    """Every row has labels and positions as the readout of `spec` gives predictions."""
    spec = task.spec
    for segment in everything(task):
        rows, labels = len(segment.inputs), list(segment.targets.shape)
        positions = None if segment.positions is None else list(segment.positions.shape)
        if spec.readout == "sequence":
            assert labels == [rows], f"readout `sequence` gives one prediction a row [{rows}], targets are {labels}"
            assert positions in (None, [rows, spec.towers]), f"positions of {rows} rows with one label are {positions}"
        else:
            assert len(labels) == 2, f"readout `{spec.readout}` gives predictions [{rows}, P], targets are {labels}"
        assert spec.readout != "last" or positions is not None, "readout `last` needs positions"


def metrics_fit_every_batch(task: Any) -> None:
    """Every batch of every split has the same metrics, each a finite sum and a count."""
    known: set[str] = set()
    for name in SPLITS:
        for segment in split(task, name):
            targets = segment.targets[:50].long()
            generator = torch.Generator().manual_seed(0)
            scores = task.score(torch.randn(*targets.shape, task.spec.num_classes, generator=generator), targets)
            assert scores, f"a batch of {name} has no metric"
            known = known or set(scores)
            assert set(scores) == known, f"a batch of {name} has the metrics {sorted(scores)}, others {sorted(known)}"
            for metric, (total, count) in scores.items():
                total, count = torch.as_tensor(total), torch.as_tensor(count)
                assert total.numel() == count.numel() == 1, f"{metric} of {name} is no pair of numbers (sum, count)"
                assert torch.isfinite(total), f"the sum of {metric} of {name} is {float(total)}"
    for metric, of in task.exponentials.items():
        assert of in known, f"{metric} is the exponential of {of}, which is no metric; there are {sorted(known)}"


def has_a_version(task: Any) -> None:
    """The class has a version, a whole number from 1 on, which is part of the identity of every run."""
    version = getattr(type(task), "version", None)
    assert type(version) is int, f"version is {version!r}; write `version: ClassVar[int] = 1` into the class"
    assert version >= 1, f"version is {version}; the first one is 1"


def blocks_are_parts_of_one_stream(task: Any) -> None:
    """A row of an endless stream depends neither on the size of the block that it is read in nor on their order."""
    if not task.fresh:
        raise NotApplicable("its training rows are a finite split")
    rows = 600
    whole = task.block(0, 0, 3 * rows)
    later, first, middle = (task.block(0, index, rows) for index in (2, 0, 1))
    for field in ("inputs", "targets", "positions"):
        expected = getattr(whole, field)
        if expected is None:
            continue
        parts = torch.cat([getattr(part, field) for part in (first, middle, later)])
        assert torch.equal(parts, expected), f"blocks of {rows} rows have other {field} than one block"
        few = getattr(task.block(0, 200, 7), field)
        assert torch.equal(few, expected[1400:1407]), f"a block of 7 rows has other {field} than a larger one"
    different = len(set(_rows([whole])))
    if not _draws(task) or different > 0.99 * len(whole):
        return
    # some short rows are equal by chance, so the repeats within a stream are compared with those between seeds
    independent = len(set(_rows([task.block(seed, 0, rows) for seed in range(3)])))
    assert different > 0.95 * independent, f"only {different} of {len(whole)} rows of the stream differ"


def settings_build_the_task_again(task: Any) -> None:
    """The resolved settings, which are part of a run's identity, build the same task."""
    again = changed(task)
    assert again == task, "a task built from its own settings is not equal to it"
    assert hash(again) == hash(task), "equal tasks have different hashes"
    assert _content(split(again, "test")) == _content(split(task, "test")), "its test rows differ"


def metrics_are_sums(task: Any) -> None:
    """Metrics are sums over labelled positions, which add up over batches, and right answers have an accuracy of 1.

    Logits that are NaN are no answers. The metrics of whole batches need not add up over parts. They are those that the
    task names, and as silent without a label.
    """
    segment = split(task, "test")[0]
    targets = segment.targets[:50].long()
    classes = task.spec.num_classes
    right = 30.0 * F.one_hot(targets.clamp(min=0), classes)
    guessed = torch.randn(*targets.shape, classes, generator=torch.Generator().manual_seed(0))
    whole, half = task.score(guessed, targets), len(targets) // 2
    parts = [task.score(guessed[part], targets[part]) for part in (slice(half), slice(half, None))]
    for metric, (total, count) in whole.items():
        sums = [sum(float(part[metric][i]) for part in parts) for i in (0, 1)]
        near = abs(sums[0] - float(total)) <= 1e-4 * max(1.0, abs(float(total)))
        assert near, f"{metric} of two halves is {sums[0]}, of the whole {float(total)}"
        assert sums[1] == float(count), f"{metric} counts {sums[1]} in two halves, {float(count)} in the whole"
    if "accuracy" in whole:
        correct, count = task.score(right, targets)["accuracy"]
        assert correct == count, f"right answers score {int(correct)} of {int(count)}"
        assert count == (targets != IGNORE).sum(), f"accuracy counts {int(count)} labels"
    lost = torch.full_like(guessed, torch.nan)
    for metric, (total, _) in {**task.score(lost, targets), **task.score_batch(lost, targets)}.items():
        none = float(total) == 0 and smaller_is_better(metric) is not True
        assert none or torch.as_tensor(total).isnan(), f"{metric} of logits that are NaN adds up to {float(total)}"
    unlabelled = torch.full_like(targets, IGNORE)
    nothing = task.score(guessed, unlabelled)
    by_batch = task.score_batch(guessed, unlabelled)
    assert set(by_batch) == set(task.batch_metrics), f"score_batch gives {sorted(by_batch)}"
    for metric, (total, count) in {**nothing, **by_batch}.items():
        assert float(total) == float(count) == 0, f"{metric} counts positions without a label"


def oracle_is_always_right(task: Any) -> None:
    """The oracle of the task, which sees no label, gives every label."""
    if not hasattr(task, "solve"):
        raise NotApplicable("it has no method solve(segment) that returns the answers [R, P] from the inputs alone")
    for name in SPLITS:
        for segment in split(task, name):
            # targets are hidden, so that an oracle which reads them cannot pass
            hidden = Segment(segment.inputs, torch.full_like(segment.targets, IGNORE), segment.positions, segment.slice)
            answers, labelled = torch.as_tensor(task.solve(hidden)), segment.targets != IGNORE
            assert answers.shape == segment.targets.shape, (
                f"solve gives {list(answers.shape)}, targets are {list(segment.targets.shape)}"
            )
            wrong = int((answers != segment.targets)[labelled].sum())
            assert wrong == 0, f"{wrong} of {int(labelled.sum())} labels of {name} ({segment.slice}) differ"


LAWS: tuple[Callable[[Any], None], ...] = (
    rows_follow_the_seed,
    global_generators_are_left_alone,
    splits_are_apart,
    policy_paper_validates_on_test,
    segments_are_well_formed,
    labels_fit_the_readout,
    blocks_are_parts_of_one_stream,
    settings_build_the_task_again,
    metrics_fit_every_batch,
    metrics_are_sums,
    has_a_version,
    oracle_is_always_right,
)
"""All laws, in the order in which `check task` tries them."""
