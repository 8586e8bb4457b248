"""What every test shares: versions in the header, fixed seeds, the gpu marker, one small model."""

import contextlib
import functools
import importlib
import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import hypothesis
import pytest
import torch

from causal_encoder.model import CausalEncoder
from tests import tiny

# The same examples on every run and every machine.
hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("repeatable")

# Handing the rows of these models to other threads costs more than computing them.
torch.set_num_threads(1)


def pytest_report_header() -> str:
    """Name the versions that decide whether a number changes."""
    versions = {"python": platform.python_version()}
    for name in ("torch", "onnx", "onnxruntime", "numpy"):
        versions[name] = _version(name)
    return "versions: " + ", ".join(f"{name} {version}" for name, version in versions.items())


def _version(name: str) -> str:
    for distribution in (name, f"{name}-gpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "missing"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked gpu where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def _operators_are_read_once() -> Iterator[None]:
    """torch reads its table of ONNX operators anew for each export, half a second a time."""
    export = torch.onnx.export

    def quicker(*args: Any, **options: Any) -> Any:
        with contextlib.suppress(ImportError, AttributeError):  # it is not public
            module = importlib.import_module("torch.onnx._internal.exporter._registration")
            if not hasattr(module.ONNXRegistry.from_torchlib, "cache_info"):
                read = functools.cache(module.ONNXRegistry.from_torchlib)
                module.ONNXRegistry.from_torchlib = staticmethod(read)
        return export(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.onnx, "export", quicker)
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def tiny_model() -> CausalEncoder:
    """Two blocks, sinusoidal positions, random weights, eval mode."""
    return tiny.model(tiny.config())
