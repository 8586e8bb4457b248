"""The network again, in NumPy and float64: what the PyTorch model is measured against.

Written from the formulas of arXiv:1706.03762 (attention 3.2, feed-forward 3.3, positions
3.5), Ba et al. 2016 (layer norm, arXiv:1607.06450), Hendrycks and Gimpel 2016 (GELU,
arXiv:1606.08415) and from the documented names of the weights, not from the PyTorch code.
One sequence and one head at a time, an explicit mask of -inf, no operator that does two
things at once.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from causal_encoder.model import EncoderConfig

Array = NDArray[np.float64]
Weights = Mapping[str, Array]
Activation = Callable[[Array], Array]


def encode(config: EncoderConfig, weights: Weights, ids: NDArray[np.int64]) -> Array:
    """Hidden vectors (B, T, D) of ids (B, T)."""
    batch, length = ids.shape
    hidden = np.empty((batch, length, config.d_model))
    for row in range(batch):
        hidden[row] = encode_one(config, weights, ids[row])
    return hidden


def encode_one(config: EncoderConfig, weights: Weights, ids: NDArray[np.int64]) -> Array:
    """Hidden vectors (T, D) of one sequence (T,)."""
    x = weights["token_embedding.weight"][ids]
    if config.position in ("sinusoidal", "sinusoidal+learned"):
        x = x + sinusoidal_table(len(ids), config.d_model)
    if config.position in ("learned", "sinusoidal+learned"):
        x = x + weights["positions.learned"][: len(ids)]
    for index in range(config.num_layers):
        x = block(config, weights, f"blocks.{index}", x)
    if config.final_norm:
        x = layer_norm(config, weights, "final_norm", x)
    return x


def block(config: EncoderConfig, weights: Weights, name: str, x: Array) -> Array:
    """x + f(norm(x)) twice for "pre", norm(x + f(x)) twice for "post"."""
    attention_norm, feed_forward_norm = f"{name}.attention_norm", f"{name}.feed_forward_norm"
    if config.norm == "pre":
        normed = layer_norm(config, weights, attention_norm, x)
        x = x + self_attention(config, weights, f"{name}.attention", normed)
        normed = layer_norm(config, weights, feed_forward_norm, x)
        return x + feed_forward(config, weights, f"{name}.feed_forward", normed)
    assert config.norm == "post"
    x = x + self_attention(config, weights, f"{name}.attention", x)
    x = layer_norm(config, weights, attention_norm, x)
    x = x + feed_forward(config, weights, f"{name}.feed_forward", x)
    return layer_norm(config, weights, feed_forward_norm, x)


def self_attention(config: EncoderConfig, weights: Weights, name: str, x: Array) -> Array:
    """Head h owns columns h*K..(h+1)*K-1 of q, of k and of v."""
    width = config.d_model
    size = width // config.num_heads
    qkv = linear(config, weights, f"{name}.qkv", x)
    q, k, v = qkv[:, :width], qkv[:, width : 2 * width], qkv[:, 2 * width :]
    joined = np.empty_like(x)
    for head in range(config.num_heads):
        own = slice(head * size, (head + 1) * size)
        joined[:, own] = causal_attention(q[:, own], k[:, own], v[:, own])
    return linear(config, weights, f"{name}.out", joined)


def causal_attention(q: Array, k: Array, v: Array) -> Array:
    """softmax(q k^T / sqrt(K) + M) v, all (T, K); M is -inf where the column is later."""
    length, size = q.shape
    mask = np.zeros((length, length))
    for row in range(length):
        mask[row, row + 1 :] = -np.inf
    return softmax(q @ k.T / math.sqrt(size) + mask) @ v


def softmax(scores: Array) -> Array:
    """Over the last axis."""
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    rows: Array = powers / powers.sum(axis=-1, keepdims=True)
    return rows


def feed_forward(config: EncoderConfig, weights: Weights, name: str, x: Array) -> Array:
    """Two linear layers with the activation between them."""
    activation = {"relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh}[config.activation]
    up = linear(config, weights, f"{name}.up", x)
    return linear(config, weights, f"{name}.down", activation(up))


def relu(x: Array) -> Array:
    """max(x, 0)."""
    return np.maximum(x, 0.0)


def gelu(x: Array) -> Array:
    """x times the normal distribution function, exactly."""
    erf = np.array([math.erf(value / math.sqrt(2)) for value in x.flat]).reshape(x.shape)
    return 0.5 * x * (1.0 + erf)


def gelu_tanh(x: Array) -> Array:
    """The approximation with tanh."""
    halves: Array = 0.5 * x * (1.0 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return halves


def linear(config: EncoderConfig, weights: Weights, name: str, x: Array) -> Array:
    """x W^T + b."""
    y: Array = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if config.bias else y


def layer_norm(config: EncoderConfig, weights: Weights, name: str, x: Array) -> Array:
    """Mean 0 and variance 1 (of the population) in every row, then scale and shift."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    y: Array = centred / np.sqrt(variance + config.layer_norm_eps) * weights[f"{name}.weight"]
    return y + weights[f"{name}.bias"] if config.bias else y


def sinusoidal_table(length: int, d_model: int) -> Array:
    """PE[p, 2i] = sin(p / 10000^(2i/D)), PE[p, 2i+1] = cos of the same angle; (length, D)."""
    table = np.empty((length, d_model))
    for position in range(length):
        for column in range(d_model):
            pair = column // 2
            angle = position / 10000.0 ** (2 * pair / d_model)
            table[position, column] = math.cos(angle) if column % 2 else math.sin(angle)
    return table
