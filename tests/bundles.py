"""Small models and bundles for the tests, and tools to tamper with them."""

import dataclasses
import hashlib
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch

from causal_encoder.export import export_onnx, export_program, export_torchscript
from causal_encoder.export.artifact import facts_of_onnx
from causal_encoder.export.prepare import prepare
from causal_encoder.export.trace import trace_onnx
from causal_encoder.model import CausalEncoder, EncoderConfig
from causal_encoder.serve import Manifest
from causal_encoder.serve.bundle import read_manifest
from causal_encoder.serve.manifest import File
from tests import tiny

POSITIONS = ("sinusoidal", "learned", "sinusoidal+learned", "none")
EXPORTERS: Mapping[str, Callable[..., Manifest]] = {
    "onnx": export_onnx,
    "torchscript": export_torchscript,
    "program": export_program,
}


def small_model(**fields: Any) -> CausalEncoder:
    """The same random weights each time, in eval mode."""
    settings = {"vocab_size": 13, "d_model": 12, "num_heads": 3, "num_layers": 2, "max_len": 17}
    return tiny.model(EncoderConfig(**(settings | fields)))


def random_ids(*shape: int) -> npt.NDArray[np.int64]:
    """The same ids of `small_model` each time."""
    return np.random.default_rng(0).integers(0, 13, shape, np.int64)


def operators_a_layer(precision: str, target: str) -> Mapping[str, int]:
    """How many operators of each type one more layer adds to a file."""

    def count(num_layers: int) -> Counter[str]:
        model = prepare(small_model(num_layers=num_layers))
        with torch.no_grad():
            return Counter(facts_of_onnx(trace_onnx(model, 23, precision, target)).operators)

    return count(2) - count(1)


def reseal(folder: Path, **changes: Any) -> None:
    """Make a tampered bundle whole again: hashes, sizes and digest fit what is there."""
    old = read_manifest(folder)
    files = {
        path.name: File(
            size_bytes=path.stat().st_size, sha256=hashlib.sha256(path.read_bytes()).hexdigest()
        )
        for path in sorted(folder.iterdir())
        if path.name != "manifest.json"
    }
    manifest = dataclasses.replace(old, **({"files": files} | changes))
    (folder / "manifest.json").write_text(manifest.to_json())


def tampered(
    bundle: Path, copy: Path, edit: Callable[[onnx.ModelProto], None], **changes: Any
) -> Path:
    """A copy of an ONNX bundle with an edited graph and hashes that fit it."""
    shutil.copytree(bundle, copy)
    proto = onnx.load(copy / "model.onnx")
    edit(proto)
    onnx.save(proto, copy / "model.onnx")
    reseal(copy, **changes)
    return copy
