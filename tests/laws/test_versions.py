"""Nothing computes other numbers without a higher version; the record and its rules are in `tests.laws.versions`."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from subquad.kernels import OPERATORS
from subquad.kernels.versions import VERSIONS
from subquad.models import MODELS
from subquad.models.backbone import Backbone
from subquad.suite.laws.tasks import digest, everything
from subquad.tasks import TASKS
from tests.laws import versions
from tests.laws.calls import OPERATOR_CALLS, run
from tests.laws.draw import Draw
from tests.laws.instances import instances
from tests.laws.networks import Network, build, logits_and_gradients, networks
from tests.laws.versions import KEYS, Entry, agree, balanced, changes, compute, empty_folder, problem, signature, update

RECORD = versions.read()
TOKENS = Network("tokens")


@pytest.mark.parametrize("key", KEYS)
def test_what_is_computed_changes_only_with_its_version(key):
    trouble = problem(key, RECORD.get(key), compute(key))
    assert trouble is None, trouble


def test_every_component_has_an_entry_and_no_other_has():
    assert set(RECORD) == set(KEYS)
    assert {name.removesuffix("_step") for name in OPERATORS} == set(VERSIONS)


def model_entry(name="s4d", **options):
    config = MODELS.load(name)
    return versions.of_networks(config, networks(name)[:1], **options)


def changed(key, found):
    """The kinds of results that differ from the record."""
    return {name.rpartition(": ")[2] for name in changes(RECORD[key], found)}


def test_another_epsilon_of_a_norm_is_found():
    assert changed("model/s4d", model_entry()) == set()
    assert changed("model/s4d", model_entry(norm_eps=1.1e-5)) == {"logits", "gradients"}


def test_another_spread_of_the_initial_weights_is_found():
    assert "start" in changed("model/s4d", model_entry(init_std=0.0201))
    # the biases of the time steps start a little higher
    assert changed("model/s4d", model_entry(dt_min=1.01e-3)) == {"start", "logits", "gradients"}


@pytest.mark.parametrize("sign", [1, -1])
def test_a_wrong_sign_in_a_layer_is_found(sign):
    model = build(MODELS.load("gla"), TOKENS, init_std=0.2)
    assert isinstance(model, Backbone)
    model.mixers[1].out.register_forward_hook(lambda module, inputs, output: sign * output)
    logits, gradients = logits_and_gradients(model, TOKENS)
    values = {"tokens: logits": signature([logits]), "tokens: gradients": signature(balanced(gradients))}
    found = Entry(1, values=values)
    assert changed("model/gla", found) == (set() if sign > 0 else {"logits", "gradients"})


@pytest.mark.parametrize("name", ["selective_scan", "lti_ssm"])
def test_a_relative_error_of_a_millionth_in_an_operator_is_found_and_rounding_is_not(name):
    call = next(OPERATOR_CALLS[name](Draw(0)))
    outputs, gradients = run(call, call.implementations["torch"])
    for parts in (balanced(outputs), balanced(gradients)):
        exact = signature(parts)
        noise = [x * (1 + 1e-5 * Draw(1)(*x.shape)) for x in parts]
        assert not agree(exact, signature(noise))
        assert agree(exact, signature([x * (1 + 1e-9 * Draw(1)(*x.shape)) for x in parts]))
        assert not agree(exact, signature([x * (1 + 2e-6) for x in parts]))


def test_operators_and_their_references_compute_the_same():
    for key in (key for key in KEYS if key.startswith("operator/")):
        values = RECORD[key].values
        pairs = [
            (name, other)
            for name in values
            if ": torch" in name and (other := name.replace(": torch", ": reference")) in values
        ]
        # the laws of models compare a step without a reference with the whole sequence
        assert pairs or key.endswith("_step"), key
        for name, other in pairs:
            assert agree(values[name], values[other]), f"{key}: {name}"


def test_one_other_token_or_label_is_found():
    with empty_folder() as folder:
        _, task = next(instances("mqar", folder))
        segments = everything(task)
    before = digest(segments)
    assert digest(copy.deepcopy(segments)) == before
    for part in ("inputs", "targets", "positions"):
        other = copy.deepcopy(segments)
        getattr(other[1], part)[3, 2] += 1
        assert digest(other) != before


def test_a_small_tensor_counts_as_much_as_a_large_one():
    large, small, noise = 1e3 * Draw(0)(50), 1e-3 * Draw(1)(50), 1e-13 * Draw(2)(50)
    exact = signature(balanced([large, small, noise]))
    assert agree(exact, signature(balanced([large, small, -noise])))
    assert not agree(exact, signature(balanced([large, 1.01 * small, noise])))


def test_another_meaning_of_a_metric_is_found():
    task = TASKS.load("mqar")

    class Perplexity(task):
        def score(self, logits, targets):
            total, count = super().score(logits, targets)["loss"]
            return {"loss": (total / 0.6931, count)}

    first, second = (versions.metrics_of(kind(vocab_size=64, num_kv_pairs=4)) for kind in (task, Perplexity))
    assert not agree(list(first["loss"]), list(second["loss"]))


OLD = Entry(3, digests={"rows": "ab"}, values={"logits": [1.0, 0.5, -0.25]})


def test_a_change_under_the_same_version_says_what_to_do():
    new = replace(OLD, values={"logits": [1.0, 0.5, -0.26]})
    assert problem("model/x", OLD, OLD) is None
    assert problem("model/x", OLD, replace(OLD, values={"logits": [1.0, 0.5 + 1e-7, -0.25]})) is None
    words = problem("model/x", OLD, new)
    assert words.startswith("model/x: computes other numbers than recorded for version 3: logits. If this is meant, ")
    assert "raise its version" in words
    assert "--update" in words
    assert "rows" in problem("task/x", OLD, replace(OLD, digests={"rows": "cd"}))
    assert "no entry" in problem("model/x", None, OLD)
    assert "raised from 3 to 4" in problem("model/x", OLD, replace(new, version=4))
    assert "down to 2" in problem("model/x", OLD, replace(OLD, version=2))


def test_an_update_rewrites_only_what_has_another_version():
    new = replace(OLD, values={"logits": [2.0, 0.5, -0.25]})
    record, refused = update({"a": OLD, "b": OLD, "gone": OLD}, {"a": new, "b": replace(new, version=4), "c": new})
    assert record == {"a": OLD, "b": replace(new, version=4), "c": new}
    assert len(refused) == 1
    assert refused[0].startswith("a: computes other numbers")


def test_an_update_adds_and_removes_cases_under_the_same_version():
    more = Entry(3, digests={}, values={"logits": [1.0, 0.5 + 1e-9, -0.25], "gradients": [1.0, 2.0, 3.0]})
    assert "the cases gradients; rows are new or gone" in problem("model/x", OLD, more)
    record, refused = update({"a": OLD}, {"a": more})
    # recorded values keep their digits
    assert record == {"a": Entry(3, values={**OLD.values, "gradients": [1.0, 2.0, 3.0]})}
    assert refused == []


def test_a_result_that_is_not_finite_is_no_record():
    with pytest.raises(AssertionError, match="NaN or infinite"):
        signature([torch.tensor([1.0, np.inf])])


def test_the_record_is_written_as_it_is_read(tmp_path):
    versions.write(RECORD, tmp_path / "copy.json")
    assert (tmp_path / "copy.json").read_text() == versions.PATH.read_text()
    assert versions.read(tmp_path / "copy.json") == RECORD
    assert versions.read(tmp_path / "none.json") == {}
