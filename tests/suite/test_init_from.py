"""`train.init_from`: a run starts with the weights of another one, which is trained first if they are not there."""

import json
import zipfile

import pytest
import torch

from subquad.models import MODELS
from subquad.suite.contracts import TaskSpec
from subquad.suite.runner import execute, missing_bases
from subquad.suite.settings.config import ExperimentConfig
from subquad.suite.settings.grid import expand
from subquad.suite.store.weights import find_weights, mark, model_settings, save_weights
from subquad.suite.training.trainer import Trainer
from subquad.suite.training.weights import load_model, take_weights
from tests.suite.toy import RESOLVER, make_run

CPU = torch.device("cpu")
TRAINED = json.dumps({"task": {"name": "mqar"}, "model": {"name": "gsa"}})
SPEC = TaskSpec("tokens", num_classes=16, readout="token", max_length=12, vocab_size=16)


def runs_of(init_from, only=(), **train):
    """The runs of a toy grid that start with other weights, behind those whose weights they are."""
    baseline = {
        "task": {"name": "parity"},
        "model": {"name": "toy", "dropout": 0.0},
        "train": {"steps": 1, "batch_size": 16, "lr": 1e-12, "init_from": init_from, **train},
    }
    return expand("toy/start", ExperimentConfig(title="start", baseline=baseline), RESOLVER, only=only)


def weights_of(run, root):
    return torch.load(root / "toy/start/paper" / f"{run.run_id}.weights")["model"]


def test_a_run_starts_with_the_weights_of_the_run_that_is_trained_first(tmp_path):
    base, run = runs_of({"train.steps": 20, "train.lr": 0.01})
    assert (base.train.steps, base.train.init_from, run.base.run_id) == (20, None, base.run_id)
    assert missing_bases([run], tmp_path) == {base.run_id: base}
    for each in (base, run):
        finished = execute(each, tmp_path, CPU, keep_weights=True)
        assert finished.status == "ok", finished.error
    assert missing_bases([run], tmp_path) == {}
    before, after = weights_of(base, tmp_path), weights_of(run, tmp_path)
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, atol=1e-9, rtol=0)


def test_without_a_change_the_same_run_is_trained_first():
    base, run = runs_of({})
    assert (base.run_id, run.base.run_id) == (runs_of(None)[0].run_id, base.run_id)


def test_the_identity_of_a_run_has_the_weights_it_starts_with(tmp_path):
    ids = [runs_of({"train.steps": steps})[-1].run_id for steps in (20, 21)]
    assert ids[0] != ids[1]
    assert runs_of({"train.steps": 20})[-1].run_id == ids[0]


def test_weights_with_a_wrong_byte_are_refused(tmp_path):
    run = make_run()
    model = run.model.build(run.task.spec)
    path = tmp_path / "ab.weights"
    save_weights(path, run.resolved, model.state_dict())
    content = bytearray(path.read_bytes())
    content[content.index(model.head.weight.detach().numpy().tobytes())] ^= 1
    path.write_bytes(content)
    for read in (mark, lambda path: load_model(path, RESOLVER, CPU)):
        with pytest.raises(ValueError, match=f"{path}: holds no weights .*Bad CRC-32"):
            read(path)


@pytest.mark.parametrize(
    ("place", "byte", "words"),
    [
        # in the attributes of a tensor in the table at the end of the archive; torch would return memory as it was
        (-8, 16, "data/4 is no plain file"),
        # the last letter of its name; the mark would be that of other weights
        (-1, ord("3"), "it has a name twice"),
    ],
)
def test_weights_with_another_table_of_their_archive_are_refused(tmp_path, place, byte, words):
    run = make_run()
    path = tmp_path / "ab.weights"
    save_weights(path, run.resolved, run.model.build(run.task.spec).state_dict())
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        (name,) = (name.encode() for name in archive.namelist() if name.endswith("data/4"))
    content[content.rindex(name) + place + len(name) * (place == -1)] = byte
    path.write_bytes(content)
    for read in (mark, lambda path: load_model(path, RESOLVER, CPU)):
        with pytest.raises(ValueError, match=f"{path}: holds no weights .*{words}"):
            read(path)


def test_settings_are_not_read_from_a_file_with_a_wrong_byte_in_them(tmp_path):
    run = make_run()
    path = tmp_path / "ab.weights"
    save_weights(path, run.resolved, run.model.build(run.task.spec).state_dict())
    path.write_bytes(path.read_bytes().replace(b'"dropout": 0.1', b'"dropout": 0.2'))
    with pytest.raises(ValueError, match=f"{path}: holds no weights .*Bad CRC-32"):
        model_settings(path)


def test_weights_that_are_not_those_of_their_settings_are_refused_in_a_line(tmp_path):
    run = make_run()
    path = tmp_path / "ab.weights"
    save_weights(path, run.resolved, make_run(model={"d_model": 8}).model.build(run.task.spec).state_dict())
    with pytest.raises(ValueError, match=rf"^{path}: its weights are not those of its settings \([^\n]+name another"):
        load_model(path, RESOLVER, CPU)


def test_weights_of_a_run_that_has_not_ended_are_known_by_their_content(tmp_path):
    run = make_run(train={"epochs": 4})
    marks = []
    for steps in (2, 4):
        path = tmp_path / f"{run.run_id}.checkpoint"
        trained = Trainer(run, CPU, checkpoint=path, stop=lambda: trained.step >= steps)  # noqa: B023
        with pytest.raises(KeyboardInterrupt):
            trained()
        marks.append(mark(find_weights(run.run_id[:6], [tmp_path])))
    assert marks[0] != marks[1]


def test_weights_are_known_by_their_content_and_not_by_their_name(tmp_path):
    run = make_run()
    weights = run.model.build(run.task.spec).state_dict()
    paths = [tmp_path / name / f"{run.run_id}.weights" for name in "ab"] + [tmp_path / "another name.weights"]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        save_weights(path, run.resolved, weights)
    assert mark(paths[0]) == mark(paths[1]) == mark(paths[2])
    before = runs_of(str(paths[1]))[-1].run_id
    assert runs_of(str(paths[2]))[-1].run_id == before
    save_weights(paths[1], run.resolved, {name: value + 1 for name, value in weights.items()})
    assert mark(paths[0]) != mark(paths[1])
    assert runs_of(str(paths[1]))[-1].run_id != before


def test_a_filter_keeps_the_run_that_is_needed_first():
    base, run = runs_of({"train.steps": 20}, only=["train.steps=1"])
    assert [base.train.steps, run.train.steps] == [20, 1]


def test_a_run_without_those_weights_says_so(tmp_path):
    run = runs_of({"train.steps": 20})[-1]
    finished = execute(run, tmp_path, CPU)
    assert (finished.status, "there are no weights" in finished.error) == ("failed", True)


def test_what_cannot_be_a_start_is_refused():
    with pytest.raises(ValueError, match=r"train\.init_from: 'steps': a dotted key"):
        runs_of({"steps": 2})
    with pytest.raises(ValueError, match=r"not train\.init_from"):
        runs_of({"train.init_from": {"train.steps": 2}})
    with pytest.raises(ValueError, match="no stored run begins with 'abc'"):
        runs_of("abc")
    with pytest.raises(ValueError, match="no such file"):
        runs_of("there/is/none.weights")
    with pytest.raises(ValueError, match="holds no weights with their settings"):
        runs_of(__file__)


def build(name, **options):
    config = MODELS.load(name)(num_layers=2, d_model=32, num_heads=2, tie_embeddings=False, **options)
    return config.build(SPEC)


@pytest.mark.parametrize(
    ("name", "options", "new"),
    [
        ("gsa", {}, ("mixer.decay", "mixer.norm")),
        ("gla", {"expand_k": 1.0, "from_attention": True}, ("mixer.decay", "mixer.norm")),
        ("retnet", {"expand_v": 1, "mlp_ratio": 8 / 3, "from_attention": True}, ("mixer.norm",)),
    ],
)
def test_a_transformer_becomes_a_recurrent_network(name, options, new, tmp_path):
    transformer, model = build("transformer++"), build(name, **options)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    path = tmp_path / "transformer.weights"
    torch.save({"config": TRAINED, "model": transformer.state_dict()}, path)
    fraction = take_weights(model, path, "mqar")
    kept = [key for key, value in model.state_dict().items() if torch.equal(value, before[key])]
    # norms start at one in both, so those that were taken are equal too
    assert all("norm" in key or any(part in key for part in new) for key in kept)
    assert 0.7 < fraction < 1
    qkv = model.state_dict()[f"layers.0.mixer.{'qkv' if name == 'gsa' else 'proj'}.weight"]
    assert torch.equal(qkv, transformer.state_dict()["layers.0.mixer.qkv.weight"])


def test_the_readout_of_another_task_is_not_taken(tmp_path):
    trained, model, same = build("gsa"), build("gsa"), build("gsa")
    path = tmp_path / "gsa.weights"
    torch.save({"config": TRAINED, "model": trained.state_dict()}, path)
    take_weights(model, path, "associative-recall")
    take_weights(same, path, "mqar")
    assert torch.equal(same.head.weight, trained.head.weight)
    assert torch.equal(model.layers[1].mixer.out.weight, trained.layers[1].mixer.out.weight)
    assert not torch.equal(model.head.weight, trained.head.weight)


def test_weights_of_another_kind_of_network_are_refused(tmp_path):
    path = tmp_path / "other.weights"
    torch.save({"config": TRAINED, "model": {"somewhere.else": torch.zeros(3)}}, path)
    with pytest.raises(ValueError, match="none of its weights has a place"):
        take_weights(build("gsa"), path, "mqar")


GRID = """
title: start
baseline:
  task: {name: mqar, vocab_size: 16, length: 16, num_kv_pairs: 2, num_train: 64, num_test: 16}
  model: {num_layers: 1, d_model: 16}
  train: {steps: 2, batch_size: 8}
sweep:
  model:
    - {model.name: abc, train.init_from: {model.name: transformer++, model.d_model: 16, train.steps: 3}}
"""


def test_the_command_trains_what_is_needed_first_and_keeps_its_weights(tmp_path, command_line):
    (tmp_path / "grid.yaml").write_text(GRID)
    results = tmp_path / "results"
    command = ("run", tmp_path, "--results", results, "--device", "cpu")
    done = command_line(*command)
    assert done.returncode == 0, done.stderr
    assert "transformer++" in done.stdout.splitlines()[0]
    (weights,) = results.rglob("*.weights")
    rows = {path.stem for path in results.rglob("*.parquet")}
    assert len(rows) == 2
    # weights that were removed are made again for a run that needs them
    weights.unlink()
    for path in results.rglob("*.parquet"):
        if path.stem != weights.stem:
            path.unlink()
    assert command_line(*command).returncode == 0
    assert weights.exists()
    assert {path.stem for path in results.rglob("*.parquet")} == rows
    # a run may also be named
    named = command_line(*command, "--set", f"train.init_from={weights.stem}", "--set", "train.steps=4")
    assert named.returncode == 0, named.stderr


def test_a_run_whose_weights_have_changed_since_it_was_planned_fails(tmp_path):
    weights = make_run().model.build(make_run().task.spec).state_dict()
    path = tmp_path / "a.weights"
    save_weights(path, make_run().resolved, weights)
    run = runs_of(str(path))[-1]
    save_weights(path, make_run().resolved, {name: value + 1 for name, value in weights.items()})
    finished = execute(run, tmp_path, CPU)
    reason = "train.init_from: a.weights changed since the run was planned; repeat the command"
    assert (finished.status, finished.error) == ("failed", reason)
