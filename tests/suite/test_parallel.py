"""Several processes that train one run give the values of one process, and none of them is lost unseen."""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from subquad.suite.contracts import IGNORE, Batch
from subquad.suite.executors import team
from subquad.suite.executors.local import run_all
from subquad.suite.executors.processes import CONTEXT, start
from subquad.suite.executors.team import Leader, Team, _member, give
from subquad.suite.runner import execute
from subquad.suite.runs import RunEnded
from subquad.suite.store import storage
from subquad.suite.training import checkpoints, parallel
from subquad.suite.training.config import EarlyStop
from subquad.suite.training.parallel import Group
from subquad.suite.training.trainer import Trainer
from subquad.tasks.compression import Compression
from tests.processes import with_subquad
from tests.suite.test_trainer import train
from tests.suite.test_workers import Recording, ending, values
from tests.suite.toy import ToyConfig, ToyModel, interrupted, make_run, numbers

CPU = torch.device("cpu")
HOME = Path(__file__).resolve().parents[2]
DOUBLE = {"double": True, "dropout": 0.0}
# 71 rows in batches of 10: the last batch of an epoch is one row, of which only one process has a part
TASK, TRAIN = {"num_train": 71}, {"batch_size": 10, "clip": 0.5, "keep": "best", "eval_every": 1}
ROUNDING = {"train": 1e-12, "": 1e-12}
"""Relative, by split: float64 has 2e-16, and 32 steps of AdamW multiply it. Evaluation takes its sums in float32."""


@contextlib.contextmanager
def two_processes(root, first=CPU, *, sharded=False):
    """A context in which this process is rank 0 of two, the other of which follows. first: the device of rank 0."""
    two = Team(2, sharded)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    _, theirs = CONTEXT.Pipe(duplex=False)
    other = start(_member, theirs, 1, two, address, str(two.device(1, first)), root, 1)
    parallel.join(0, 2, first, address=address, sharded=sharded)

    def end():
        give(None)
        # NCCL ends a group in all of its processes at once
        parallel.leave()
        other.join(20 if first == CPU else 60)

    try:
        yield
        end()
        assert other.exitcode == 0
    except AssertionError:
        # the other process waits for the next run: killed before it has left the group, it would hold this one in NCCL
        end()
        raise
    finally:
        other.kill()
        parallel.leave()


def together(run, root, first=CPU, **options):
    """Trains as rank 0 of the processes that are there."""
    give(run)
    path = storage.checkpoint_path(root, run.experiment, run.scale, run.run_id)
    return Trainer(run, first, checkpoint=path, **options)()


def assert_same_but_for_rounding(rows, expected, *, least=0.0):
    """least: relative, where the two differ by more than the order of their sums."""
    # a run that another number of processes has begun says so
    ours, theirs = [row for row in numbers(rows) if row[0] != "continued"], numbers(expected)
    assert [row[:-1] for row in ours] == [row[:-1] for row in theirs]
    assert [row[-1] is None for row in ours] == [row[-1] is None for row in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one[-1] is None or one[-1] == pytest.approx(other[-1], rel=max(least, ROUNDING.get(one[1], 1e-6))), one


def flip_a_bit(path):
    """Changes one bit of a weight in a file of torch."""
    weight = torch.load(path, weights_only=True)["model"]["embed.weight"].numpy().tobytes()
    content = bytearray(path.read_bytes())
    content[content.index(weight)] ^= 1
    path.write_bytes(content)


def write_as_shards_of_two(path):
    """Replaces a checkpoint by the files that two sharded processes would have written."""

    def share(tree, rank):
        if isinstance(tree, dict):
            return {key: share(value, rank) for key, value in tree.items()}
        if tree is None or tree.ndim == 0:
            return tree
        half = -(-len(tree) // 2)
        return tree[half * rank : half * (rank + 1)].clone()

    state = torch.load(path, weights_only=True)
    tensors = {name: state.pop(name) for name in ("model", "optimizer", "best_weights")}
    folder = checkpoints.shard_folder(path)
    folder.mkdir()
    for rank in range(2):
        torch.save({"run_id": state["run_id"], "step": state["step"], **share(tensors, rank)}, folder / str(rank))
    torch.save({**state, "shards": ["0", "1"]}, path)


@pytest.mark.parametrize(
    "sharded", [pytest.param(False, id="DDP"), pytest.param(True, id="FSDP", marks=pytest.mark.slow)]
)
def test_two_processes_give_the_values_of_one(tmp_path, sharded):
    whole = make_run(TASK, DOUBLE, TRAIN)
    pieces = make_run(TASK, DOUBLE, {**TRAIN, "micro_batch_size": 3})
    expected = train(whole).rows
    assert whole.run_id == pieces.run_id == whole.in_processes(2).run_id
    with two_processes(tmp_path, sharded=sharded):
        for run in (whole, pieces):
            assert_same_but_for_rounding(together(run, tmp_path).rows, expected)
        with interrupted(13) as stop:
            together(whole, tmp_path, stop=stop)
        path = storage.checkpoint_path(tmp_path, whole.experiment, whole.scale, whole.run_id)
        assert checkpoints.shard_folder(path).is_dir() == sharded
        kept = path.read_bytes()
        assert_same_but_for_rounding(together(whole, tmp_path).rows, expected)
        path.write_bytes(kept)
    # one process continues what two have begun
    assert_same_but_for_rounding(train(whole, checkpoint=path).rows, expected)
    if sharded:
        flip_a_bit(sorted(checkpoints.shard_folder(path).iterdir())[1])
        with pytest.raises(RunEnded, match="Bad CRC-32"):
            train(whole, checkpoint=path)
    checkpoints.remove(path)
    assert not list(path.parent.iterdir())


def test_a_parameter_without_a_gradient_shifts_no_state_of_the_optimizer(tmp_path, monkeypatch):
    def build(self, spec):
        model = ToyModel(self, spec)
        # first of all parameters, with the shape of half of the embedding, which is the next one
        model.idle = torch.nn.Parameter(torch.zeros(1, self.d_model))
        return model

    monkeypatch.setattr(ToyConfig, "build", build)
    run, path = make_run(), tmp_path / "a.checkpoint"
    with interrupted(7) as stop:
        train(run, checkpoint=path, stop=stop)
    write_as_shards_of_two(path)
    assert numbers(train(run, checkpoint=path).rows) == numbers(train(run).rows)


def test_pieces_of_a_batch_are_added_up_to_the_whole():
    run = make_run(TASK, DOUBLE, TRAIN)
    for size in (1, 3, 10):
        pieces = make_run(TASK, DOUBLE, {**TRAIN, "micro_batch_size": size})
        assert_same_but_for_rounding(train(pieces).rows, train(run).rows)


@pytest.mark.parametrize("rows", [1, 2, 7, 12])
@pytest.mark.parametrize("size", [None, 1, 3])
def test_every_row_is_in_one_piece_and_no_process_has_more_pieces(rows, size):
    batch = Batch(torch.arange(rows)[:, None], torch.arange(rows, dtype=torch.uint8)[:, None])
    found = [list(Group(rank, 3).pieces(batch, size)) for rank in range(3)]
    assert len({len(pieces) for pieces in found}) == 1
    labelled = [piece.batch for pieces in found for piece in pieces if (piece.batch.targets != IGNORE).any()]
    assert torch.cat([piece.targets for piece in labelled]).flatten().tolist() == list(range(rows))
    assert all(len(piece.inputs) <= (size or rows) for piece in labelled)


def test_only_with_dropout_does_the_division_of_a_batch_count_for_identity():
    for dropout, counts in ((0.0, False), (0.1, True)):
        run = make_run(model={"dropout": dropout})
        pieces = make_run(model={"dropout": dropout}, train={"micro_batch_size": 4})
        ids = [run.run_id, run.in_processes(2).run_id, run.in_processes(3).run_id, pieces.run_id]
        assert len(set(ids)) == (4 if counts else 1)
        assert run.in_processes(1).run_id == run.run_id
    with pytest.raises(ValueError, match=r"train\.compile is for one process"):
        make_run(train={"compile": True}).in_processes(2)
    run = make_run()
    stopped = run.train.model_copy(update={"early_stop": EarlyStop(metric="macro_accuracy", threshold=0.9)})
    with pytest.raises(ValueError, match=r"early_stop\.metric=macro_accuracy: it is measured on whole batches"):
        replace(run, task=Compression(), train=stopped, processes=2)


def test_the_checkpoint_before_a_damaged_one_is_continued_from(tmp_path):
    run, path = make_run(train={"epochs": 4}), tmp_path / "a.checkpoint"
    for steps in (3, 6):
        made = Trainer(run, CPU, checkpoint=path, stop=lambda: made.step >= steps)  # noqa: B023
        with pytest.raises(KeyboardInterrupt):
            made()
    flip_a_bit(path)
    begun = []
    again = Trainer(run, CPU, checkpoint=path, stop=lambda: begun.append(again.step) or False)
    assert numbers(again().rows) == numbers(train(run).rows)
    assert begun[0] in (3, 4)
    path.unlink()
    assert checkpoints.earlier(path).is_file()
    checkpoints.remove(path)
    assert not list(tmp_path.iterdir())


def test_a_damaged_checkpoint_is_refused(tmp_path):
    run, path = make_run(), tmp_path / "a.checkpoint"
    with pytest.raises(KeyboardInterrupt):
        train(run, checkpoint=path, stop=lambda: True)
    flip_a_bit(path)
    with pytest.raises(RunEnded, match="Bad CRC-32"):
        train(run, checkpoint=path)


@pytest.mark.slow
def test_a_lost_process_ends_its_team_and_costs_one_try(tmp_path):
    dies_once = make_run(model={"fault": "killed once", "fault_file": str(tmp_path / "died")})
    oom, display = make_run(model={"fault": "oom of one"}), Recording()
    run_all([dies_once, oom], tmp_path, CPU, display, team=Team(2))
    assert display.repeats == [(dies_once.run_id, "process 1: killed, signal 9")]
    assert ending(tmp_path, dies_once)[0] == "ok"
    assert ending(tmp_path, oom)[0] == "oom"
    assert "process 1 of 2: OutOfMemoryError: planted" in ending(tmp_path, oom)[1]


def test_a_process_that_waits_for_a_lost_one_tells_its_parent_which_and_ends(monkeypatch):
    told = []
    monkeypatch.setattr(team, "GRACE_S", 0.0)
    monkeypatch.setattr(team.os, "_exit", told.append)
    mine, theirs = CONTEXT.Pipe(duplex=False)
    leader = Leader.__new__(Leader)
    leader.members = [(start(signal.raise_signal, signal.SIGKILL, name="process 1"), mine)]
    leader.lost, leader.error, leader.on_failure = threading.Event(), None, lambda *given: told.append(given)
    theirs.close()
    leader._watch()
    assert told == [("failed", *["process 1: killed, signal 9"] * 2), 1]


@pytest.mark.slow
def test_under_torchrun_the_runs_of_a_grid_are_carried_out_once(tmp_path):
    script = tmp_path / "grid.py"
    script.write_text(
        "import sys; from pathlib import Path\n"
        "from subquad.suite.executors.contract import Settings, choose\n"
        "from tests.suite.test_workers import Recording; from tests.suite.toy import make_run\n"
        f"runs = [make_run({TASK}, {DOUBLE}, {TRAIN}, seed=seed).in_processes(2) for seed in range(2)]\n"
        "choose('local')(runs, Path(sys.argv[1]), Recording(), Settings(device='cpu', processes=2))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script), str(tmp_path)]
    environment = with_subquad(HOME)
    subprocess.run(command, cwd=HOME, env=environment, check=True, timeout=200)
    runs = [make_run(TASK, DOUBLE, TRAIN, seed=seed) for seed in range(2)]
    for run in runs:
        execute(run, tmp_path / "alone", CPU)
    for ours, alone in zip(values(tmp_path, runs), values(tmp_path / "alone", runs), strict=True):
        assert ours.pop("value") == pytest.approx(alone.pop("value"), rel=1e-6)
        assert ours == alone
    frame = storage.read(storage.files([tmp_path], runs[0].experiment))
    assert frame["device"].str.startswith("2 x ").all()


@pytest.mark.parametrize("size", [None, 1, 3])
def test_pieces_of_a_batch_weigh_by_their_labels(size):
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[1, IGNORE, IGNORE], [1, 2, 3], [IGNORE] * 3, [4, 5, IGNORE]])

    def loss(batch):
        return (weight * batch.targets[batch.targets != IGNORE]).mean()

    shares = [piece.share(loss(piece.batch)) for piece in Group().pieces(Batch(torch.zeros(4, 3), targets), size)]
    for share in shares:
        share.backward()
    value = Group().total([share.detach() for share in shares])
    assert (float(value), float(weight.grad)) == pytest.approx((16 / 6, 16 / 6))
