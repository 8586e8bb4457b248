"""The form of the network that is traced to ONNX; no other code depends on it.

It computes what model/encoder.py computes, from the same weights, with three differences:

- Attention is one `Attention` operator on (B, T, D) tensors (opset 23), which needs no
  reshapes and stays whole on CUDA; below opset 23 it is PyTorch's own attention.
- The file guards itself, for those who load it without a session. The embedding gets one
  more row, all NaN, at index V, which is also index -1, and ids are clamped to [-1, V]:
  every id out of range reads NaN. The position table gets a NaN row too: T = L + 1 reads
  it, a longer T fails to broadcast. A model without positions gets a table of one column
  of zeros that ends in NaN. NaN stays in the residual stream at that position and, through
  attention, in all later ones.
- Matrices are stored transposed, ready for `MatMul`.

In fp16 and bf16 every weight is rounded once, and the position table once from float64.
Softmax and norms still accumulate in float32, which the operators take from their
attributes `softmax_precision` and `stash_type`, and the output is cast to float32.
"""

import copy

import onnx
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from causal_encoder.model.encoder import Block, CausalEncoder, multi_head_attention
from causal_encoder.model.positions import sinusoidal_table

# int8 is traced in float32; export/int8.py then replaces its matrices.
DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.float32,
}
ATTENTION_OPSET = 23  # the first with ai.onnx Attention


class OnnxEncoder(nn.Module):
    """A CausalEncoder in the form for ONNX.

    Args:
        model: a prepared copy, see export/prepare.py.
        opset: version of the ai.onnx operator set that will be written.
        dtype: type of the weights, and of everything between ids and output.
    """

    def __init__(self, model: CausalEncoder, opset: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.vocab_size = model.config.vocab_size
        self.token_embedding = _frozen(_with_nan_row(model.token_embedding.weight))
        self.position_table = _frozen(_with_nan_row(_position_table(model, dtype)))
        self.blocks = nn.ModuleList(OnnxBlock(block, opset) for block in model.blocks)
        self.final_norm = copy.deepcopy(model.final_norm)
        self.to(dtype)

    def forward(self, input_ids: Tensor) -> Tensor:
        """(B, T) int64 -> (B, T, D)."""
        guarded_ids = input_ids.clamp(-1, self.vocab_size)
        x = F.embedding(guarded_ids, self.token_embedding)
        x = x + self.position_table[: input_ids.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.final_norm(x).to(torch.float32)


class OnnxBlock(nn.Module):
    """One layer, see model/encoder.py."""

    def __init__(self, block: nn.Module, opset: int) -> None:
        super().__init__()
        assert isinstance(block, Block)
        self.pre_norm = block.pre_norm
        self.attention_norm = copy.deepcopy(block.attention_norm)
        self.num_heads = block.attention.num_heads
        self.attention_operator = opset >= ATTENTION_OPSET
        self.qkv = OnnxLinear(block.attention.qkv)
        self.out = OnnxLinear(block.attention.out)
        self.feed_forward_norm = copy.deepcopy(block.feed_forward_norm)
        self.activation = block.feed_forward.activation
        self.up = OnnxLinear(block.feed_forward.up)
        self.down = OnnxLinear(block.feed_forward.down)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        if self.pre_norm:
            x = x + self.attention(self.attention_norm(x))
            return x + self.feed_forward(self.feed_forward_norm(x))
        x = self.attention_norm(x + self.attention(x))
        return self.feed_forward_norm(x + self.feed_forward(x))

    def attention(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        q_BTD, k_BTD, v_BTD = self.qkv(x).chunk(3, dim=-1)
        if self.attention_operator:
            y_BTD, *_ = torch.onnx.ops.attention(
                q_BTD,
                k_BTD,
                v_BTD,
                is_causal=True,
                q_num_heads=self.num_heads,
                kv_num_heads=self.num_heads,
                softmax_precision=onnx.TensorProto.FLOAT,
            )
        else:
            y_BTD = multi_head_attention(q_BTD, k_BTD, v_BTD, self.num_heads, True)
        return self.out(y_BTD)

    def feed_forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        return self.down(self.activation(self.up(x)))


class OnnxLinear(nn.Module):
    """x W + b with W stored as (in, out)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = _frozen(linear.weight.T.contiguous())
        self.bias = None if linear.bias is None else _frozen(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        y = x @ self.weight
        return y if self.bias is None else y + self.bias


def _position_table(model: CausalEncoder, dtype: torch.dtype) -> Tensor:
    """(L, D), or (L, 1) zeros without positions: all schemes become one addition."""
    config = model.config
    width = 1 if config.position == "none" else config.d_model
    table = torch.zeros(config.max_len, width, dtype=torch.float64)
    if config.has_sinusoidal:
        table += sinusoidal_table(config.max_len, config.d_model, torch.float64)
    if model.positions.learned is not None:
        table += model.positions.learned
    return table.to(dtype)


def _with_nan_row(table: Tensor) -> Tensor:
    return torch.cat((table, torch.full((1, table.size(1)), torch.nan, dtype=table.dtype)))


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=False)
