"""Whole language models of other libraries with the sizes of ours, to be timed beside them (`speed.against`).

Where weights have a common layout (`models.checkpoints`), the settings of the peer are those of the layout, and the two
networks compute the same. The others are the same kind of layer in the same sizes:

- `rwkv7` of flash-linear-attention mixes the values of the first layer into those of the others.
- `mamba3` of mamba_ssm takes another function of the rate of decay (`models.mamba3`).
- `transformer++` is Llama: attention with rotary positions, SwiGLU, RMS norms.

Nothing of these libraries is imported before a peer is built. Read at fla-core and flash-linear-attention 0.6.0,
mamba_ssm 2.3.2.post1 (state-spaces/mamba at e9594ce1c7) and transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from subquad.models.checkpoints import LAYOUTS, fla_settings, mamba_settings
from subquad.models.layout import sizes_of
from subquad.suite.contracts import IGNORE, TaskSpec
from subquad.suite.model import Model

Settings = dict[str, Any]
MakeSettings = Callable[[Any, Settings, int, int], Settings]
"""Function from one of our configurations, its options, the vocabulary and the longest sequence to theirs."""


class First(nn.Module):
    """A mixer that returns more than its output."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, x: Tensor) -> Tensor:
        y: Any = self.mixer(x)
        found: Tensor = y[0] if isinstance(y, tuple) else y
        return found


class PeerModel(Model):
    """Another library's language model, whose loss is the mean cross entropy of its logits.

    config: our configuration, whose sizes it has.
    mixer:  the path of the mixer of its first layer; empty where one cannot be called by itself.
    """

    def __init__(self, network: nn.Module, config: Any, package: str, mixer: str = "") -> None:
        super().__init__()
        self.network, self.config, self.package = network, config, package
        self._mixer = mixer

    @property
    def version(self) -> str:
        """Version of the library."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return "unknown"

    @property
    def mixers(self) -> Sequence[nn.Module]:
        return [First(self.network.get_submodule(self._mixer))] if self._mixer else []

    def forward(self, inputs: Tensor, positions: Tensor | None = None) -> Tensor:
        logits: Tensor = self.network(inputs).logits
        return logits

    def generate(self, prompts: Tensor, new_tokens: int) -> Tensor:
        """Prompts [B, P] with the likeliest `new_tokens` behind them."""
        network: Any = self.network
        tokens: Tensor = network.generate(
            prompts, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, use_cache=True
        )
        return tokens


class MambaModel(PeerModel):
    """A language model of mamba_ssm, which records a step of its generation as a CUDA graph."""

    def generate(self, prompts: Tensor, new_tokens: int) -> Tensor:
        network: Any = self.network
        tokens: Tensor = network.generate(
            input_ids=prompts, max_length=prompts.shape[1] + new_tokens, top_k=1, cg=prompts.is_cuda
        )
        return tokens


class FLAModel(PeerModel):
    """A language model of flash-linear-attention with that library's loss, which does not hold all logits."""

    def hidden(self, inputs: Tensor, positions: Tensor | None = None) -> Tensor:
        states: Tensor = self.network.get_submodule("model")(input_ids=inputs)[0]
        return states

    def readout(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.network.get_submodule("lm_head")(hidden)
        return logits

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        if not hidden.is_cuda:
            return super().loss(hidden, targets)
        from fla.modules import FusedLinearCrossEntropyLoss

        head: Any = self.network.get_submodule("lm_head")
        loss: Tensor = FusedLinearCrossEntropyLoss(ignore_index=IGNORE)(hidden, targets, head.weight, head.bias)
        return loss


def _of_layout(name: str) -> MakeSettings:
    return lambda config, options, vocab_size, length: LAYOUTS[name].settings(options, vocab_size, length)


def _attention_of_fla(kind: str, own: Callable[[Any], Settings]) -> MakeSettings:
    """Settings of flash-linear-attention that no checkpoint of ours has. own: those of the mixer."""
    return lambda config, options, vocab_size, length: fla_settings(kind, options, vocab_size, length, **own(config))


def _delta(config: Any) -> Settings:
    return {
        "num_heads": config.num_heads,
        "use_short_conv": config.d_conv is not None,
        "conv_size": config.d_conv or 4,
        "allow_neg_eigval": config.negative_eigenvalues,
    }


def _delta_net(config: Any) -> Settings:
    return {**_delta(config), "expand_k": config.expand_k, "expand_v": config.expand_k * config.expand_v}


def _delta_of_heads(config: Any) -> Settings:
    return {**_delta(config), "head_dim": config.key_width // config.num_heads, "expand_v": config.expand_v}


def _rwkv7(config: Any, options: Settings, vocab_size: int, length: int) -> Settings:
    narrow, wide = config.ranks
    own = {
        "intermediate_size": config.channel_width,
        "head_dim": config.head_size,
        "decay_low_rank_dim": narrow,
        "a_low_rank_dim": narrow,
        "v_low_rank_dim": min(32, narrow),
        "gate_low_rank_dim": wide,
        "max_position_embeddings": length,
        "norm_eps": config.norm_eps,
    }
    return sizes_of(options, vocab_size, **own)


def _mamba3(config: Any, options: Settings, vocab_size: int, length: int) -> Settings:
    width = round(config.mlp_ratio * config.d_model) if config.channel_mixer == "swiglu" else 0
    settings = mamba_settings({**options, "dt_rank": None, "d_state": config.d_state}, vocab_size, length)
    # the width is a multiple of 128 in the library, which a share of one per cent allows for
    return {**settings, "d_intermediate": width}


def _llama(config: Any, options: Settings, vocab_size: int, length: int) -> Settings:
    own = {
        "architectures": ["LlamaForCausalLM"],
        "intermediate_size": 8 * -(-round(config.mlp_ratio * config.d_model) // 8),
        "num_attention_heads": config.num_heads,
        "max_position_embeddings": length,
        "rms_norm_eps": config.norm_eps,
    }
    return sizes_of(options, vocab_size, **own)


FLA: dict[str, tuple[str, MakeSettings]] = {
    "GLAConfig": ("GLAForCausalLM", _of_layout("gla")),
    "RetNetConfig": ("RetNetForCausalLM", _of_layout("retnet")),
    "HGRN2Config": ("HGRN2ForCausalLM", _of_layout("hgrn2")),
    "GSAConfig": ("GSAForCausalLM", _of_layout("gsa")),
    "DeltaNetConfig": ("DeltaNetForCausalLM", _attention_of_fla("delta_net", _delta_net)),
    "GatedDeltaNetConfig": ("GatedDeltaNetForCausalLM", _attention_of_fla("gated_deltanet", _delta_of_heads)),
    "KDAConfig": ("KDAForCausalLM", _attention_of_fla("kda", _delta_of_heads)),
    "RWKV7Config": ("RWKV7ForCausalLM", _rwkv7),
    "TransformerPPConfig": (
        "TransformerForCausalLM",
        _attention_of_fla("transformer", lambda config: {"num_heads": config.num_heads}),
    ),
}
"""Our configurations, the models of flash-linear-attention, and their settings."""
MAMBA_SSM: dict[str, MakeSettings] = {
    "MambaConfig": _of_layout("mamba"),
    "Mamba2Config": _of_layout("mamba2"),
    "Mamba3Config": _mamba3,
}
TRANSFORMERS: dict[str, MakeSettings] = {
    "MambaConfig": _of_layout("mamba-hf"),
    "Mamba2Config": _of_layout("mamba2-hf"),
    "AttentionConfig": _of_layout("gpt2"),
    "PythiaConfig": _of_layout("gpt_neox"),
    "TransformerPPConfig": _llama,
}
TABLES: dict[str, dict[str, Any]] = {"fla": FLA, "mamba_ssm": MAMBA_SSM, "transformers": TRANSFORMERS}


def build_peer(library: str, config: Any, spec: TaskSpec) -> PeerModel:
    """The language model of a library (`fla`, `mamba_ssm`, `transformers`) with the sizes of ours.

    LookupError where the library has no such model, ImportError where it is not installed.
    """
    found = TABLES[library].get(type(config).__name__)
    if found is None or (spec.input, spec.readout) != ("tokens", "token"):
        raise LookupError(f"{library} has no language model of this kind")
    options, sizes = config.model_dump(), (spec.num_classes, spec.max_length)
    if library == "mamba_ssm":
        return _mamba_ssm(found(config, options, *sizes), config)
    if library == "transformers":
        return _transformers(found(config, options, *sizes), config)
    name, settings = found
    return _fla(name, settings(config, options, *sizes), config)


def _fla(name: str, settings: Settings, config: Any) -> PeerModel:
    import fla.models

    network = getattr(fla.models, name)
    # the rest of the settings are the library's defaults, with its fused norms and channel mixers
    given = network.config_class(**{**settings, "use_cache": False})
    path = "model.layers.0.attn"
    return FLAModel(network(given), config, "flash-linear-attention", path)


def _mamba_ssm(settings: Settings, config: Any) -> PeerModel:
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

    # the library allocates on a device that it is told
    device = torch.get_default_device()
    network = MambaLMHeadModel(MambaConfig(**settings), device=device)
    if type(config).__name__ == "Mamba3Config":
        from mamba_ssm.modules.mamba3 import Mamba3

        # the language model of 2.3.2.post1 refuses the name of this layer, so that it is put into its blocks here
        sizes = {"d_state": config.d_state, "expand": config.expand, "headdim": config.head_size}
        for index, block in enumerate(network.backbone.layers):
            block.mixer = Mamba3(config.d_model, **sizes, layer_idx=index, device=device)
    return MambaModel(network, config, "mamba-ssm", "backbone.layers.0.mixer")


def _transformers(settings: Settings, config: Any) -> PeerModel:
    import transformers

    (name,) = settings.pop("architectures")
    settings.pop("model_type", None)
    network = getattr(transformers, name)
    given = network.config_class(**settings, use_cache=False)
    return PeerModel(network(given), config, "transformers", "backbone.layers.0.mixer" if "Mamba" in name else "")
