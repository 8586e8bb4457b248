"""Absolute positions, added to the token embedding.

Shapes: T sequence length, D d_model, L max_len.
A scheme that acts inside attention (on q, k or the scores) would be a second module
beside this one, called from the attention instead of the embedding.
"""

import torch
from torch import Tensor, nn

from causal_encoder.model.config import EncoderConfig


def sinusoidal_table(length: int, d_model: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The interleaved sine and cosine table of arXiv:1706.03762, section 3.5.

    PE[p, 2i] = sin(p / 10000^(2i/D)), PE[p, 2i+1] = cos of the same angle. For an odd D
    the last cosine column is dropped. Computed in float64 and rounded once.

    Args:
        length: number of rows, one a position.
        d_model: number of columns.
        dtype: type of the result.

    Returns:
        (length, d_model), values in [-1, 1].
    """
    position = torch.arange(length, dtype=torch.float64).unsqueeze(1)
    even_columns = torch.arange(0, d_model, 2, dtype=torch.float64)
    angle = position / 10000.0 ** (even_columns / d_model)
    table = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)
    return table[:, :d_model].to(dtype).contiguous()


class Positions(nn.Module):
    """Adds the position vectors of rows 0..T-1, the same for every sample of the batch.

    The sinusoidal table is a non-persistent buffer: it is derived from the config, so it
    is in no state dict and max_len can be raised at export. The learned table is the
    parameter `learned`, (L, D). The caller makes sure that T <= L.
    """

    sinusoidal: Tensor | None
    learned: Tensor | None

    def __init__(self, config: EncoderConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        length, d_model = config.max_len, config.d_model
        sinusoidal = sinusoidal_table(length, d_model, dtype) if config.has_sinusoidal else None
        self.register_buffer("sinusoidal", sinusoidal, persistent=False)
        learned = torch.empty(length, d_model, dtype=dtype) if config.has_learned else None
        self.register_parameter("learned", None if learned is None else nn.Parameter(learned))
        if learned is not None:
            nn.init.normal_(learned, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        sinusoidal, learned = self.sinusoidal, self.learned  # TorchScript narrows locals only
        if sinusoidal is not None:
            x = x + sinusoidal[: x.size(1)]
        if learned is not None:
            x = x + learned[: x.size(1)]
        return x
