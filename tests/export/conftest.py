"""Bundles that several tests read; a test that changes one works on a copy."""

from collections.abc import Callable
from pathlib import Path

import pytest

from causal_encoder.model import CausalEncoder
from tests.bundles import EXPORTERS, small_model

Exported = tuple[CausalEncoder, Path]


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Exported]:
    """(format, position) -> the model and its bundle, exported once a session."""
    cache: dict[tuple[str, str], Exported] = {}
    root = tmp_path_factory.mktemp("bundles")

    def get(kind: str, position: str) -> Exported:
        key = (kind, position)
        if key not in cache:
            model = small_model(position=position)
            EXPORTERS[kind](model, root / f"{kind}-{position}")
            cache[key] = model, root / f"{kind}-{position}"
        return cache[key]

    return get
