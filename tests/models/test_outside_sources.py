"""Models against implementations that are not ours, `transformers`, with the same weights.

Its norms are in float32 whatever the weights, so both sides are, and agree to rounding. GPT-2, GPT-NeoX, Mamba and
Mamba-2 are compared where their checkpoints are read (tests/suite/test_command_line_weights.py).
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
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


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
