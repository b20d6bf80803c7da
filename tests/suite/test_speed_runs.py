"""A grid that times models on random inputs: resolved, stored, skipped and reported as any other."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch

from subquad.models import MODELS
from subquad.reports.render import build, render
from subquad.suite.bench import generation
from subquad.suite.bench import models as timed
from subquad.suite.bench.config import SpeedConfig
from subquad.suite.bench.generation import build_for_inference
from subquad.suite.plugins import load_plugin
from subquad.suite.runner import execute, plan
from subquad.suite.settings.config import ExperimentConfig
from subquad.suite.settings.grid import expand
from subquad.suite.settings.resolver import Resolver
from subquad.suite.store import storage
from tests.suite.rivals import LOG, RIVALS, Here, brief, logged_step
from tests.suite.toy import TASKS

CPU = torch.device("cpu")
MODEL = {"name": "gla", "d_model": 8, "num_layers": 1, "num_heads": 2}
SPEED = {"measure": "train", "lengths": [16, 32], "tokens": 64, "vocab_size": 7, "precision": "fp32"}
TABLE = {
    "rows": {"GLA": {"model.name": "gla"}, "Transformer": {"model.name": "transformer++"}},
    "columns": {
        "K tokens/s": {"metric": "train_throughput", "slice": "length=16"},
        "GiB": {"metric": "peak_memory", "slice": "length=16"},
        "ms at T=32": {"slice": "length=32"},
    },
    "metric": "time",
    "split": "",
    "percent": False,
    "decimals": 4,
}


def one(model=None, models=RIVALS, **speed):
    """The one resolved run of a grid without a sweep."""
    model = {key: value for key, value in {**MODEL, **(model or {})}.items() if value is not None}
    baseline = {"model": model, "speed": {**SPEED, **speed}}
    (run,) = expand("demo/speed", ExperimentConfig(title="speed", baseline=baseline), Resolver(TASKS, models))
    return run


def measured(root, model=None, train_step=timed.train_step, **speed):
    """The finished run, and its rows by metric and slice."""
    run = brief(one(model, **speed), makers={**timed.STEPS, "train": train_step})
    finished = execute(run, root, CPU)
    rows = storage.read(storage.files([root], "demo/speed")).to_dict("records")
    return finished, {(row["metric"], row["slice"]): row for row in rows}


def test_a_training_run_has_a_time_and_a_throughput_for_each_length(tmp_path):
    finished, rows = measured(tmp_path)
    assert finished.status == "ok", finished.error
    for length in (16, 32):
        time, rate = (rows[name, f"length={length}"] for name in ("time", "train_throughput"))
        assert (time["unit"], rate["unit"], time["task"], time["model"]) == ("ms", "tokens/s", "train", "gla")
        assert len(time["samples"]) >= 3
        # a batch has 64 tokens at every length
        assert [ms * tokens for ms, tokens in zip(time["samples"], rate["samples"], strict=True)] == pytest.approx(
            [64e3] * len(time["samples"])
        )
    model = MODELS.load("gla")(**{k: v for k, v in MODEL.items() if k != "name"}).build(one().speed.spec(16))
    assert rows["num_parameters", ""]["value"] == sum(parameter.numel() for parameter in model.parameters())
    assert plan([one()], [tmp_path])[0].stored == "ok"


def test_a_training_step_moves_every_parameter():
    run = one()
    model = run.model.build(run.speed.spec(16))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    timed.train_step(model, run.speed, 16, CPU)()
    for (name, parameter), old in zip(model.named_parameters(), before, strict=True):
        assert not torch.equal(parameter, old), f"{name} stayed as it was"


def test_a_layer_is_the_first_mixer_alone(monkeypatch):
    run = one({"num_layers": 2}, measure="layer", batch_size=3, tokens=None)
    model = run.model.build(run.speed.spec(16))
    seen = []
    for number, mixer in enumerate(model.mixers):
        mixer.register_forward_hook(lambda _, args, y, number=number: seen.append((number, args[0].shape, y.shape)))
    monkeypatch.setattr(model, "forward", lambda *_: pytest.fail("the whole model ran"))
    timed.layer(model, run.speed, 16, CPU)()
    assert seen == [(0, (3, 16, 8), (3, 16, 8))]


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("transformer++", "fp32"), ("transformer++", "bf16"), ("mamba", "bf16"), ("retnet", "fp32"), ("gla", "bf16"),
        ("hgrn2", "fp32"), ("gsa", "bf16"),
    ],
)  # fmt: skip
def test_a_token_is_decoded_behind_the_whole_prefix(name, precision, tmp_path, monkeypatch):
    model = {"name": name, "num_heads": None if name == "mamba" else 2}
    run = one(model, measure="decode", lengths=[5], batch_size=2, tokens=None, precision=precision)
    network = run.model.build(run.speed.spec(5))
    step = timed.decode_step(network, run.speed, 5, CPU)
    times = []
    original = type(network).step

    def spy(inputs, state):
        times.append(state.time.tolist())
        return original(network, inputs, state)

    monkeypatch.setattr(network, "step", spy)
    step()
    step()
    assert times == [[5, 5], [5, 5]]
    _, rows = measured(tmp_path, model, measure="decode", lengths=[5], batch_size=2, tokens=None, precision=precision)
    assert rows["time", "length=5"]["value"] > 0
    rate = rows["decode_throughput", "length=5"]
    assert rate["unit"] == "tokens/s"
    # a step gives one token to each of the two sequences
    assert rate["samples"] == pytest.approx([2e3 / ms for ms in rows["time", "length=5"]["samples"]])
    assert rows["state_size", "length=5"]["value"] == network.state_size(5)


def test_unfused_attention_forbids_the_fused_kernels(tmp_path):
    seen = {}

    def spy(model, speed, length, device):
        kernels = torch.backends.cuda
        allowed = (
            kernels.flash_sdp_enabled(),
            kernels.math_sdp_enabled(),
            kernels.fp16_bf16_reduction_math_sdp_allowed(),
        )
        seen[speed.attention] = allowed
        return lambda: None

    for attention in ("fused", "unfused"):
        assert measured(tmp_path / attention, train_step=spy, attention=attention)[0].status == "ok"
    assert seen == {"fused": (True, True, False), "unfused": (False, True, True)}
    assert not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()


def test_precision_is_that_of_the_run_and_is_put_back(tmp_path):
    seen = []

    def spy(model, speed, length, device):
        seen.append(torch.get_float32_matmul_precision())
        return lambda: None

    before = torch.get_float32_matmul_precision()
    measured(tmp_path, train_step=spy, precision="tf32", lengths=[16])
    assert seen == ["high"]
    assert torch.get_float32_matmul_precision() == before


def test_a_length_without_memory_is_a_row_and_the_series_goes_on(tmp_path):
    def hungry(model, speed, length, device):
        if length == 16:
            raise torch.OutOfMemoryError("planted")
        return timed.train_step(model, speed, length, device)

    finished, rows = measured(tmp_path, train_step=hungry)
    assert finished.status == "ok"
    assert rows["time", "length=16"]["status"] == "oom"
    assert rows["time", "length=32"]["status"] == "ok"


def test_a_fault_of_the_model_fails_the_run_with_its_reason(tmp_path):
    def broken(model, speed, length, device):
        raise RuntimeError("planted fault")

    finished, rows = measured(tmp_path, train_step=broken)
    assert finished.status == "failed"
    assert "planted fault" in rows["time", "length=16"]["error"]
    assert plan([one()], [tmp_path])[0].todo


@pytest.mark.parametrize("name", list(MODELS))
def test_every_model_can_be_built_where_it_is_timed(name, monkeypatch):
    """Nothing of it starts on the host; `meta` stands for an accelerator.

    `from_pretrained` of transformers, called first in a process, leaves a `torch.linspace` that torch's default device
    does not reach.
    """
    monkeypatch.setattr(torch, "linspace", partial(torch.linspace, device="cpu"))
    with torch.device("meta"):
        model = MODELS.load(name)(d_model=64).build(one().speed.spec(32))
    assert {x.device.type for x in (*model.parameters(), *model.buffers())} == {"meta"}


def test_what_moves_the_time_moves_the_run_id():
    ids = [
        one().run_id,
        one(lengths=[16]).run_id,
        one(tokens=128).run_id,
        one(measure="layer").run_id,
        one(precision="bf16").run_id,
        one(attention="unfused").run_id,
        one({"d_model": 16}).run_id,
    ]
    assert len(set(ids)) == len(ids)
    # a default written out is the same run
    assert one(attention="fused").run_id == ids[0]


@pytest.mark.parametrize(
    ("speed", "words"),
    [
        ({"measure": "trian"}, ["speed: measure", "'trian'"]),
        ({"batch_size": 2}, ["one of batch_size and tokens", "2 and 64"]),
        ({"tokens": None}, ["one of batch_size and tokens"]),
        ({"lengths": [16, 24]}, ["tokens=64", "no multiple of the length 24"]),
        ({"lengths": [16, 16]}, ["different"]),
        ({"measure": "decode", "input": "signal"}, ["measure=decode", "signal"]),
        ({"lenghts": [16]}, ["lenghts: unknown key", "did you mean 'lengths'"]),
    ],
)
def test_what_cannot_be_timed_is_one_line_at_second_0(speed, words):
    with pytest.raises(ValueError, match=r"grid\.yaml: speed") as caught:
        one(**speed)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_model_that_cannot_serve_a_length_is_refused_at_second_0():
    with pytest.raises(ValueError, match="num_heads=3 does not divide"):
        one({"num_heads": 3})


@pytest.mark.parametrize("section", ["task", "train", "bench"])
def test_a_grid_of_speeds_trains_nothing(section):
    both = ExperimentConfig(title="x", baseline={"model": MODEL, "speed": SPEED, section: {}})
    with pytest.raises(ValueError, match=rf"baseline\.{section}: a grid with speed times models"):
        expand("x", both, Resolver(TASKS, MODELS))


def test_a_report_shows_thousands_of_tokens_and_gibibytes_and_no_seeds(tmp_path):
    grid = {
        "title": "speed",
        "baseline": {"model": MODEL, "speed": SPEED},
        "sweep": {"model.name": ["gla", "transformer++"]},
        "table": TABLE,
    }
    config = ExperimentConfig(**grid)
    runs = expand("demo/speed", config, Resolver(TASKS, MODELS))
    for run in runs:
        execute(brief(run), tmp_path, CPU)
        # a host tells no memory of its own
        path = storage.result_path(tmp_path, "demo/speed", "paper", run.run_id)
        rows = pq.read_table(path).to_pylist()
        memory = {**rows[-1], "metric": "peak_memory", "unit": "bytes", "value": 3 * 2.0**29, "slice": "length=16"}
        storage.write(path, [*rows, memory])
    frame = storage.read(storage.files([tmp_path], "demo/speed"))
    report = build(config, tmp_path, frame)
    cells = {(cell.row, cell.column): cell for cell in report.cells}
    stored = frame[(frame["metric"] == "train_throughput") & (frame["slice"] == "length=16")]
    for name, row in (("gla", "GLA"), ("transformer++", "Transformer")):
        (rate,) = stored[stored["model"] == name]["value"]
        assert cells[row, "K tokens/s"].mean == pytest.approx(rate / 1e3)
        assert cells[row, "GiB"].mean == pytest.approx(1.5)
        assert cells[row, "ms at T=32"].spread is not None
    assert report.timed
    text = render(report, "md")
    assert "seed" not in text
    # throughputs of several lengths are no one cost
    assert "train tokens/s" not in text


def test_decoding_needs_tokens_in_and_out():
    with pytest.raises(ValueError, match="measure=decode needs tokens"):
        SpeedConfig(measure="decode", lengths=(4,), batch_size=1, readout="sequence")


@pytest.mark.parametrize("name", ["transformer++", "mamba", "hyena"])
def test_a_generation_is_timed_with_its_prompt(name, tmp_path):
    model = {"name": name, "num_heads": 2 if name == "transformer++" else None}
    options = {"measure": "generate", "lengths": [5], "batch_size": 2, "tokens": None, "new_tokens": 4}
    finished, rows = measured(tmp_path, model, **options)
    assert finished.status == "ok", finished.error
    samples = {key: rows[key, "length=5"]["samples"] for key in ("time", "prefill_time", "decode_time")}
    for total, prefill, token in zip(*samples.values(), strict=True):
        assert 0 < prefill < total
        assert total == pytest.approx(prefill + 3 * token)
    rate = rows["generate_throughput", "length=5"]
    assert rate["samples"] == pytest.approx([8e3 / ms for ms in samples["time"]])
    run = one(model, **options)
    network = run.model.build(run.speed.spec(5))
    assert rows["state_size", "length=5"]["value"] == network.state_size(5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measure": "generate"}, "new_tokens=None with measure=generate"),
        ({"new_tokens": 4}, "only generate has new_tokens"),
        ({"measure": "generate", "new_tokens": 4, "lengths": [1]}, "prompts of at least 2 tokens, got 1"),
        ({"measure": "generate", "new_tokens": 4, "input": "signal"}, "needs tokens in and out"),
    ],
)
def test_a_generation_that_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        one(**{"lengths": [16], **options})


def test_new_tokens_are_no_part_of_the_identity_of_other_measures():
    assert "new_tokens" not in one().resolved["speed"]
    assert one(measure="generate", new_tokens=4).resolved["speed"]["new_tokens"] == 4


@pytest.mark.parametrize("name", list(MODELS))
@torch.no_grad()
def test_a_model_built_for_inference_has_only_its_matrices_in_bf16(name):
    spec = one(lengths=[16]).speed.spec(16)
    model = build_for_inference(MODELS.load(name)(d_model=16, num_layers=2), spec, CPU).eval()
    ssm = {id(parameter) for mixer in model.mixers for parameter in mixer.ssm_parameters().values()}
    for module in model.modules():
        matrix = isinstance(module, (torch.nn.Linear, torch.nn.Embedding))
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            low = matrix and id(tensor) not in ssm
            assert not tensor.is_floating_point() or tensor.dtype == (torch.bfloat16 if low else torch.float32)
    tokens = torch.randint(7, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, state = model.prefill(tokens)
        logits, _ = model.step(tokens[:, 0], state)
    assert torch.isfinite(logits).all()
    assert torch.get_default_dtype() == torch.float32


def beside(tmp_path, monkeypatch, habits, train_step=timed.train_step, name="rival", **options):
    """The finished run of a model and of peers with these habits, its rows, and the lines that the peers have logged.

    options: those of `one`, and `run`: others of `execute`.
    """
    log = tmp_path / "log"
    tmp_path.mkdir(exist_ok=True)
    log.touch()
    monkeypatch.setenv(LOG, str(log))
    more, model = options.pop("run", {}), {"name": name, "habits": habits, "position": "learned"}
    run = brief(one(model, against=list(habits), **options), makers={**timed.STEPS, "train": train_step})
    finished = execute(run, tmp_path, CPU, **more)
    rows = storage.read(storage.files([tmp_path], "demo/speed")).to_dict("records")
    return finished, {(row["metric"], row["slice"]): row for row in rows}, log.read_text().splitlines()


def test_a_peer_is_timed_in_the_same_run_with_the_same_step(tmp_path, monkeypatch):
    monkeypatch.setattr(timed, "Worker", Here)
    finished, rows, trained = beside(tmp_path, monkeypatch, {"fla": "as ours"}, logged_step)
    assert finished.status == "ok", finished.error
    # ours at every length first, because a peer may leave a device in disorder
    assert trained == ["Backbone", "Backbone", "Peer", "Peer"]
    # the positions that a model learns are parameters, of which there are more for longer sequences
    for length in (16, 32):
        ours, theirs = rows["time", f"length={length}"], rows["time", f"length={length},against=fla"]
        assert theirs["error"] == ""
        speedup = rows["speedup", f"length={length},against=fla"]
        assert speedup["value"] == pytest.approx(theirs["value"] / ours["value"])
        assert rows["train_throughput", f"length={length},against=fla"]["value"] > 0
    assert rows["num_parameters", "against=fla,version=3.1"]["value"] == rows["num_parameters", ""]["value"]


def test_a_run_that_is_stopped_while_a_peer_is_timed_leaves_no_process_behind(tmp_path, monkeypatch):
    log, heard = tmp_path / "log", []
    options = {"stop": lambda: log.read_text() != "", "alive": lambda phase, step: heard.append(phase)}
    with pytest.raises(KeyboardInterrupt):
        beside(tmp_path, monkeypatch, {"fla": "hangs"}, run=options, peer_minutes=1)
    (pid,) = log.read_text().split()
    assert not Path(f"/proc/{pid}").exists()
    # whoever watches the run hears of it while the peer works
    assert heard.count("timing fla at length=16") > 2


@pytest.mark.slow
def test_a_peer_that_writes_answers_and_kills_its_process_costs_one_row(tmp_path, monkeypatch):
    finished, rows, _ = beside(tmp_path, monkeypatch, {"fla": "dies"})
    assert finished.status == "ok", finished.error
    row = rows["time", "length=16,against=fla"]
    assert (row["status"], "signal 11" in row["error"], "tuning kernel 7" in row["error"]) == ("n/a", True, True)
    for part in ("length=16", "length=32", "length=32,against=fla"):
        assert rows["time", part]["value"] > 0


def test_a_peer_that_takes_too_long_is_stopped_at_all_lengths(tmp_path, monkeypatch):
    finished, rows, _ = beside(tmp_path, monkeypatch, {"fla": "hangs"}, peer_minutes=0.001)
    assert finished.status == "ok", finished.error
    for length in (16, 32):
        assert rows["time", f"length={length}"]["value"] > 0
        row = rows["time", f"length={length},against=fla"]
        assert row["status"] == "n/a"
        assert "more than 0.001 minutes" in row["error"]
        assert "speed.peer_minutes=0.002" in row["error"]


@pytest.mark.slow
def test_a_plugin_that_is_edited_during_a_run_gets_no_times_of_its_new_code(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "plugin_with_peers.py"
    text = "from tests.suite.rivals import RivalConfig\n\nclass Mine(RivalConfig): ...\n\nMODELS = {'mine': Mine}\n"
    path.write_text(text)
    models = MODELS.extended(load_plugin(str(path)).entries["model"], "")

    def edit(phase, step):
        if "mamba_ssm" in phase:
            path.write_text(text + "# changed\n")

    habits = {"fla": "as ours", "mamba_ssm": "as ours"}
    options = {"name": "mine", "models": models, "lengths": [16], "run": {"alive": edit}}
    finished, rows, _ = beside(tmp_path, monkeypatch, habits, **options)
    assert finished.status == "ok", finished.error
    assert rows["time", "length=16,against=fla"]["error"] == ""
    assert "has changed since the run was planned" in rows["time", "length=16,against=mamba_ssm"]["error"]


def test_a_peer_that_cannot_be_compared_is_a_row_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(timed, "Worker", Here)
    words = {
        "missing": "No module named 'fla'",
        "exits": "no license",
        "grows": "not equal to one per cent",
        "rounds": "the code changed torch's float32 matmul precision",
    }
    for habit, reason in words.items():
        finished, rows, _ = beside(tmp_path / habit, monkeypatch, {"fla": habit}, lengths=[16])
        assert finished.status == "ok", finished.error
        row = rows["time", "length=16,against=fla"]
        assert row["status"] == "n/a"
        assert reason in row["error"]
        assert {("speedup", row["slice"]), ("train_throughput", row["slice"])}.isdisjoint(rows)


def test_a_grid_without_peers_keeps_its_identity():
    assert "against" not in one().resolved["speed"]
    assert one(against=["fla"]).run_id != one().run_id
    assert one(against=["fla"], peer_minutes=1).run_id == one(against=["fla"]).run_id
    with pytest.raises(
        ValueError, match="against: other libraries are timed with measure train, layer or generate, not decode"
    ):
        one(measure="decode", against=["fla"])
    with pytest.raises(ValueError, match="against"):
        one(against=["flax"])


def test_a_peer_generates_in_its_own_way_behind_the_same_prompts(tmp_path, monkeypatch):
    monkeypatch.setattr(timed, "Worker", Here)
    speed = {"measure": "generate", "lengths": [5], "batch_size": 2, "tokens": None, "new_tokens": 3}
    finished, rows, asked = beside(tmp_path, monkeypatch, {"mamba_ssm": "as ours"}, precision="bf16", **speed)
    assert finished.status == "ok", finished.error
    time, rate = (rows[name, "length=5,against=mamba_ssm"] for name in ("time", "generate_throughput"))
    assert set(asked) == {"(2, 5), 3, torch.bfloat16"}, time["error"]
    assert [ms * tokens for ms, tokens in zip(time["samples"], rate["samples"], strict=True)] == pytest.approx(
        [2 * 3 * 1e3] * len(time["samples"])
    )
    assert rows["speedup", "length=5,against=mamba_ssm"]["value"] > 0


def test_memory_with_which_a_peer_tunes_itself_is_not_its_peak(monkeypatch):
    """Its kernels are tuned in the first call."""
    events = []
    timer = SimpleNamespace(device=CPU, _recorded=lambda step: (events.append("measured"), None))
    timed.ModelTimer._recorded_or_called(timer, lambda: events.append("called"))
    monkeypatch.setattr(generation, "reset_peak_memory", lambda device: events.append("measured"))
    generation.time_peer(lambda: events.append("called"), CPU, 0.0)
    assert events[:4] == ["called", "measured"] * 2
