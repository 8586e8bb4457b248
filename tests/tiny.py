"""Models small enough to build in a millisecond, with weights that hide no mistake."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from causal_encoder.model import CausalEncoder, EncoderConfig


def config(**changes: object) -> EncoderConfig:
    """Two blocks of width 8 with two heads, V = 11, L = 9."""
    fields: dict[str, object] = {
        "vocab_size": 11,
        "d_model": 8,
        "num_heads": 2,
        "num_layers": 2,
        "d_ff": 12,
        "max_len": 9,
    }
    return EncoderConfig.from_dict(fields | changes)


def model(config: EncoderConfig, *, dtype: torch.dtype = torch.float32) -> CausalEncoder:
    """A model in eval mode; no weight is at its initial 0 or 1."""
    built = CausalEncoder(config, dtype).eval()
    randomize(built)
    return built


def randomize(module: nn.Module, seed: int = 0) -> None:
    """Draw every parameter, so that a forgotten bias or a skipped norm changes the output."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn * 0.7)


def ids(config: EncoderConfig, batch: int, length: int, seed: int = 0) -> Tensor:
    """Random ids, (batch, length) int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (batch, length), generator=generator)


def weights(model: CausalEncoder) -> dict[str, NDArray[np.float64]]:
    """The state dict in NumPy, widened to float64."""
    return {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}
