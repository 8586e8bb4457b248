"""The torch.export file, opened with nothing but torch."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from causal_encoder.export import export_program
from tests.bundles import POSITIONS, small_model
from tests.export.conftest import Exported


def test_config_and_limits_travel_in_the_extra_files(
    exported: Callable[[str, str], Exported],
) -> None:
    model, bundle = exported("program", "sinusoidal")
    extra = {"config.json": "", "metadata.json": ""}
    torch.export.load(bundle / "model.pt2", extra_files=extra)
    assert json.loads(extra["config.json"]) == model.config.to_dict()
    assert json.loads(extra["metadata.json"])["causal_encoder.max_len"] == "17"


@pytest.mark.parametrize("position", POSITIONS)
def test_what_eager_refuses_the_program_refuses(
    position: str, exported: Callable[[str, str], Exported]
) -> None:
    _, bundle = exported("program", position)
    program = torch.export.load(bundle / "model.pt2").module()
    for ids in (
        torch.zeros(1, 18, dtype=torch.int64),
        torch.zeros(1, 0, dtype=torch.int64),
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(1, 2, 3, dtype=torch.int64),
        torch.zeros(1, 1, 1, dtype=torch.int64),
        torch.zeros(2, 1, 1, dtype=torch.int64),
        torch.zeros(1, 3),
        torch.zeros(1, 3, dtype=torch.bool),
        torch.tensor([[13]]),
        torch.tensor([[-1]]),
        torch.tensor([[2**40]]),
    ):
        with pytest.raises((AssertionError, RuntimeError, IndexError, ValueError)):
            program(ids)
    assert program(torch.zeros(1, 17, dtype=torch.int64)).shape == (1, 17, 12)


@pytest.mark.parametrize("max_len", [1, 2, 3, 4])
def test_short_limits_are_exact(max_len: int, tmp_path: Path) -> None:
    export_program(small_model(max_len=max_len), tmp_path / "bundle")
    program = torch.export.load(tmp_path / "bundle" / "model.pt2").module()
    for length in range(1, max_len + 1):
        assert program(torch.zeros(5, length, dtype=torch.int64)).shape == (5, length, 12)
    with pytest.raises(AssertionError):
        program(torch.zeros(5, max_len + 1, dtype=torch.int64))
