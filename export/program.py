"""Export to a torch.export program (.pt2), the successor of TorchScript."""

import io
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim

from causal_encoder.export.prepare import INPUT, extra_files, prepare
from causal_encoder.export.publish import publish
from causal_encoder.export.verify import Progress
from causal_encoder.model import CausalEncoder
from causal_encoder.serve.bundle import Manifest


def export_program(
    model: CausalEncoder,
    path: str | os.PathLike[str],
    *,
    max_len: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Export to a bundle with a torch.export program, verify it, then publish it.

    Args:
        model: the trained model; it is left as it is.
        path: folder of the bundle, made by this call.
        max_len: longest sequence of the export; the model's own if not given. Cannot be
            changed for learned positions.
        force: replace an existing bundle.
        progress: called with (step, done, total) as verification goes on.

    Returns:
        The manifest of the published bundle, its parity report inside.

    Raises:
        ExportError: as export_onnx.
    """
    prepared = prepare(model, max_len)

    def write(path: Path) -> None:
        config = prepared.config
        # With max_len 1 the axis has one valid size, which torch.export wants to be fixed.
        length = (
            Dim(str(INPUT.axes[1]), min=1, max=config.max_len) if config.max_len > 1 else Dim.STATIC
        )
        # Sizes that differ, and are not 1 where they need not be.
        example = torch.zeros(2, min(3, config.max_len), dtype=torch.int64)
        axes = {0: Dim(str(INPUT.axes[0]), min=0), 1: length}
        program = torch.export.export(_NonEmpty(prepared), (example,), dynamic_shapes=(axes,))
        buffer = io.BytesIO()
        torch.export.save(program, buffer, extra_files=extra_files(config))
        path.write_bytes(buffer.getbuffer())

    return publish(prepared, "program", "fp32", path, write, force=force, progress=progress)


class _NonEmpty(nn.Module):
    """Refuses T = 0 and more than two axes when the program runs.

    torch.export assumes that a dynamic size is not 0, and that ids have the axes they were
    traced with, and drops every test for it. So the refusals have to be operators: putting
    the first token back where it was fails where there is none, and expanding to two sizes
    fails for three axes.
    """

    def __init__(self, encoder: CausalEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor) -> Tensor:
        batch, length = input_ids.shape
        first = input_ids.select(1, 0)
        flat = input_ids.select_scatter(first, 1, 0).expand(batch, length)
        hidden: Tensor = self.encoder(flat)
        return hidden
