"""Export to ONNX: one file with dynamic axes, its limits in its metadata."""

import operator
import os
from collections.abc import Iterable
from pathlib import Path

import onnx
import torch

from causal_encoder.errors import ExportError
from causal_encoder.export.artifact import Facts, facts_of_onnx
from causal_encoder.export.prepare import in_a_line, prepare
from causal_encoder.export.publish import publish
from causal_encoder.export.trace import OPSETS, trace_onnx
from causal_encoder.export.verify import Progress
from causal_encoder.export.wrapper import ATTENTION_OPSET, DTYPES
from causal_encoder.model import CausalEncoder
from causal_encoder.serve.buckets import MAX_BUCKETS, MAX_TOKENS, Shape, bucket_of
from causal_encoder.serve.manifest import PRECISIONS, TARGETS, Manifest

DEFAULT_OPSET = 23
_WITHOUT_KERNELS = {("int8", "cuda"), ("bf16", "cpu")}
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
    target: str = "portable",
    max_len: int | None = None,
    warm_up: Iterable[Shape] = (),
    force: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Export to an ONNX bundle, verify the written file, then publish it.

    Args:
        model: the trained model; it is left as it is.
        path: folder of the bundle, made by this call.
        opset: version of the ai.onnx operator set, 18 to 23.
        precision: "fp32", "fp16", "bf16" or "int8"; ids stay int64 and the output float32.
            The lower ones need opset 23. int8 multiplies in 8-bit integers, with one scale a
            token, and is for CPU; see export/int8.py. bf16 runs on CUDA alone, so its
            numbers are checked at export only where there is CUDA; the report says what was
            left open.
        target: "portable", a graph of ai.onnx operators that every runtime reads; "cpu" or
            "cuda", a graph that ONNX Runtime runs faster there. These need opset 23.
        max_len: longest sequence of the export; the model's own if not given. Cannot be
            changed for learned positions.
        warm_up: up to 32 (batch, sequence) shapes for the manifest. A session with
            `cuda_graphs` captures them when it opens; no other takes notice.
        force: replace an existing bundle.
        progress: called with (step, done, total) as verification goes on.

    Returns:
        The manifest of the published bundle, its parity report inside.

    Raises:
        ExportError: an argument was refused, the file failed verification, or the folder
            cannot be written. Nothing is published then, and an old bundle stays.
    """
    _check_form(opset, precision, target)
    prepared = prepare(model, max_len)
    shapes = _check_shapes(warm_up, prepared.config.max_len)
    if shapes and (target == "cpu" or precision == "int8"):
        raise ExportError(
            f"warm_up is for CUDA graphs, and {precision} for target {target} does not run on "
            "CUDA; leave the shapes out"
        )
    _check_range(prepared, precision)

    def write(path: Path) -> Facts:
        proto = trace_onnx(prepared, opset, precision, target)
        facts = facts_of_onnx(proto)
        _save(proto, path)
        return facts

    return publish(
        prepared,
        "onnx",
        precision,
        target,
        path,
        write,
        warm_up=shapes,
        force=force,
        progress=progress,
    )


def _check_form(opset: int, precision: str, target: str) -> None:
    """Refuse what ONNX Runtime could not run, or would run with another arithmetic."""
    if opset not in OPSETS:
        raise ExportError(f"opset {opset} is outside {OPSETS.start}..{OPSETS.stop - 1}")
    for name, value, choices in (
        ("precision", precision, PRECISIONS),
        ("target", target, TARGETS),
    ):
        if value not in choices:
            raise ExportError(f"{name} is {value!r}, expected one of {', '.join(choices)}")
    if opset < ATTENTION_OPSET and (precision, target) != ("fp32", "portable"):
        raise ExportError(
            f"{precision} for {target} needs opset {ATTENTION_OPSET}, whose Attention keeps its "
            f"softmax in float32, but opset {opset} was asked for; leave the opset out"
        )
    if (precision, target) in _WITHOUT_KERNELS:
        raise ExportError(
            f"ONNX Runtime has no {precision} products on {target}; choose another precision, or "
            "target portable"
        )


def _check_shapes(shapes: Iterable[Shape], max_len: int) -> tuple[Shape, ...]:
    try:
        checked = tuple((operator.index(batch), operator.index(length)) for batch, length in shapes)
    except (TypeError, ValueError) as error:
        raise ExportError(f"warm_up holds no pairs of batch and sequence: {error}") from error
    if len(checked) > MAX_BUCKETS:
        raise ExportError(f"warm_up has {len(checked)} shapes, expected at most {MAX_BUCKETS}")
    for batch, length in checked:
        if batch < 1 or not 1 <= length <= max_len:
            raise ExportError(
                f"warm_up has shape {batch}x{length}, expected a batch of at least 1 and a "
                f"length of 1 to max_len {max_len}"
            )
        if bucket_of((batch, length), max_len) is None:
            raise ExportError(
                f"warm_up has shape {batch}x{length}, which padded to powers of two is over the "
                f"{MAX_TOKENS} tokens of a CUDA graph; leave it out, it runs without one"
            )
    return checked


def _check_range(model: CausalEncoder, precision: str) -> None:
    dtype = DTYPES[precision]
    for name, tensor in model.state_dict().items():
        if not bool(tensor.to(dtype).isfinite().all()):
            raise ExportError(
                f"{name} holds {float(tensor.abs().max()):.3g}, beyond the {precision} range of "
                f"{torch.finfo(dtype).max:.3g}; export it in fp32"
            )


def _save(proto: onnx.ModelProto, path: Path) -> None:
    # The folder is fresh: onnx appends to an existing data file instead of replacing it.
    # Not proto.ByteSize(), which fails from 2 GiB on.
    if sum(len(tensor.raw_data) for tensor in proto.graph.initializer) <= SINGLE_FILE_LIMIT_BYTES:
        onnx.save_model(proto, path)
        _check_valid(proto)
    else:
        onnx.save_model(
            proto,
            path,
            save_as_external_data=True,
            location=f"{path.name}.data",
            size_threshold=_INLINE_LIMIT_BYTES,
        )
        _check_valid(path)


def _check_valid(proto: onnx.ModelProto | Path) -> None:
    """Other runtimes may refuse what ONNX Runtime lets pass, such as a name that is made twice."""
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        raise ExportError(
            f"the exported graph is no valid ONNX, please report it: {in_a_line(error)}"
        ) from error
