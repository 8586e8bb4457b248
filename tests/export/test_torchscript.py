"""The TorchScript file, opened with nothing but torch."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from causal_encoder.export import export_torchscript
from tests.bundles import POSITIONS, small_model
from tests.export.conftest import Exported


def test_config_and_limits_travel_in_the_extra_files(
    exported: Callable[[str, str], Exported],
) -> None:
    model, bundle = exported("torchscript", "learned")
    extra = {"config.json": "", "metadata.json": ""}
    torch.jit.load(bundle / "model.pt", _extra_files=extra)  # type: ignore[no-untyped-call]
    assert json.loads(extra["config.json"]) == model.config.to_dict()
    limits = json.loads(extra["metadata.json"])
    assert limits["causal_encoder.max_len"] == "17"
    assert limits["causal_encoder.vocab_size"] == "13"
    assert limits["causal_encoder.precision"] == "fp32"


@pytest.mark.parametrize("position", POSITIONS)
def test_what_eager_refuses_the_scripted_file_refuses(
    position: str, exported: Callable[[str, str], Exported]
) -> None:
    _, bundle = exported("torchscript", position)
    scripted = torch.jit.load(bundle / "model.pt")  # type: ignore[no-untyped-call]
    with pytest.raises(torch.jit.Error, match="max_len 17"):
        scripted(torch.zeros(1, 18, dtype=torch.int64))
    for ids in (
        torch.zeros(1, 0, dtype=torch.int64),
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(1, 2, 3, dtype=torch.int64),
        torch.zeros(1, 3),
        torch.zeros(1, 3, dtype=torch.bool),
        torch.tensor([[13]]),
        torch.tensor([[-1]]),
        torch.tensor([[2**40]]),
    ):
        with pytest.raises((torch.jit.Error, RuntimeError)):
            scripted(ids)
    assert scripted(torch.zeros(1, 17, dtype=torch.int64)).shape == (1, 17, 12)


def test_training_mode_does_not_bring_dropout_back(tmp_path: Path) -> None:
    export_torchscript(small_model(dropout=0.9), tmp_path / "bundle")
    scripted = torch.jit.load(tmp_path / "bundle" / "model.pt")  # type: ignore[no-untyped-call]
    ids = torch.arange(10)[None]
    assert torch.equal(scripted.train()(ids), scripted.eval()(ids))


def test_an_empty_batch_gives_an_empty_result(exported: Callable[[str, str], Exported]) -> None:
    _, bundle = exported("torchscript", "sinusoidal")
    scripted = torch.jit.load(bundle / "model.pt")  # type: ignore[no-untyped-call]
    assert scripted(torch.zeros(0, 5, dtype=torch.int64)).shape == (0, 5, 12)


@pytest.mark.parametrize("position", POSITIONS)
def test_the_file_has_the_weights_of_the_model_and_no_other(
    position: str, exported: Callable[[str, str], Exported]
) -> None:
    """A table that is in the file's state but not in the model's breaks strict loading."""
    model, bundle = exported("torchscript", position)
    scripted = torch.jit.load(bundle / "model.pt")  # type: ignore[no-untyped-call]
    assert list(scripted.state_dict()) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(scripted.state_dict()[name], tensor), name
    scripted.load_state_dict(model.state_dict(), strict=True)


def test_a_run_changes_no_state_of_the_file(exported: Callable[[str, str], Exported]) -> None:
    _, bundle = exported("torchscript", "sinusoidal+learned")
    scripted = torch.jit.load(bundle / "model.pt")  # type: ignore[no-untyped-call]
    before = [tensor.clone() for tensor in (*scripted.parameters(), *scripted.buffers())]
    for length in (10, 17, 1):
        scripted(torch.zeros(2, length, dtype=torch.int64))
    after = [*scripted.parameters(), *scripted.buffers()]
    assert len(after) == len(before)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("position", POSITIONS)
def test_no_device_is_written_into_the_file(
    position: str, exported: Callable[[str, str], Exported]
) -> None:
    """A traced range of positions would stay where it was traced."""
    _, bundle = exported("torchscript", position)
    moved = torch.jit.load(bundle / "model.pt", map_location="meta")  # type: ignore[no-untyped-call]
    hidden = moved(torch.zeros(2, 5, dtype=torch.int64, device="meta"))
    assert hidden.device.type == "meta"
    assert hidden.shape == (2, 5, 12)
    pending = list(moved.inlined_graph.nodes())
    while pending:
        node = pending.pop()
        assert not [value for value in node.outputs() if str(value.type()) == "Device"], node
        for block in node.blocks():
            pending.extend(block.nodes())


@pytest.mark.gpu
@pytest.mark.parametrize("position", POSITIONS)
def test_the_file_runs_on_cuda_and_back_on_cpu(
    position: str, exported: Callable[[str, str], Exported]
) -> None:
    model, bundle = exported("torchscript", position)
    ids = torch.arange(24).reshape(2, 12) % 13
    expected = model(ids)
    scripted = torch.jit.load(bundle / "model.pt")  # type: ignore[no-untyped-call]
    there = torch.jit.load(bundle / "model.pt", map_location="cuda")  # type: ignore[no-untyped-call]
    for module in (scripted.to("cuda"), there):
        hidden = module(ids.to("cuda"))
        assert hidden.device.type == "cuda"
        torch.testing.assert_close(hidden.cpu(), expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(module.to("cpu")(ids), expected, rtol=0, atol=1e-5)


def test_every_name_in_the_file_is_ascii(exported: Callable[[str, str], Exported]) -> None:
    """Others cannot be loaded (pytorch issue 73608)."""
    _, bundle = exported("torchscript", "sinusoidal+learned")
    with zipfile.ZipFile(bundle / "model.pt") as archive:
        assert all(name.isascii() for name in archive.namelist())
        code = [archive.read(name) for name in archive.namelist() if name.endswith(".py")]
    assert code
    assert all(text.isascii() for text in code)
