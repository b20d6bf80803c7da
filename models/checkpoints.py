"""Public layouts of checkpoints: their names of settings and weights beside ours, in both directions.

| layout | whose | model |
| --- | --- | --- |
| `mamba` | state-spaces/mamba-* on the hub (state-spaces/mamba at 107eb600e8) | `mamba` |
| `mamba-hf` | `MambaForCausalLM` of transformers | `mamba` |
| `mamba2` | state-spaces/mamba2-* on the hub (the same code) | `mamba2` |
| `mamba2-hf` | `Mamba2ForCausalLM` of transformers | `mamba2` |
| `gpt2` | `GPT2LMHeadModel` of transformers | `attention` |
| `gpt_neox` | `GPTNeoXForCausalLM` of transformers, Pythia among others | `pythia` |
| `gla`, `retnet`, `hgrn2`, `gsa` | fla-hub (flash-linear-attention 0.6.0) | same |

A layout is a table: our name of a weight, and theirs. Where a weight of ours is several of theirs, one below the other,
the table has a tuple. Where rows stand in another order, the layout has a function that gives it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from subquad.models.layout import Layout, Names, Settings, options_of, sizes_of, unless

BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".inv_freq")
"""Endings of names of buffers that transformers has saved at times, and that follow from the settings."""


def _unlimited(settings: Settings, key: str) -> None:
    """Raises ValueError where step sizes are cut to an interval, because ours are not. They are positive by themselves.

    Newer versions of transformers write an infinite number as an object with its name.
    """
    least, most = settings.get(key) or (0.0, "inf")
    if float(least) > 0 or float(most["__float__"] if isinstance(most, Mapping) else most) != math.inf:
        raise ValueError(f"config.json: {key}={settings[key]!r} is not supported, only [0.0, Infinity]")


# ---------------------------------------------------------------- Mamba

MAMBA_LAYER: Names = {
    "mixer_norm.weight": "backbone.layers.{i}.norm.weight",
    "mixer.in_proj.weight": "backbone.layers.{i}.mixer.in_proj.weight",
    "mixer.conv_weight": "backbone.layers.{i}.mixer.conv1d.weight",
    "mixer.conv_bias": "backbone.layers.{i}.mixer.conv1d.bias",
    "mixer.inner.x_proj.weight": "backbone.layers.{i}.mixer.x_proj.weight",
    "mixer.inner.dt_proj.weight": "backbone.layers.{i}.mixer.dt_proj.weight",
    "mixer.inner.dt_bias": "backbone.layers.{i}.mixer.dt_proj.bias",
    "mixer.inner.log_A": "backbone.layers.{i}.mixer.A_log",
    "mixer.inner.D": "backbone.layers.{i}.mixer.D",
    "mixer.out.weight": "backbone.layers.{i}.mixer.out_proj.weight",
}


def _mamba_options(settings: Settings) -> dict[str, Any]:
    unless(settings, rms_norm=True, attn_layer_idx=[], d_intermediate=0)
    inner = dict(settings.get("ssm_cfg") or {})
    unless(inner, layer="Mamba1")
    return {
        "d_model": settings["d_model"],
        "num_layers": settings["n_layer"],
        "d_state": inner.get("d_state", 16),
        "d_conv": inner.get("d_conv", 4),
        "expand": inner.get("expand", 2),
        "dt_rank": inner["dt_rank"] if isinstance(inner.get("dt_rank"), int) else None,
        "tie_embeddings": settings.get("tie_embeddings", True),
        "norm_eps": 1e-5,
    }


def mamba_settings(options: dict[str, Any], vocab_size: int, length: int) -> dict[str, Any]:
    inner = {"d_state": options["d_state"]} | ({"dt_rank": options["dt_rank"]} if options["dt_rank"] else {})
    return {
        "d_model": options["d_model"],
        "n_layer": options["num_layers"],
        "vocab_size": vocab_size,
        "ssm_cfg": inner,
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,
        "tie_embeddings": options["tie_embeddings"],
    }


def _mamba1_settings(options: dict[str, Any], vocab_size: int, length: int) -> dict[str, Any]:
    settings = mamba_settings(options, vocab_size, length)
    return settings | {"ssm_cfg": settings["ssm_cfg"] | {key: options[key] for key in ("d_conv", "expand")}}


def _mamba_hf_options(settings: Settings) -> dict[str, Any]:
    unless(settings, use_conv_bias=True, use_bias=False, hidden_act="silu")
    own = {"d_state": settings["state_size"], "dt_rank": settings["time_step_rank"]}
    own |= {"d_conv": settings.get("conv_kernel", 4), "expand": settings.get("expand", 2)}
    return options_of(settings, tied=True, norm_eps=settings["layer_norm_epsilon"], **own)


def _mamba_hf_settings(options: dict[str, Any], vocab_size: int, length: int) -> dict[str, Any]:
    own = {
        "model_type": "mamba",
        "architectures": ["MambaForCausalLM"],
        "state_size": options["d_state"],
        "time_step_rank": options["dt_rank"] or -(-options["d_model"] // 16),
        "conv_kernel": options["d_conv"],
        "expand": options["expand"],
        "layer_norm_epsilon": options["norm_eps"],
    }
    return sizes_of(options, vocab_size, **own)


# ---------------------------------------------------------------- Mamba-2

MAMBA2_LAYER: Names = {
    "mixer_norm.weight": "backbone.layers.{i}.norm.weight",
    "mixer.in_proj.weight": "backbone.layers.{i}.mixer.in_proj.weight",
    "mixer.conv_weight": "backbone.layers.{i}.mixer.conv1d.weight",
    "mixer.conv_bias": "backbone.layers.{i}.mixer.conv1d.bias",
    "mixer.dt_bias": "backbone.layers.{i}.mixer.dt_bias",
    "mixer.log_A": "backbone.layers.{i}.mixer.A_log",
    "mixer.D": "backbone.layers.{i}.mixer.D",
    "mixer.norm.weight": "backbone.layers.{i}.mixer.norm.weight",
    "mixer.out.weight": "backbone.layers.{i}.mixer.out_proj.weight",
}


def _mamba2_options(settings: Settings) -> dict[str, Any]:
    unless(settings, rms_norm=True, attn_layer_idx=[], d_intermediate=0)
    inner = dict(settings["ssm_cfg"])
    unless(inner, layer="Mamba2", ngroups=1, D_has_hdim=False, rmsnorm=True, norm_before_gate=False, d_ssm=None)
    _unlimited(inner, "dt_limit")
    return {
        "d_model": settings["d_model"],
        "num_layers": settings["n_layer"],
        "d_state": inner.get("d_state", 128),
        "head_dim": inner.get("headdim", 64),
        "expand": inner.get("expand", 2),
        "d_conv": inner.get("d_conv", 4),
        "tie_embeddings": settings.get("tie_embeddings", True),
        "norm_eps": 1e-5,
    }


def _mamba2_head(options: dict[str, Any]) -> int:
    return int(options["head_dim"] or min(64, options["expand"] * options["d_model"]))


def _mamba2_settings(options: dict[str, Any], vocab_size: int, length: int) -> dict[str, Any]:
    inner = {
        "layer": "Mamba2",
        "d_state": options["d_state"],
        "headdim": _mamba2_head(options),
        "expand": options["expand"],
        "d_conv": options["d_conv"],
    }
    return mamba_settings({**options, "dt_rank": None}, vocab_size, length) | {"ssm_cfg": inner}


def _mamba2_hf_options(settings: Settings) -> dict[str, Any]:
    unless(settings, n_groups=1, use_conv_bias=True, use_bias=False, hidden_act="silu")
    _unlimited(settings, "time_step_limit")
    own = {"d_state": settings["state_size"], "d_conv": settings["conv_kernel"]}
    own |= {"head_dim": settings["head_dim"], "expand": settings["expand"]}
    return options_of(settings, tied=False, norm_eps=settings["layer_norm_epsilon"], **own)


def _mamba2_hf_settings(options: dict[str, Any], vocab_size: int, length: int) -> dict[str, Any]:
    own = {
        "model_type": "mamba2",
        "architectures": ["Mamba2ForCausalLM"],
        "num_heads": options["expand"] * options["d_model"] // _mamba2_head(options),
        "state_size": options["d_state"],
        "head_dim": _mamba2_head(options),
        "expand": options["expand"],
        "conv_kernel": options["d_conv"],
        "n_groups": 1,
        "layer_norm_epsilon": options["norm_eps"],
    }
    return sizes_of(options, vocab_size, **own)


# ---------------------------------------------------------------- GPT-2

GPT2_PARTS = {
    "mixer_norm": "ln_1",
    "mixer.qkv": "attn.c_attn",
    "mixer.out": "attn.c_proj",
    "channel_norm": "ln_2",
    "channel.up": "mlp.c_fc",
    "channel.down": "mlp.c_proj",
}


def _gpt2_options(settings: Settings) -> dict[str, Any]:
    unless(settings, activation_function="gelu_new", scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
    return {
        "d_model": settings["n_embd"],
        "num_layers": settings["n_layer"],
        "num_heads": settings["n_head"],
        "mlp_ratio": (settings.get("n_inner") or 4 * settings["n_embd"]) / settings["n_embd"],
        "norm_eps": settings.get("layer_norm_epsilon", 1e-5),
        "tie_embeddings": settings.get("tie_word_embeddings", True),
    }


def _gpt2_settings(options: dict[str, Any], vocab_size: int, length: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": vocab_size,
        "n_positions": length,
        "n_embd": options["d_model"],
        "n_layer": options["num_layers"],
        "n_head": options["num_heads"],
        "n_inner": round(options["mlp_ratio"] * options["d_model"]),
        "layer_norm_epsilon": options["norm_eps"],
        "tie_word_embeddings": options["tie_embeddings"],
    }


# ---------------------------------------------------------------- GPT-NeoX

NEOX_PARTS = {
    "mixer_norm": "input_layernorm",
    "mixer.qkv": "attention.query_key_value",
    "mixer.out": "attention.dense",
    "channel_norm": "post_attention_layernorm",
    "channel.up": "mlp.dense_h_to_4h",
    "channel.down": "mlp.dense_4h_to_h",
}


def _neox_options(settings: Settings) -> dict[str, Any]:
    unless(settings, hidden_act="gelu", use_parallel_residual=True, attention_bias=True, rope_scaling=None)
    # newer versions of transformers keep all about rotary positions in one setting, whose type was `type` first
    rotary = {"rotary_pct": 0.25, "rotary_emb_base": 10000, **settings}
    rope = settings.get("rope_parameters") or {}
    unless({"rope_type": rope.get("type", "default"), **rope}, rope_type="default")
    base = rope.get("rope_theta", rotary["rotary_emb_base"])
    if base != 10000:
        raise ValueError(f"config.json: rotary_emb_base={base!r} is not supported, only 10000")
    own = {
        "num_heads": settings["num_attention_heads"],
        "mlp_ratio": settings["intermediate_size"] / settings["hidden_size"],
        "rotary_fraction": rope.get("partial_rotary_factor", rotary["rotary_pct"]),
        "norm_eps": settings.get("layer_norm_eps", 1e-5),
    }
    return options_of(settings, tied=False, **own)


def _neox_settings(options: dict[str, Any], vocab_size: int, length: int) -> dict[str, Any]:
    own = {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        "num_attention_heads": options["num_heads"],
        "intermediate_size": round(options["mlp_ratio"] * options["d_model"]),
        "hidden_act": "gelu",
        "rotary_pct": options["rotary_fraction"],
        "rotary_emb_base": 10000,
        "max_position_embeddings": length,
        "layer_norm_eps": options["norm_eps"],
        "use_parallel_residual": True,
        "attention_bias": True,
    }
    return sizes_of(options, vocab_size, **own)


def _neox_order(model: nn.Module) -> Tensor:
    """Returns the order of the rows of W_q, W_k and W_v.

    GPT-NeoX keeps them head by head. In a head the first r channels are rotated, i with i + r / 2. Our models rotate i
    with i + K / 2, so the second half of these r channels moves to the second half of the head.
    """
    mixer: Any = model.get_submodule("layers.0.mixer")
    size, half = mixer.head_dim, mixer.rotary.rotated // 2
    fixed = torch.arange(2 * half, size).tensor_split(2)
    channels = torch.cat([torch.arange(half), fixed[0], torch.arange(half, 2 * half), fixed[1]])
    rows = torch.arange(3 * mixer.num_heads * size).view(mixer.num_heads, 3, size)
    return torch.cat([rows[:, 0, channels].flatten(), rows[:, 1, channels].flatten(), rows[:, 2].flatten()])


# ---------------------------------------------------------------- flash-linear-attention

FLA_NETWORK: Names = {
    "encoder.weight": "model.embeddings.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


FLA_OUTPUT_EPS = 1e-5
"""Epsilon of the output norms of HGRN2 and GSA, which these layers do not give to `rms_norm_linear`, whatever
`norm_eps` says (fla/layers/hgrn2.py and fla/layers/gsa.py in all releases, 0.1 to 0.6.0)."""


def _fla_layer(proj: str, parts: str, more: Mapping[str, str]) -> Names:
    """The table of a layer. proj: our name of the joined projections; parts: a letter for each of theirs."""
    at = "model.layers.{i}"
    return {
        "mixer_norm.weight": f"{at}.attn_norm.weight",
        "channel_norm.weight": f"{at}.mlp_norm.weight",
        "channel.gate_up.weight": (f"{at}.mlp.gate_proj.weight", f"{at}.mlp.up_proj.weight"),
        "channel.down.weight": f"{at}.mlp.down_proj.weight",
        f"mixer.{proj}.weight": tuple(f"{at}.attn.{part}_proj.weight" for part in parts),
        "mixer.out.weight": f"{at}.attn.o_proj.weight",
        **{f"mixer.{ours}": f"{at}.attn.{theirs}" for ours, theirs in more.items()},
    }


def _fla_options(settings: Settings, **own: Any) -> dict[str, Any]:
    unless(settings, use_short_conv=False, hidden_act="swish", attn=None, use_output_gate=True)
    unless(settings, num_kv_heads=settings.get("num_kv_heads") and settings["num_heads"])
    width = settings["hidden_size"]
    inner = settings.get("intermediate_size")
    if inner is None:
        # rounded as fla/modules/mlp.py rounds it
        inner = 256 * -(-int(width * (settings.get("hidden_ratio") or 4) * 2 / 3) // 256)
    return options_of(settings, tied=False, mlp_ratio=inner / width, norm_eps=settings.get("norm_eps", 1e-6), **own)


def fla_settings(kind: str, options: dict[str, Any], vocab_size: int, length: int, **own: Any) -> dict[str, Any]:
    common = {
        "model_type": kind,
        "intermediate_size": 8 * -(-round(options["mlp_ratio"] * options["d_model"]) // 8),
        "max_position_embeddings": length,
        "norm_eps": options["norm_eps"],
        "hidden_act": "swish",
    }
    return sizes_of(options, vocab_size, **common, **own)


def _gla_options(settings: Settings) -> dict[str, Any]:
    unless(settings, expand_v=1, feature_map=None, clamp_min=None)
    heads, expand_k = settings["num_heads"], settings.get("expand_k", 0.5)
    return _fla_options(settings, num_heads=heads, expand_k=expand_k)


def _retnet_options(settings: Settings) -> dict[str, Any]:
    unless(settings, expand_k=1, feature_map=None)
    expand_v = int(settings.get("expand_v", 2))
    return _fla_options(settings, num_heads=settings["num_heads"], expand_v=expand_v)


def _hgrn2_options(settings: Settings) -> dict[str, Any]:
    unless(settings, use_lower_bound=True)
    ratio = settings.get("expand_ratio", 128)
    heads = settings["hidden_size"] // ratio if ratio else settings["num_heads"]
    return _fla_options(settings, num_heads=heads, output_norm_eps=FLA_OUTPUT_EPS)


def _gsa_options(settings: Settings) -> dict[str, Any]:
    unless({**settings, "use_output_gate": None}, expand_k=1, expand_v=1, feature_map="swish", use_norm=True)
    heads = settings["num_heads"]
    slots = settings.get("num_slots") or settings["hidden_size"] // heads
    plain = {**settings, "use_output_gate": True}
    damping = float(settings.get("gate_logit_normalizer", 8))
    return _fla_options(plain, num_heads=heads, num_slots=slots, damping=damping, output_norm_eps=FLA_OUTPUT_EPS)


MAMBA_NETWORK: Names = {
    "encoder.weight": "backbone.embedding.weight",
    "final_norm.weight": "backbone.norm_f.weight",
    "head.weight": "lm_head.weight",
}
MAMBA_HF_NETWORK: Names = {**MAMBA_NETWORK, "encoder.weight": "backbone.embeddings.weight"}

LAYOUTS: dict[str, Layout] = {
    "mamba": Layout("mamba", _mamba_options, _mamba1_settings, MAMBA_NETWORK, MAMBA_LAYER, pickled=True),
    "mamba-hf": Layout("mamba", _mamba_hf_options, _mamba_hf_settings, MAMBA_HF_NETWORK, MAMBA_LAYER),
    "mamba2": Layout("mamba2", _mamba2_options, _mamba2_settings, MAMBA_NETWORK, MAMBA2_LAYER, pickled=True),
    "mamba2-hf": Layout("mamba2", _mamba2_hf_options, _mamba2_hf_settings, MAMBA_HF_NETWORK, MAMBA2_LAYER),
    "gpt2": Layout(
        "attention",
        _gpt2_options,
        _gpt2_settings,
        {
            "encoder.weight": "transformer.wte.weight",
            "pos_embedding.weight": "transformer.wpe.weight",
            "final_norm.weight": "transformer.ln_f.weight",
            "final_norm.bias": "transformer.ln_f.bias",
            "head.weight": "lm_head.weight",
        },
        {
            f"{ours}.{kind}": f"transformer.h.{{i}}.{theirs}.{kind}"
            for ours, theirs in GPT2_PARTS.items()
            for kind in ("weight", "bias")
        },
        transposed=("mixer.qkv.weight", "mixer.out.weight", "channel.up.weight", "channel.down.weight"),
    ),
    "gpt_neox": Layout(
        "pythia",
        _neox_options,
        _neox_settings,
        {
            "encoder.weight": "gpt_neox.embed_in.weight",
            "final_norm.weight": "gpt_neox.final_layer_norm.weight",
            "final_norm.bias": "gpt_neox.final_layer_norm.bias",
            "head.weight": "embed_out.weight",
        },
        {
            f"{ours}.{kind}": f"gpt_neox.layers.{{i}}.{theirs}.{kind}"
            for ours, theirs in NEOX_PARTS.items()
            for kind in ("weight", "bias")
        },
        reordered=("mixer.qkv.weight", "mixer.qkv.bias"),
        order=_neox_order,
    ),
    "gla": Layout(
        "gla",
        _gla_options,
        lambda options, vocab_size, length: fla_settings(
            "gla", options, vocab_size, length, num_heads=options["num_heads"], expand_k=options["expand_k"], expand_v=1
        ),
        FLA_NETWORK,
        _fla_layer(
            "proj",
            "qkvg",
            {
                "decay_down.weight": "gk_proj.0.weight",
                "decay_up.weight": "gk_proj.1.weight",
                "decay_up.bias": "gk_proj.1.bias",
                "norm.weight": "g_norm_swish_gate.weight",
            },
        ),
    ),
    "retnet": Layout(
        "retnet",
        _retnet_options,
        lambda options, vocab_size, length: fla_settings(
            "retnet", options, vocab_size, length, num_heads=options["num_heads"], expand_v=options["expand_v"]
        ),
        FLA_NETWORK,
        _fla_layer("proj", "qkvg", {"norm.weight": "g_norm_swish_gate.weight"}),
    ),
    "hgrn2": Layout(
        "hgrn2",
        _hgrn2_options,
        lambda options, vocab_size, length: fla_settings(
            "hgrn2", options, vocab_size, length, num_heads=options["num_heads"], expand_ratio=None
        ),
        FLA_NETWORK,
        _fla_layer("proj", "qfi", {"norm.weight": "g_norm.weight"})
        | {"mixer.lower_bounds.logits": "model.lower_bounds"},
    ),
    "gsa": Layout(
        "gsa",
        _gsa_options,
        lambda options, vocab_size, length: fla_settings(
            "gsa",
            options,
            vocab_size,
            length,
            num_heads=options["num_heads"],
            num_slots=options["num_slots"],
            gate_logit_normalizer=round(options["damping"]),
        ),
        FLA_NETWORK,
        _fla_layer("qkv", "qkv", {"decay.weight": "f_proj.weight", "norm.weight": "g_norm.weight"}),
    ),
}


def layout_of(settings: Settings) -> str:
    """The name of the layout of a config.json. ValueError for one that has none."""
    kind = settings.get("model_type")
    if kind is None and "ssm_cfg" in settings:
        return "mamba2" if (settings["ssm_cfg"] or {}).get("layer") == "Mamba2" else "mamba"
    if kind in ("mamba", "mamba2"):
        return f"{kind}-hf"
    if kind in LAYOUTS:
        return str(kind)
    raise ValueError(f"config.json: model_type={kind!r} has no layout here; there are: {', '.join(LAYOUTS)}")


def with_prefix(layout: Layout, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights by their names in a language model, where a checkpoint has those of the network without its head.

    So are the files of GPT-2 on the hub: `wte.weight` in place of `transformer.wte.weight`.
    """
    prefix = layout.theirs("encoder.weight")[0].partition(".")[0] + "."
    if any(name.startswith(prefix) for name in weights):
        return dict(weights)
    outside = {name for name in layout.network.values() if isinstance(name, str) and not name.startswith(prefix)}
    return {name if name in outside else prefix + name: value for name, value in weights.items()}


def _sizes(model: nn.Module, name: str, parts: int, rows: int) -> list[int]:
    """Rows of each of their weights in one of ours: those that the module states in `split`, or equal parts."""
    owner = model.get_submodule(name.rsplit(".", 2)[0]) if parts > 1 else model
    split = getattr(owner, "split", None)
    return list(split) if isinstance(split, tuple) else [rows // parts] * parts


@torch.no_grad()
def load(model: nn.Module, layout: Layout, weights: Mapping[str, Tensor]) -> None:
    """Copies weights of a layout into our model. ValueError for one that is missing, left over or of another kind."""
    left = set(weights)
    mine = model.state_dict()
    for name, value in mine.items():
        names = layout.theirs(name)
        tied = name == "head.weight" and value.data_ptr() == mine["encoder.weight"].data_ptr()
        if tied:
            head = weights.get(names[0])
            if head is not None and not torch.equal(head.to(value.dtype), value):
                raise ValueError(f"{names[0]}: differs from the embedding, of which config.json says that they are one")
            left -= set(names)
            continue
        # fla's older checkpoints keep gate and up projection in one matrix
        if len(names) == 2 and names[0] in weights and names[1] not in weights:
            names = names[:1]
        # without its option `fuse_norm`, fla has a module for the norm and none for the gate
        names = tuple(part if part in weights else part.replace(".g_norm_swish_gate.", ".g_norm.") for part in names)
        for part in names:
            if part not in weights:
                raise ValueError(f"{part}: missing in the checkpoint; it has: {', '.join(sorted(weights)[:4])}, ...")
        left -= set(names)
        parts = [weights[part].T if name.endswith(layout.transposed or " ") else weights[part] for part in names]
        fits = all(part.is_floating_point() and part.shape[1:] == parts[0].shape[1:] for part in parts)
        found = torch.cat(parts) if fits and len(parts) > 1 else parts[0]
        # a depthwise convolution keeps an axis of its one input channel
        found = found.squeeze(1) if found.ndim == value.ndim + 1 else found
        if not fits or found.shape != value.shape:
            theirs = ", ".join(f"{list(part.shape)} {part.dtype}" for part in parts)
            raise ValueError(f"{', '.join(names)}: {theirs}, our {name} is {list(value.shape)} {value.dtype}")
        rows = layout.rows(name, model)
        value.copy_(found if rows is None else found[rows])
    if left := {name for name in left if not name.endswith(BUFFERS)}:
        raise ValueError(f"{', '.join(sorted(left)[:4])}: the checkpoint has weights that our model does not have")


def unload(model: nn.Module, layout: Layout) -> dict[str, Tensor]:
    """The weights of our model in a layout. ValueError for a weight that the layout does not have."""
    weights: dict[str, Tensor] = {}
    mine = model.state_dict()
    for name, value in mine.items():
        if name == "head.weight" and value.data_ptr() == mine["encoder.weight"].data_ptr():
            if layout.pickled:
                weights[layout.theirs(name)[0]] = weights[layout.theirs("encoder.weight")[0]]
            continue
        try:
            names = layout.theirs(name)
        except KeyError:
            raise ValueError(f"{name}: this layout has no such weight; the model has options that it lacks") from None
        order = layout.rows(name, model)
        if order is not None:
            value = value[order.argsort()]
        for part, rows in zip(names, value.split(_sizes(model, name, len(names), len(value))), strict=True):
            kept = rows.T if name.endswith(layout.transposed or " ") else rows
            kept = kept.unsqueeze(1) if name.endswith("conv_weight") else kept
            weights[part] = kept.contiguous().clone()
    return weights
