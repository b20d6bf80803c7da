"""Hybrids: networks whose layers have different mixers.

`AttentionLayersConfig` adds softmax attention in some layers to a model with one other mixer, as in the hybrid models
of H3 (Fu et al. 2023, section 3.3) and GSS. The model `hybrid` takes any list of registered models:

    layers: [mamba, attention]                          repeated from the first layer to the last
    options: {attention: {num_heads: 4, position: rope}}

Mamba-MHA of Mamba's figure 9 (appendix E.2.2) is such a network; its Mamba-MLP is `mamba` with a channel mixer.
Models without one mixer a layer are refused: RWKV, which alternates two, and SaShiMi.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, ValidationInfo, field_validator

from subquad.models import MODELS
from subquad.models.attention import Attention
from subquad.models.backbone import BackboneConfig
from subquad.models.parts.mixer import Mixer
from subquad.models.parts.options import require_divides
from subquad.models.parts.short_conv import BaseConv
from subquad.suite.bounds import Count, Positive, Width
from subquad.suite.contracts import TaskSpec

BASE_CONV = "base-conv"
"""Name of a `BaseConv` layer, which is not in the registry of models."""
OWN_POSITIONS = ("rope", "xpos")
"""Positions that act inside a mixer, so that each mixer of a hybrid may have its own."""
OF_THE_WHOLE = ("position", "mixer_gain")
"""Options that the network does not hand on to its parts."""
OF_THE_NETWORK = {*BackboneConfig.model_fields, "ssm_lr", "dt_lr"} - {"position"}
"""Options that belong to the network and not to one of its mixers."""


class AttentionLayersConfig(BackboneConfig):
    """A model in which softmax attention without positions takes the place of the mixer in some layers."""

    left_out_when_off: ClassVar[tuple[str, ...]] = (
        *BackboneConfig.left_out_when_off,
        "attention_layers",
        "attention_heads",
    )

    attention_layers: tuple[Count, ...] = ()
    """Layers, counted from 0, whose mixer is softmax attention without positions. H3's paper has two, the second layer
    and the one half the network later; its released 1.3B model has 8 and 16 of 24."""
    attention_heads: Width | None = None
    """Heads of these layers."""

    def check(self, spec: TaskSpec) -> None:
        super().check(spec)
        name = type(self).__name__.removesuffix("Config").lower()
        if bool(self.attention_layers) != (self.attention_heads is not None):
            raise ValueError(
                f"{name}: attention_layers={list(self.attention_layers)} and attention_heads={self.attention_heads}; "
                "give both or neither."
            )
        if self.attention_heads is not None:
            require_divides(name, attention_heads=self.attention_heads, d_model=self.d_model)
        if not set(self.attention_layers) <= set(range(self.num_layers)):
            raise ValueError(
                f"{name}: attention_layers={list(self.attention_layers)} must lie in 0 to {self.num_layers - 1}."
            )

    def _make(self, layer: int, spec: TaskSpec) -> Mixer:
        if layer not in self.attention_layers:
            return self.mixer(layer, spec)
        assert self.attention_heads is not None
        return Attention(self.d_model, self.attention_heads, dropout=0.0, bias=True, rotary=None)

    def mixers(self, spec: TaskSpec) -> list[Mixer]:
        return [self._make(layer, spec) for layer in range(self.num_layers)]


class HybridConfig(BackboneConfig):
    """A network whose layers have the mixers of registered models.

    Width, depth, norms, channel mixers and initialisation are those of this network, and the options of a mixer are
    those that its own model adds. Options that are not given have the defaults of that model, which are written out in
    `options`, together with the version of the model, so that both are part of the identity of a run.
    """

    layers: tuple[str, ...] = ("h3", "attention")
    """Names of registered models, or `base-conv`, from the first layer on; repeated until every layer has a mixer."""
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options of a mixer by the name of its model. `position` may be `rope` or `xpos` where the model has them."""
    versions: dict[str, int] = Field(default_factory=dict)
    """Versions of the models whose mixers are used. They are filled in; another version than today's is refused."""
    ssm_lr: Positive | None = None
    """Learning rate of the state space parameters of all mixers, which have no weight decay. None: that of the run."""

    @field_validator("layers")
    @classmethod
    def _known_layers(cls, layers: tuple[str, ...]) -> tuple[str, ...]:
        if not layers:
            raise ValueError("expected at least one name")
        if "hybrid" in layers:
            raise ValueError("a hybrid cannot be a layer of a hybrid")
        for name in _models(layers):
            if not MODELS.load(name).one_mixer_a_layer:
                raise ValueError(f"{name} does not have one mixer a layer and cannot be in a hybrid; use another model")
        return layers

    @field_validator("options")
    @classmethod
    def _resolved(cls, given: dict[str, dict[str, Any]], info: ValidationInfo) -> dict[str, dict[str, Any]]:
        names = _models(info.data.get("layers", ()))
        if "layers" in info.data and set(given) - set(names):
            raise ValueError(f"got options of {', '.join(given)}; layers has {', '.join(names)}")
        return {name: own_options(name, given.get(name, {})) for name in names}

    @field_validator("versions")
    @classmethod
    def _filled_in(cls, stored: dict[str, int], info: ValidationInfo) -> dict[str, int]:
        return today(stored, _models(info.data.get("layers", ())))

    def parts(self) -> dict[str, BackboneConfig]:
        """The configurations of the models whose mixers are used, with the width and depth of this network."""
        # the network itself starts the linear maps of its mixers anew where it has a gain
        network = {key: getattr(self, key) for key in BackboneConfig.model_fields if key not in OF_THE_WHOLE}
        network |= {"short_conv": 0, "base_conv_layers": ()}
        return {name: MODELS.load(name)(**network, **own) for name, own in self.options.items()}

    def check(self, spec: TaskSpec) -> None:
        super().check(spec)
        for part in self.parts().values():
            part.check(spec)

    def mixers(self, spec: TaskSpec) -> list[Mixer]:
        made: dict[str, list[Mixer]] = {name: part.mixers(spec) for name, part in self.parts().items()}
        names = [self.layers[layer % len(self.layers)] for layer in range(self.num_layers)]
        return [BaseConv(self.d_model) if name == BASE_CONV else made[name][i] for i, name in enumerate(names)]


def _models(layers: tuple[str, ...]) -> list[str]:
    """The models among the names of layers, each once."""
    return sorted({name for name in layers if name != BASE_CONV})


def today(stored: dict[str, int], names: list[str]) -> dict[str, int]:
    """The versions of models. ValueError where others are stored."""
    versions = {name: MODELS.load(name).version for name in names}
    if stored and stored != versions:
        raise ValueError(f"the models are at {versions} now, got {stored}; train again")
    return versions


def own_options(name: str, given: dict[str, Any], *, of_blocks: tuple[str, ...] = ()) -> dict[str, Any]:
    """The options that a model adds to those of the network, defaults written out.

    of_blocks: options of networks that this one leaves to its parts.
    """
    kind = MODELS.load(name)
    network = OF_THE_NETWORK - set(of_blocks)
    own = set(kind.model_fields) - network
    if strange := sorted(set(given) - own):
        raise ValueError(f"{name} has no option {', '.join(strange)} here; allowed are {', '.join(sorted(own))}")
    position = given.get("position", "none")
    if position not in ("none", *OWN_POSITIONS):
        raise ValueError(f"position={position!r} belongs to the network; a mixer may have {' or '.join(OWN_POSITIONS)}")
    resolved = kind(**{**given, "position": position}).model_dump(mode="json")
    return {
        key: value for key, value in resolved.items() if key not in network and (key != "position" or value != "none")
    }
