"""The network against its oracles, and the properties of causal attention.

What the numbers must be comes from tests/oracle.py (NumPy, float64) and from
torch.nn.TransformerEncoder; what is refused is one table for eager and scripted models.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from causal_encoder import errors
from causal_encoder.model import CausalEncoder, EncoderConfig, sinusoidal_table
from causal_encoder.model.encoder import CausalSelfAttention, multi_head_attention
from tests import oracle, tiny

POSITIONS = ("sinusoidal", "learned", "sinusoidal+learned", "none")
ACTIVATIONS = ("gelu", "gelu_tanh", "relu")


def assert_close_to_oracle(model: CausalEncoder, ids: Tensor, tolerance: float) -> None:
    """Largest error relative to the largest value."""
    expected = oracle.encode(model.config, tiny.weights(model), ids.numpy())
    actual = model(ids).detach().double().numpy()
    assert actual.shape == (*ids.shape, model.config.d_model)
    if actual.size:
        error = np.abs(actual - expected)
        worst = np.unravel_index(error.argmax(), error.shape)
        limit = tolerance * max(1.0, float(np.abs(expected).max()))
        where = tuple(int(index) for index in worst)
        assert error.max() <= limit, f"error {error.max():.3g} over {limit:.3g} at {where}"


# ---------------------------------------------------------------- equal to the NumPy oracle


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize(
    ("d_model", "num_heads"),
    [(1, 1), (5, 1), (8, 1), (9, 3), (8, 8)],
    ids=lambda size: f"{size}",
)
def test_every_kind_of_model_equals_the_oracle(
    d_model: int, num_heads: int, position: str, norm: str, activation: str, bias: bool
) -> None:
    config = tiny.config(
        d_model=d_model,
        num_heads=num_heads,
        position=position,
        norm=norm,
        activation=activation,
        bias=bias,
        max_len=7,
        layer_norm_eps=1e-3,
    )
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
        model = tiny.model(config, dtype=dtype)
        for batch, length in ((1, 1), (2, 3), (3, 7)):
            assert_close_to_oracle(model, tiny.ids(config, batch, length), tolerance)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("final_norm", [True, False])
def test_the_final_norm_is_there_or_not_as_configured(norm: str, final_norm: bool) -> None:
    config = tiny.config(norm=norm, final_norm=final_norm)
    model = tiny.model(config, dtype=torch.float64)
    assert_close_to_oracle(model, tiny.ids(config, 2, 5), 1e-12)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("batch", [1, 4])
def test_a_table_of_one_position_is_enough_for_one_token(position: str, batch: int) -> None:
    config = tiny.config(position=position, max_len=1)
    model = tiny.model(config, dtype=torch.float64)
    assert_close_to_oracle(model, tiny.ids(config, batch, 1), 1e-12)


def test_the_smallest_model_of_all_equals_the_oracle() -> None:
    config = EncoderConfig(
        vocab_size=1, d_model=1, num_heads=1, num_layers=1, d_ff=1, max_len=1, norm="post"
    )
    assert_close_to_oracle(tiny.model(config), torch.zeros(1, 1, dtype=torch.int64), 1e-6)


@pytest.mark.parametrize("length", [127, 128, 129, 513])
def test_long_sequences_equal_the_oracle(length: int) -> None:
    """Around the block sizes of the attention kernels."""
    config = tiny.config(num_layers=1, max_len=513)
    assert_close_to_oracle(
        tiny.model(config, dtype=torch.float64), tiny.ids(config, 1, length), 1e-12
    )


CONFIGS = st.builds(
    lambda head_size, num_heads, **rest: EncoderConfig(
        d_model=head_size * num_heads, num_heads=num_heads, **rest
    ),
    head_size=st.integers(1, 5),
    num_heads=st.integers(1, 4),
    vocab_size=st.integers(1, 9),
    num_layers=st.integers(1, 3),
    d_ff=st.integers(1, 9),
    max_len=st.integers(1, 12),
    position=st.sampled_from(POSITIONS),
    activation=st.sampled_from(ACTIVATIONS),
    norm=st.sampled_from(["pre", "post"]),
    layer_norm_eps=st.sampled_from([1e-3, 1e-2, 0.1, 1]),
    bias=st.booleans(),
    final_norm=st.booleans(),
)


@settings(max_examples=150)
@given(config=CONFIGS, data=st.data())
def test_any_small_model_on_any_shape_equals_the_oracle(
    config: EncoderConfig, data: st.DataObject
) -> None:
    length = data.draw(st.integers(1, config.max_len), label="length")
    rows = st.lists(st.integers(0, config.vocab_size - 1), min_size=length, max_size=length)
    batch = data.draw(st.lists(rows, max_size=3), label="ids")
    ids = torch.tensor(batch, dtype=torch.int64).reshape(len(batch), length)
    assert_close_to_oracle(tiny.model(config, dtype=torch.float64), ids, 1e-12)


# ---------------------------------------------------- equal to torch.nn.TransformerEncoder

# Names in torch.nn.TransformerEncoderLayer and in a block here.
SAME_WEIGHTS = {
    "self_attn.in_proj_": "attention.qkv.",
    "self_attn.out_proj.": "attention.out.",
    "linear1.": "feed_forward.up.",
    "linear2.": "feed_forward.down.",
    "norm1.": "attention_norm.",
    "norm2.": "feed_forward_norm.",
}


def torch_encoder(config: EncoderConfig, activation: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        config.d_model,
        config.num_heads,
        config.d_ff,
        dropout=0.0,
        activation=activation,
        layer_norm_eps=config.layer_norm_eps,
        batch_first=True,
        norm_first=config.norm == "pre",
        bias=config.bias,
        dtype=torch.float64,
    )
    norm = None
    if config.final_norm:
        norm = nn.LayerNorm(
            config.d_model, config.layer_norm_eps, bias=config.bias, dtype=torch.float64
        )
    encoder = nn.TransformerEncoder(layer, config.num_layers, norm, enable_nested_tensor=False)
    tiny.randomize(encoder)
    return encoder.eval()


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    ("name", "activation"), [("relu", "relu"), ("gelu", "gelu"), ("gelu_tanh", nn.GELU("tanh"))]
)
def test_the_model_equals_torch_with_the_same_weights_and_a_square_mask(
    norm: str, bias: bool, name: str, activation: Any
) -> None:
    config = tiny.config(norm=norm, bias=bias, activation=name, num_layers=3)
    encoder = torch_encoder(config, activation)
    embedding = torch.randn(config.vocab_size, config.d_model, dtype=torch.float64)
    state = {"token_embedding.weight": embedding}
    for key, value in encoder.state_dict().items():
        part, _, rest = key.partition(".")
        if part == "norm":
            state[f"final_norm.{rest}"] = value
            continue
        index, _, weight = rest.partition(".")
        (theirs,) = (prefix for prefix in SAME_WEIGHTS if weight.startswith(prefix))
        state[f"blocks.{index}.{weight.replace(theirs, SAME_WEIGHTS[theirs])}"] = value
    model = CausalEncoder(config, torch.float64)
    model.load_state_dict(state, strict=True)

    for batch, length in ((1, 1), (2, 5), (3, 9)):
        ids = tiny.ids(config, batch, length)
        x = embedding[ids] + sinusoidal_table(length, config.d_model, torch.float64)
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)
        # With gradients: torch's fast path for inference takes any GELU for the exact one.
        expected = encoder(x, mask=mask)
        torch.testing.assert_close(model.eval()(ids), expected, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------- causality


def first_difference(actual: Tensor, expected: Tensor, tolerance: float) -> int | None:
    """The first position (axis 1) at which two results differ."""
    apart = ((actual - expected).abs() > tolerance).any(dim=2).any(dim=0)
    return int(apart.nonzero()[0]) if bool(apart.any()) else None


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("num_heads", [1, 4])
@pytest.mark.parametrize("position", POSITIONS)
def test_later_tokens_have_exactly_no_influence(position: str, num_heads: int, norm: str) -> None:
    config = tiny.config(position=position, num_heads=num_heads, norm=norm)
    model = tiny.model(config)
    ids = tiny.ids(config, 2, 9)
    expected = model(ids)
    for changed in range(1, 9):
        others = ids.clone()
        others[:, changed:] = (others[:, changed:] + 1) % config.vocab_size
        actual = model(others)
        first = first_difference(actual, expected, 0.0)
        assert first == changed, f"a change from token {changed} on moved output {first}"


@pytest.mark.parametrize("changed", [1, 31, 32, 63, 64, 127, 128, 255, 256, 511, 512, 599])
def test_later_tokens_have_exactly_no_influence_at_any_block_of_the_kernel(changed: int) -> None:
    config = tiny.config(num_layers=1, max_len=600)
    model = tiny.model(config)
    ids = tiny.ids(config, 1, 600)
    others = ids.clone()
    others[:, changed:] = (others[:, changed:] + 1) % config.vocab_size
    first = first_difference(model(others), model(ids), 0.0)
    assert first == changed, f"a change from token {changed} on moved output {first}"


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("num_heads", [1, 4])
def test_no_gradient_flows_to_later_tokens(num_heads: int, norm: str) -> None:
    config = tiny.config(num_heads=num_heads, norm=norm)
    model = tiny.model(config)
    embedded: list[Tensor] = []
    model.token_embedding.register_forward_hook(lambda _m, _i, output: embedded.append(output))
    output = model(tiny.ids(config, 2, 9))
    for index in range(9):
        (gradient,) = torch.autograd.grad(output[:, index].sum(), embedded[0], retain_graph=True)
        touched = (gradient != 0).any(dim=2).any(dim=0).tolist()
        assert touched == [column <= index for column in range(9)], f"output {index}"


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("position", POSITIONS)
def test_a_prefix_of_the_input_gives_the_prefix_of_the_output(position: str, norm: str) -> None:
    config = tiny.config(position=position, norm=norm)
    model = tiny.model(config, dtype=torch.float64)
    ids = tiny.ids(config, 2, 9)
    whole = model(ids)
    for length in range(1, 10):
        first = first_difference(model(ids[:, :length]), whole[:, :length], 1e-12)
        assert first is None, f"the first {length} tokens alone differ at position {first}"


def test_one_token_at_a_time_gives_what_the_whole_sequence_gives_at_once() -> None:
    config = tiny.config()
    model = tiny.model(config, dtype=torch.float64)
    ids = tiny.ids(config, 1, 9)
    steps = torch.stack([model(ids[:, : last + 1])[:, -1] for last in range(9)], dim=1)
    assert first_difference(steps, model(ids), 1e-12) is None


def test_the_samples_of_a_batch_do_not_touch_each_other() -> None:
    config = tiny.config()
    model = tiny.model(config, dtype=torch.float64)
    ids = tiny.ids(config, 4, 6)
    together = model(ids)
    for row in range(4):
        torch.testing.assert_close(model(ids[row : row + 1])[0], together[row], rtol=0, atol=1e-12)


# ------------------------------------------------------------------------- attention


def test_attention_weights_are_a_lower_triangle_whose_rows_sum_to_one() -> None:
    """With the unit matrix as values, the output is the matrix of weights."""
    q, k = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    weights = multi_head_attention(q, k, torch.eye(8, dtype=torch.float64)[None], 1, True)[0]
    assert torch.equal(weights.triu(1), torch.zeros(8, 8, dtype=torch.float64))
    assert bool((weights.tril() > 0).sum() == 36)
    torch.testing.assert_close(weights.sum(1), torch.ones(8, dtype=torch.float64))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("num_heads", [1, 2, 8])
def test_attention_over_equal_values_returns_them(num_heads: int, is_causal: bool) -> None:
    q, k = 5 * torch.randn(2, 3, 10, 8)
    out = multi_head_attention(q, k, torch.ones(3, 10, 8), num_heads, is_causal)
    torch.testing.assert_close(out, torch.ones(3, 10, 8))


def test_masked_scores_are_not_merely_zero() -> None:
    """All scores 0: row i is the mean of values 0..i, not of all of them."""
    zeros = torch.zeros(1, 4, 1)
    values = torch.tensor([1.0, 3.0, 5.0, 7.0]).view(1, 4, 1)
    out = multi_head_attention(zeros, zeros, values, 1, True)
    torch.testing.assert_close(out.flatten(), torch.tensor([1.0, 2.0, 3.0, 4.0]))


@pytest.mark.parametrize("num_heads", [1, 2, 4])
def test_attention_without_mask_is_permutation_equivariant(num_heads: int) -> None:
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    order = torch.randperm(7)
    out = multi_head_attention(x, x, x, num_heads, False)
    permuted = multi_head_attention(x[:, order], x[:, order], x[:, order], num_heads, False)
    torch.testing.assert_close(permuted, out[:, order], rtol=0, atol=1e-13)


def test_heads_side_by_side_equal_heads_one_by_one() -> None:
    q, k, v = torch.randn(3, 2, 5, 6, dtype=torch.float64)
    together = multi_head_attention(q, k, v, 3, True)
    heads = [slice(start, start + 2) for start in (0, 2, 4)]
    alone = [multi_head_attention(q[..., h], k[..., h], v[..., h], 1, True) for h in heads]
    torch.testing.assert_close(together, torch.cat(alone, dim=-1), rtol=0, atol=1e-13)


# --------------------------------------------------------------------------- inputs


def test_int32_ids_give_what_int64_ids_give(tiny_model: CausalEncoder) -> None:
    ids = tiny.ids(tiny_model.config, 2, 5)
    assert torch.equal(tiny_model(ids.to(torch.int32)), tiny_model(ids))


def test_ids_need_not_be_contiguous(tiny_model: CausalEncoder) -> None:
    ids = tiny.ids(tiny_model.config, 5, 3)
    assert torch.equal(tiny_model(ids.T), tiny_model(ids.T.contiguous()))


@pytest.mark.parametrize("length", [1, 9])
def test_an_empty_batch_gives_an_empty_result(tiny_model: CausalEncoder, length: int) -> None:
    out = tiny_model(torch.zeros(0, length, dtype=torch.int64))
    assert out.shape == (0, length, 8)
    assert out.dtype == torch.float32


def test_the_model_does_not_write_to_its_input(tiny_model: CausalEncoder) -> None:
    ids = tiny.ids(tiny_model.config, 2, 5)
    kept = ids.clone()
    tiny_model(ids)
    assert torch.equal(ids, kept)


def int64(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


# V = 11, L = 9. Columns: the input, the error, what its message must name.
REFUSED = [
    pytest.param(int64(1, 2).float(), errors.InvalidInputError, ["float32"], id="float"),
    pytest.param(int64(1, 2).double(), errors.InvalidInputError, ["float64"], id="double"),
    pytest.param(int64(1, 2).bool(), errors.InvalidInputError, ["bool"], id="bool"),
    pytest.param(
        int64(1, 2).to(torch.complex64), errors.InvalidInputError, ["complex64"], id="complex"
    ),
    pytest.param(int64(), errors.InvalidInputError, ["()", "two axes"], id="rank 0"),
    pytest.param(int64(3), errors.InvalidInputError, ["(3,)", "batch of one"], id="rank 1"),
    pytest.param(int64(1, 2, 3), errors.InvalidInputError, ["(1, 2, 3)"], id="rank 3"),
    pytest.param([[1, 2]], errors.InvalidInputError, ["list", "Tensor"], id="list"),
    pytest.param(None, errors.InvalidInputError, ["NoneType"], id="none"),
    pytest.param("1 2", errors.InvalidInputError, ["str"], id="string"),
    pytest.param(np.zeros((1, 2), np.int64), errors.InvalidInputError, ["ndarray"], id="numpy"),
    pytest.param(int64(2, 0), errors.EmptySequenceError, ["0 tokens"], id="T 0"),
    pytest.param(int64(0, 0), errors.EmptySequenceError, ["0 tokens"], id="B 0 and T 0"),
    pytest.param(
        int64(2, 10),
        errors.SequenceTooLongError,
        ["length 10", "max_len 9", "sinusoidal", "--max-len"],
        id="one too long",
    ),
    pytest.param(int64(1, 5000), errors.SequenceTooLongError, ["5000"], id="much too long"),
    pytest.param(int64(0, 10), errors.SequenceTooLongError, ["10"], id="B 0 and too long"),
    pytest.param(
        torch.tensor([[0, 1], [2, -1]]),
        errors.TokenOutOfRangeError,
        ["id -1", "row 1, column 1", "0..10"],
        id="negative id",
    ),
    pytest.param(torch.tensor([[-11]]), errors.TokenOutOfRangeError, ["-11"], id="id -V"),
    pytest.param(
        torch.tensor([[10, 11]]),
        errors.TokenOutOfRangeError,
        ["id 11", "row 0, column 1"],
        id="id V",
    ),
    pytest.param(
        torch.tensor([[11]], dtype=torch.int32),
        errors.TokenOutOfRangeError,
        ["id 11"],
        id="int32 id V",
    ),
    pytest.param(
        torch.tensor([[2**40]]), errors.TokenOutOfRangeError, ["1099511627776"], id="id over 32 bit"
    ),
    pytest.param(
        torch.tensor([[0, 0], [99, -5]]),
        errors.TokenOutOfRangeError,
        ["id 99", "row 1, column 0"],
        id="the first of two bad ids is named",
    ),
]


@pytest.mark.parametrize(("ids", "error", "named"), REFUSED)
def test_what_cannot_be_encoded_is_refused_by_name(
    tiny_model: CausalEncoder, ids: Any, error: type[errors.InputError], named: list[str]
) -> None:
    good = tiny.ids(tiny_model.config, 1, 3)
    before = tiny_model(good)
    with pytest.raises(errors.InputError) as caught:
        tiny_model(ids)
    assert type(caught.value) is error
    assert isinstance(caught.value, ValueError)
    for text in named:
        assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert torch.equal(tiny_model(good), before), "a refusal changed the model"


@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.uint64],
)
def test_every_integer_type_is_widened(tiny_model: CausalEncoder, dtype: torch.dtype) -> None:
    ids = torch.tensor([[1, 5, 10]])
    assert torch.equal(tiny_model(ids.to(dtype)), tiny_model(ids))
    with pytest.raises(errors.TokenOutOfRangeError, match="id 11"):
        tiny_model(torch.tensor([[11]]).to(dtype))


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        pytest.param(
            torch.full((1, 10), -1.0), errors.InvalidInputError, id="type before length and id"
        ),
        pytest.param(torch.zeros(1, 0), errors.InvalidInputError, id="type before emptiness"),
        pytest.param(
            torch.full((1, 10, 1), -1), errors.InvalidInputError, id="rank before length and id"
        ),
        pytest.param(int64(1, 0, 3), errors.InvalidInputError, id="rank before emptiness"),
        pytest.param(
            torch.full((1, 10), -1), errors.SequenceTooLongError, id="length before the ids"
        ),
    ],
)
def test_checks_come_in_the_documented_order(
    tiny_model: CausalEncoder, ids: Tensor, error: type[errors.InputError]
) -> None:
    """Type, T = 0, T over max_len, ids."""
    with pytest.raises(errors.InputError) as caught:
        tiny_model(ids)
    assert type(caught.value) is error


def test_of_type_and_rank_the_type_is_named_first(tiny_model: CausalEncoder) -> None:
    with pytest.raises(errors.InvalidInputError, match="float32"):
        tiny_model(torch.zeros(3))


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("max_len", [1, 2, 8])
def test_one_token_over_max_len_is_refused_with_every_scheme(position: str, max_len: int) -> None:
    """A table of one row would broadcast, a longer one would fail with a shape error."""
    config = tiny.config(position=position, max_len=max_len)
    model = tiny.model(config)
    assert model(int64(2, max_len)).shape == (2, max_len, 8)
    for length in (max_len + 1, 50):
        with pytest.raises(errors.SequenceTooLongError) as caught:
            model(int64(2, length))
        message = str(caught.value)
        assert f"length {length} is over max_len {max_len} of the {position} positions" in message
        assert ("learned table" in message) == config.has_learned


# -------------------------------------------------------------------------- scripted

SCRIPTED = {
    "sinusoidal": tiny.config(),
    "learned": tiny.config(position="learned"),
    "both": tiny.config(position="sinusoidal+learned", num_heads=1),
    "none": tiny.config(position="none", bias=False, activation="gelu_tanh"),
    "post": tiny.config(norm="post", activation="relu", dropout=0.3),
}


@pytest.fixture(scope="module")
def scripted() -> Callable[[str], tuple[CausalEncoder, torch.jit.ScriptModule]]:
    """Name in SCRIPTED -> the model, eager and scripted; compiled once."""
    compiled: dict[str, tuple[CausalEncoder, torch.jit.ScriptModule]] = {}

    def get(name: str) -> tuple[CausalEncoder, torch.jit.ScriptModule]:
        if name not in compiled:
            model = tiny.model(SCRIPTED[name])
            compiled[name] = model, torch.jit.script(model)
        return compiled[name]

    return get


Scripted = Callable[[str], tuple[CausalEncoder, torch.jit.ScriptModule]]


@pytest.mark.parametrize("name", SCRIPTED)
def test_a_scripted_model_gives_identical_numbers_for_all_shapes_in_turn(
    scripted: Scripted, name: str
) -> None:
    """The executor specialises on the first shapes: long and short ones come and go."""
    model, module = scripted(name)
    for batch, length in ((2, 3), (2, 3), (1, 1), (3, 9), (1, 1), (2, 8), (0, 4), (5, 2), (2, 3)):
        ids = tiny.ids(model.config, batch, length)
        assert torch.equal(module(ids), model(ids)), f"({batch}, {length})"
    ids = tiny.ids(model.config, 2, 4)
    assert torch.equal(module(ids.to(torch.int32)), model(ids)), "int32"


@pytest.mark.parametrize("name", ["sinusoidal", "none"])
@pytest.mark.parametrize(("ids", "error", "named"), REFUSED)
def test_a_scripted_model_refuses_what_eager_refuses(
    scripted: Scripted, name: str, ids: Any, error: type[Exception], named: list[str]
) -> None:
    del error, named  # TorchScript raises types of its own
    model, module = scripted(name)
    with pytest.raises(Exception) as caught:  # noqa: PT011  # whatever type it can raise
        module(ids)
    assert not isinstance(caught.value, AssertionError)
    good = tiny.ids(model.config, 1, 3)
    assert torch.equal(module(good), model(good)), "a refusal changed the model"


def test_a_scripted_model_names_the_shape_and_the_limit(scripted: Scripted) -> None:
    _, module = scripted("learned")
    with pytest.raises(Exception, match=r"\[2, 10\].*max_len 9"):
        module(int64(2, 10))


@pytest.mark.parametrize("position", ["sinusoidal", "learned"])
def test_a_scripted_table_of_one_row_does_not_broadcast(position: str) -> None:
    module = torch.jit.script(tiny.model(tiny.config(position=position, max_len=1, num_layers=1)))
    assert module(int64(3, 1)).shape == (3, 1, 8)
    for length in (2, 50):
        with pytest.raises(Exception, match=f"{length}.*max_len 1"):
            module(int64(3, length))


def test_scripting_neither_adds_nor_hides_a_weight(scripted: Scripted) -> None:
    """A table that is in one state dict but not in the other breaks strict loading."""
    for name in SCRIPTED:
        model, module = scripted(name)
        assert list(module.state_dict()) == list(model.state_dict())
        module.load_state_dict(model.state_dict(), strict=True)


# ---------------------------------------------------------------------------- weights

BLOCK_WEIGHTS = [
    ("attention_norm", (8,)),
    ("attention.qkv", (24, 8)),
    ("attention.out", (8, 8)),
    ("feed_forward_norm", (8,)),
    ("feed_forward.up", (12, 8)),
    ("feed_forward.down", (8, 12)),
]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("final_norm", [True, False])
@pytest.mark.parametrize("position", POSITIONS)
def test_names_and_shapes_of_the_weights_are_the_published_ones(
    position: str, final_norm: bool, bias: bool
) -> None:
    config = tiny.config(position=position, bias=bias, final_norm=final_norm)
    expected: dict[str, tuple[int, ...]] = {"token_embedding.weight": (11, 8)}
    if "learned" in position:
        expected["positions.learned"] = (9, 8)
    modules = [(f"blocks.{i}.{name}", shape) for i in (0, 1) for name, shape in BLOCK_WEIGHTS]
    if final_norm:
        modules.append(("final_norm", (8,)))
    for name, shape in modules:
        expected[f"{name}.weight"] = shape
        if bias:
            expected[f"{name}.bias"] = shape[:1]
    state = CausalEncoder(config).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == expected


def test_the_names_of_a_one_block_model_word_by_word() -> None:
    assert list(CausalEncoder(tiny.config(num_layers=1, position="learned")).state_dict()) == [
        "token_embedding.weight",
        "positions.learned",
        "blocks.0.attention_norm.weight",
        "blocks.0.attention_norm.bias",
        "blocks.0.attention.qkv.weight",
        "blocks.0.attention.qkv.bias",
        "blocks.0.attention.out.weight",
        "blocks.0.attention.out.bias",
        "blocks.0.feed_forward_norm.weight",
        "blocks.0.feed_forward_norm.bias",
        "blocks.0.feed_forward.up.weight",
        "blocks.0.feed_forward.up.bias",
        "blocks.0.feed_forward.down.weight",
        "blocks.0.feed_forward.down.bias",
        "final_norm.weight",
        "final_norm.bias",
    ]


@pytest.mark.parametrize("position", ["sinusoidal", "none"])
def test_max_len_can_be_raised_without_touching_the_weights(position: str) -> None:
    model = tiny.model(tiny.config(position=position), dtype=torch.float64)
    longer = CausalEncoder(dataclasses.replace(model.config, max_len=20), torch.float64).eval()
    longer.load_state_dict(model.state_dict(), strict=True)
    ids = tiny.ids(model.config, 2, 20)
    torch.testing.assert_close(longer(ids)[:, :9], model(ids[:, :9]), rtol=0, atol=1e-12)
    assert_close_to_oracle(longer, ids, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_output_has_the_type_of_the_weights(dtype: torch.dtype) -> None:
    model = tiny.model(tiny.config(position="sinusoidal+learned"), dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model(tiny.ids(model.config, 2, 5)).dtype == dtype


# ---------------------------------------------------------------------------- dropout


def test_dropout_acts_in_training_mode_only() -> None:
    config = tiny.config(dropout=0.5)
    model = tiny.model(config)
    without = tiny.model(dataclasses.replace(config, dropout=0.0))
    ids = tiny.ids(config, 2, 5)
    assert torch.equal(model(ids), without(ids))
    model.train()
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), without(ids))


def test_without_dropout_training_mode_computes_the_same(tiny_model: CausalEncoder) -> None:
    ids = tiny.ids(tiny_model.config, 2, 5)
    expected = tiny_model(ids)
    assert torch.equal(tiny_model.train()(ids), expected)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_dropout_follows_the_embedding_with_positions_and_each_sublayer(norm: str) -> None:
    model = tiny.model(tiny.config(dropout=0.5, num_layers=2, norm=norm))
    calls: list[str] = []
    inputs: list[Tensor] = []

    def record(name: str) -> Callable[[nn.Module, tuple[Tensor]], None]:
        def hook(_module: nn.Module, args: tuple[Tensor]) -> None:
            calls.append(name)
            inputs.append(args[0])

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_pre_hook(record(name))
    ids = tiny.ids(model.config, 1, 5)
    model(ids)
    assert calls == ["dropout", *["blocks.0.dropout"] * 2, *["blocks.1.dropout"] * 2]
    assert torch.equal(inputs[0], model.positions(model.token_embedding(ids)))


def test_attention_weights_are_dropped_in_training_mode_only() -> None:
    config = tiny.config(dropout=0.5)
    attention = CausalSelfAttention(config, torch.float32)
    x = torch.randn(2, 6, 8)
    assert not torch.equal(attention(x), attention(x))
    attention.eval()
    assert torch.equal(attention(x), attention(x))


def test_training_with_dropout_is_causal_too() -> None:
    """The same random numbers, another future: the past is bit-equal."""
    config = tiny.config(dropout=0.3)
    model = tiny.model(config).train()
    ids = tiny.ids(config, 2, 9)
    others = ids.clone()
    others[:, 5:] = (others[:, 5:] + 1) % config.vocab_size
    results = []
    for batch in (ids, others):
        torch.manual_seed(3)
        results.append(model(batch))
    assert first_difference(results[0], results[1], 0.0) == 5
