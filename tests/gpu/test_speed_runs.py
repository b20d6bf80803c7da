"""Every model of the experiments of speed can be recorded: a step of training, its layer, one more token."""

import pytest
import torch

from subquad.models import MODELS
from subquad.suite.runner import execute
from subquad.suite.settings.config import ExperimentConfig
from subquad.suite.settings.grid import expand
from subquad.suite.settings.resolver import Resolver
from subquad.suite.store.storage import files, read
from tests.suite.rivals import RIVALS, brief
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


def test_a_peer_that_cannot_be_recorded_or_breaks_the_device_is_timed_where_it_can(tmp_path):
    # at its first length the library that comes first leaves a device on which its process can do nothing else
    habits = {"transformers": "breaks", "mamba_ssm": "reads", "fla": "as ours"}
    speed = {**SPEED, "measure": "train", "against": list(habits)}
    baseline = {"model": {"name": "rival", **SIZES, "habits": habits}, "speed": speed}
    (run,) = expand("gpu/speed", ExperimentConfig(title="speed", baseline=baseline), Resolver(TASKS, RIVALS))
    finished = execute(brief(run), tmp_path, torch.device("cuda"))
    assert finished.status == "ok", finished.error
    rows = {(row["metric"], row["slice"]): row for row in read(files([tmp_path], "gpu/speed")).to_dict("records")}
    broken = rows["time", "length=64,against=transformers"]
    assert (broken["status"], "device-side assert" in broken["error"]) == ("n/a", True), broken["error"]
    for length in SPEED["lengths"]:
        for library, recorded in (("fla", 1.0), ("mamba_ssm", 0.0), ("transformers", 1.0)):
            part = f"length={length},against={library}"
            if (library, length) != ("transformers", 64):
                assert rows["time", part]["status"] == "ok", rows["time", part]["error"]
                assert rows["recorded", part]["value"] == recorded
                assert rows["peak_memory", part]["value"] > 0
                assert rows["speedup", part]["value"] > 0
