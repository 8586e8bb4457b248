"""The whole network, in reading order from ids to hidden vectors.

Shapes: B batch, T sequence length, D d_model, H heads, K = D/H head size, V vocabulary.
Names ending in capitals state the axes of a tensor, for example q_BHTK.
"""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from causal_encoder import errors
from causal_encoder.model.config import EncoderConfig
from causal_encoder.model.positions import Positions

# The first two are what torch.nn.functional.embedding accepts; the others are widened.
_INTEGER_DTYPES = (
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
)


class CausalEncoder(nn.Module):
    """Token embedding, positions, causal self-attention blocks (arXiv:1706.03762).

    Output i depends on tokens 0..i only: a prefix of the input gives the prefix of the
    output. Names in the state dict are a public contract, listed in the README.

    Args:
        config: sizes and choices.
        dtype: type of the weights; the sinusoidal table is rounded to it from float64.
    """

    def __init__(self, config: EncoderConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.max_len = config.max_len
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model, dtype=dtype)
        self.positions = Positions(config, dtype)
        self.dropout = _dropout(config)
        self.blocks = nn.ModuleList(Block(config, dtype) for _ in range(config.num_layers))
        self.final_norm = _layer_norm(config, dtype) if config.final_norm else nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        """Encode a batch of equally long sequences.

        Args:
            ids: (B, T) of any integer dtype, 1 <= T <= max_len, values 0..V-1.

        Returns:
            (B, T, D), the hidden vectors after the last block.

        Raises:
            InvalidInputError: ids are not integers with two axes.
            EmptySequenceError: T = 0.
            SequenceTooLongError: T > max_len.
            TokenOutOfRangeError: an id is outside 0..V-1 (checked on CPU; on CUDA the
                embedding kernel stops with a device-side assert).

        Scripted and exported forms refuse the same inputs with the errors they can raise.
        """
        if not torch.jit.is_scripting():
            ids = _check_ids(ids, self.config)
        elif ids.dim() != 2 or ids.size(1) < 1 or ids.size(1) > self.max_len:
            # TorchScript can raise neither our classes nor see the config.
            raise ValueError(
                f"ids have shape {ids.shape}, expected (batch, sequence) with a sequence "
                f"length from 1 to max_len {self.max_len}"
            )
        x = self.dropout(self.positions(self.token_embedding(ids)))
        for block in self.blocks:
            x = block(x)
        return self.final_norm(x)


class Block(nn.Module):
    """One layer: causal self-attention, then the feed-forward network, each residual."""

    pre_norm: Final[bool]  # so that TorchScript compiles the branch that is taken alone

    def __init__(self, config: EncoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.pre_norm = config.norm == "pre"
        self.attention_norm = _layer_norm(config, dtype)
        self.attention = CausalSelfAttention(config, dtype)
        self.feed_forward_norm = _layer_norm(config, dtype)
        self.feed_forward = FeedForward(config, dtype)
        self.dropout = _dropout(config)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        if self.pre_norm:
            x = x + self.dropout(self.attention(self.attention_norm(x)))
            return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        x = self.attention_norm(x + self.dropout(self.attention(x)))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which position i sees positions 0..i."""

    def __init__(self, config: EncoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        d_model = config.d_model
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        # q, k and v in one matrix, in this order, each (D, D) with heads side by side.
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=config.bias, dtype=dtype)
        self.out = nn.Linear(d_model, d_model, bias=config.bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        q_BTD, k_BTD, v_BTD = self.qkv(x).chunk(3, dim=-1)
        dropout = self.dropout if self.training else 0.0
        return self.out(multi_head_attention(q_BTD, k_BTD, v_BTD, self.num_heads, True, dropout))


class FeedForward(nn.Module):
    """Two linear layers with the activation between them, applied to each position."""

    def __init__(self, config: EncoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation = _activation(config)
        self.up = nn.Linear(config.d_model, config.d_ff, bias=config.bias, dtype=dtype)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=config.bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        return self.down(self.activation(self.up(x)))


def multi_head_attention(
    q_BTD: Tensor,
    k_BTD: Tensor,
    v_BTD: Tensor,
    num_heads: int,
    is_causal: bool,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(Q K^T / sqrt(K) + M) V for each head (arXiv:1706.03762, section 3.2).

    Args:
        q_BTD: queries, (B, T, D), heads side by side in the last axis.
        k_BTD: keys, likewise.
        v_BTD: values, likewise.
        num_heads: H.
        is_causal: whether M is -inf above the diagonal; otherwise M is 0.
        dropout: probability of dropping an attention weight.

    Returns:
        (B, T, D), the heads concatenated.
    """
    batch, length, d_model = q_BTD.shape
    heads = (batch, length, num_heads, d_model // num_heads)
    y_BHTK = F.scaled_dot_product_attention(
        q_BTD.view(heads).transpose(1, 2),
        k_BTD.view(heads).transpose(1, 2),
        v_BTD.view(heads).transpose(1, 2),
        dropout_p=dropout,
        is_causal=is_causal,
    )
    return y_BHTK.transpose(1, 2).reshape(batch, length, d_model)


def _layer_norm(config: EncoderConfig, dtype: torch.dtype) -> nn.LayerNorm:
    return nn.LayerNorm(config.d_model, config.layer_norm_eps, bias=config.bias, dtype=dtype)


def _activation(config: EncoderConfig) -> nn.Module:
    if config.activation == "relu":
        return nn.ReLU()
    return nn.GELU("tanh" if config.activation == "gelu_tanh" else "none")


def _dropout(config: EncoderConfig) -> nn.Module:
    # Without dropout there is no such operator to be found in an exported graph.
    return nn.Dropout(config.dropout) if config.dropout else nn.Identity()


def _check_ids(ids: Tensor, config: EncoderConfig) -> Tensor:
    """Refuse what the session refuses, in the same order and with the same errors."""
    if not isinstance(ids, Tensor):
        raise errors.InvalidInputError(f"ids are {type(ids).__name__}, expected a torch.Tensor")
    if ids.dtype not in _INTEGER_DTYPES:
        raise errors.invalid_dtype(ids.dtype)
    if ids.dim() != 2:
        raise errors.invalid_rank(tuple(ids.shape))
    if ids.size(1) == 0:
        raise errors.empty_sequence()
    if ids.size(1) > config.max_len:
        raise errors.sequence_too_long(ids.size(1), config.max_len, config.position)
    wide = ids if ids.dtype in _INTEGER_DTYPES[:2] else ids.long()
    if torch.compiler.is_compiling() or ids.device.type != "cpu":
        return wide  # values are not known while tracing, and reading them would stall a GPU
    out_of_range = (wide < 0) | (wide >= config.vocab_size)
    if bool(out_of_range.any()):
        row, column = out_of_range.nonzero()[0].tolist()
        token = int(ids[row, column].item())
        raise errors.token_out_of_range(token, row, column, config.vocab_size)
    return wide
