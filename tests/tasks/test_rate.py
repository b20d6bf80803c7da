"""Feeding rates: they count the rows that were drawn, by the requested number of threads."""

import sys
import time

import pytest
import torch

from subquad import run_suite
from subquad.suite.contracts import Batch
from subquad.suite.training.data import FreshOrder, steps_of_block
from subquad.tasks.associative_recall import AssociativeRecall
from subquad.tasks.base import CHUNK_ROWS
from subquad.tasks.data.rate import Feed, feed, measure
from tests.stored import store
from tests.suite.toy import Parity

ROWS = Batch(torch.zeros(5, 7, dtype=torch.int16), torch.zeros(5, 1, dtype=torch.int16))


def slow(index):
    time.sleep(0.02)
    return ROWS


@pytest.mark.parametrize("workers", [1, 4])
def test_a_source_of_known_speed_is_measured_right(workers):
    rate = measure(Feed(slow, 0.0, 0), workers, seconds=0.6)
    # a draw takes at least as long as its pause, and longer on a busy machine
    assert 0.4 * workers * 250 < rate.rows_per_s <= workers * 250
    assert rate.tokens_per_s == pytest.approx(7 * rate.rows_per_s)
    assert rate.bytes_per_s == pytest.approx((7 + 1) * 2 * rate.rows_per_s)


def test_no_two_threads_draw_the_same_rows():
    drawn = []

    def draw(index):
        drawn.append(index)
        return slow(index)

    measure(Feed(draw, 0.0, 0), 3, seconds=0.2)
    assert len(set(drawn)) == len(drawn) >= 6


def test_a_stream_is_drawn_in_the_blocks_of_a_run():
    task = Parity(endless=True, length=8)
    source = feed(task, 16)
    order = FreshOrder(task, 16, 0, 1, torch.device("cpu"))
    block, _ = order.locate(order.block_steps)
    order.close()
    assert torch.equal(source.draw(1).inputs, block.inputs)
    assert source.resident_bytes == 0


def test_no_block_of_a_stream_begins_inside_of_a_chunk():
    # 7 steps of 64 rows would fit, which are no whole chunks
    assert (steps_of_block(64, 4112) * 64) % CHUNK_ROWS == 0
    assert steps_of_block(64, 1) == 256
    assert steps_of_block(64, 10**6) == 1


def test_a_finite_task_is_drawn_in_the_batches_of_an_epoch():
    task = AssociativeRecall(vocab_size=10, length=20, num_train=50, num_test=10)
    source = feed(task, 16)
    epoch = torch.cat([source.draw(i).inputs for i in range(4)])
    (segment,) = task.segments("train", 0)
    assert sorted(map(tuple, epoch.tolist())) == sorted(map(tuple, segment.inputs.tolist()))
    parts = (segment.inputs, segment.targets, segment.positions)
    assert source.resident_bytes == sum(part.nbytes for part in parts)


def test_the_command_tells_rates_beside_the_fastest_model(monkeypatch, capsys, tmp_path):
    arguments = ["data", "rate", "associative-recall", "--workers", "1", "--seconds", "0.05"]
    arguments += ["--set", "num_train=64", "--set", "num_test=8", "--results", str(tmp_path)]

    def call():
        monkeypatch.setattr(sys, "argv", ["run_suite.py", *arguments])
        with pytest.raises(SystemExit) as end:
            run_suite.main()
        shown = capsys.readouterr()
        assert not end.value.code, shown.err
        return shown.out.splitlines()

    head, columns, line, last = call()
    assert "MB stay on the device" in head
    assert line.split("\t")[-1] == "-"
    assert last == "no stored row says how fast a model trains"
    for seed, (task, value) in enumerate([("mqar", 9e9), ("associative-recall", 1000.0), ("associative-recall", 10.0)]):
        settings = {"model": {"name": "gla"}, "task": {"name": task}, "seed": seed}
        store(tmp_path, [{"metric": "train_throughput", "value": value}], settings, device="abacus")
    _, _, line, last = call()
    # the rows of this task count and not those of another one
    assert last == "fastest model: 1,000 tokens/s, gla on associative-recall, abacus"
    values = dict(zip(columns.split("\t"), line.split("\t"), strict=True))
    tokens = float(values["tokens/s"].replace(",", ""))
    assert float(values["times the fastest model"].replace(",", "")) == pytest.approx(tokens / 1000, rel=1e-3, abs=0.1)
