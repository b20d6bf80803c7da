"""`weights import` reads public checkpoints, `weights export` writes them, and nothing is lost on the way."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from subquad.models import MODELS
from subquad.models.checkpoints import LAYOUTS, layout_of, load, unload
from subquad.suite.commands.weights import _weights
from subquad.suite.contracts import TaskSpec
from subquad.suite.settings.resolver import Resolver
from subquad.suite.training.weights import load_model
from subquad.tasks import TASKS

safetensors = pytest.importorskip("safetensors.torch", reason="`safetensors` is not installed (extra `weights`)")

SPEC = TaskSpec("tokens", num_classes=264, readout="token", max_length=48, vocab_size=264)


def read(path):
    return load_model(path, Resolver(TASKS, MODELS), torch.device("cpu"))[1]


def settings_of(name, config):
    """Returns the metadata of a file of weights."""
    return {
        "task": {"name": "text-file", "version": 1, "vocabulary": "bpe", "vocab_size": 264, "length": 48},
        "model": {"name": name, "version": config.version, **config.model_dump(mode="json")},
    }


def spread(model):
    """Weights large enough that every path of the small network contributes."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def theirs(kind):
    """A small model of transformers."""
    transformers = pytest.importorskip("transformers", reason="`transformers` is not installed; it is no dependency")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=264, n_positions=48, n_embd=32, n_layer=2, n_head=4)
        return spread(transformers.GPT2LMHeadModel(config))
    if kind == "gpt_neox":
        config = transformers.GPTNeoXConfig(
            vocab_size=264, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=96,
            max_position_embeddings=48,
        )  # fmt: skip
        return spread(transformers.GPTNeoXForCausalLM(config))
    if kind == "mamba2-hf":
        config = transformers.Mamba2Config(
            vocab_size=264, hidden_size=32, state_size=5, head_dim=16, num_heads=4, n_groups=1, num_hidden_layers=2,
            residual_in_fp32=False,
        )  # fmt: skip
        return spread(transformers.Mamba2ForCausalLM(config))
    config = transformers.MambaConfig(
        vocab_size=264, hidden_size=32, state_size=5, num_hidden_layers=2, time_step_rank=4, residual_in_fp32=False
    )
    return spread(transformers.MambaForCausalLM(config))


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "mamba-hf", "mamba2-hf"])
def test_a_checkpoint_of_transformers_gives_its_logits_and_comes_back_bit_by_bit(kind, tmp_path, command_line):
    model = theirs(kind)
    model.save_pretrained(tmp_path / "theirs")
    done = command_line("weights", "import", tmp_path / "theirs", "--out", tmp_path / "ours.weights", "--length", 48)
    assert done.returncode == 0, done.stderr
    ours = read(tmp_path / "ours.weights")
    inputs = torch.randint(264, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(inputs), model(inputs).logits, rtol=1e-4, atol=1e-4)

    back = ("weights", "export", tmp_path / "ours.weights", "--out", tmp_path / "back", "--layout", kind)
    done = command_line(*back)
    assert done.returncode == 0, done.stderr
    before = safetensors.load_file(tmp_path / "theirs" / "model.safetensors")
    after = safetensors.load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
    # and transformers reads what was written
    again = type(model).from_pretrained(tmp_path / "back").eval()
    with torch.no_grad():
        assert torch.equal(again(inputs).logits, model(inputs).logits)


UNUSUAL = {
    "mamba": {"d_conv": 3, "expand": 3},
    "mamba2": {"d_conv": 3, "expand": 3},
    "hgrn2": {"output_norm_eps": 1e-5},
    "gsa": {"output_norm_eps": 1e-5},
}
"""Options of our models that their layouts keep."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_comes_back_bit_by_bit(name, tmp_path, command_line):
    """Also with fewer tokens than there are bytes, as models of other tasks than text have, and of a small width."""
    layout = LAYOUTS[name]
    config = MODELS.load(layout.model)(
        num_layers=2, d_model=16, tie_embeddings=False, **UNUSUAL.get(layout.model, {})
    )  # fmt: skip
    folder = tmp_path / "first"
    torch.manual_seed(0)
    model = spread(config.build(replace(SPEC, num_classes=20, vocab_size=20)))
    path = tmp_path / "start.weights"
    resolved = settings_of(layout.model, config)
    resolved["task"]["vocab_size"] = 20
    torch.save({"config": json.dumps(resolved), "model": model.state_dict()}, path)
    for source, target in ((path, folder), (tmp_path / "again.weights", tmp_path / "second")):
        done = command_line("weights", "export", source, "--out", target, "--layout", name)
        assert done.returncode == 0, done.stderr
        if target == folder:
            assert layout_of(json.loads((folder / "config.json").read_text())) == name
            done = command_line("weights", "import", folder, "--out", tmp_path / "again.weights", "--length", 48)
            assert done.returncode == 0, done.stderr
    first, second = (_weights(tmp_path / part) for part in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    inputs = torch.randint(20, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(read(tmp_path / "again.weights")(inputs), model(inputs))


@pytest.mark.parametrize(("name", "option", "value"), [("gsa", "gate", "retnet"), ("pythia", "position", "none")])
def test_options_that_a_layout_cannot_say_are_named(name, option, value, tmp_path, command_line):
    config = MODELS.load(name)(num_layers=1, d_model=64, **{option: value})
    path = tmp_path / "mine.weights"
    torch.save({"config": json.dumps(settings_of(name, config)), "model": config.build(SPEC).state_dict()}, path)
    done = command_line("weights", "export", path, "--out", tmp_path / "out")
    assert (done.returncode, f"has no field for {option}" in done.stderr) == (2, True)


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_an_export_for_mamba_ssm_is_a_file_that_it_reads_with_every_name_of_its_network(name, tmp_path, command_line):
    config = MODELS.load(name)(num_layers=1, d_model=64, tie_embeddings=True)
    path, out = tmp_path / "mine.weights", tmp_path / "out"
    torch.save({"config": json.dumps(settings_of(name, config)), "model": config.build(SPEC).state_dict()}, path)
    for layout in (f"{name}-hf", name):
        done = command_line("weights", "export", path, "--out", out, "--layout", layout)
        assert done.returncode == 0, done.stderr
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "pytorch_model.bin"]
    weights = torch.load(out / "pytorch_model.bin", weights_only=True)
    assert weights["lm_head.weight"].data_ptr() == weights["backbone.embedding.weight"].data_ptr()


@pytest.mark.parametrize(("eps", "differ"), [(1e-6, True), (1e-5, False)])
def test_an_export_says_where_the_library_has_another_epsilon(eps, differ, tmp_path, command_line):
    config = MODELS.load("gsa")(num_layers=1, d_model=64, norm_eps=eps)
    path = tmp_path / "mine.weights"
    torch.save({"config": json.dumps(settings_of("gsa", config)), "model": config.build(SPEC).state_dict()}, path)
    done = command_line("weights", "export", path, "--out", tmp_path / "out")
    assert (done.returncode, "output_norm_eps=1e-05, and the run has 1e-06" in done.stderr) == (0, differ)


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_options_that_only_training_reads_need_no_field(name, tmp_path, command_line):
    config = MODELS.load(name)(num_layers=1, d_model=64, dt_min=0.01, dt_max=0.2, ssm_lr=1e-4)
    path = tmp_path / "mine.weights"
    torch.save({"config": json.dumps(settings_of(name, config)), "model": config.build(SPEC).state_dict()}, path)
    done = command_line("weights", "export", path, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr


def test_older_checkpoints_of_fla_have_gate_and_up_projection_in_one():
    config = MODELS.load("gsa")(num_layers=1, d_model=64)
    model, layout = spread(config.build(SPEC)), LAYOUTS["gsa"]
    weights = unload(model, layout)
    at = "model.layers.0.mlp"
    weights[f"{at}.gate_proj.weight"] = torch.cat([weights.pop(f"{at}.{x}_proj.weight") for x in ("gate", "up")])
    again = config.build(SPEC)
    load(again, layout, weights)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["gla", "retnet"])
def test_without_fused_norms_fla_has_another_name_for_the_output_norm(name):
    config = MODELS.load(name)(num_layers=1, d_model=64)
    model, layout = spread(config.build(SPEC)), LAYOUTS[name]
    weights = {key.replace("g_norm_swish_gate", "g_norm"): value for key, value in unload(model, layout).items()}
    again = config.build(SPEC)
    load(again, layout, weights)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())


def small(folder, settings, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(settings if isinstance(settings, str) else json.dumps(settings))
    if tensors is not None:
        safetensors.save_file(tensors, folder / "model.safetensors")
    return folder


def _saved(folder, name, tensors):
    if name.endswith(".bin"):
        torch.save(tensors, folder / name)
    else:
        safetensors.save_file(tensors, folder / name)


def _halves(tensors):
    names = sorted(tensors)
    return [{name: tensors[name] for name in part} for part in (names[::2], names[1::2])]


def test_an_older_checkpoint_with_a_wrong_byte_is_refused(tmp_path):
    _saved(tmp_path, "pytorch_model.bin", {"a": torch.arange(9.0)})
    path = tmp_path / "pytorch_model.bin"
    content = path.read_bytes()
    path.write_bytes(content.replace(torch.arange(9.0).numpy().tobytes(), torch.arange(1.0, 10.0).numpy().tobytes()))
    with pytest.raises(ValueError, match=f"{path}: cannot be read .*Bad CRC-32"):
        _weights(tmp_path)


@pytest.fixture
def gpt2(tmp_path):
    """A small network in the layout gpt2: its folder without weights, the right tensors, and others."""
    config = MODELS.load("attention")(num_layers=1, d_model=32, num_heads=4)
    right = unload(spread(config.build(SPEC)), LAYOUTS["gpt2"])
    folder = small(tmp_path / "folder", LAYOUTS["gpt2"].settings(config.model_dump(), 264, 48), None)
    return folder, right, {name: value + 1 for name, value in right.items()}


def _index(folder, name, halves, files):
    places = {key: file for half, file in zip(halves, files, strict=True) for key in half}
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.parametrize("kind", ["shards", "shards, stale ones", "one file", "bin", "bin shards", "one odd name"])
def test_a_checkpoint_is_what_transformers_reads_whatever_lies_beside_it(gpt2, kind, command_line, tmp_path):
    folder, right, wrong = gpt2
    ending = "bin" if "bin" in kind else "safetensors"
    base = "pytorch_model" if "bin" in kind else "model"
    if "shards" in kind:
        files = [f"{base}-0000{i}-of-00002.{ending}" for i in (1, 2)]
        for name, half in zip(files, _halves(right), strict=True):
            _saved(folder, name, half)
        _index(folder, f"{base}.{ending}.index.json", _halves(right), files)
        if "stale" in kind:
            for i in (1, 2, 3):
                _saved(folder, f"{base}-0000{i}-of-00003.{ending}", wrong)
            _saved(folder, "pytorch_model.bin", wrong)
    elif kind == "one odd name":
        _saved(folder, "weights.safetensors", right)
        _saved(folder, "adapter_model.safetensors", wrong)
    else:
        _saved(folder, f"{base}.{ending}", right)
        _saved(folder, f"{base}-00001-of-00002.{ending}", wrong)
        if kind == "one file":
            _index(folder, "model.safetensors.index.json", [wrong], ["model-00001-of-00002.safetensors"])
    done = command_line("weights", "import", folder, "--out", tmp_path / "x.weights")
    assert done.returncode == 0, done.stderr
    assert all(torch.equal(right[k], v) for k, v in unload(read(tmp_path / "x.weights"), LAYOUTS["gpt2"]).items())


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (
            None,
            "model-00001-of-00002.safetensors, model-00002-of-00002.safetensors and no model.safetensors.index.json",
        ),
        ("{", "model.safetensors.index.json: no index of a checkpoint"),
        ({"weight_map": []}, "no index of a checkpoint"),
        ({"weight_map": {"a": "../a.safetensors"}}, "'../a.safetensors' is no name of a file in this folder"),
        ({"weight_map": {"a": "gone.safetensors"}}, "gone.safetensors: cannot be read"),
        ({"weight_map": {"a": "model-00001-of-00002.safetensors"}}, "has no a, which the index says; restore the file"),
    ],
)
def test_shards_that_do_not_belong_together_are_refused(gpt2, index, words, command_line, tmp_path):
    folder, right, _ = gpt2
    for i, half in enumerate(_halves(right), start=1):
        _saved(folder, f"model-0000{i}-of-00002.safetensors", half)
    if index is not None:
        text = index if isinstance(index, str) else json.dumps(index)
        (folder / "model.safetensors.index.json").write_text(text)
    done = command_line("weights", "import", folder, "--out", tmp_path / "x.weights")
    assert (done.returncode, words in done.stderr, len(done.stderr.splitlines())) == (2, True, 1), done.stderr


def test_the_names_of_gpt2_on_the_hub_have_no_prefix(gpt2, command_line, tmp_path):
    folder, right, _ = gpt2
    bare = {name.removeprefix("transformer."): value for name, value in right.items()}
    _saved(folder, "model.safetensors", {**bare, "h.0.attn.bias": torch.ones(1, 1, 48, 48)})
    done = command_line("weights", "import", folder, "--out", tmp_path / "x.weights")
    assert done.returncode == 0, done.stderr
    assert all(torch.equal(right[k], v) for k, v in unload(read(tmp_path / "x.weights"), LAYOUTS["gpt2"]).items())


def test_a_head_that_is_no_copy_of_the_embedding_is_refused_where_they_are_one(gpt2, command_line, tmp_path):
    folder, right, _ = gpt2
    _saved(folder, "model.safetensors", {**right, "lm_head.weight": right["transformer.wte.weight"] + 1})
    done = command_line("weights", "import", folder, "--out", tmp_path / "x.weights")
    assert (done.returncode, "lm_head.weight: differs from the embedding" in done.stderr) == (2, True)


GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 8, "vocab_size": 264}

MAMBA2 = {
    "model_type": "mamba2", "hidden_size": 32, "num_hidden_layers": 1, "state_size": 8, "conv_kernel": 4,
    "head_dim": 16, "expand": 2, "layer_norm_epsilon": 1e-5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "tensors", "words"),
    [
        ("{", None, "config.json: cannot be read"),
        ("[]", None, "expected an object with settings, got list"),
        ({"model_type": "gpt_neox", "use_parallel_residual": False}, None, "use_parallel_residual=False is not supp"),
        (
            {"model_type": "gpt_neox", "rope_parameters": {"type": "linear", "factor": 2.0}},
            None,
            "rope_type='linear' is",
        ),
        ({"model_type": "gla", "num_heads": 2, "num_kv_heads": 1}, None, "num_kv_heads=1 is not supported, only 2"),
        ({"model_type": "bert"}, None, "has no layout here; there are: mamba, mamba-hf, mamba2, mamba2-hf, gpt2"),
        ({"model_type": "gpt2"}, None, "a setting of gpt2 is missing"),
        ({**GPT2, "activation_function": "relu"}, None, "activation_function='relu' is not supported"),
        ({**MAMBA2, "time_step_limit": [0.0, 0.3]}, None, "time_step_limit=[0.0, 0.3] is not supported"),
        ({**MAMBA2, "time_step_limit": [0.5, {"__float__": "Infinity"}]}, None, "only [0.0, Infinity]"),
        ({**MAMBA2, "time_step_limit": [0.0, math.inf]}, None, "no *.safetensors and no pytorch_model*.bin"),
        ({"ssm_cfg": {"layer": "Mamba2", "dt_limit": [0.0, 0.3]}}, None, "dt_limit=[0.0, 0.3] is not supported"),
        (GPT2, None, "no *.safetensors and no pytorch_model*.bin"),
        (GPT2, {"a": torch.zeros(2)}, "transformer.wte.weight: missing in the checkpoint"),
        (GPT2, {"transformer.wte.weight": torch.zeros(264, 16)}, "our encoder.weight is [264, 32]"),
        (GPT2, {"transformer.wte.weight": torch.zeros(264, 32, dtype=torch.int8)}, "[264, 32] torch.int8, our encoder"),
    ],
)
def test_what_is_no_checkpoint_is_refused_in_one_line(settings, tensors, words, tmp_path, command_line):
    settings = {**settings, "n_embd": 32} if isinstance(settings, dict) and tensors else settings
    folder = small(tmp_path / "folder", settings, tensors)
    done = command_line("weights", "import", folder, "--out", tmp_path / "x.weights")
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_parts_of_one_weight_that_do_not_go_together_are_refused():
    model = MODELS.load("gla")(num_layers=1, d_model=64, tie_embeddings=False).build(SPEC)
    weights = unload(model, LAYOUTS["gla"])
    (name,) = (name for name in weights if name.endswith("k_proj.weight"))
    with pytest.raises(ValueError, match=r"k_proj.weight.*\[32, 63\] torch.float32, .* our layers.0.mixer.proj.weight"):
        load(model, LAYOUTS["gla"], {**weights, name: weights[name][:, :63]})


def test_a_model_without_a_layout_and_a_wrong_name_are_refused(tmp_path, command_line):
    config = MODELS.load("hyena")(num_layers=1, d_model=16)
    path = tmp_path / "hyena.weights"
    resolved = settings_of("hyena", config)
    torch.save({"config": json.dumps(resolved), "model": config.build(SPEC).state_dict()}, path)
    done = command_line("weights", "export", path, "--out", tmp_path / "out")
    assert (done.returncode, "hyena has none" in done.stderr) == (2, True)
    (tmp_path / "file").touch()
    config = MODELS.load("gla")(num_layers=2, d_model=64, tie_embeddings=False)
    torch.save({"config": json.dumps(settings_of("gla", config)), "model": config.build(SPEC).state_dict()}, path)
    done = command_line("weights", "export", path, "--out", tmp_path / "file")
    assert (done.returncode, f"--out {tmp_path}/file: this is a file; name a folder" in done.stderr) == (2, True)
    done = command_line("weights", "import", tmp_path, "--out", tmp_path / "name.bin")
    assert (done.returncode, "must end in .weights" in done.stderr) == (2, True)
