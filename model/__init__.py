"""The network in PyTorch: configuration, positions, encoder, checkpoints."""

from causal_encoder.model.checkpoint import fingerprint, load_checkpoint, save_checkpoint
from causal_encoder.model.config import EncoderConfig
from causal_encoder.model.convert import from_torch_encoder
from causal_encoder.model.encoder import CausalEncoder
from causal_encoder.model.positions import sinusoidal_table

__all__ = [
    "CausalEncoder",
    "EncoderConfig",
    "fingerprint",
    "from_torch_encoder",
    "load_checkpoint",
    "save_checkpoint",
    "sinusoidal_table",
]
