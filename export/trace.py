"""From a prepared model to each format in memory, before anything is written.

The exporters write what these functions give, and `verify` compares a file with what they
give again: they are deterministic under the same versions of the tools.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping

import onnx
import torch
from torch import Tensor, nn
from torch.export import Dim

from causal_encoder.export.artifact import all_nodes
from causal_encoder.export.chunked import chunk_layers
from causal_encoder.export.fused_cuda import fuse_bias_gelus, fuse_residual_norms
from causal_encoder.export.int8 import quantize_products
from causal_encoder.export.padded import pad_hidden_rows
from causal_encoder.export.prepare import (
    CONTRIB_DOMAIN,
    INPUT,
    OUTPUT_NAME,
    extra_files,
    metadata,
)
from causal_encoder.export.wrapper import DTYPES, OnnxEncoder
from causal_encoder.model import CausalEncoder

# What is done to the plain graph for a target, in this order.
_REWRITES: Mapping[str, tuple[Callable[[onnx.ModelProto], None], ...]] = {
    "portable": (),
    "cpu": (pad_hidden_rows, chunk_layers),
    "cuda": (fuse_residual_norms, fuse_bias_gelus),
}
OPSETS = range(18, 24)
IR_VERSION = 10  # readable by every ONNX Runtime we support; onnx's own default is not


def trace_onnx(model: CausalEncoder, opset: int, precision: str, target: str) -> onnx.ModelProto:
    """The ONNX graph of a model, its limits in its metadata.

    Args:
        model: a prepared model.
        opset: version of the ai.onnx operator set.
        precision: type of the weights.
        target: what the graph is written for, see TARGETS in serve/manifest.py.
    """
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
    if precision == "int8":
        quantize_products(proto, fused=target == "cpu")
    for rewrite in _REWRITES[target]:
        rewrite(proto)
    if any(node.domain == CONTRIB_DOMAIN for node in all_nodes(proto.graph)):
        proto.opset_import.append(onnx.helper.make_opsetid(CONTRIB_DOMAIN, 1))
    for key, value in metadata(model.config, precision, target).items():
        proto.metadata_props.add(key=key, value=value)
    return proto


def trace_script(model: CausalEncoder) -> bytes:
    """The TorchScript archive of a model; the checks in forward stay alive."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.*", DeprecationWarning)
        scripted = torch.jit.script(model)
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer, _extra_files=extra_files(model.config))
    return buffer.getvalue()


def trace_program(model: CausalEncoder) -> bytes:
    """The torch.export archive (.pt2) of a model."""
    # With max_len 1 the axis has one valid size, which torch.export wants to be fixed.
    max_len = model.config.max_len
    length = Dim(str(INPUT.axes[1]), min=1, max=max_len) if max_len > 1 else Dim.STATIC
    # Sizes that differ, and are not 1 where they need not be.
    example = torch.zeros(2, min(3, max_len), dtype=torch.int64)
    axes = {0: Dim(str(INPUT.axes[0]), min=0), 1: length}
    program = torch.export.export(_NonEmpty(model), (example,), dynamic_shapes=(axes,))
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files=extra_files(model.config))
    return buffer.getvalue()


# How the archive of a format is made.
ARCHIVES: Mapping[str, Callable[[CausalEncoder], bytes]] = {
    "torchscript": trace_script,
    "program": trace_program,
}


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
