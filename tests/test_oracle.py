"""The oracle is checked against numbers worked out by hand or printed in the literature."""

import math

import numpy as np
import pytest

from tests import oracle


def test_attention_of_two_equal_keys_is_the_mean_of_their_values() -> None:
    q, k = np.zeros((2, 1)), np.ones((2, 1))
    v = np.array([[2.0], [4.0]])
    np.testing.assert_array_equal(oracle.causal_attention(q, k, v), [[2.0], [3.0]])


def test_attention_weighs_by_the_exponential_of_the_scaled_product() -> None:
    """K = 4, so the score q.k = 2 ln 3 is halved: weights 1 : 3."""
    q = np.array([[0.0] * 4, [2 * math.log(3.0), 0.0, 0.0, 0.0]])
    k = np.array([[0.0] * 4, [1.0, 0.0, 0.0, 0.0]])
    v = np.array([[0.0] * 4, [4.0] * 4])
    np.testing.assert_allclose(oracle.causal_attention(q, k, v)[1], [3.0] * 4, rtol=1e-15)


@pytest.mark.parametrize(
    ("function", "at_one", "at_minus_two"),
    [
        (oracle.relu, 1.0, 0.0),
        (oracle.gelu, 0.8413447460685429, -0.04550026389635842),
        (oracle.gelu_tanh, 0.8411919906082768, -0.04540230591222),
    ],
)
def test_activations_have_their_published_values(
    function: oracle.Activation, at_one: float, at_minus_two: float
) -> None:
    np.testing.assert_allclose(function(np.array([1.0, -2.0])), [at_one, at_minus_two], rtol=1e-12)


def test_softmax_survives_large_scores_and_a_masked_cell() -> None:
    np.testing.assert_array_equal(
        oracle.softmax(np.array([[1e4, 1e4, -np.inf]])), [[0.5, 0.5, 0.0]]
    )
