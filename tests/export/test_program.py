"""The torch.export file, opened with nothing but torch."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from causal_encoder.export import export_program
from causal_encoder.serve import open_bundle
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


def test_every_operator_is_listed_by_a_name(exported: Callable[[str, str], Exported]) -> None:
    _, bundle = exported("program", "sinusoidal")
    with open_bundle(bundle) as opened:
        names = opened.manifest.operators
    assert names["aten.scaled_dot_product_attention.default"] == 2
    assert [name for name in names if not re.fullmatch(r"[a-zA-Z0-9_.]+", name)] == []


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


def test_an_empty_batch_gives_an_empty_result(exported: Callable[[str, str], Exported]) -> None:
    _, bundle = exported("program", "sinusoidal")
    program = torch.export.load(bundle / "model.pt2").module()
    assert program(torch.zeros(0, 5, dtype=torch.int64)).shape == (0, 5, 12)


@pytest.mark.parametrize("position", POSITIONS)
def test_no_device_is_written_into_the_file(
    position: str, exported: Callable[[str, str], Exported]
) -> None:
    _, bundle = exported("program", position)
    program = torch.export.load(bundle / "model.pt2")
    for node in program.graph_module.graph.nodes:
        devices = [arg for arg in (*node.args, *node.kwargs.values()) if _is_device(arg)]
        assert devices == [], node.format_node()
    moved = program.module().to("meta")
    hidden = moved(torch.zeros(2, 5, dtype=torch.int64, device="meta"))
    assert hidden.device.type == "meta"
    assert hidden.shape == (2, 5, 12)


def _is_device(argument: object) -> bool:
    return isinstance(argument, torch.device) or argument in ("cpu", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("position", POSITIONS)
def test_the_program_runs_on_cuda(position: str, exported: Callable[[str, str], Exported]) -> None:
    model, bundle = exported("program", position)
    ids = torch.arange(24).reshape(2, 12) % 13
    program = torch.export.load(bundle / "model.pt2").module().to("cuda")
    hidden = program(ids.to("cuda"))
    assert hidden.device.type == "cuda"
    torch.testing.assert_close(hidden.cpu(), model(ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("max_len", "position"),
    [(1, "sinusoidal"), (1, "learned"), (1, "none"), (2, "learned"), (3, "sinusoidal")],
)
def test_short_limits_are_exact(max_len: int, position: str, tmp_path: Path) -> None:
    model = small_model(max_len=max_len, position=position, num_layers=1)
    export_program(model, tmp_path / "bundle")
    program = torch.export.load(tmp_path / "bundle" / "model.pt2").module()
    for length in range(1, max_len + 1):
        assert program(torch.zeros(5, length, dtype=torch.int64)).shape == (5, length, 12)
    with pytest.raises(AssertionError):
        program(torch.zeros(5, max_len + 1, dtype=torch.int64))
