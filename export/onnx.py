"""Export to ONNX: one file with dynamic axes, its limits in its metadata."""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import onnx
import torch
from torch.export import Dim

from causal_encoder.errors import ExportError
from causal_encoder.export.prepare import INPUT, OUTPUT_NAME, metadata, prepare
from causal_encoder.export.publish import publish
from causal_encoder.export.verify import Progress
from causal_encoder.export.wrapper import ATTENTION_OPSET, DTYPES, OnnxEncoder
from causal_encoder.model import CausalEncoder
from causal_encoder.serve.bundle import Manifest

OPSETS = range(18, 24)
DEFAULT_OPSET = 23
IR_VERSION = 10  # readable by every ONNX Runtime we support; onnx's own default is not
# A protobuf ends at 2 GiB, and readers copy one whole: above this, weights go beside it.
SINGLE_FILE_LIMIT_BYTES = 3 * 2**29
# Smaller tensors stay inside: shape inference of ONNX Runtime reads some of them.
_INLINE_LIMIT_BYTES = 1024


def export_onnx(
    model: CausalEncoder,
    path: str | os.PathLike[str],
    *,
    opset: int = DEFAULT_OPSET,
    precision: str = "fp32",
    max_len: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Export to an ONNX bundle, verify the written file, then publish it.

    Args:
        model: the trained model; it is left as it is.
        path: folder of the bundle, made by this call.
        opset: version of the ai.onnx operator set, 18 to 23.
        precision: "fp32", "fp16" or "bf16"; ids stay int64 and the output float32. The
            lower ones need opset 23. bf16 runs on CUDA alone, so its numbers are checked
            at export only where there is CUDA; the report says what was left open.
        max_len: longest sequence of the export; the model's own if not given. Cannot be
            changed for learned positions.
        force: replace an existing bundle.
        progress: called with (step, done, total) as verification goes on.

    Returns:
        The manifest of the published bundle, its parity report inside.

    Raises:
        ExportError: an argument was refused, the file failed verification, or the folder
            cannot be written. Nothing is published then, and an old bundle stays.
    """
    if opset not in OPSETS:
        raise ExportError(f"opset {opset} is outside {OPSETS.start}..{OPSETS.stop - 1}")
    if precision not in DTYPES:
        raise ExportError(f"precision is {precision!r}, expected one of {', '.join(DTYPES)}")
    if precision != "fp32" and opset < ATTENTION_OPSET:
        raise ExportError(
            f"{precision} needs opset {ATTENTION_OPSET}, whose Attention keeps its softmax in "
            f"float32, but opset {opset} was asked for"
        )
    prepared = prepare(model, max_len)
    _check_range(prepared, precision)

    def write(path: Path) -> None:
        _save(_trace(prepared, opset, precision), path)

    return publish(prepared, "onnx", precision, path, write, force=force, progress=progress)


def _check_range(model: CausalEncoder, precision: str) -> None:
    dtype = DTYPES[precision]
    for name, tensor in model.state_dict().items():
        if not bool(tensor.to(dtype).isfinite().all()):
            raise ExportError(
                f"{name} holds {float(tensor.abs().max()):.3g}, beyond the {precision} range of "
                f"{torch.finfo(dtype).max:.3g}; export it in fp32"
            )


def _trace(model: CausalEncoder, opset: int, precision: str) -> onnx.ModelProto:
    # No upper bound on the axes: the guard row makes T = L + 1 a valid shape.
    axes = {0: Dim(str(INPUT.axes[0])), 1: Dim(str(INPUT.axes[1]))}
    with _known_noise_silenced():
        program = torch.onnx.export(
            OnnxEncoder(model, opset, DTYPES[precision]).eval(),
            (torch.zeros(2, 2, dtype=torch.int64),),
            input_names=[INPUT.name],
            output_names=[OUTPUT_NAME],
            opset_version=opset,
            dynamo=True,
            dynamic_shapes=(axes,),
            verbose=False,
        )
    assert program is not None
    proto = program.model_proto
    proto.ir_version = IR_VERSION
    _strip_traces(proto)
    for key, value in metadata(model.config, precision).items():
        proto.metadata_props.add(key=key, value=value)
    return proto


@contextlib.contextmanager
def _known_noise_silenced() -> Iterator[None]:
    """Two messages of torch 2.13 that say nothing about the model; all others are shown."""
    registration = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = registration.level
    registration.setLevel(logging.ERROR)  # operators of torchvision, which is not installed
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)  # torch's own use
            yield
    finally:
        registration.setLevel(level)


def _strip_traces(proto: onnx.ModelProto) -> None:
    """Drop the exporter's notes: they hold source paths of the machine that exported."""
    graph = proto.graph
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info):
        del part.metadata_props[:]
    for tensor in graph.initializer:
        del tensor.metadata_props[:]


def _save(proto: onnx.ModelProto, path: Path) -> None:
    # The folder is fresh: onnx appends to an existing data file instead of replacing it.
    # Not proto.ByteSize(), which fails from 2 GiB on.
    if sum(len(tensor.raw_data) for tensor in proto.graph.initializer) <= SINGLE_FILE_LIMIT_BYTES:
        onnx.save_model(proto, path)
    else:
        onnx.save_model(
            proto,
            path,
            save_as_external_data=True,
            location=f"{path.name}.data",
            size_threshold=_INLINE_LIMIT_BYTES,
        )
