"""Position tables: the printed values and properties of arXiv:1706.03762, section 3.5."""

import itertools
import math

import numpy as np
import pytest
import torch

from causal_encoder.model import CausalEncoder, sinusoidal_table
from causal_encoder.model.positions import Positions
from tests import oracle, tiny


def frequencies(d_model: int) -> list[float]:
    """The angular frequency of each sine and cosine pair."""
    return [10000.0 ** (-2 * pair / d_model) for pair in range(d_model // 2)]


def test_the_first_rows_of_width_16_have_their_known_values() -> None:
    golden = [
        [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0],
        [0.8415, 0.5403, 0.3110, 0.9504, 0.0998, 0.9950, 0.0316, 0.9995],
        [0.9093, -0.4161, 0.5911, 0.8066, 0.1987, 0.9801, 0.0632, 0.9980],
    ]
    table = sinusoidal_table(3, 16)[:, :8]
    np.testing.assert_allclose(table.numpy(), golden, rtol=0, atol=0.5e-4)


@pytest.mark.parametrize("d_model", [1, 2, 3, 5, 8, 127, 128])
@pytest.mark.parametrize("length", [1, 2, 64])
def test_the_table_is_the_formula_for_even_and_odd_widths(length: int, d_model: int) -> None:
    table = sinusoidal_table(length, d_model)
    assert table.shape == (length, d_model)
    assert table.dtype == torch.float32
    expected = oracle.sinusoidal_table(length, d_model)
    np.testing.assert_array_equal(table.numpy(), expected.astype(np.float32))


def test_sine_and_cosine_of_one_angle_stand_side_by_side() -> None:
    """Interleaved, not first all sines and then all cosines."""
    table = sinusoidal_table(50, 6, torch.float64)
    for pair, frequency in enumerate(frequencies(6)):
        angle = torch.arange(50, dtype=torch.float64) * frequency
        torch.testing.assert_close(table[:, 2 * pair], angle.sin(), rtol=0, atol=1e-13)
        torch.testing.assert_close(table[:, 2 * pair + 1], angle.cos(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("d_model", [1, 3, 5, 127])
def test_an_odd_width_drops_the_last_cosine_alone(d_model: int) -> None:
    table = sinusoidal_table(20, d_model, torch.float64)
    last_sine = np.sin(np.arange(20) / 10000.0 ** ((d_model - 1) / d_model))
    np.testing.assert_allclose(table[:, -1].numpy(), last_sine, rtol=0, atol=1e-13)


@pytest.mark.parametrize("position", [10_000, 99_991, 1_048_575])
def test_far_positions_are_rounded_once_from_float64(position: int) -> None:
    """Angles in float32 would be off by 0.03 here; the bound is half a unit of the result.

    What is added to it is the rounding of the angle itself in float64.
    """
    d_model = 32
    row = sinusoidal_table(position + 1, d_model)[position].numpy()
    for column in range(d_model):
        angle = position / 10000.0 ** (2 * (column // 2) / d_model)
        exact = math.cos(angle) if column % 2 else math.sin(angle)
        budget = 0.5 * float(np.spacing(np.float32(abs(exact)))) + 4 * angle * 2.0**-53
        assert abs(float(row[column]) - exact) <= budget, f"column {column}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_each_type_is_rounded_from_float64(dtype: torch.dtype) -> None:
    table = sinusoidal_table(300, 16, dtype)
    assert table.dtype == dtype
    assert torch.equal(table, sinusoidal_table(300, 16, torch.float64).to(dtype))


def test_values_are_between_minus_one_and_one() -> None:
    table = sinusoidal_table(5000, 32)
    assert bool((table.abs() <= 1).all())
    assert table.min() < -0.999
    assert table.max() > 0.999


def test_no_two_positions_share_a_row() -> None:
    table = sinusoidal_table(5000, 16)
    assert len(torch.unique(table, dim=0)) == 5000


def test_row_zero_is_zero_and_one_in_turn() -> None:
    assert sinusoidal_table(1, 5).tolist() == [[0.0, 1.0, 0.0, 1.0, 0.0]]


def test_a_longer_table_begins_with_the_shorter_one() -> None:
    assert torch.equal(sinusoidal_table(100, 12)[:7], sinusoidal_table(7, 12))


@pytest.mark.parametrize("d_model", [2, 16, 512])
def test_wavelengths_grow_geometrically_from_two_pi(d_model: int) -> None:
    """The angle between rows 0 and 1 is the frequency of a pair."""
    row = sinusoidal_table(2, d_model, torch.float64)[1].numpy()
    wavelengths = 2 * math.pi / np.arctan2(row[0::2], row[1::2])
    expected = [2 * math.pi / frequency for frequency in frequencies(d_model)]
    np.testing.assert_allclose(wavelengths, expected, rtol=1e-12)
    assert wavelengths[0] == pytest.approx(2 * math.pi, rel=1e-15)
    assert wavelengths[-1] < 2 * math.pi * 10000


@pytest.mark.parametrize("delta", [1, 7, 100])
def test_a_shift_is_one_rotation_for_all_positions(delta: int) -> None:
    d_model = 16
    table = sinusoidal_table(200 + delta, d_model, torch.float64).numpy()
    for pair, frequency in enumerate(frequencies(d_model)):
        sine, cosine = math.sin(delta * frequency), math.cos(delta * frequency)
        rotation = np.array([[cosine, sine], [-sine, cosine]])
        columns = slice(2 * pair, 2 * pair + 2)
        np.testing.assert_allclose(
            table[delta:, columns], table[:200, columns] @ rotation.T, rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("delta", [0, 1, 5, 63])
def test_the_dot_product_of_two_rows_depends_on_their_distance_alone(delta: int) -> None:
    d_model = 16
    table = sinusoidal_table(200 + delta, d_model, torch.float64).numpy()
    products = (table[:200] * table[delta : delta + 200]).sum(axis=1)
    expected = sum(math.cos(frequency * delta) for frequency in frequencies(d_model))
    np.testing.assert_allclose(products, expected, rtol=0, atol=1e-12)


def test_the_sinusoidal_table_is_in_no_state_dict() -> None:
    model = CausalEncoder(tiny.config(position="sinusoidal"))
    assert model.positions.sinusoidal is not None
    assert not [name for name in model.state_dict() if name.startswith("positions")]
    assert not [name for name, _ in model.named_parameters() if name.startswith("positions")]


def test_a_model_in_float64_has_the_table_in_float64() -> None:
    table = CausalEncoder(tiny.config(), torch.float64).positions.sinusoidal
    assert table is not None
    assert torch.equal(table, sinusoidal_table(9, 8, torch.float64))


def test_the_learned_table_is_a_trained_matrix_of_max_len_rows() -> None:
    positions = Positions(tiny.config(position="learned", max_len=7, d_model=4))
    (table,) = positions.parameters()
    assert table.shape == (7, 4)
    assert table.requires_grad
    assert 0 < table.std() < 0.1


def test_every_sample_of_the_batch_gets_the_same_rows() -> None:
    for position in ("sinusoidal", "learned", "sinusoidal+learned"):
        model = tiny.model(tiny.config(position=position))
        added = model.positions(torch.zeros(3, 5, 8))
        assert torch.equal(added, added[:1].expand(3, 5, 8)), position
        assert len(torch.unique(added[0], dim=0)) == 5, position


def test_the_sum_of_both_tables_is_added() -> None:
    model = tiny.model(tiny.config(position="sinusoidal+learned"), dtype=torch.float64)
    added = model.positions(torch.zeros(1, 5, 8, dtype=torch.float64))[0]
    expected = sinusoidal_table(5, 8, torch.float64) + model.state_dict()["positions.learned"][:5]
    torch.testing.assert_close(added, expected, rtol=0, atol=1e-15)


def test_without_positions_nothing_is_added() -> None:
    x = torch.randn(2, 5, 8)
    assert torch.equal(tiny.model(tiny.config(position="none")).positions(x), x)


def test_gradients_reach_only_the_rows_of_the_learned_table_that_were_read() -> None:
    config = tiny.config(position="learned")
    model = tiny.model(config)
    model(tiny.ids(config, 2, 4)).square().sum().backward()
    gradient = model.get_parameter("positions.learned").grad
    assert gradient is not None
    assert bool((gradient[:4] != 0).any(dim=1).all())
    assert torch.equal(gradient[4:], torch.zeros(5, 8))


def test_a_forward_pass_changes_no_state() -> None:
    """The tables are fixed: they do not grow with the longest sequence seen."""
    config = tiny.config(position="sinusoidal+learned")
    model = tiny.model(config)
    before = [tensor.clone() for tensor in itertools.chain(model.parameters(), model.buffers())]
    for length in (2, 9, 1):
        model(tiny.ids(config, 1, length))
    after = list(itertools.chain(model.parameters(), model.buffers()))
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new)
