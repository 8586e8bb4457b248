"""EncoderConfig: defaults, limits of every field, plain dictionaries."""

import dataclasses
import json
import math
import re
from fractions import Fraction

import numpy as np
import pytest

from causal_encoder.errors import CausalEncoderError, ConfigError
from causal_encoder.model import EncoderConfig
from tests import tiny

POSITIVE_INTEGERS = ("vocab_size", "d_model", "num_heads", "num_layers", "d_ff", "max_len")
FIELDS = (
    "vocab_size",
    "d_model",
    "num_heads",
    "num_layers",
    "d_ff",
    "max_len",
    "position",
    "activation",
    "norm",
    "dropout",
    "layer_norm_eps",
    "bias",
    "final_norm",
)


def test_defaults_are_those_of_the_documentation() -> None:
    config = EncoderConfig(vocab_size=1000)
    assert config.to_dict() == {
        "vocab_size": 1000,
        "d_model": 512,
        "num_heads": 8,
        "num_layers": 6,
        "d_ff": 2048,
        "max_len": 2048,
        "position": "sinusoidal",
        "activation": "gelu",
        "norm": "pre",
        "dropout": 0.0,
        "layer_norm_eps": 1e-5,
        "bias": True,
        "final_norm": True,
    }


def test_vocab_size_alone_has_no_default() -> None:
    with pytest.raises(TypeError, match="vocab_size"):
        EncoderConfig()  # type: ignore[call-arg]


@pytest.mark.parametrize("d_model", [1, 8, 24])
def test_the_feed_forward_width_is_four_times_the_model_width(d_model: int) -> None:
    assert EncoderConfig(vocab_size=5, d_model=d_model, num_heads=1).d_ff == 4 * d_model


def test_a_given_feed_forward_width_is_kept() -> None:
    assert tiny.config(d_model=8, d_ff=7).d_ff == 7


@pytest.mark.parametrize(("norm", "expected"), [("pre", True), ("post", False)])
def test_only_pre_norm_has_a_final_norm_by_default(norm: str, expected: bool) -> None:
    assert tiny.config(norm=norm).final_norm is expected
    assert tiny.config(norm=norm, final_norm=not expected).final_norm is not expected


def test_derived_sizes_follow_from_the_fields() -> None:
    assert tiny.config(d_model=12, num_heads=3).head_size == 4
    schemes = {
        position: (
            tiny.config(position=position).has_sinusoidal,
            tiny.config(position=position).has_learned,
        )
        for position in ("sinusoidal", "learned", "sinusoidal+learned", "none")
    }
    assert schemes == {
        "sinusoidal": (True, False),
        "learned": (False, True),
        "sinusoidal+learned": (True, True),
        "none": (False, False),
    }


@pytest.mark.parametrize("name", FIELDS)
def test_no_field_can_be_changed_afterwards(name: str) -> None:
    config = tiny.config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, name, getattr(config, name))


def test_fields_are_given_by_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        EncoderConfig(1000)  # type: ignore[call-arg]


def test_equal_fields_make_equal_and_hashable_configs() -> None:
    assert tiny.config() == tiny.config()
    assert tiny.config() != tiny.config(max_len=10)
    assert len({tiny.config(), tiny.config()}) == 1


@pytest.mark.parametrize("name", POSITIVE_INTEGERS)
@pytest.mark.parametrize(
    "value",
    [0, -1, True, False, 2.0, 2.5, math.nan, "2", [2], np.int64(2), Fraction(2)],
    ids=repr,
)
def test_a_size_must_be_a_whole_number_of_at_least_one(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {re.escape(repr(value))}.*at least 1"):
        tiny.config(**{name: value})


@pytest.mark.parametrize("name", ["vocab_size", "d_model", "num_heads", "num_layers", "max_len"])
def test_a_size_cannot_be_none(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is None"):
        tiny.config(**{name: None})


@pytest.mark.parametrize("name", POSITIVE_INTEGERS)
def test_every_size_may_be_one(name: str) -> None:
    assert getattr(tiny.config(**{"num_heads": 1, name: 1}), name) == 1


@pytest.mark.parametrize(("d_model", "num_heads"), [(8, 3), (8, 16), (7, 2), (1, 2)])
def test_heads_must_divide_the_width(d_model: int, num_heads: int) -> None:
    message = f"d_model {d_model} is not divisible by num_heads {num_heads}; choose"
    with pytest.raises(ConfigError, match=message):
        tiny.config(d_model=d_model, num_heads=num_heads)


@pytest.mark.parametrize(("d_model", "num_heads"), [(8, 8), (7, 7), (7, 1), (9, 3), (1, 1)])
def test_any_divisor_of_the_width_is_a_number_of_heads(d_model: int, num_heads: int) -> None:
    assert tiny.config(d_model=d_model, num_heads=num_heads).head_size == d_model // num_heads


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("position", ["sinusoidal", "learned", "sinusoidal+learned", "none"]),
        ("activation", ["gelu", "gelu_tanh", "relu"]),
        ("norm", ["pre", "post"]),
    ],
)
@pytest.mark.parametrize(
    "value", ["", "rope", "GELU", "pre ", None, 1, True, ["pre"], {}], ids=repr
)
def test_a_choice_must_be_one_of_the_listed(name: str, choices: list[str], value: object) -> None:
    for choice in choices:
        assert getattr(tiny.config(**{name: choice}), name) == choice
    message = f"{name} is {re.escape(repr(value))}, expected one of {re.escape(', '.join(choices))}"
    with pytest.raises(ConfigError, match=message):
        tiny.config(**{name: value})


@pytest.mark.parametrize("name", ["bias", "final_norm"])
@pytest.mark.parametrize("value", [0, 1, "true", 1.0, np.True_], ids=repr)
def test_a_switch_is_a_boolean_and_nothing_like_it(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {re.escape(repr(value))}.*true or false"):
        tiny.config(**{name: value})


@pytest.mark.parametrize("value", [0, 0.0, 0.5, math.nextafter(1.0, 0.0)])
def test_dropout_may_be_anything_below_one(value: float) -> None:
    assert tiny.config(dropout=value).dropout == value


@pytest.mark.parametrize(
    "value",
    [1, 1.0, -0.1, math.nan, math.inf, -math.inf, True, False, "0.1", None, [0.1], 10**400],
    ids=lambda value: repr(value)[:8],
)
def test_dropout_outside_its_interval_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"dropout is .*\[0, 1\)"):
        tiny.config(dropout=value)


@pytest.mark.parametrize("value", [1e-12, 1e-5, 1, 1.5])
def test_epsilon_may_be_any_positive_number(value: float) -> None:
    assert tiny.config(layer_norm_eps=value).layer_norm_eps == value


@pytest.mark.parametrize(
    "value",
    [0, 0.0, -1e-5, math.nan, math.inf, True, "1e-5", None, 10**400],
    ids=lambda value: repr(value)[:8],
)
def test_epsilon_that_is_not_a_positive_number_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"layer_norm_eps is .*over 0"):
        tiny.config(layer_norm_eps=value)


def test_config_errors_are_ours_and_value_errors() -> None:
    assert issubclass(ConfigError, CausalEncoderError)
    assert issubclass(ConfigError, ValueError)


def test_a_message_is_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        tiny.config(position="a\nb")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": "post", "final_norm": True, "bias": False, "d_ff": 3},
        {"position": "sinusoidal+learned", "activation": "gelu_tanh", "dropout": 0.25},
        {"num_heads": 1, "d_model": 1, "max_len": 1, "vocab_size": 1, "layer_norm_eps": 1e-12},
    ],
)
def test_a_dictionary_gives_the_config_back(changes: dict[str, object]) -> None:
    config = tiny.config(**changes)
    assert tuple(config.to_dict()) == FIELDS
    assert EncoderConfig.from_dict(config.to_dict()) == config
    assert EncoderConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_dictionary_may_leave_out_what_has_a_default() -> None:
    assert EncoderConfig.from_dict({"vocab_size": 7}) == EncoderConfig(vocab_size=7)


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown field 'n_heads'; known fields: .*'num_heads'"):
        EncoderConfig.from_dict({"vocab_size": 7, "n_heads": 2})


def test_unknown_fields_of_mixed_types_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown field"):
        EncoderConfig.from_dict({"vocab_size": 7, 1: 2, "x": 3})  # type: ignore[dict-item]


def test_a_missing_vocab_size_is_named() -> None:
    with pytest.raises(ConfigError, match="vocab_size is missing"):
        EncoderConfig.from_dict({"d_model": 8})


def test_values_from_a_dictionary_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"d_model is 8\.0"):
        EncoderConfig.from_dict({"vocab_size": 7, "d_model": 8.0})
