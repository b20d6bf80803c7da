"""Models against implementations that are not ours, `transformers`, with the same weights.

Its norms and its scan are in float32 whatever the weights, so both sides are, and agree to rounding.
"""

from __future__ import annotations

import pytest
import torch

from subquad.models import MODELS
from subquad.suite.contracts import TaskSpec

transformers = pytest.importorskip("transformers", reason="`transformers` is not installed; it is no dependency")

VOCABULARY, LENGTH = 40, 70
SPEC = TaskSpec("tokens", num_classes=VOCABULARY, readout="token", max_length=LENGTH, vocab_size=VOCABULARY)


def compare(ours, weights, theirs):
    """Copies their weights, by our names, and compares logits and the gradient of the embedding."""
    missing, unexpected = ours.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"head.weight"}, "a weight of ours has none of theirs"
    inputs = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    logits = [ours(inputs), theirs(inputs).logits]
    assert logits[0].std() > 0.1
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)
    gradients = [
        torch.autograd.grad(x.square().mean(), embedding)[0]
        for x, embedding in zip(logits, (ours.encoder.weight, theirs.get_input_embeddings().weight), strict=True)
    ]
    error = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
    assert error < 1e-4


def spread(model):
    """Weights large enough that every path of the small network contributes."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "A_log" not in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.mark.parametrize("state", [5, 16])
def test_mamba_equals_mamba_of_transformers(state):
    config = transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, state_size=state, num_hidden_layers=3, time_step_rank=4,
        residual_in_fp32=False,
    )  # fmt: skip
    theirs = spread(transformers.MambaForCausalLM(config))
    ours = MODELS.load("mamba")(num_layers=3, d_model=32, d_state=state, dt_rank=4).build(SPEC).eval()
    source = theirs.state_dict()
    weights = {"encoder.weight": "backbone.embeddings.weight", "final_norm.weight": "backbone.norm_f.weight"}
    inside = {
        "in_proj.weight": "in_proj.weight", "conv_weight": "conv1d.weight", "conv_bias": "conv1d.bias",
        "inner.x_proj.weight": "x_proj.weight", "inner.dt_proj.weight": "dt_proj.weight",
        "inner.dt_bias": "dt_proj.bias", "inner.log_A": "A_log", "inner.D": "D", "out.weight": "out_proj.weight",
    }  # fmt: skip
    for i in range(3):
        weights[f"layers.{i}.mixer_norm.weight"] = f"backbone.layers.{i}.norm.weight"
        weights |= {f"layers.{i}.mixer.{a}": f"backbone.layers.{i}.mixer.{b}" for a, b in inside.items()}
    copied = {name: source[other] for name, other in weights.items()}
    compare(ours, {k: v.squeeze(1) if k.endswith("conv_weight") else v for k, v in copied.items()}, theirs)


def test_attention_equals_gpt2_of_transformers():
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0, embd_pdrop=0,
        resid_pdrop=0,
    )  # fmt: skip
    theirs = spread(transformers.GPT2LMHeadModel(config))
    ours = MODELS.load("attention")(num_layers=2, d_model=32, num_heads=4).build(SPEC).eval()
    source = theirs.state_dict()
    weights = {
        "encoder.weight": source["transformer.wte.weight"],
        "pos_embedding.weight": source["transformer.wpe.weight"],
    }
    names = {
        "mixer_norm": "ln_1", "mixer.qkv": "attn.c_attn", "mixer.out": "attn.c_proj", "channel_norm": "ln_2",
        "channel.up": "mlp.c_fc", "channel.down": "mlp.c_proj",
    }  # fmt: skip
    places = {f"layers.{i}.{a}": f"transformer.h.{i}.{b}" for i in range(2) for a, b in names.items()}
    for a, b in {**places, "final_norm": "transformer.ln_f"}.items():
        # its linear maps keep their weights as [inputs, outputs]
        weights |= {f"{a}.weight": source[f"{b}.weight"].t(), f"{a}.bias": source[f"{b}.bias"]}
    compare(ours, weights, theirs)


def test_transformer_pp_equals_llama_of_transformers():
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=88, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=LENGTH, rms_norm_eps=1e-5, tie_word_embeddings=True,
    )  # fmt: skip
    theirs = spread(transformers.LlamaForCausalLM(config))
    ours = MODELS.load("transformer++")(num_layers=2, d_model=32, num_heads=4).build(SPEC).eval()
    source = theirs.state_dict()
    weights = {"encoder.weight": source["model.embed_tokens.weight"], "final_norm.weight": source["model.norm.weight"]}
    for i in range(2):
        at = f"model.layers.{i}"
        parts = {
            "mixer_norm": [f"{at}.input_layernorm"],
            "mixer.qkv": [f"{at}.self_attn.{x}_proj" for x in "qkv"],
            "mixer.out": [f"{at}.self_attn.o_proj"],
            "channel_norm": [f"{at}.post_attention_layernorm"],
            "channel.gate_up": [f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"],
            "channel.down": [f"{at}.mlp.down_proj"],
        }
        weights |= {f"layers.{i}.{a}.weight": torch.cat([source[f"{b}.weight"] for b in bs]) for a, bs in parts.items()}
    compare(ours, weights, theirs)


def test_rwkv_equals_rwkv_of_transformers():
    config = transformers.RwkvConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=3,
        context_length=LENGTH,
        rescale_every=0,
        use_cache=False,
    )
    theirs = spread(transformers.RwkvForCausalLM(config))
    ours = MODELS.load("rwkv")(num_layers=3, d_model=32).build(SPEC).eval()
    source = theirs.state_dict()
    weights = {"encoder.weight": source["rwkv.embeddings.weight"], "head.weight": source["head.weight"]}
    norms = {"layers.0.entry_norm": "blocks.0.pre_ln", "final_norm": "ln_out"}
    for i in range(3):
        time, channel = f"layers.{2 * i}", f"layers.{2 * i + 1}"
        theirs_time, theirs_channel = (f"rwkv.blocks.{i}.{part}" for part in ("attention", "feed_forward"))
        norms |= {f"{time}.mixer_norm": f"blocks.{i}.ln1", f"{channel}.mixer_norm": f"blocks.{i}.ln2"}
        weights |= {
            f"{time}.mixer.mu": torch.cat(
                [source[f"{theirs_time}.time_mix_{m}"][0] for m in ("key", "value", "receptance")]
            ),
            f"{time}.mixer.log_rate": source[f"{theirs_time}.time_decay"],
            f"{time}.mixer.bonus": source[f"{theirs_time}.time_first"],
            f"{channel}.mixer.mu": torch.cat(
                [source[f"{theirs_channel}.time_mix_{m}"][0] for m in ("key", "receptance")]
            ),
        }
        maps = {"key": "key", "value": "value", "receptance": "receptance", "out": "output"}
        weights |= {f"{time}.mixer.{a}.weight": source[f"{theirs_time}.{b}.weight"] for a, b in maps.items()}
        maps = {"key": "key", "receptance": "receptance", "out": "value"}
        weights |= {f"{channel}.mixer.{a}.weight": source[f"{theirs_channel}.{b}.weight"] for a, b in maps.items()}
    weights |= {f"{a}.{kind}": source[f"rwkv.{b}.{kind}"] for a, b in norms.items() for kind in ("weight", "bias")}
    compare(ours, weights, theirs)


def test_mamba2_equals_mamba2_of_transformers():
    config = transformers.Mamba2Config(
        vocab_size=VOCABULARY, hidden_size=32, state_size=12, head_dim=16, num_heads=4, n_groups=1, expand=2,
        num_hidden_layers=3, chunk_size=16, residual_in_fp32=False, tie_word_embeddings=True,
    )  # fmt: skip
    theirs = spread(transformers.Mamba2ForCausalLM(config))
    options = {"num_layers": 3, "d_model": 32, "d_state": 12, "head_dim": 16}
    ours = MODELS.load("mamba2")(**options).build(SPEC).eval()
    source = theirs.state_dict()
    weights = {"encoder.weight": "backbone.embeddings.weight", "final_norm.weight": "backbone.norm_f.weight"}
    inside = {
        "in_proj.weight": "in_proj.weight", "conv_weight": "conv1d.weight", "conv_bias": "conv1d.bias",
        "dt_bias": "dt_bias", "log_A": "A_log", "D": "D", "norm.weight": "norm.weight", "out.weight": "out_proj.weight",
    }  # fmt: skip
    for i in range(3):
        weights[f"layers.{i}.mixer_norm.weight"] = f"backbone.layers.{i}.norm.weight"
        weights |= {f"layers.{i}.mixer.{a}": f"backbone.layers.{i}.mixer.{b}" for a, b in inside.items()}
    copied = {name: source[other] for name, other in weights.items()}
    compare(ours, {k: v.squeeze(1) if k.endswith("conv_weight") else v for k, v in copied.items()}, theirs)
