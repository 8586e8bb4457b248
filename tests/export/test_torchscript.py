"""The TorchScript file, opened with nothing but torch."""

import json
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


def test_the_folder_may_have_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "a b é日本"
    export_torchscript(small_model(), folder / "bundle")
    assert (folder / "bundle" / "model.pt").exists()
