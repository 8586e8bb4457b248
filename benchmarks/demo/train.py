"""Train a small causal encoder to guess the next byte of Python source code.

The text is what every Python installation ships: the modules of its standard library.
The head is tied to the embedding, logits = hidden @ E^T / sqrt(D), and stays outside the
encoder: what is exported returns hidden vectors.

Shapes: B batch, T sequence length, D d_model, V vocabulary, here the 256 bytes.
"""

import math
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from causal_encoder.model import CausalEncoder, EncoderConfig

VOCAB_SIZE = 256
UNIFORM_BITS = 8.0  # a byte, if nothing is known about it
LEARNING_RATE = 4e-3
WARM_UP_STEPS = 20
EMBEDDING_STD = 0.3  # small enough that the positions, of at most 1, are heard

# Called with (step, steps done, steps in all).
Progress = Callable[[str, int, int], None]


def read_text(limit_bytes: int) -> tuple[bytes, bytes]:
    """Python's own modules, cut into a part to train on and a part that is held out.

    Args:
        limit_bytes: how much to read.

    Returns:
        Whole files, nine tenths of the bytes, and the rest.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:limit_bytes]
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def next_byte_logits(hidden: Tensor, embedding: Tensor) -> Tensor:
    """(.., D) hidden vectors and the (V, D) embedding -> (.., V)."""
    return hidden @ embedding.T / math.sqrt(embedding.size(1))


def train(
    config: EncoderConfig,
    text: bytes,
    *,
    steps: int,
    batch_size: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> CausalEncoder:
    """Train from scratch on random pieces of the text, max_len bytes each.

    Args:
        config: the model; vocab_size must be 256.
        text: what to learn, longer than max_len.
        steps: number of updates.
        batch_size: pieces in each.
        seed: of the first weights and of the pieces.
        progress: called with (step, done, total); the step names the loss.

    Returns:
        The trained model in eval mode.
    """
    torch.manual_seed(seed)
    model = CausalEncoder(config).train()
    torch.nn.init.normal_(model.token_embedding.weight, std=EMBEDDING_STD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _pace(step, steps))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    for step in range(steps):
        loss = _loss(model, _pieces(data, batch_size, config.max_len))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if progress is not None:
            progress(f"{loss.item() / math.log(2):.2f} bits a byte", step + 1, steps)
    return model.eval()


@torch.no_grad()
def bits_per_byte(model: CausalEncoder, text: bytes, pieces: int = 64) -> float:
    """Cross entropy in bits on text, over evenly spread pieces of max_len bytes."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    length = model.config.max_len + 1
    starts = torch.linspace(0, len(data) - length, pieces).long()
    losses = [_loss(model, data[None, start : start + length]) for start in starts.tolist()]
    return float(torch.stack(losses).mean()) / math.log(2)


def _loss(model: CausalEncoder, pieces: Tensor) -> Tensor:
    """(B, T + 1) bytes -> mean cross entropy of each byte after the first, in nats."""
    logits = next_byte_logits(model(pieces[:, :-1]), model.token_embedding.weight)
    return F.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())


def _pieces(data: Tensor, batch_size: int, length: int) -> Tensor:
    """(B, length + 1), each from a random place."""
    starts = torch.randint(len(data) - length, (batch_size,))
    return torch.stack([data[start : start + length + 1] for start in starts.tolist()])


def _pace(step: int, steps: int) -> float:
    """Factor on the learning rate: a short ramp up, then half a cosine down to 0."""
    return min(1.0, (step + 1) / WARM_UP_STEPS) * (1 + math.cos(math.pi * step / steps)) / 2
