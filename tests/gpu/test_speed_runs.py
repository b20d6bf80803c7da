"""Every model of the experiments of speed can be recorded: a step of training, its layer, one more token."""

import pytest
import torch

from subquad.models import MODELS
from subquad.suite.runner import execute
from subquad.suite.settings.config import ExperimentConfig
from subquad.suite.settings.grid import expand
from subquad.suite.settings.resolver import Resolver
from subquad.suite.store.storage import files, read
from tests.suite.test_speed_runs import Peer, brief
from tests.suite.toy import TASKS

SIZES = {"d_model": 64, "num_layers": 2}
SPEED = {"lengths": [64, 128], "batch_size": 2, "vocab_size": 32}


@pytest.mark.parametrize("name", ["attention", "transformer++", "mamba", "retnet", "gla", "hgrn2", "gsa", "s4d", "h3"])
def test_a_model_is_timed_in_every_way(name, tmp_path):
    for measure in ("layer", "train", "decode"):
        baseline = {"model": {"name": name, **SIZES}, "speed": {**SPEED, "measure": measure}}
        (run,) = expand("gpu/speed", ExperimentConfig(title="speed", baseline=baseline), Resolver(TASKS, MODELS))
        root = tmp_path / measure
        finished = execute(brief(run), root, torch.device("cuda"))
        assert finished.status == "ok", f"{measure}: {finished.error}"
        rows = {(row["metric"], row["slice"]): row for row in read(files([root], "gpu/speed")).to_dict("records")}
        # weights are bfloat16 or wider, so a model takes at least two bytes a parameter
        size = rows["num_parameters", ""]["value"] if measure != "layer" else 0
        for length in SPEED["lengths"]:
            assert rows["time", f"length={length}"]["value"] > 0
            assert rows["peak_memory", f"length={length}"]["value"] > 2 * size


class Reads(Peer):
    """Another library's model that reads a value back from the device, which no recording allows."""

    def forward(self, inputs, positions=None):
        logits = self.network(inputs)
        assert torch.isfinite(logits.sum()).item()
        return logits


def test_a_peer_that_cannot_be_recorded_is_timed_as_it_is(tmp_path, monkeypatch):
    kinds = {"fla": Peer, "mamba_ssm": Reads}
    build = lambda config, library, spec: kinds[library](config.build(spec))  # noqa: E731
    monkeypatch.setattr(MODELS.load("gla"), "build_peer", build)
    # the library that cannot be recorded comes first, and the other one is recorded behind it
    speed = {**SPEED, "measure": "train", "against": ["mamba_ssm", "fla"]}
    baseline = {"model": {"name": "gla", **SIZES}, "speed": speed}
    (run,) = expand("gpu/speed", ExperimentConfig(title="speed", baseline=baseline), Resolver(TASKS, MODELS))
    finished = execute(brief(run), tmp_path, torch.device("cuda"))
    assert finished.status == "ok", finished.error
    rows = {(row["metric"], row["slice"]): row for row in read(files([tmp_path], "gpu/speed")).to_dict("records")}
    for length in SPEED["lengths"]:
        for library, recorded in (("fla", 1.0), ("mamba_ssm", 0.0)):
            part = f"length={length},against={library}"
            assert rows["time", part]["status"] == "ok", rows["time", part]["error"]
            assert rows["recorded", part]["value"] == recorded
            assert rows["speedup", part]["value"] > 0
