"""Reading an exported model file: what it says of itself, and running it bare.

The bare run goes past EncoderSession, to see what the file does by itself. TorchScript
and .pt2 files are code: open them only from a bundle whose hashes were checked.
"""

import dataclasses
import hashlib
import json
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from inspect import isbuiltin
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import torch
from onnx import numpy_helper
from torch.export import ExportedProgram

from causal_encoder.errors import BundleError
from causal_encoder.export.prepare import INPUT, METADATA_EXTRA, OUTPUT_NAME, in_a_line
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
_WHERE_VALUES_ARE = {"raw_data", "external_data", "data_location"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What a model file is, read without running it.

    Attributes:
        operators: number of operators of each type.
        opset, ir_version: of an ONNX file.
        metadata: what the exporter wrote into it, see export/prepare.py.
        input_axes, output_axes: names of dynamic axes, sizes of fixed ones; None where
            the format fixes no axis (TorchScript).
        graph: everything the file computes, without the values of its tensors: one line a
            node or declaration. Two files with the same lines compute the same function of
            their tensors.
        weights: digest of each tensor in the file, by name.
    """

    operators: Counter[str]
    opset: int | None = None
    ir_version: int | None = None
    metadata: Mapping[str, str]
    input_axes: tuple[str | int, ...] | None = None
    output_axes: tuple[str | int, ...] | None = None
    graph: tuple[str, ...]
    weights: Mapping[str, str]


def read_facts(path: Path, format: str) -> Facts:  # noqa: A002  # the word of the manifest
    """Read a model file of the given format without running it.

    Raises:
        BundleError: it cannot be read.
    """
    try:
        if format == "onnx":
            return facts_of_onnx(onnx.load(path, load_external_data=False), path.parent)
        with path.open("rb") as file:
            return facts_of_archive(file, format)
    except BundleError:
        raise
    except Exception as error:  # onnx and torch raise what they like for a file that is odd
        raise BundleError(f"{path} cannot be read: {in_a_line(error)}") from error


def facts_of_onnx(proto: onnx.ModelProto, folder: Path | None = None) -> Facts:
    """What an ONNX model is.

    Args:
        proto: the model.
        folder: where the files are that it names; it has all of its data if not given.
    """
    (opset,) = (entry.version for entry in proto.opset_import if entry.domain == "")
    return Facts(
        operators=Counter(node.op_type for node in all_nodes(proto.graph)),
        opset=opset,
        ir_version=proto.ir_version,
        metadata={prop.key: prop.value for prop in proto.metadata_props},
        input_axes=_axes(proto.graph.input[0]),
        output_axes=_axes(proto.graph.output[0]),
        graph=tuple(_onnx_lines(proto)),
        weights={
            tensor.name: _digest(_values(tensor, folder)) for tensor in proto.graph.initializer
        },
    )


def facts_of_archive(file: BinaryIO, format: str) -> Facts:  # noqa: A002
    """What a TorchScript or torch.export archive is."""
    extra: dict[str, Any] = {METADATA_EXTRA: ""}
    if format == "torchscript":
        return _script_facts(_load_script(file, extra), json.loads(extra[METADATA_EXTRA]))
    program = torch.export.load(file, extra_files=extra)
    return _program_facts(program, json.loads(extra[METADATA_EXTRA]), zipfile.ZipFile(file))


def _script_facts(scripted: torch.jit.ScriptModule, metadata: Mapping[str, str]) -> Facts:
    operators: Counter[str] = Counter()
    pending = list(scripted.inlined_graph.nodes())
    while pending:
        node = pending.pop()
        if node.kind().startswith("aten::"):
            operators[node.kind()] += 1
        for block in node.blocks():
            pending.extend(block.nodes())
    return Facts(
        operators=operators,
        metadata=metadata,
        graph=tuple(_script_lines(scripted)),
        weights=_digests(scripted.state_dict() | dict(scripted.named_buffers())),
    )


def _program_facts(
    program: ExportedProgram, metadata: Mapping[str, str], archive: zipfile.ZipFile
) -> Facts:
    nodes = program.graph_module.graph.nodes
    (ids,) = (node for node in nodes if node.name in program.graph_signature.user_inputs)
    return Facts(
        operators=Counter(
            getattr(node.target, "__name__", "") if isbuiltin(node.target) else str(node.target)
            for node in nodes
            if node.op == "call_function"
        ),
        metadata=metadata,
        input_axes=tuple(
            name if isinstance(size, torch.SymInt) else int(size)
            for name, size in zip(INPUT.axes, ids.meta["val"].shape, strict=True)
        ),
        graph=tuple(_program_lines(archive)),
        weights=_digests(program.state_dict | program.constants),
    )


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """With those in the bodies of loops and branches."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                yield from all_nodes(body)


def _onnx_lines(proto: onnx.ModelProto) -> Iterator[str]:
    """Nodes with all they hold, by their digests; tensors by name, type and shape."""
    graph = proto.graph
    yield f"ir {proto.ir_version}"
    for prop in proto.metadata_props:
        if not prop.key.endswith(".version"):
            yield f"metadata {prop.key} {prop.value}"
    for kind, parts in (
        ("opset", proto.opset_import),
        ("function", proto.functions),
        ("input", graph.input),
        ("output", graph.output),
        ("value", graph.value_info),
        ("sparse tensor", graph.sparse_initializer),
        ("quantization", graph.quantization_annotation),
    ):
        for part in parts:
            yield f"{kind} {_digest_of(part)}"
    for tensor in graph.initializer:
        # Where the values are is not part of it, but a second set of them would be.
        fields = sorted({field.name for field, _ in tensor.ListFields()} - _WHERE_VALUES_ARE)
        yield f"tensor {tensor.name} {tensor.data_type} {list(tensor.dims)} {fields}"
    for node in graph.node:
        yield f"{node.op_type} {node.name} {_digest_of(node)}"


def _values(tensor: onnx.TensorProto, folder: Path | None) -> Array:
    """The array of a tensor, wherever it is.

    onnx itself refuses a data file that has a second name (hard link). Here its hash was
    checked, and what counts is that it is read from inside the bundle.
    """
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return numpy_helper.to_array(tensor)
    where = {entry.key: entry.value for entry in tensor.external_data}
    location = where["location"]
    if folder is None or Path(location).name != location:
        raise BundleError(f"{tensor.name} is stored in {location!r}, outside of the bundle")
    if odd := set(where) - {"location", "offset", "length"}:
        # ONNX Runtime takes weights it once packed from there, in place of these.
        raise BundleError(f"{tensor.name} has an entry {min(odd)!r} beside where its values are")
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    offset, shape = int(where.get("offset", 0)), tuple(tensor.dims)
    return np.memmap(folder / location, dtype, "r", offset, shape)


def _digest_of(part: Any) -> str:
    return hashlib.sha256(part.SerializeToString(deterministic=True)).hexdigest()[:16]


def _script_lines(scripted: torch.jit.ScriptModule) -> Iterator[str]:
    """Every method of every module, its attributes and its hooks.

    Names of values and classes are numbered anew by each loading.
    """
    for name, module in scripted.named_modules():
        for hook in (*module._c._get_forward_pre_hooks(), *module._c._get_forward_hooks()):
            yield f"hook {name} {hook.name}"
    numbers: dict[str, str] = {}
    for line in scripted._c.dump_to_str(True, True, False).splitlines():
        code = re.sub(r"___torch_mangle_\d+\.| +# .*| at 0x[0-9a-f]+", "", line)
        if code.lstrip().startswith("method "):
            numbers.clear()
        yield re.sub(
            r"%[\w.]+", lambda name: numbers.setdefault(name[0], f"%{len(numbers)}"), code
        ).strip()


def _program_lines(archive: zipfile.ZipFile) -> Iterator[str]:
    """The names in the archive and its JSON files, without the notes of where code came from."""
    for name in sorted(archive.namelist()):
        place = name.partition("/")[2]
        if place.endswith(".json") and not place.startswith("extra/"):
            fields = json.loads(archive.read(name), object_hook=_without_notes)
            for key in sorted(fields):
                yield f"{place} {key} {json.dumps(fields[key], sort_keys=True)}"
        else:
            yield place


def _without_notes(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != "metadata"}


def _digests(state: Mapping[str, Any]) -> Mapping[str, str]:
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
    with path.open("rb") as file:
        if format == "torchscript":
            return _torch_run(_load_script(file, {}))
        return _torch_run(torch.export.load(file).module())


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


def _axes(value: onnx.ValueInfoProto) -> tuple[str | int, ...]:
    return tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim)


def _load_script(file: BinaryIO, extra: dict[str, Any]) -> torch.jit.ScriptModule:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.*", DeprecationWarning)
        return torch.jit.load(file, map_location="cpu", _extra_files=extra)  # type: ignore[no-untyped-call]


def _torch_run(module: Callable[[torch.Tensor], torch.Tensor]) -> Run:
    def run(ids: Array) -> Array:
        with torch.no_grad():
            return np.asarray(module(torch.from_numpy(ids)))

    return run
