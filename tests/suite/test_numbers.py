"""A number in a setting is finite, is not `true`, and is whole however YAML writes it, in every kind of config."""

import json
import re
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from pydantic import Field, ValidationError

from subquad.models import MODELS
from subquad.suite import options
from subquad.suite.bench.config import BenchConfig, SpeedConfig
from subquad.suite.options import Config, assignment, parse, read_yaml, wanted_by
from subquad.suite.settings.config import ExperimentConfig, load_experiment
from subquad.suite.settings.grid import expand
from subquad.suite.training.config import TrainConfig
from subquad.tasks import TASKS
from tests.suite.toy import RESOLVER, make_run

CONFIGS = {
    **{f"task {name}": lambda name=name: TASKS.load(name) for name in TASKS},
    **{f"model {name}": lambda name=name: MODELS.load(name) for name in MODELS},
    "train": lambda: TrainConfig,
    "bench": lambda: BenchConfig,
    "speed": lambda: SpeedConfig,
}
NOT_FINITE = [float("nan"), float("inf"), float("-inf"), "nan", "inf", "-Infinity", "1e999"]


class Options(Config):
    size: int = 1
    rate: float = 1.0
    flag: bool = False
    either: int | bool = 1
    name: str = ""
    sizes: tuple[int, ...] = ()
    perhaps: float | None = None
    mixed: dict[str, int | str] = Field(default_factory=dict)
    choice: Literal["a", "b"] | int = 3
    free: Any = None


@pytest.mark.parametrize("kind", CONFIGS)
def test_no_config_takes_true_or_nan_or_infinity_for_a_number(kind):
    cls = CONFIGS[kind]()
    for name in cls.model_fields:
        allowed = wanted_by(cls, name)
        refused = [*NOT_FINITE[:3], *([True, False] if allowed.number and not allowed.boolean else [])]
        for value in refused:
            with pytest.raises(ValidationError) as caught:
                cls(**{name: value})
            (error,) = (error for error in caught.value.errors() if error["loc"][0] == name)
            assert re.search(r"expected a (finite )?number, got (true|false|nan|-?inf)", error["msg"]), error


@pytest.mark.parametrize("name", ["rate", "perhaps", "size", "sizes"])
@pytest.mark.parametrize("value", NOT_FINITE)
def test_what_is_not_finite_is_no_number(name, value):
    with pytest.raises(ValueError, match=rf"here: {name}"):
        parse(Options, {name: [1, value] if name == "sizes" else value}, "here")


@pytest.mark.parametrize("name", ["name", "mixed", "free"])
@pytest.mark.parametrize("value", NOT_FINITE[:3])
def test_what_is_not_finite_is_refused_where_texts_are_allowed(name, value):
    given = {"name": value, "mixed": {"B": value}, "free": {"deep": [value]}}[name]
    with pytest.raises(ValueError, match=rf"here: {name}"):
        parse(Options, {name: given}, "here")


@pytest.mark.parametrize(
    "given",
    [
        {"size": True},
        {"rate": False},
        {"sizes": [1, True]},
        {"perhaps": True},
        {"mixed": {"B": True}},
        {"choice": True},
    ],
)
def test_true_and_false_are_no_numbers(given):
    (name,) = given
    with pytest.raises(ValueError, match=rf"here: {name}: .*expected a number, got (true|false)"):
        parse(Options, given, "here")


def test_a_bool_stays_one_where_it_is_wanted():
    found = parse(Options, {"flag": True, "either": True, "free": {"deep": True}}, "here")
    assert (found.flag, found.either, found.free) == (True, True, {"deep": True})


@pytest.mark.parametrize("text", ["1000", "1e3", "1.0e3", "1E+3", "'1e3'"])
def test_a_whole_number_is_an_integer_however_it_is_written(text):
    found = parse(Options, {"size": read_yaml(text), "sizes": [read_yaml(text)], "rate": read_yaml(text)}, "here")
    assert (found.size, found.sizes, found.rate) == (1000, (1000,), 1000.0)
    assert (type(found.size), type(found.sizes[0]), type(found.rate)) == (int, int, float)
    assert make_run(train={"epochs": read_yaml(text)}).run_id == make_run(train={"epochs": 1000}).run_id


@pytest.mark.parametrize("text", ["1.5", "1e-3", "15e-1", "'ten'", "1e3x"])
def test_what_is_no_whole_number_is_no_integer(text):
    with pytest.raises(ValueError, match="here: size: "):
        parse(Options, {"size": read_yaml(text)}, "here")


def test_texts_that_look_like_numbers_stay_texts_where_a_text_is_wanted():
    found = parse(Options, {"name": "1e3", "mixed": {"form": "1e3"}}, "here")
    assert (found.name, found.mixed) == ("1e3", {"form": "1e3"})


def test_yaml_reads_exponents_as_numbers_and_leaves_names_alone():
    assert read_yaml("[1e3, -2E-4, .5e1, 1.e2]") == [1000.0, -0.0002, 5.0, 100.0]
    assert read_yaml("[e3, 1e, h3, 12ab34, 1e3f]") == ["e3", "1e", "h3", "12ab34", "1e3f"]


# the examples of section 10.3.2 of YAML 1.2.2, and what YAML 1.1 reads as something else
SCALARS = {
    "010": 10, "-08": -8, "0o10": 8, "0x1F": 31, "+12": 12, "0": 0, "1.": 1.0, ".5": 0.5, "+12e03": 12000.0,
    "-2E+05": -200000.0, "null": None, "~": None, "": None, "True": True, "FALSE": False,
    **{word: word for word in (
        "yes", "no", "on", "Off", "y", "tRUE", "1:30", "190:20:30.15", "1_000", "685_230.15", "0b11", "0o8",
        "2026-11-28",
        "2001-12-14t21:59:43.10-05:00", "=", ".", "1e", "e3", "0x", "nul",
    )},
}  # fmt: skip


@pytest.mark.parametrize("text", SCALARS)
def test_a_plain_scalar_is_that_of_the_core_schema(text):
    (found,) = read_yaml(f"[{text or '~'}]")
    assert (found, type(found)) == (SCALARS[text], type(SCALARS[text]))
    assert read_yaml(f"a: {text}") == {"a": SCALARS[text]}
    assert assignment(f"train.x={text}", "--set")[1] == SCALARS[text]


@pytest.mark.parametrize("value", [0, 7, 10, 123])
@pytest.mark.parametrize("form", ["{:d}", "{:03d}", "+{:05d}", "0o{:o}", "0x{:x}", "{:.1f}", "{:e}", "'{:d}'"])
def test_a_whole_number_is_the_same_number_in_all_its_forms(value, form):
    assert parse(Options, {"size": read_yaml(form.format(value))}, "here").size == value


def test_zero_padded_seeds_of_a_sweep_are_different_runs():
    config = ExperimentConfig(
        title="x",
        baseline={"task": {"name": "parity"}, "model": {"name": "toy"}},
        sweep=read_yaml("{train.steps: [008, 010]}"),
    )
    assert [run.train.steps for run in expand("x", config, RESOLVER)] == [8, 10]


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "1e999", "{a: [.nan]}"])
@pytest.mark.parametrize("flag", ["--set", "--only"])
def test_a_flag_takes_no_value_that_is_not_finite(flag, value):
    with pytest.raises(ValueError, match=rf"{flag} 'model.d_model=.*': .*expected a finite number, got"):
        assignment(f"model.d_model={value}", flag)


@pytest.mark.parametrize(
    "tree",
    [
        "baseline: {model: {name: toy, dropout: .nan}}",
        "baseline: {}\nsweep: {train.lr: [0.1, .inf]}",
        "baseline: {}\nscales: {paper: {train.lr: -.inf}}",
        "baseline: {}\nseeds: [true]",
        "baseline: {}\nseeds: [.nan]",
        "baseline: {}\ntable: {rows: {a: {train.lr: .nan}}, columns: {}}",
    ],
)
def test_a_grid_file_is_refused_by_file_and_key(tmp_path, tree):
    path = tmp_path / "grid.yaml"
    path.write_text(f"title: x\n{tree}\n")
    with pytest.raises(ValueError, match=r"grid\.yaml: (baseline|sweep|scales|seeds|table).*: expected a") as caught:
        load_experiment(path)
    assert "\n" not in str(caught.value)


def test_a_filter_compares_numbers_and_not_their_spelling():
    config = ExperimentConfig(
        title="x",
        baseline={"task": {"name": "parity"}, "model": {"name": "toy"}, "train": {"steps": 1000}},
        sweep={"train.lr": [0.001, 1]},
    )

    def kept(only):
        return len(expand("x", config, RESOLVER, only=[only]))

    assert kept("train.steps=1e3") == 2
    assert kept("train.lr=1e-3") == 1
    for true_for_one in ("train.lr=true", "train.deterministic=0"):
        with pytest.raises(ValueError, match="no run has it"):
            kept(true_for_one)


def test_a_resolved_run_is_json_that_every_reader_takes():
    assert "NaN" not in json.dumps(make_run().resolved, allow_nan=False)


@pytest.mark.slow
def test_the_fast_parser_reads_every_file_of_ours_as_the_slow_one_does():
    files = sorted(Path("reports").rglob("*.yaml"))
    assert files
    for path in files:
        text = path.read_text()
        assert read_yaml(text) == yaml.load(text, options._Loader), path


@pytest.mark.parametrize("depth", [1_000, 100_000])
@pytest.mark.parametrize("level", ["[", "- ", "{a: ", "? ", "a:\n"])
def test_deep_nesting_is_refused_and_does_not_end_the_process(level, depth):
    if level == "a:\n":
        # a line for each level, each one deeper than the one before
        depth = min(depth, 4_000)
        text = "".join(f"{' ' * i}a:\n" for i in range(depth))
    else:
        text = level * depth
    with pytest.raises(yaml.YAMLError):
        read_yaml(text + "]" * depth if level == "[" else text)


def test_a_key_that_stands_twice_is_refused_with_its_line():
    with pytest.raises(yaml.YAMLError, match=r"the key 'lr' stands twice, again in line 4"):
        read_yaml("train:\n  lr: 1\n  steps: 2\n  lr: 3\n")
    assert read_yaml('{1: a, "1": b}') == {1: "a", "1": "b"}
