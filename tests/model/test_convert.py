"""Converting a trained torch.nn.TransformerEncoder: the same numbers, or a refusal by name."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from causal_encoder.errors import ConfigError
from causal_encoder.model import from_torch_encoder, sinusoidal_table
from tests import tiny

V, D, H, FF, L = 11, 8, 2, 12, 9


def stack(**options: Any) -> nn.TransformerEncoder:
    """Two layers with random weights; options of TransformerEncoderLayer and `final_norm`."""
    final_norm = options.pop("final_norm", None)
    layer = nn.TransformerEncoderLayer(D, H, FF, **({"dropout": 0.0} | options))
    encoder = nn.TransformerEncoder(layer, 2, final_norm, enable_nested_tensor=False)
    tiny.randomize(encoder)
    return encoder.eval()


def embedding() -> nn.Embedding:
    return nn.Embedding(V, D)


def run_torch(
    encoder: nn.TransformerEncoder, weight: Tensor, table: Tensor | None, ids: Tensor
) -> Tensor:
    """What the trained model computes: embedding, positions, square subsequent mask.

    With gradients: torch's fast path for inference takes any GELU for the exact one.
    """
    length = ids.size(1)
    x = F.embedding(ids, weight)
    if table is not None:
        x = x + table[:length]
    layer = encoder.layers[0]
    assert isinstance(layer, nn.TransformerEncoderLayer)
    batch_first = layer.self_attn.batch_first
    mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=x.dtype)
    y: Tensor = encoder(x if batch_first else x.transpose(0, 1), mask=mask)
    return y if batch_first else y.transpose(0, 1)


# -------------------------------------------------------------------------- same numbers


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "sequence first"])
@pytest.mark.parametrize("final_norm", [True, False], ids=["final norm", "no final norm"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    ("activation", "name"),
    [
        ("relu", "relu"),
        ("gelu", "gelu"),
        (nn.ReLU(), "relu"),
        (torch.relu, "relu"),
        (nn.GELU(), "gelu"),
        (nn.GELU("tanh"), "gelu_tanh"),
    ],
    ids=["relu", "gelu", "ReLU module", "torch.relu", "GELU module", "GELU tanh module"],
)
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_converted_model_computes_what_torch_computes(
    norm: str, activation: Any, name: str, bias: bool, final_norm: bool, batch_first: bool
) -> None:
    encoder = stack(
        norm_first=norm == "pre",
        activation=activation,
        bias=bias,
        final_norm=nn.LayerNorm(D, bias=bias) if final_norm else None,
        batch_first=batch_first,
    )
    words = embedding()
    model = from_torch_encoder(encoder, words, position="sinusoidal", max_len=L)
    assert (model.config.norm, model.config.activation) == (norm, name)
    assert (model.config.bias, model.config.final_norm) == (bias, final_norm)
    table = sinusoidal_table(L, D)
    for batch, length in ((1, 1), (2, 5), (3, L)):
        ids = tiny.ids(model.config, batch, length)
        expected = run_torch(encoder, words.weight, table, ids)
        torch.testing.assert_close(model(ids), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("position", ["learned", "sinusoidal+learned", "sinusoidal", "none"])
def test_positions_are_taken_over_with_their_scheme(position: str) -> None:
    encoder, words = stack(), embedding()
    learned = torch.randn(L, D) if "learned" in position else None
    model = from_torch_encoder(encoder, words, position=position, position_table=learned)
    table = torch.zeros(L, D)
    if learned is not None:
        table = table + learned
        assert model.config.max_len == L
    if "sinusoidal" in position:
        table = table + sinusoidal_table(L, D)
    ids = tiny.ids(model.config, 2, L)
    expected = run_torch(encoder, words.weight, table, ids)
    torch.testing.assert_close(model(ids), expected, rtol=1e-5, atol=2e-5)


def test_every_setting_is_read_from_the_layers() -> None:
    encoder = stack(dropout=0.25, layer_norm_eps=1e-3)
    model = from_torch_encoder(encoder, embedding(), position="none")
    assert model.config == tiny.config(
        max_len=2048,
        position="none",
        activation="relu",
        norm="post",
        dropout=0.25,
        layer_norm_eps=1e-3,
        final_norm=False,
    )


def test_an_embedding_scaled_by_the_caller_is_the_one_of_the_2017_paper() -> None:
    encoder, words, scaled = stack(), embedding(), embedding()
    with torch.no_grad():
        scaled.weight.copy_(words.weight * D**0.5)
    model = from_torch_encoder(encoder, scaled, position="sinusoidal", max_len=L)
    ids = tiny.ids(model.config, 2, 6)
    expected = run_torch(encoder, words.weight * D**0.5, sinusoidal_table(L, D), ids)
    torch.testing.assert_close(model(ids), expected, rtol=1e-5, atol=2e-5)


def test_a_padding_row_stays_the_row_it_is() -> None:
    words = nn.Embedding(V, D, padding_idx=0)
    model = from_torch_encoder(stack(), words, position="none")
    assert torch.equal(model.token_embedding.weight, words.weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_weights_become_float32(dtype: torch.dtype) -> None:
    encoder, words = stack().to(dtype), embedding().to(dtype)
    model = from_torch_encoder(encoder, words, position="none")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.token_embedding.weight, words.weight.float())


def test_the_result_is_a_copy_in_eval_mode() -> None:
    encoder, words, table = stack().train(), embedding(), torch.randn(L, D)
    model = from_torch_encoder(encoder, words, position="learned", position_table=table)
    assert not any(module.training for module in model.modules())
    assert encoder.training
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for source in (*encoder.parameters(), words.weight, table):
            source.zero_()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_model_trained_on_is_converted_as_it_stands_now() -> None:
    encoder, words = stack().train(), embedding()
    optimizer = torch.optim.SGD([*encoder.parameters(), *words.parameters()], lr=0.1)
    ids = torch.tensor([[1, 2, 3]])
    torch.autograd.backward(run_torch(encoder, words.weight, None, ids).square().mean())
    optimizer.step()
    model = from_torch_encoder(encoder, words, position="none")
    expected = run_torch(encoder.eval(), words.weight, None, ids)
    torch.testing.assert_close(model(ids), expected, rtol=1e-5, atol=2e-5)


# ------------------------------------------------------------------------------ refusals


def refusal(encoder: nn.TransformerEncoder, words: nn.Embedding | None = None, **more: Any) -> str:
    """The message with which a model is refused; anything but our error fails."""
    with pytest.raises(ConfigError) as caught:
        from_torch_encoder(encoder, words or embedding(), **({"position": "none"} | more))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_layers_of_another_class_are_refused() -> None:
    class OwnLayer(nn.TransformerEncoderLayer):
        pass

    encoder = stack()
    encoder.layers[1] = OwnLayer(D, H, FF)
    assert "layer 1 is OwnLayer, expected torch.nn.TransformerEncoderLayer" in refusal(encoder)


def test_a_decoder_is_refused() -> None:
    decoder: Any = nn.TransformerDecoder(nn.TransformerDecoderLayer(D, H, FF), 1)
    assert "encoder is TransformerDecoder" in refusal(decoder)


def test_an_encoder_without_layers_is_refused() -> None:
    layer = nn.TransformerEncoderLayer(D, H, FF)
    assert "0 layers" in refusal(nn.TransformerEncoder(layer, 0, enable_nested_tensor=False))


@pytest.mark.parametrize(
    "options",
    [{"norm_first": True}, {"activation": "gelu"}, {"layer_norm_eps": 1e-3}, {"bias": False}],
    ids=str,
)
def test_layers_that_differ_are_refused(options: dict[str, Any]) -> None:
    encoder = stack()
    encoder.layers[1] = nn.TransformerEncoderLayer(D, H, FF, dropout=0.0, **options)
    assert "differ" in refusal(encoder)


@pytest.mark.parametrize(
    ("width", "heads", "feed_forward"), [(D, 4, FF), (D, H, 13)], ids=["heads", "feed-forward"]
)
def test_layers_of_different_sizes_are_refused(width: int, heads: int, feed_forward: int) -> None:
    encoder = stack()
    encoder.layers[1] = nn.TransformerEncoderLayer(width, heads, feed_forward, dropout=0.0)
    assert "differ" in refusal(encoder)


@pytest.mark.parametrize(
    "activation",
    [F.silu, nn.SiLU(), nn.GELU("tanh").forward, lambda x: x, torch.sigmoid, nn.LeakyReLU()],
    ids=["silu", "SiLU", "bound method", "lambda", "sigmoid", "LeakyReLU"],
)
def test_other_activations_are_refused(activation: Callable[[Tensor], Tensor]) -> None:
    message = refusal(stack(activation=activation))
    assert re.search("activation .*relu.*gelu", message)


def test_an_activation_derived_from_a_known_one_is_refused() -> None:
    class ScaledGelu(nn.GELU):
        def forward(self, x: Tensor) -> Tensor:
            return 1.7 * super().forward(x)

    class ScaledRelu(nn.ReLU):
        def forward(self, x: Tensor) -> Tensor:
            return 1.7 * super().forward(x)

    assert "ScaledGelu" in refusal(stack(activation=ScaledGelu()))
    assert "ScaledRelu" in refusal(stack(activation=ScaledRelu()))


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm1d(D), nn.RMSNorm(D), nn.Identity()],
    ids=lambda module: type(module).__name__,
)
def test_a_final_norm_of_another_kind_is_refused(norm: nn.Module) -> None:
    assert f"encoder.norm is {type(norm).__name__}" in refusal(stack(final_norm=norm))


@pytest.mark.parametrize("place", ["norm1", "norm2"])
@pytest.mark.parametrize(
    ("norm", "bias"),
    [(nn.BatchNorm1d(D), True), (nn.RMSNorm(D, eps=1e-5), False), (nn.Identity(), True)],
    ids=["BatchNorm1d", "RMSNorm", "Identity"],
)
def test_a_layer_with_another_kind_of_norm_is_refused(
    place: str, norm: nn.Module, bias: bool
) -> None:
    """These have the same weights and epsilon as a layer norm, and compute something else."""
    encoder = stack(bias=bias)
    for layer in encoder.layers:
        setattr(layer, place, norm)
    message = refusal(encoder)
    assert place in message
    assert type(norm).__name__ in message


@pytest.mark.parametrize("place", ["norm1", "norm2", "encoder.norm"])
def test_a_layer_norm_without_weights_is_refused(place: str) -> None:
    plain = nn.LayerNorm(D, elementwise_affine=False)
    encoder = stack(final_norm=plain if place == "encoder.norm" else None)
    if place != "encoder.norm":
        for layer in encoder.layers:
            setattr(layer, place, plain)
    assert f"{place}.weight" in refusal(encoder)


def test_norms_with_different_epsilons_are_refused() -> None:
    message = refusal(stack(final_norm=nn.LayerNorm(D, eps=1e-3)))
    assert "0.001" in message
    assert "1e-05" in message
    encoder = stack()
    for layer in encoder.layers:
        layer.norm2 = nn.LayerNorm(D, eps=1e-3)
    message = refusal(encoder)
    assert "0.001" in message
    assert "1e-05" in message


@pytest.mark.parametrize(
    "options",
    [{"add_zero_attn": True}, {"add_bias_kv": True}, {"kdim": 4, "vdim": 4}],
    ids=["zero key", "bias key", "other key width"],
)
def test_attention_with_extra_parts_is_refused(options: dict[str, Any]) -> None:
    """An added key is seen by every position and has no counterpart here."""
    encoder = stack()
    for layer in encoder.layers:
        layer.self_attn = nn.MultiheadAttention(D, H, **options)
    assert "self_attn" in refusal(encoder)


def test_biases_in_some_places_only_are_refused_by_name() -> None:
    encoder = stack()
    for layer in encoder.layers:
        layer.self_attn = nn.MultiheadAttention(D, H, bias=False)
    message = refusal(encoder)
    assert "self_attn.in_proj_bias has shape None" in message
    encoder = stack(bias=False)
    for layer in encoder.layers:
        layer.linear2 = nn.Linear(FF, D, bias=True)
    assert "linear2.bias" in refusal(encoder)


def test_an_embedding_that_rescales_itself_is_refused() -> None:
    message = refusal(stack(), nn.Embedding(V, D, max_norm=1.0))
    assert "max_norm 1.0" in message


def test_an_embedding_of_another_width_is_refused() -> None:
    message = refusal(stack(), nn.Embedding(V, 4))
    assert f"embedding.weight has shape {(V, 4)}, expected {(V, D)}" in message


@pytest.mark.parametrize("position", ["learned", "sinusoidal+learned"])
def test_a_learned_scheme_needs_its_table(position: str) -> None:
    message = refusal(stack(), position=position)
    assert f"position '{position}' needs position_table" in message


@pytest.mark.parametrize("position", ["sinusoidal", "none"])
def test_a_table_without_a_learned_scheme_is_refused(position: str) -> None:
    message = refusal(stack(), position=position, position_table=torch.zeros(L, D))
    assert f"position '{position}' takes no position_table" in message


def test_an_unknown_scheme_is_refused() -> None:
    assert "position is 'rope'" in refusal(stack(), position="rope")


@pytest.mark.parametrize("shape", [(), (D,), (L, 4), (1, L, D)], ids=str)
def test_a_table_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    message = refusal(stack(), position="learned", position_table=torch.zeros(shape))
    assert f"position_table has shape {shape}" in message


def test_a_table_without_rows_is_refused() -> None:
    message = refusal(stack(), position="learned", position_table=torch.zeros(0, D))
    assert "max_len is 0" in message


def test_a_max_len_that_contradicts_the_table_is_refused() -> None:
    table = torch.zeros(L, D)
    message = refusal(stack(), position="learned", position_table=table, max_len=L + 1)
    assert f"max_len is {L + 1}" in message
    assert f"{L} rows" in message
    model = from_torch_encoder(
        stack(), embedding(), position="learned", position_table=table, max_len=L
    )
    assert model.config.max_len == L


def test_a_dropout_no_config_can_have_is_refused() -> None:
    assert "dropout is 1.0" in refusal(stack(dropout=1.0))
