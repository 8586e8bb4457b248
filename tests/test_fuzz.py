"""Random configurations, shapes and ids: what was exported against the oracle in NumPy."""

from collections.abc import Mapping
from typing import Any

import hypothesis
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from causal_encoder import errors
from causal_encoder.export import export_onnx, export_torchscript
from causal_encoder.export.artifact import open_bare
from causal_encoder.export.subject import RELATIVE_ERROR_LIMITS
from causal_encoder.model import CausalEncoder, EncoderConfig
from causal_encoder.serve import EncoderSession
from tests import oracle, tiny
from tests.bundles import POSITIONS, small_model

Ids = npt.NDArray[np.int64]
# Of the largest output. Measured over 400 configurations: at most 3.1e-6 for fp32; and as
# much as the budget of verification for fp16.
LIMITS = {"fp32": 3e-5, "fp16": RELATIVE_ERROR_LIMITS["fp16"]}


def relative_error(found: npt.NDArray[Any], expected: npt.NDArray[np.float64]) -> float:
    """The largest error, as a part of the largest output, or of 1 if that is larger."""
    assert found.shape == expected.shape
    assert found.dtype == np.float32
    return float(np.abs(found - expected).max() / max(1.0, np.abs(expected).max()))


@st.composite
def configurations(draw: st.DrawFn) -> EncoderConfig:
    """Small, with every choice there is."""
    heads = draw(st.integers(1, 4))
    return EncoderConfig(
        vocab_size=draw(st.integers(1, 40)),
        d_model=heads * draw(st.integers(1 if heads > 3 else 4, 9)),
        num_heads=heads,
        num_layers=draw(st.integers(1, 3)),
        d_ff=draw(st.integers(1, 20)),
        max_len=draw(st.integers(1, 20)),
        position=draw(st.sampled_from(POSITIONS)),
        activation=draw(st.sampled_from(("gelu", "gelu_tanh", "relu"))),
        norm=draw(st.sampled_from(("pre", "post"))),
        dropout=draw(st.sampled_from((0.0, 0.5))),
        layer_norm_eps=draw(st.sampled_from((1e-5, 1e-3, 0.1))),
        bias=draw(st.booleans()),
        final_norm=draw(st.sampled_from((None, True, False))),  # type: ignore[arg-type]  # its default
    )


def random_ids(config: EncoderConfig, draw: st.DataObject) -> Ids:
    shape = draw.draw(st.tuples(st.integers(1, 5), st.integers(1, config.max_len)))
    return draw.draw(arrays.arrays(np.int64, shape, elements=st.integers(0, config.vocab_size - 1)))


@pytest.mark.slow
@hypothesis.given(config=configurations(), data=st.data())
@hypothesis.settings(
    max_examples=25,
    phases=[hypothesis.Phase.generate],  # an export an example: shrinking takes minutes
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
def test_any_configuration_exported_to_torchscript_computes_what_the_oracle_does(
    tmp_path_factory: pytest.TempPathFactory, config: EncoderConfig, data: st.DataObject
) -> None:
    model = tiny.model(config)
    folder = tmp_path_factory.mktemp("fuzz") / "bundle"
    export_torchscript(model, folder)
    run = open_bare(folder / "model.pt", "torchscript")
    for _ in range(3):
        ids = random_ids(config, data)
        expected = oracle.encode(config, tiny.weights(model), ids)
        assert relative_error(run(ids), expected) < LIMITS["fp32"]
    token = data.draw(st.sampled_from((-1, -(2**63), config.vocab_size, 2**31, 2**63 - 1)))
    ids = random_ids(config, data)
    ids[-1, data.draw(st.integers(0, ids.shape[1] - 1))] = token
    with pytest.raises(RuntimeError, match="index out of range"):
        run(ids)
    for length in (0, config.max_len + 1):
        with pytest.raises(torch.jit.Error, match=f"from 1 to max_len {config.max_len}"):
            run(np.zeros((2, length), np.int64))


Pool = Mapping[str, tuple[CausalEncoder, EncoderSession]]
POOL: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sinusoidal": ({}, {}),
    "learned, opset 18, post-norm": (
        {"position": "learned", "norm": "post", "activation": "relu", "bias": False},
        {"opset": 18},
    ),
    "none, fp16": (
        {"position": "none", "activation": "gelu_tanh", "d_model": 9},
        {"precision": "fp16"},
    ),
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Pool:
    """A few ONNX bundles, open for all examples."""
    opened = {}
    for name, (fields, options) in POOL.items():
        model = small_model(num_layers=1, max_len=12, **fields)
        folder = tmp_path_factory.mktemp("pool") / "bundle"
        export_onnx(model, folder, **options)
        opened[name] = model, EncoderSession(folder, "cpu")
    return opened


@pytest.mark.parametrize("name", POOL)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=60)
def test_an_onnx_bundle_computes_what_the_oracle_does_whatever_the_ids(
    name: str, pool: Pool, data: st.DataObject
) -> None:
    model, session = pool[name]
    ids = random_ids(model.config, data)
    expected = oracle.encode(model.config, tiny.weights(model), ids)
    limit = LIMITS[session.manifest.precision]
    assert relative_error(session.run(ids), expected) < limit
    lengths = data.draw(st.lists(st.integers(1, ids.shape[1]), max_size=len(ids)))
    rows = session.encode([row[:length] for row, length in zip(ids, lengths, strict=False)])
    assert len(rows) == len(lengths)
    for row, whole, length in zip(rows, expected, lengths, strict=False):
        assert relative_error(row, whole[:length]) < limit


odd_integers = st.one_of(
    st.integers(-2, 15), st.sampled_from((2**31, 2**32, 2**40, 2**63, 2**64, 10**30, -(2**63)))
)
leaves = st.one_of(odd_integers, st.floats(), st.booleans(), st.none(), st.text(max_size=2))
ids_of_any_kind = st.one_of(
    st.lists(st.lists(odd_integers, min_size=1, max_size=3), max_size=3),
    st.integers(0, 14).flatmap(
        lambda length: st.lists(
            st.lists(st.integers(-1, 13), min_size=length, max_size=length), max_size=3
        )
    ),
    st.recursive(leaves, lambda inner: st.lists(inner, max_size=3), max_leaves=6),
    arrays.arrays(
        st.one_of(
            arrays.integer_dtypes(endianness="?"),
            arrays.unsigned_integer_dtypes(endianness="?"),
            arrays.floating_dtypes(),
            arrays.boolean_dtypes(),
        ),
        arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=14),
    ),
)


def rectangle(ids: Any) -> tuple[list[list[int]], int] | None:
    """Rows of Python integers and their length; None where ids are no batch of integers."""
    if isinstance(ids, np.ndarray):
        if ids.dtype.kind not in "iu" or ids.ndim != 2:
            return None
        return [[int(token) for token in row] for row in ids], ids.shape[1]
    if not isinstance(ids, list) or not ids or not all(isinstance(row, list) for row in ids):
        return None
    tokens = [token for row in ids for token in row]
    if any(len(row) != len(ids[0]) for row in ids) or any(type(each) is not int for each in tokens):
        return None
    return ids, len(ids[0])


def documented_error(ids: Any, config: EncoderConfig) -> tuple[type[Exception] | None, str]:
    """What the README says of some ids, decided with Python integers: an error and its words."""
    batch = rectangle(ids)
    if batch is None:
        return errors.InvalidInputError, ""
    rows, length = batch
    if length == 0:
        return errors.EmptySequenceError, "0 tokens"
    if length > config.max_len:
        return errors.SequenceTooLongError, f"length {length} is over max_len {config.max_len}"
    for row, tokens in enumerate(rows):
        for column, token in enumerate(tokens):
            if not 0 <= token < config.vocab_size:
                place = f"id {token} at (row {row}, column {column})"
                return errors.TokenOutOfRangeError, place
    return None, ""


@hypothesis.given(ids=ids_of_any_kind)
@hypothesis.settings(max_examples=300)
def test_any_ids_at_all_are_encoded_or_refused_with_the_documented_error(
    pool: Pool, ids: Any
) -> None:
    model, session = pool["sinusoidal"]
    expected, words = documented_error(ids, model.config)
    if expected is None:
        tokens = np.array(ids).astype(np.int64)
        hidden = session.run(ids)
        assert hidden.shape == (*tokens.shape, model.config.d_model)
        if tokens.size:
            exact = oracle.encode(model.config, tiny.weights(model), tokens)
            assert relative_error(hidden, exact) < LIMITS["fp32"]
        return
    with pytest.raises(expected) as caught:
        session.run(ids)
    assert caught.type is expected
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
