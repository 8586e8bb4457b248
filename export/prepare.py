"""What every exporter starts from: a private copy of the model, and its metadata."""

import contextlib
import dataclasses
import json
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import version

import onnxruntime
import torch

from causal_encoder import __version__
from causal_encoder.errors import ConfigError, ExportError
from causal_encoder.model import CausalEncoder, EncoderConfig
from causal_encoder.serve.manifest import Tensor
from causal_encoder.serve.placement import first_line

_ALIKE_LENGTH = 16
# Relative L2 differences; the model may be on a GPU, and in half precision.
_ALIKE_LIMITS = {
    torch.float64: 1e-3,
    torch.float32: 1e-3,
    torch.float16: 5e-2,
    torch.bfloat16: 2e-1,
}
# The one table of names: example inputs, graph inputs and the manifest are made from it.
INPUT = Tensor(name="input_ids", dtype="int64", axes=("batch", "sequence"))
OUTPUT_NAME = "hidden"
CONTRIB_DOMAIN = "com.microsoft"  # of operators that only ONNX Runtime has
# The oldest ONNX Runtime that exported files were tested with.
MIN_ONNXRUNTIME = "1.28.0"
CONFIG_EXTRA = "config.json"
METADATA_EXTRA = "metadata.json"


def output_of(config: EncoderConfig) -> Tensor:
    """The output: (batch, sequence, D) float32."""
    return Tensor(name=OUTPUT_NAME, dtype="float32", axes=(*INPUT.axes, config.d_model))


def prepare(model: CausalEncoder, max_len: int | None = None) -> CausalEncoder:
    """Copy a model for export: float32, on CPU, eval mode, no dropout, max_len as asked.

    The caller's model is left as it is, its training mode too.

    Args:
        model: the trained model.
        max_len: the longest sequence of the export; the model's own if not given.

    Raises:
        ExportError: it is no CausalEncoder, max_len cannot be changed, or a weight is not finite.
    """
    check_encoder(model)
    config = exported_config(model.config, max_len)
    try:
        with torch.device("cpu"):
            copy = CausalEncoder(config)
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:
        raise ExportError(
            f"a model of max_len {config.max_len} cannot be built: {first_line(error)}"
        ) from error
    state = model.state_dict()
    for name, tensor in state.items():
        if not bool(tensor.isfinite().all()):
            raise ExportError(f"{name} holds NaN or infinity; export a checkpoint that is whole")
    try:
        copy.load_state_dict(state)
    except RuntimeError as error:  # pruned, parametrized, with a part added or replaced
        reason = " ".join(str(error).split())
        raise ExportError(f"the weights are not those of its config: {reason[:200]}") from error
    copy.eval().requires_grad_(False)
    _check_alike(model, copy)
    return copy


def _check_alike(model: CausalEncoder, copy: CausalEncoder) -> None:
    """Refuse a model that was altered in what its config and weights do not tell.

    A subclass, a hook, another activation or eps in a layer: the copy has none of them, and
    every later check is made against the copy.
    """
    config = copy.config
    generator = torch.Generator().manual_seed(0)
    shape = (2, min(config.max_len, model.config.max_len, _ALIKE_LENGTH))
    ids = torch.randint(config.vocab_size, shape, generator=generator)
    device = model.token_embedding.weight.device
    training = {module: module.training for module in model.modules()}
    with exact_arithmetic():
        try:
            own = model.eval()(ids.to(device)).cpu().double()
        except Exception as error:  # an altered model raises what it likes
            raise ExportError(f"the model does not run: {in_a_line(error)}") from error
        finally:
            for module, mode in training.items():
                module.training = mode
        expected = copy(ids).double()
    if own.shape != expected.shape:
        difference = float("inf")
    else:
        difference = float((own - expected).norm() / expected.norm().clamp_min(1e-30))
    limit = _ALIKE_LIMITS.get(model.token_embedding.weight.dtype, 0.0)
    if not difference <= limit and bool(expected.isfinite().all()):
        raise ExportError(
            f"the model computes something else than its config and weights say, by "
            f"{difference:.2g} of its output: it has a hook, a changed part or another forward; "
            "undo that, or put it into the weights"
        )


def in_a_line(error: Exception) -> str:
    """Type and first line of what onnx or torch raised; they raise what they like."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def check_encoder(model: object) -> None:
    """Refuse another kind of module before it fails somewhere inside."""
    if not isinstance(model, CausalEncoder):
        raise ExportError(
            f"model is {type(model).__name__}, expected a CausalEncoder; convert it with "
            "causal_encoder.model.from_torch_encoder"
        )


@contextlib.contextmanager
def exact_arithmetic() -> Iterator[None]:
    """What is exported and measured is fp32, whatever the caller has switched on."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast("cpu", enabled=False), torch.no_grad():
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def exported_config(config: EncoderConfig, max_len: int | None) -> EncoderConfig:
    """The config of the export: without dropout, and with another max_len if asked.

    Raises:
        ExportError: max_len is not valid, or a learned table fixes it.
    """
    length = config.max_len if max_len is None else max_len
    if length != config.max_len and config.has_learned:
        raise ExportError(
            f"max_len {length} was asked for, but the learned position table has "
            f"{config.max_len} rows and no others were trained; leave max_len (--max-len) out"
        )
    try:
        return dataclasses.replace(config, max_len=length, dropout=0.0)
    except ConfigError as error:
        raise ExportError(str(error)) from error


def metadata(config: EncoderConfig, precision: str, target: str) -> Mapping[str, str]:
    """What the model file says of itself, for those who load it without the bundle."""
    return {
        "causal_encoder.version": __version__,
        "causal_encoder.vocab_size": str(config.vocab_size),
        "causal_encoder.max_len": str(config.max_len),
        "causal_encoder.d_model": str(config.d_model),
        "causal_encoder.position": config.position,
        "causal_encoder.precision": precision,
        "causal_encoder.target": target,
    }


def extra_files(config: EncoderConfig) -> dict[str, str]:
    """The same and the config, as the extra files of TorchScript and .pt2 archives."""
    return {
        CONFIG_EXTRA: json.dumps(config.to_dict()),
        METADATA_EXTRA: json.dumps(metadata(config, "fp32", "portable")),
    }


def tool_versions() -> Mapping[str, str]:
    """Versions of what makes and checks a bundle."""
    return {
        "causal-encoder": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "onnx": version("onnx"),
        "onnxscript": version("onnxscript"),
        "onnxruntime": onnxruntime.__version__,
    }
