"""Export to TorchScript, by scripting: the checks in forward stay alive.

TorchScript is deprecated in PyTorch; causal_encoder.export.program is its successor.
"""

import io
import os
from pathlib import Path

from causal_encoder.export.artifact import Facts, facts_of_archive
from causal_encoder.export.prepare import prepare
from causal_encoder.export.publish import publish
from causal_encoder.export.trace import trace_script
from causal_encoder.export.verify import Progress
from causal_encoder.model import CausalEncoder
from causal_encoder.serve.bundle import Manifest


def export_torchscript(
    model: CausalEncoder,
    path: str | os.PathLike[str],
    *,
    max_len: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Export to a TorchScript bundle, verify the written file, then publish it.

    The file carries its config, and precision, max_len and vocab_size, as extra files
    `config.json` and `metadata.json`.

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

    def write(path: Path) -> Facts:
        # In memory first: a full disk is then Python's own error, which names itself, and
        # torch never has to open a path, which it cannot do everywhere if it is not ASCII.
        archive = trace_script(prepared)
        path.write_bytes(archive)
        return facts_of_archive(io.BytesIO(archive), "torchscript")

    return publish(
        prepared, "torchscript", "fp32", "portable", path, write, force=force, progress=progress
    )
