"""Any text in a setting or a file gives a run or a refusal in one clear line, and never a traceback or a hang.

Every check is a property that Hypothesis tries to break, with few examples in the quick tier and many in the slow one.
"""

import datetime
import io
import json
import os
import re
import tarfile
import zipfile
from typing import Literal, get_args, get_origin

import pytest
import torch
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from subquad.models import MODELS
from subquad.run_suite import HOME
from subquad.suite.bench.config import BenchConfig, SpeedConfig
from subquad.suite.contracts import TaskSpec
from subquad.suite.options import parse, wanted_by
from subquad.suite.runner import execute
from subquad.suite.settings.config import ExperimentConfig, load_experiment
from subquad.suite.settings.grid import expand
from subquad.suite.settings.report_spec import FigureSpec, Select, Source, TableSpec
from subquad.suite.settings.resolver import Resolver
from subquad.suite.store import storage
from subquad.suite.store.claims import read_claim
from subquad.suite.store.weights import save_weights
from subquad.suite.training.config import EarlyStop, KernelProbe, Stage, TrainConfig
from subquad.suite.training.trainer import Trainer
from subquad.suite.training.weights import load_model
from subquad.tasks import TASKS
from subquad.tasks.data.unpack import unpack
from tests.suite.toy import RESOLVER, make_run

CPU = torch.device("cpu")
RESOLVE = Resolver(TASKS, MODELS, without_data=True)
SPEC = TaskSpec("tokens", num_classes=16, readout="token", max_length=32, vocab_size=16)

KINDS = [MODELS.load(name) for name in MODELS]
FREE = {(Source, "table"), (Source, "figure")}
"""Options whose value may be a number and is a name."""
PARTS = [EarlyStop, KernelProbe, Stage, TrainConfig, BenchConfig, SpeedConfig, Select, TableSpec, FigureSpec, Source]
CONFIGS = [*PARTS, *dict.fromkeys(TASKS.load(name) for name in TASKS), *KINDS]
FIELDS = [(cls, field) for cls in CONFIGS for field in cls.model_fields]


def fuzz(examples, check, *strategies):
    """Calls `check` with so many examples, the same ones in every run of the tests."""
    limits = settings(
        max_examples=examples,
        # an example that takes so long counts as a hang
        deadline=datetime.timedelta(seconds=60),
        derandomize="SUBQUAD_FUZZ_RANDOM" not in os.environ,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
    )
    limits(given(*strategies)(check))()


def cases(quick, slow):
    return pytest.mark.parametrize("examples", [quick, pytest.param(slow, marks=pytest.mark.slow)])


def refused(call):
    """Whether a call refuses what it was given; anything but a ValueError in few lines is an error of this test."""
    try:
        call()
    except ValueError as error:
        text = str(error)
        assert text
        assert "\n" not in text
        assert len(text) < 3000
        return True
    return False


# ---------------------------------------------------------------- settings

NUMBERS = st.one_of(
    st.integers(-2, 70),
    st.sampled_from([2**k for k in range(3, 70, 3)]),
    st.sampled_from([-1, 10**10, 10**40, -(10**40), 0.0, -0.5, 1e-30, 1e30, 1e300, -1e300]),
    st.floats(-2, 2),
    st.floats(),
)
WORDS = st.one_of(
    st.sampled_from(
        ["", "1e3", "1e400", "nan", "true", "null", "accuracy", "loss", "attention", "h3", "gsa", "hybrid"]
    ),
    st.text(max_size=8),
)
LEAVES = st.one_of(NUMBERS, WORDS, st.booleans(), st.none(), st.dates(), st.binary(max_size=3))
KEYS = st.one_of(
    st.sampled_from(["steps", "epochs", "length", "metric", "patience", "name", "T", "B", "gsa", "num_heads"]), LEAVES
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=6,
)


def choices(annotation):
    """The values of every Literal in an annotation."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for part in get_args(annotation) for value in choices(part)]


@st.composite
def options(draw, fields=FIELDS):
    """A configuration class, one of its options, and a value for it that may be sensible or not."""
    cls, field = draw(st.sampled_from(fields))
    known = choices(cls.model_fields[field].annotation)
    value = draw(st.one_of(NUMBERS, VALUES, *([st.sampled_from(known)] if known else [])))
    return cls, field, value


REQUIRED = {
    EarlyStop: {"patience": 3},
    Stage: {"length": 8, "steps": 2},
    TrainConfig: {"epochs": 2},
    BenchConfig: {"op": "attention", "implementation": "torch", "shape": {"B": 1}, "lengths": [8]},
    SpeedConfig: {"measure": "train", "lengths": [8], "batch_size": 2},
    Select: {"best_of": ["train.lr"]},
    TableSpec: {"rows": {}, "columns": {}},
    FigureSpec: {"kind": "lines", "x": "step"},
    Source: {"paper": "h3"},
}
"""Options without a default, or without which there is nothing to try."""


def resolved(cls, field, value):
    """The configuration with this value, whose settings have an identity and are read back as they are; or None."""
    found = []
    values = {**REQUIRED.get(cls, {}), field: value}
    if refused(lambda: found.append(parse(cls, values, "here"))):
        return None
    dumped = found[0].model_dump(mode="json")
    text = json.dumps(dumped, sort_keys=True, allow_nan=False)
    assert json.dumps(parse(cls, json.loads(text), "again").model_dump(mode="json"), sort_keys=True) == text
    return found[0]


@pytest.mark.parametrize("cls", CONFIGS, ids=lambda cls: cls.__name__)
def test_no_number_is_without_bounds(cls):
    for field in cls.model_fields:
        allowed = wanted_by(cls, field)
        if not allowed.number or (cls, field) in FREE:
            continue
        for value in (10**40, 1e300, -1e300, [10**40] * 2, [1e300] * 2):
            config = resolved(cls, field, value)
            assert config is None or (cls in KINDS and refused(lambda config=config: config.check(SPEC))), field


@cases(50, 400)
def test_any_value_of_any_option_is_refused_or_has_an_identity(examples):
    def check(option):
        resolved(*option)

    fuzz(examples, check, options())


def small(config):
    """Whether a model is small enough to be built in a blink, judged by its options alone."""
    values = json.loads(config.model_dump_json())
    numbers = [value for value in values.values() if isinstance(value, (int, float))]
    return max(numbers) <= 70 and config.num_layers <= 4


@cases(15, 150)
def test_a_model_that_is_not_refused_computes_finite_logits(examples):
    tokens = torch.arange(2 * 16).view(2, 16) % SPEC.vocab_size

    def check(option):
        config = resolved(*option)
        if config is None or refused(lambda: config.check(SPEC)) or not small(config):
            return
        torch.manual_seed(0)
        loss = config.build(SPEC)(tokens).square().mean()
        assert loss.isfinite()
        loss.backward()

    fuzz(examples, check, options([(cls, field) for cls in KINDS for field in cls.model_fields]))


@cases(5, 60)
def test_a_training_that_is_not_refused_ends(tmp_path, examples):
    def check(option):
        _, field, value = option
        if field in ("compile", "record_kernels"):
            # a compiler takes a minute, and the toy has no filters
            return
        budget = {} if field in ("steps", "epochs") else {"epochs": 2}
        found = []
        if refused(lambda: found.append(make_run(train={"epochs": None, **budget, field: value}))):
            return
        (run,) = found
        train = run.train
        if max(train.steps or 0, train.epochs or 0, *(s.steps or s.epochs or 0 for s in train.length_warmup)) > 70:
            return
        finished = execute(run, tmp_path, CPU, fresh=True)
        assert finished.status in ("ok", "diverged"), finished.error

    fuzz(examples, check, options([(TrainConfig, field) for field in TrainConfig.model_fields]))


TEXTS = st.one_of(
    st.builds(lambda key, value: f"{key}={value}", st.sampled_from([
        *("model.name", "task.name", "train.lr", "train.betas", "train.early_stop", "model.d_model", "task.length"),
        *("train", "model.", ".x", "train.lr.x", "speed.lengths", "seeds", ""),
    ]), st.one_of(WORDS, NUMBERS, VALUES, st.sampled_from(["[a", "{a: b}", "&a [*a]", "*a", "!!int x", "[[1]]"]))),
    st.text(max_size=12),
)  # fmt: skip


@cases(10, 70)
def test_any_command_line_is_refused_or_planned(command_line, tmp_path, examples):
    def check(flag, text, dry):
        more = () if dry else ("--results", str(tmp_path / "file"))
        done = command_line("run", "quickstart", f"--{flag}={text}", "--dry-run", *more)
        assert done.returncode in (0, 2)
        if done.returncode:
            assert re.match(r"error: [^\n]+\n$", done.stderr) or "Usage" in done.stderr

    fuzz(examples, check, st.sampled_from(["set", "only", "scale", "within", "device", "data"]), TEXTS, st.booleans())


# ---------------------------------------------------------------- files


def damaged(content):
    """Copies of a file with some bytes changed, cut out, doubled or cut off."""

    def change(places, byte, how):
        data = bytearray(content)
        for place in places:
            at = place % max(1, len(data))
            if how == "flip":
                data[at : at + 1] = bytes([byte])
            elif how == "cut":
                data[at : at + byte % 64] = b""
            elif how == "double":
                data[at:at] = data[at : at + byte]
            else:
                del data[at:]
        return bytes(data)

    places = st.lists(st.integers(0, 2**20), min_size=1, max_size=4)
    return st.builds(change, places, st.integers(0, 255), st.sampled_from(["flip", "cut", "double", "end"]))


GRIDS = sorted((HOME / "reports").rglob("grid.yaml"))


@cases(10, 80)
def test_a_damaged_grid_is_refused_or_expands(tmp_path, examples):
    path = tmp_path / "grid.yaml"

    def check(content):
        path.write_bytes(content)
        found = []
        if not refused(lambda: found.append(load_experiment(path))):
            (config,) = found
            for scale in config.scales:
                refused(lambda scale=scale: expand("damaged", config, RESOLVE, scale=scale))

    fuzz(examples, check, st.sampled_from(GRIDS).flatmap(lambda grid: damaged(grid.read_bytes())))


@cases(10, 80)
def test_a_grid_with_a_strange_value_is_refused_or_expands(tmp_path, examples):
    whole = yaml.safe_load((HOME / "reports" / "quickstart" / "grid.yaml").read_text())
    paths = list(_paths(whole))

    def check(place, value, key):
        tree = json.loads(json.dumps(whole))
        inner = tree
        for part in place[:-1]:
            inner = inner[part]
        inner[place[-1]] = value
        if isinstance(inner, dict) and key is not None:
            inner[key] = value
        found = []
        if not refused(lambda: found.append(parse(ExperimentConfig, tree, "here"))):
            for scale in found[0].scales:
                refused(lambda scale=scale: expand("strange", found[0], RESOLVE, scale=scale))

    fuzz(examples, check, st.sampled_from(paths), VALUES, st.one_of(st.none(), KEYS))


def _paths(tree, above=()):
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield (*above, key)
        if isinstance(value, (dict, list)):
            yield from _paths(value, (*above, key))


@cases(15, 70)
def test_a_damaged_results_file_is_refused_or_read(tmp_path, examples):
    run = make_run()
    path = storage.result_path(tmp_path, "toy/test", "paper", run.run_id)
    execute(run, tmp_path, CPU)
    whole = storage.load(path)

    def check(content):
        found = []
        path.write_bytes(content)
        if not refused(lambda: found.append(storage.load(path))):
            assert found[0].equals(whole)
        # a file without a digest may have other values, which its pages' checksums do not find
        path.write_bytes(content.replace(storage.DIGEST, storage.DIGEST.swapcase()))
        refused(lambda: storage.load(path))

    fuzz(examples, check, damaged(path.read_bytes()))


@cases(15, 100)
def test_any_claim_is_read(tmp_path, examples):
    path = tmp_path / "ab.claim"
    good = json.dumps({"host": "a", "pid": 1, "process": "", "token": "t", "since": "", "place": "", "expiry_s": 9})

    def check(content):
        path.write_bytes(content)
        claim = read_claim(path)
        assert claim.holder
        assert claim.live in (True, False)

    values = st.dictionaries(st.sampled_from([*json.loads(good)]), VALUES, max_size=4)
    dumped = values.map(lambda tree: json.dumps({**json.loads(good), **tree}, default=str, skipkeys=True).encode())
    fuzz(examples, check, st.one_of(damaged(good.encode()), dumped))


def archive(kind):
    content = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as packed:
            for number in range(5):
                packed.writestr(f"set/{number}.txt", b"ab" * 300 * number)
        return content.getvalue()
    with tarfile.open(fileobj=content, mode=f"w:{kind}") as tar:
        for number in range(5):
            member = tarfile.TarInfo(f"set/{number}.txt")
            member.size = 600 * number
            tar.addfile(member, io.BytesIO(b"ab" * 300 * number))
    return content.getvalue()


@cases(15, 70)
def test_a_damaged_archive_is_refused_or_unpacked_whole(tmp_path, examples):
    path, target = tmp_path / "archive", tmp_path / "out"

    def check(content):
        path.write_bytes(content)
        counts = []
        if not refused(lambda: counts.append(unpack(path, target))):
            assert 5 <= counts[0] <= 6 or not tarfile.is_tarfile(path)

    fuzz(examples, check, st.sampled_from(["", "gz", "bz2", "xz", "zip"]).flatmap(lambda kind: damaged(archive(kind))))


@cases(4, 16)
def test_a_damaged_checkpoint_never_ends_the_grid(tmp_path, examples):
    run = make_run(train={"epochs": 2})
    path = storage.checkpoint_path(tmp_path, run.experiment, run.scale, run.run_id)
    path.parent.mkdir(parents=True)
    trainer = Trainer(run, CPU, checkpoint=path, stop=lambda: trainer.step > 2)
    with pytest.raises(KeyboardInterrupt):
        trainer()
    whole = path.read_bytes()

    def check(content):
        path.write_bytes(content)
        finished = execute(run, tmp_path, CPU)
        assert finished.status in ("ok", "failed")
        if finished.status == "failed":
            assert str(path) in finished.error
            assert "remove it" in finished.error

    fuzz(examples, check, damaged(whole))


@cases(6, 20)
def test_damaged_weights_are_refused_or_loaded_as_they_were(tmp_path, examples):
    run = make_run()
    path = tmp_path / "ab.weights"
    model = run.model.build(run.task.spec)
    save_weights(path, run.resolved, model.state_dict())

    def loads_the_same():
        found = load_model(path, RESOLVER, CPU)[1].state_dict()
        assert all(torch.equal(value, found[name]) for name, value in model.state_dict().items())

    def check(content):
        path.write_bytes(content)
        refused(loads_the_same)

    fuzz(examples, check, damaged(path.read_bytes()))
