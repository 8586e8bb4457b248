"""Export to TorchScript, by scripting: the checks in forward stay alive.

TorchScript is deprecated in PyTorch; causal_encoder.export.program is its successor.
"""

import os

from causal_encoder.export.prepare import prepare
from causal_encoder.export.publish import publish_archive
from causal_encoder.export.verify import Progress
from causal_encoder.model import CausalEncoder
from causal_encoder.serve.manifest import Manifest


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
    return publish_archive(
        prepare(model, max_len), "torchscript", path, force=force, progress=progress
    )
