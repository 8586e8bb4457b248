"""Reading an exported model file: what it says of itself, and running it bare.

The bare run goes past EncoderSession, to see what the file does by itself. TorchScript
and .pt2 files are code: open them only from a bundle whose hashes were checked.
"""

import dataclasses
import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import torch
from onnx import numpy_helper
from torch.export import ExportedProgram

from causal_encoder.export.prepare import INPUT, METADATA_EXTRA, OUTPUT_NAME
from causal_encoder.serve.cpu import available_cpus
from causal_encoder.serve.placement import CPU_PROVIDER, CUDA_OPTIONS, CUDA_PROVIDER

Array = npt.NDArray[Any]
Run = Callable[[Array], Array]

OPTIMIZATION_LEVELS = {
    "none": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
_ORT_LOG_FATAL = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What a model file says of itself.

    Attributes:
        operators: number of operators of each type.
        opset, ir_version: of an ONNX file.
        metadata: what the exporter wrote into it, see export/prepare.py.
        input_axes, output_axes: names of dynamic axes, sizes of fixed ones; None where
            the format fixes no axis (TorchScript).
    """

    operators: Counter[str]
    opset: int | None = None
    ir_version: int | None = None
    metadata: Mapping[str, str]
    input_axes: tuple[str | int, ...] | None = None
    output_axes: tuple[str | int, ...] | None = None


def read_facts(path: Path, format: str) -> Facts:  # noqa: A002  # the word of the manifest
    """Read a model file of the given format without running it."""
    return {"onnx": _onnx_facts, "torchscript": _script_facts, "program": _program_facts}[format](
        path
    )


def read_weights(path: Path, format: str) -> Mapping[str, str]:  # noqa: A002
    """Digest of each tensor that is stored in a model file, by name."""
    if format == "onnx":
        return {
            tensor.name: _digest(numpy_helper.to_array(tensor))
            for tensor in onnx.load(path).graph.initializer
        }
    state = (
        _load_script(path, {}).state_dict()
        if format == "torchscript"
        else _load_program(path, {}).state_dict
    )
    return digests(state)


def digests(state: Mapping[str, torch.Tensor]) -> Mapping[str, str]:
    """Digest of each tensor, as `read_weights` gives it."""
    return {name: _digest(tensor.detach().cpu()) for name, tensor in state.items()}


def _digest(values: Any) -> str:
    """Over shape and bits; a torch.Tensor may be of a type that NumPy does not know."""
    flat = (
        values.contiguous().flatten().view(torch.uint8).numpy()
        if isinstance(values, torch.Tensor)
        else np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    )
    digest = hashlib.sha256(repr(tuple(values.shape)).encode())
    digest.update(flat.data)
    return digest.hexdigest()


def open_bare(path: Path, format: str, device: str = "cpu") -> Run:  # noqa: A002
    """Load a model file with its own runtime: (B, T) int64 -> (B, T, D) float32.

    Args:
        path: the model file.
        format: "onnx", "torchscript" or "program"; the last two run on CPU.
        device: "cpu" or "cuda".
    """
    if format == "onnx":
        return open_onnx(path, device, "all", available_cpus())
    return _torch_run(
        _load_script(path, {}) if format == "torchscript" else _load_program(path, {}).module()
    )


def open_onnx(path: Path, device: str, level: str, threads: int) -> Run:
    """Load an ONNX file with a graph optimisation level and a number of threads."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = OPTIMIZATION_LEVELS[level]
    options.intra_op_num_threads = threads
    options.log_severity_level = _ORT_LOG_FATAL
    provider = (CUDA_PROVIDER, CUDA_OPTIONS) if device == "cuda" else CPU_PROVIDER
    session = onnxruntime.InferenceSession(path, options, providers=[provider], enable_fallback=0)

    def run(ids: Array) -> Array:
        hidden: Array = session.run([OUTPUT_NAME], {INPUT.name: ids})[0]
        return hidden

    return run


def _onnx_facts(path: Path) -> Facts:
    proto = onnx.load(path, load_external_data=False)
    (opset,) = (entry.version for entry in proto.opset_import if entry.domain == "")
    return Facts(
        operators=Counter(node.op_type for node in proto.graph.node),
        opset=opset,
        ir_version=proto.ir_version,
        metadata={prop.key: prop.value for prop in proto.metadata_props},
        input_axes=_axes(proto.graph.input[0]),
        output_axes=_axes(proto.graph.output[0]),
    )


def _axes(value: onnx.ValueInfoProto) -> tuple[str | int, ...]:
    return tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim)


def _load_script(path: Path, extra: dict[str, Any]) -> torch.jit.ScriptModule:
    with warnings.catch_warnings(), path.open("rb") as file:
        warnings.filterwarnings("ignore", ".*torch.jit.*", DeprecationWarning)
        return torch.jit.load(file, map_location="cpu", _extra_files=extra)  # type: ignore[no-untyped-call]


def _script_facts(path: Path) -> Facts:
    extra: dict[str, Any] = {METADATA_EXTRA: ""}
    scripted = _load_script(path, extra)
    operators: Counter[str] = Counter()
    pending = list(scripted.inlined_graph.nodes())
    while pending:
        node = pending.pop()
        if node.kind().startswith("aten::"):
            operators[node.kind()] += 1
        for block in node.blocks():
            pending.extend(block.nodes())
    return Facts(operators=operators, metadata=json.loads(extra[METADATA_EXTRA]))


def _load_program(path: Path, extra: dict[str, Any]) -> ExportedProgram:
    with path.open("rb") as file:
        return torch.export.load(file, extra_files=extra)


def _program_facts(path: Path) -> Facts:
    extra: dict[str, Any] = {METADATA_EXTRA: ""}
    program = _load_program(path, extra)
    nodes = program.graph_module.graph.nodes
    (ids,) = (node for node in nodes if node.name in program.graph_signature.user_inputs)
    return Facts(
        operators=Counter(str(node.target) for node in nodes if node.op == "call_function"),
        metadata=json.loads(extra[METADATA_EXTRA]),
        input_axes=tuple(
            name if isinstance(size, torch.SymInt) else int(size)
            for name, size in zip(INPUT.axes, ids.meta["val"].shape, strict=True)
        ),
    )


def _torch_run(module: Callable[[torch.Tensor], torch.Tensor]) -> Run:
    def run(ids: Array) -> Array:
        with torch.no_grad():
            return np.asarray(module(torch.from_numpy(ids)))

    return run
