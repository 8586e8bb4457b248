"""What every export starts from."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from causal_encoder.errors import ExportError
from causal_encoder.export import export_onnx, verify
from causal_encoder.export.prepare import exported_config, prepare
from causal_encoder.model import CausalEncoder
from tests.bundles import small_model


def test_the_callers_model_keeps_its_mode_and_its_weights() -> None:
    model = small_model(dropout=0.5).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prepared = prepare(model)
    for parameter in prepared.parameters():
        parameter.data.zero_()
    assert model.training
    assert not prepared.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_dropout_is_gone_from_the_copy() -> None:
    prepared = prepare(small_model(dropout=0.5))
    assert prepared.config.dropout == 0.0
    assert not any(isinstance(module, torch.nn.Dropout) for module in prepared.modules())


def test_half_precision_weights_are_widened_exactly() -> None:
    model = small_model().half()
    prepared = prepare(model)
    weight = prepared.token_embedding.weight
    assert weight.dtype == torch.float32
    assert torch.equal(weight, model.token_embedding.weight.float())


def test_another_kind_of_module_is_refused_by_its_name(tmp_path: Path) -> None:
    other = torch.nn.Linear(2, 2)
    for call in (prepare, partial(export_onnx, path=tmp_path / "b"), partial(verify, tmp_path)):
        with pytest.raises(ExportError, match="Linear, expected a CausalEncoder"):
            call(other)  # type: ignore[arg-type]


def double(_module: object, _inputs: object, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


class Doubled(CausalEncoder):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(ids)


def doubled() -> CausalEncoder:
    model = small_model()
    other = Doubled(model.config)
    other.load_state_dict(model.state_dict())
    return other


def altered(change: Callable[[Any], object]) -> Callable[[], CausalEncoder]:
    def make() -> CausalEncoder:
        model = small_model()
        change(model)
        return model

    return make


ALTERED: dict[str, Callable[[], CausalEncoder]] = {
    "a subclass": doubled,
    "a hook": altered(lambda m: m.register_forward_hook(double)),
    "a hook inside": altered(lambda m: m.blocks[0].register_forward_hook(double)),
    "another forward": altered(lambda m: setattr(m, "forward", lambda _: 2 * m.final_norm.weight)),
    "a table of zeros": altered(lambda m: m.positions.sinusoidal.mul_(0)),
    "another eps": altered(lambda m: setattr(m.final_norm, "eps", 1.0)),
    "another norm": altered(lambda m: setattr(m.blocks[0], "pre_norm", False)),
    "other heads": altered(lambda m: setattr(m.blocks[0].attention, "num_heads", 2)),
    "another activation": altered(
        lambda m: setattr(m.blocks[1].feed_forward, "activation", torch.nn.SiLU())
    ),
}


@pytest.mark.parametrize("name", ALTERED)
def test_a_model_that_computes_something_else_than_its_config_says_is_refused(name: str) -> None:
    with pytest.raises(ExportError, match="computes something else than its config"):
        prepare(ALTERED[name]())


def test_a_layer_with_other_weights_than_its_config_is_refused_in_a_line() -> None:
    model = small_model()
    torch.nn.utils.parametrizations.weight_norm(model.blocks[0].attention.out)  # type: ignore[union-attr, arg-type]
    with pytest.raises(ExportError, match="not those of its config") as caught:
        prepare(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name(value: float) -> None:
    model = small_model()
    model.blocks[1].feed_forward.down.bias.data[3] = value  # type: ignore[union-attr, operator]
    with pytest.raises(ExportError, match=r"blocks\.1\.feed_forward\.down\.bias"):
        prepare(model)


@pytest.mark.parametrize("position", ["sinusoidal", "none"])
@pytest.mark.parametrize("max_len", [1, 17, 18, 1000])
def test_max_len_may_change_where_nothing_was_trained_for_it(position: str, max_len: int) -> None:
    assert prepare(small_model(position=position), max_len).config.max_len == max_len


@pytest.mark.parametrize("position", ["learned", "sinusoidal+learned"])
@pytest.mark.parametrize("max_len", [1, 16, 18])
def test_max_len_of_a_learned_table_may_not_change(position: str, max_len: int) -> None:
    with pytest.raises(ExportError, match=f"max_len {max_len} .* 17 rows"):
        prepare(small_model(position=position), max_len)
    assert prepare(small_model(position=position), 17).config.max_len == 17


@pytest.mark.parametrize("max_len", [0, -1, 1.5, True])
def test_a_max_len_that_is_no_length_is_refused(max_len: int) -> None:
    with pytest.raises(ExportError, match="max_len is"):
        exported_config(small_model().config, max_len)
