"""Bundles that several tests read; a test that changes one works on a copy."""

from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import pytest

from causal_encoder.export import subject
from causal_encoder.export.trace import trace_onnx
from causal_encoder.model import CausalEncoder, fingerprint
from tests.bundles import EXPORTERS, small_model

Exported = tuple[CausalEncoder, Path]


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Exported]:
    """(format, position) -> the model and its bundle, exported once a session."""
    cache: dict[tuple[str, str], Exported] = {}
    root = tmp_path_factory.mktemp("a b é日本")  # so that no format needs paths in ASCII

    def get(kind: str, position: str) -> Exported:
        key = (kind, position)
        if key not in cache:
            model = small_model(position=position)
            EXPORTERS[kind](model, root / f"{kind}-{position}")
            cache[key] = model, root / f"{kind}-{position}"
        return cache[key]

    return get


@pytest.fixture(scope="session", autouse=True)
def _trace_each_model_once() -> Iterator[None]:
    """Verifying traces the model again, a second each time, and the tests verify few models."""
    cache: dict[object, onnx.ModelProto] = {}

    def trace(model: CausalEncoder, *form: object) -> onnx.ModelProto:
        key = (fingerprint(model), model.config, *form)
        if key not in cache:
            cache[key] = trace_onnx(model, *form)  # type: ignore[arg-type]
        return cache[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subject, "trace_onnx", trace)
        yield
