"""The options that all networks share, whatever their mixer is."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

from pydantic import Field

from subquad.models.parts.channel import ChannelMixerKind
from subquad.models.parts.mixer import Mixer
from subquad.models.parts.norms import NormKind
from subquad.models.parts.recompute import Recompute
from subquad.suite.bounds import Count, Epsilon, Fraction, Layers, Positive, Ratio, Width
from subquad.suite.contracts import ModelConfig, TaskSpec


class NetworkOptions(ModelConfig):
    """Options of a network of `num_layers` layers of width `d_model`, and its mixers, which a model defines."""

    left_out_when_off: ClassVar[tuple[str, ...]] = (
        "short_conv",
        "base_conv_layers",
        "torch_init",
        "mixer_gain",
        "readout_bias",
    )
    """Options that were added after some runs were stored. While an option is off, it is not part of the identity of a
    run, so that older runs keep their ids."""
    positions: ClassVar[tuple[str, ...]] = ("none", "learned", "sinusoidal")
    """The values of `position` that this model supports."""
    heads_divide: ClassVar[tuple[str, ...]] = ()
    """Widths that the option `num_heads` of the model must divide."""
    one_mixer_a_layer: ClassVar[bool] = True
    """Whether `mixers` gives one mixer for each of `num_layers`. Only then can a layer of `hybrid` or a block of
    `sashimi` have such a mixer."""

    num_layers: Layers = 2
    d_model: Width = 64
    channel_mixer: ChannelMixerKind = "mlp"
    mlp_ratio: Ratio = 4.0
    """Inner width of the channel mixer, as a multiple of d_model. A `swiglu` of 8/3 is as large as an `mlp` of 4."""
    norm: NormKind = "layer"
    norm_eps: Epsilon = 1e-5
    prenorm: bool = True
    position: Literal["none", "learned", "sinusoidal", "rope", "xpos"] = "none"
    """`learned` and `sinusoidal` are added to the input; `rope` and `xpos` act inside attention."""
    short_conv: int = 0
    """Number of taps of a causal depthwise convolution before every mixer, 2 to 4. 0: there is none."""
    base_conv_layers: tuple[Count, ...] = ()
    """Layers, counted from 0, whose mixer is a `BaseConv` of three taps without `short_conv`. Zoology's grids of linear
    attention alternate: even layers are BaseConv, odd ones the mixer of the model (HazyResearch/zoology at
    d88d6f5474f36998d82d5c3bd58a190248d0a669, zoology/mixers/hybrid.py and zoology/experiments/models_repo.py)."""
    embed_dropout: Fraction = 0.0
    resid_dropout: Fraction = 0.0
    """Dropout on what a mixer or a channel mixer adds to the residual stream."""
    tie_embeddings: bool = True
    """Whether the readout shares the weights of the embedding, where input and output vocabulary are the same."""
    readout_bias: bool = False
    """Whether the readout of tokens has a bias. A readout of sequences always has one."""
    init_std: Positive = 0.02
    init_residual: Literal["scaled", "scaled-mlp", "plain"] = "scaled"
    """`scaled`: projections into the residual stream start 1/sqrt(number of residual branches) smaller (GPT-2).
    `scaled-mlp`: only those of the channel mixers do, as in H3's released code (HazyResearch/safari at
    02220c69d247e5473616cd053a443ad99fd2559b), which rescales by parameter name and so leaves out the output maps of
    its H3 and S4D layers. `plain`: none does.

    Limits: RWKV, whose layers have two branches, counts one a layer. Mamba without `network_init`, Mamba-2 and Mamba-3
    start their output maps 1/sqrt(num_layers) smaller also where there is a channel mixer, for which their authors'
    code counts a second branch a layer (state-spaces/mamba, mamba_ssm/models/mixer_seq_simple.py)."""
    torch_init: Literal[True, False, "weights"] = False
    """Linear maps and embeddings of the network keep the initialisation of torch, weights and biases uniform within
    1 / sqrt(inputs) and embeddings standard normal; `init_std` and `init_residual` have no effect, except that `scaled`
    still scales the output maps of Mamba without `network_init`, Mamba-2 and Mamba-3. The released code of DSS and S4
    does so (ag1988/dss at 777084e777c27caba2e87eceecb3f49d1b761cd8). `weights`: only the weights of linear maps keep
    it; biases start at zero and embeddings with `init_std`, as in MAD's code (athms/mad-lab at
    1f77b94127309e9f3e0280fe73d6079ba3eaf3eb, mad/model/language_model.py)."""
    mixer_gain: Positive | None = None
    """Linear maps of the mixers start by Xavier's rule, uniform within gain sqrt(6 / (inputs + outputs)), in place of
    the start of the network's. GLA does so in MAD's code, with the gain 2^-2.5 (athms/mad-lab at
    6e7e4c903b7d4d1a31d12186b709f36fa3184041, mad/model/layers/attention_gated_linear.py). Mamba without `network_init`,
    Mamba-2 and Mamba-3 start their maps themselves and refuse it."""
    pooling: Literal["mean", "last"] = "mean"
    """Summary of the time axis in a sequence readout."""

    recompute: Recompute = Field(default="auto", exclude=True)
    """Selects the activations that the backward pass recomputes instead of keeping them. It changes no value, so it is
    not part of the identity of a run."""

    def build_peer(self, library: str, spec: TaskSpec) -> Any:
        from subquad.models.peers import build_peer

        return build_peer(library, self, spec)

    def mixer(self, layer: int, spec: TaskSpec) -> Mixer:
        """The mixer of one layer."""
        raise NotImplementedError(f"{type(self).__name__} defines no method mixer(self, layer, spec)")

    def mixers(self, spec: TaskSpec) -> list[Mixer]:
        """The mixers of all layers. A model whose layers share parameters overrides this."""
        return [self.mixer(layer, spec) for layer in range(self.num_layers)]

    def check(self, spec: TaskSpec) -> None:
        """Raises ValueError where this model cannot serve that task."""
        name = type(self).__name__
        if self.position not in self.positions:
            raise ValueError(
                f"{name}: position={self.position!r} is not available, choose one of {', '.join(self.positions)}."
            )
        if self.recompute == "layer" and self.norm == "batch":
            raise ValueError(
                f"{name}: recompute='layer' would count every batch twice in the statistics of a batch norm; set "
                "recompute to 'auto' or 'never'."
            )
        if round(self.mlp_ratio * self.d_model) == 0 and self.channel_mixer != "swiglu":
            raise ValueError(
                f"{name}: mlp_ratio={self.mlp_ratio} of d_model={self.d_model} is an inner width of 0; raise mlp_ratio."
            )
        for width in self.heads_divide:
            require_divides(name, num_heads=getattr(self, "num_heads"), **{width: getattr(self, width)})  # noqa: B009
        if self.short_conv not in (0, 2, 3, 4):
            raise ValueError(f"{name}: short_conv must be 0 or 2 to 4, got {self.short_conv}.")
        for layer in self.base_conv_layers:
            if not 0 <= layer < self.num_layers:
                raise ValueError(
                    f"{name}: base_conv_layers={list(self.base_conv_layers)}: there is no layer {layer}; "
                    f"num_layers={self.num_layers} gives the layers 0 to {self.num_layers - 1}."
                )
        for key in ("resid_dropout", "attention_dropout"):
            if self.recompute == "layer" and getattr(self, key, 0.0) > 0:
                raise ValueError(
                    f"{name}: recompute='layer' would draw another dropout in the backward pass; set {key} to 0 or "
                    "recompute to 'auto' or 'never'."
                )
        if spec.input == "tokens" and spec.vocab_size < 1:
            raise ValueError(f"{name}: token inputs need vocab_size >= 1, got {spec.vocab_size}; set it in the task.")
        if spec.input == "signal" and spec.channels < 1:
            raise ValueError(f"{name}: signal inputs need channels >= 1, got {spec.channels}; set it in the task.")
        if spec.towers not in (1, 2) or (spec.towers == 2 and spec.readout != "sequence"):
            raise ValueError(
                f"{name}: towers={spec.towers} and readout={spec.readout!r}; allowed: 1, or 2 with one label per row."
            )


def require_divides(model: str, **numbers: int) -> None:
    """Raises ValueError unless the first option divides the second one.

    require_divides("gsa", num_heads=4, d_model=64)
    """
    (small_name, small), (large_name, large) = numbers.items()
    if large < 1:
        raise ValueError(f"{model}: {large_name} would be {large}; raise the options that it follows from.")
    if small < 1 or large % small:
        low = [n for n in range(1, math.isqrt(large) + 1) if large % n == 0]
        allowed = sorted({*low, *(large // n for n in low)})
        raise ValueError(
            f"{model}: {small_name}={small} does not divide {large_name}={large}; "
            f"choose {small_name} from {', '.join(map(str, allowed))} or change {large_name}."
        )
