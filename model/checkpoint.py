"""Checkpoints: a folder with config.json and model.safetensors.

A state dict saved by torch (model.pt) is read too, without running code from it.
"""

import contextlib
import hashlib
import json
import logging
import os
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from causal_encoder.errors import CheckpointError, ConfigError
from causal_encoder.model.config import EncoderConfig
from causal_encoder.model.encoder import CausalEncoder

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
TORCH_WEIGHTS_FILE = "model.pt"
_SEAL = "causal_encoder"  # metadata of the weights file: their config and hash
_BUNDLE_FILE = "manifest.json"
_TABLE_LIMIT = 2**30  # numbers of a sinusoidal table, 4 GiB; the weights do not bound it
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WRAPPER_PREFIXES = ("module", "_orig_mod")  # DistributedDataParallel, torch.compile

_logger = logging.getLogger(__name__)


def save_checkpoint(model: CausalEncoder, path: str | os.PathLike[str]) -> None:
    """Write config.json and model.safetensors into the folder `path`, made if missing.

    Each file is written beside its place and moved onto it, so neither is ever half
    there. The config is stored in the weights file too: loading refuses a pair that was
    not saved together, as after a save that was cut off between the two files.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    folder = Path(path)
    config = json.dumps(model.config.to_dict(), indent=2)
    tensors = _apart({n: t.detach().cpu().contiguous() for n, t in model.state_dict().items()})
    # One entry: safetensors writes several in an order that changes from run to run.
    seal = json.dumps({"config": model.config.to_dict(), "sha256": _hash(tensors)})
    weights = safetensors.torch.save(tensors, metadata={_SEAL: seal})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_whole(
            {folder / WEIGHTS_FILE: weights, folder / CONFIG_FILE: (config + "\n").encode()}
        )
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error


def load_checkpoint(path: str | os.PathLike[str]) -> CausalEncoder:
    """Read a checkpoint folder into a model in eval mode, float32 on CPU.

    Wrapper prefixes (`module.`, `_orig_mod.`, nested or inside a name) are stripped and
    the fact is logged as a warning. Keys and shapes must then fit the config exactly.

    Raises:
        CheckpointError: a file is missing, damaged, or does not fit the config.
    """
    folder = Path(path)
    if not os.path.isdir(folder):  # noqa: PTH112  # false for a bad name, no error
        raise CheckpointError(
            f"{folder} is not a folder; a checkpoint is a folder with {CONFIG_FILE} "
            f"and {WEIGHTS_FILE}"
        )
    # os.path: no error for a folder that may not be entered, which is told below.
    if os.path.isfile(folder / _BUNDLE_FILE) and not os.path.isfile(folder / CONFIG_FILE):  # noqa: PTH113
        raise CheckpointError(
            f"{folder} is a bundle, not a checkpoint; pass the folder with {CONFIG_FILE}"
        )
    config = _read_config(folder / CONFIG_FILE)
    state = _strip_prefixes(_read_weights(folder, config))
    if config.num_layers > max(len(state), 1000):  # would build blocks until memory runs out
        raise CheckpointError(
            f"{folder}: {CONFIG_FILE} says num_layers {config.num_layers}, but the weights have "
            f"{len(state)} tensors in all"
        )
    # Names and shapes alone at first, so that no size is believed that the weights do not have.
    _check_fit(state, _build(config, "meta", folder).state_dict(), folder)
    if config.has_sinusoidal and config.max_len * config.d_model > _TABLE_LIMIT:
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: max_len {config.max_len} needs a position table of "
            f"{config.max_len} x {config.d_model}, over the limit of {_TABLE_LIMIT} numbers; "
            f"lower it to {_TABLE_LIMIT // config.d_model} or less"
        )
    model = _build(config, "cpu", folder)
    model.load_state_dict(state)
    return model.eval()


def _apart(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights that share memory, as layers used twice do, as copies: the file has no sharing."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in state.items():
        apart[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return apart


def _build(config: EncoderConfig, device: str, folder: Path) -> CausalEncoder:
    try:
        with torch.device(device):
            return CausalEncoder(config)
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: a model of these sizes cannot be built: {_first_line(error)}"
        ) from error


def fingerprint(model: CausalEncoder) -> str:
    """SHA-256 over what the model computes: its config and every weight, bit for bit.

    max_len is left out unless a learned table fixes it, so a bundle exported with a
    raised max_len still names the checkpoint it came from.
    """
    config = model.config.to_dict() | {"max_len": None, "dropout": None}
    about = json.dumps(config, sort_keys=True) + _hash(model.state_dict())
    return hashlib.sha256(about.encode()).hexdigest()


def _hash(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and every bit of the weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _write_whole(files: Mapping[Path, bytes]) -> None:
    """Replace the files once all are written, through temporary files in the same folder."""
    staged: dict[str, Path] = {}
    try:
        for path, content in files.items():
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            staged[temporary] = path
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(0o666 & ~_umask())
        for temporary, path in staged.items():
            os.replace(temporary, path)
    except BaseException:
        for temporary in staged:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
        raise


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _read_config(path: Path) -> EncoderConfig:
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for without end
            raise CheckpointError(f"{path} is not a regular file")
        fields = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return _config_from(fields, path)


def _config_from(fields: Any, source: Path) -> EncoderConfig:
    if not isinstance(fields, dict):
        raise CheckpointError(f"{source} holds {type(fields).__name__}, expected a JSON object")
    try:
        return EncoderConfig.from_dict(fields)
    except ConfigError as error:
        raise CheckpointError(f"{source}: {error}") from error


def _read_weights(folder: Path, config: EncoderConfig) -> dict[str, Tensor]:
    safe, pickled = folder / WEIGHTS_FILE, folder / TORCH_WEIGHTS_FILE
    for path in (safe, pickled):
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path} is not a regular file")
    if safe.exists() and pickled.exists():
        raise CheckpointError(
            f"{folder} has both {WEIGHTS_FILE} and {TORCH_WEIGHTS_FILE}; remove the outdated one"
        )
    if safe.exists():
        return _read_safetensors(safe, config)
    if pickled.exists():
        return _read_torch_state(pickled)
    raise CheckpointError(f"{safe} is missing")


def _read_safetensors(path: Path, config: EncoderConfig) -> dict[str, Tensor]:
    try:
        path.open("rb").close()  # safetensors says of every error that there is no such file
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if _SEAL in metadata:  # files of other tools have none
        try:
            seal = json.loads(metadata[_SEAL])
            saved = _config_from(seal["config"], path)
            whole = seal["sha256"] == _hash(state)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: its metadata cannot be read") from error
        if not whole:
            raise CheckpointError(
                f"{path} is damaged: its weights do not fit the hash saved with them"
            )
        _check_same_config(config, saved, path)
    return state


def _check_same_config(config: EncoderConfig, saved: EncoderConfig, weights: Path) -> None:
    for name, value in config.to_dict().items():
        if value != getattr(saved, name):
            raise CheckpointError(
                f"{weights} was saved with {name} {getattr(saved, name)!r} but "
                f"{CONFIG_FILE} says {value!r}; save both again with save_checkpoint"
            )


def _read_torch_state(path: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors and is not opened, because that could run code; "
            "save model.state_dict() alone"
        ) from error
    except Exception as error:  # torch raises many types for a damaged archive
        raise CheckpointError(f"{path} cannot be read: {_first_line(error)}") from error
    if not isinstance(state, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
    ):
        raise CheckpointError(f"{path} is not a state dict; save model.state_dict() alone")
    return dict(state)


def _strip_prefixes(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    stripped: dict[str, Tensor] = {}
    renamed = 0
    for name, tensor in state.items():
        parts = name.split(".")
        clean = ".".join(part for part in parts if part not in _WRAPPER_PREFIXES)
        if clean in stripped:
            raise CheckpointError(
                f"{name!r} and another tensor are both {clean!r} without their wrapper "
                "prefixes; keep one"
            )
        renamed += clean != name
        stripped[clean] = tensor
    if renamed:
        _logger.warning(
            "stripped the wrapper prefixes module. and _orig_mod. from %d of %d tensor names",
            renamed,
            len(state),
        )
    return stripped


def _check_fit(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], folder: Path) -> None:
    missing = sorted(set(expected) - set(found))
    unexpected = sorted(set(found) - set(expected))
    if missing or unexpected:
        parts = [
            f"{len(names)} {kind} (first: {names[0]})"
            for kind, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise CheckpointError(
            f"{folder}: weights do not fit {CONFIG_FILE}: tensors {' and '.join(parts)}"
        )
    for name, tensor in found.items():
        if tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta:
            raise CheckpointError(f"{folder}: {name} is sparse or empty, expected all its numbers")
        if tensor.shape != expected[name].shape:
            raise CheckpointError(
                f"{folder}: {name} has shape {tuple(tensor.shape)}, but {CONFIG_FILE} asks "
                f"for {tuple(expected[name].shape)}"
            )
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"{folder}: {name} is {tensor.dtype}, expected float16, bfloat16, float32 or "
                "float64 (quantised weights need their scales applied first)"
            )
        if bool((tensor.isfinite() & ~tensor.float().isfinite()).any()):
            raise CheckpointError(f"{folder}: {name} holds numbers beyond the float32 range")
