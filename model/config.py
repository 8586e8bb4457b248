"""The configuration of an encoder: one frozen, checked record."""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from causal_encoder.errors import ConfigError

POSITIONS = ("sinusoidal", "learned", "sinusoidal+learned", "none")
ACTIVATIONS = ("gelu", "gelu_tanh", "relu")
NORMS = ("pre", "post")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Sizes and choices of a causal transformer encoder (arXiv:1706.03762, section 3).

    Attributes:
        vocab_size: V, number of token ids; valid ids are 0..V-1.
        d_model: D, width of every hidden vector.
        num_heads: H, attention heads; must divide d_model.
        num_layers: number of blocks.
        d_ff: width of the feed-forward layer; 4 * d_model if not given.
        max_len: L, longest sequence, in tokens.
        position: "sinusoidal", "learned", "sinusoidal+learned" (their sum) or "none".
        activation: "gelu" (exact), "gelu_tanh" (its tanh approximation) or "relu".
        norm: "pre", x + f(norm(x)), or "post", norm(x + f(x)).
        dropout: probability, in training mode only; 0 <= dropout < 1.
        layer_norm_eps: epsilon inside every layer norm.
        bias: whether linear layers and layer norms have a bias.
        final_norm: a layer norm after the last block; if not given, true for "pre" and
            false for "post" (the 2017 paper has none).

    Raises:
        ConfigError: a value has the wrong type or is outside its limits.
    """

    vocab_size: int
    d_model: int = 512
    num_heads: int = 8
    num_layers: int = 6
    d_ff: int = None  # type: ignore[assignment]  # filled in below, never None afterwards
    max_len: int = 2048
    position: str = "sinusoidal"
    activation: str = "gelu"
    norm: str = "pre"
    dropout: float = 0.0
    layer_norm_eps: float = 1e-5
    bias: bool = True
    final_norm: bool = None  # type: ignore[assignment]  # filled in below, never None afterwards

    def __post_init__(self) -> None:
        """Fill in the derived defaults, then check every value."""
        for name in ("vocab_size", "d_model", "num_heads", "num_layers", "max_len"):
            _check_positive_int(name, getattr(self, name))
        if self.d_ff is None:
            object.__setattr__(self, "d_ff", 4 * self.d_model)
        _check_positive_int("d_ff", self.d_ff)
        if self.d_model % self.num_heads:
            raise ConfigError(
                f"d_model {self.d_model} is not divisible by num_heads {self.num_heads}; "
                "choose num_heads that divides d_model"
            )
        _check_choice("position", self.position, POSITIONS)
        _check_choice("activation", self.activation, ACTIVATIONS)
        _check_choice("norm", self.norm, NORMS)
        if self.final_norm is None:
            object.__setattr__(self, "final_norm", self.norm == "pre")
        for name in ("bias", "final_norm"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}, expected true or false")
        if not (_is_real(self.dropout) and 0 <= self.dropout < 1):
            raise ConfigError(f"dropout is {self.dropout!r}, expected a number in [0, 1)")
        if not (_is_real(self.layer_norm_eps) and self.layer_norm_eps > 0):
            raise ConfigError(
                f"layer_norm_eps is {self.layer_norm_eps!r}, expected a number over 0"
            )

    @property
    def head_size(self) -> int:
        """K = D / H."""
        return self.d_model // self.num_heads

    @property
    def has_sinusoidal(self) -> bool:
        """Whether the fixed sinusoidal table is added to the embedding."""
        return "sinusoidal" in self.position

    @property
    def has_learned(self) -> bool:
        """Whether a trained position table is added to the embedding."""
        return "learned" in self.position

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "EncoderConfig":
        """Build from plain values.

        Raises:
            ConfigError: a field is unknown, missing, or outside its limits.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(fields) - known, key=str):
            raise ConfigError(f"unknown field {unknown[0]!r}; known fields: {sorted(known)}")
        if "vocab_size" not in fields:
            raise ConfigError("vocab_size is missing, and it has no default")
        return cls(**fields)


def _check_positive_int(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r}, expected a whole number of at least 1")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}, expected one of {', '.join(choices)}")


def _is_real(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # false for NaN, and for an int beyond any float
