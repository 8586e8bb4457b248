"""One small ONNX bundle, exported once, and what its model says of every input."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from causal_encoder.export import export_onnx, export_torchscript
from causal_encoder.model import CausalEncoder
from causal_encoder.serve import EncoderSession
from tests.bundles import small_model

Array = npt.NDArray[np.float32]


@pytest.fixture(scope="session")
def model() -> CausalEncoder:
    """V = 37, L = 24, D = 12."""
    return small_model(vocab_size=37, max_len=24)


@pytest.fixture(scope="session")
def bundle(model: CausalEncoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its ONNX bundle, alone in a folder; not to be changed."""
    folder = tmp_path_factory.mktemp("onnx") / "bundle"
    export_onnx(model, folder)
    return folder


@pytest.fixture(scope="session")
def scripted_bundle(model: CausalEncoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its TorchScript bundle."""
    folder = tmp_path_factory.mktemp("torchscript") / "bundle"
    export_torchscript(model, folder)
    return folder


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    """A copy of the ONNX bundle to damage, alone in a folder."""
    return shutil.copytree(bundle, tmp_path / "home" / "bundle")


@pytest.fixture(scope="session")
def session(bundle: Path) -> EncoderSession:
    """The bundle opened on CPU."""
    return EncoderSession(bundle, "cpu")


@pytest.fixture(scope="session")
def cutting_session(bundle: Path) -> EncoderSession:
    """The same, cutting what is too long."""
    return EncoderSession(bundle, "cpu", overflow="truncate")


@pytest.fixture(scope="session")
def reference(model: CausalEncoder) -> Callable[[object], Array]:
    """The trained model itself, run by PyTorch."""

    def run(ids: object) -> Array:
        with torch.no_grad():
            return model(torch.as_tensor(np.asarray(ids, np.int64))).numpy()

    return run
