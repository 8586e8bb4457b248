"""Every exported form computes what the float64 model computes, at every shape."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from causal_encoder.export import export_onnx, verify
from causal_encoder.export.artifact import open_bare
from causal_encoder.model import CausalEncoder
from causal_encoder.serve import EncoderSession, open_bundle
from causal_encoder.serve.manifest import MODEL_FILES
from tests.bundles import EXPORTERS, POSITIONS, small_model
from tests.export.conftest import Exported

BATCHES = range(1, 9)


def reference(model: CausalEncoder, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The model in float64, its sinusoidal table too."""
    double = CausalEncoder(model.config, torch.float64).eval()
    double.load_state_dict(model.state_dict())
    with torch.no_grad():
        return double(torch.from_numpy(ids)).numpy()


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("kind", EXPORTERS)
def test_one_artifact_is_right_for_every_batch_size_and_length(
    kind: str, position: str, exported: Callable[[str, str], Exported]
) -> None:
    model, bundle = exported(kind, position)
    run = (
        EncoderSession(bundle, "cpu").run
        if kind == "onnx"
        else open_bare(bundle / MODEL_FILES[kind], kind)
    )
    random = np.random.default_rng(3)
    for length in range(1, model.config.max_len + 1):
        for batch in BATCHES:
            ids = random.integers(0, model.config.vocab_size, (batch, length))
            with torch.no_grad():
                eager = model(torch.from_numpy(ids)).numpy()
            expected = reference(model, ids)
            limit = 4 * np.abs(eager - expected).max() + 1e-6
            assert np.abs(run(ids) - expected).max() <= limit, f"batch {batch}, length {length}"


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"d_model": 1, "num_heads": 1}, id="d_model 1"),
        pytest.param({"d_model": 5, "num_heads": 1}, id="odd d_model"),
        pytest.param({"d_model": 9, "num_heads": 3}, id="odd head size"),
        pytest.param({"max_len": 1}, id="max_len 1"),
        pytest.param({"max_len": 2}, id="max_len 2"),
        pytest.param({"vocab_size": 1}, id="vocab_size 1"),
        pytest.param({"d_ff": 1}, id="d_ff 1"),
        pytest.param({"norm": "post", "activation": "relu", "num_layers": 2}, id="post-norm relu"),
        pytest.param({"norm": "post", "final_norm": True}, id="post-norm with final norm"),
        pytest.param({"final_norm": False}, id="pre-norm without final norm"),
        pytest.param({"activation": "gelu_tanh"}, id="tanh gelu"),
        pytest.param({"bias": False}, id="no bias"),
        pytest.param({"layer_norm_eps": 0.1}, id="large eps"),
    ],
)
@pytest.mark.parametrize("kind", EXPORTERS)
def test_odd_configurations_are_exported_and_proven(
    kind: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    model = small_model(**({"num_layers": 1} | fields))
    manifest = EXPORTERS[kind](model, tmp_path / "bundle")
    assert manifest.parity is not None
    assert manifest.parity["verdict"] == "proven"


@pytest.mark.parametrize(
    ("opset", "position"),
    [*((18, position) for position in POSITIONS), *((opset, "learned") for opset in range(19, 23))],
)
def test_every_opset_gives_the_same_numbers(opset: int, position: str, tmp_path: Path) -> None:
    model = small_model(position=position, num_layers=1)
    manifest = export_onnx(model, tmp_path / "bundle", opset=opset)
    assert manifest.opset == opset
    assert manifest.ir_version == 10
    assert "Attention" not in manifest.operators
    assert manifest.parity is not None
    assert manifest.parity["verdict"] == "proven"


@pytest.mark.parametrize("kind", EXPORTERS)
def test_a_bundle_below_a_folder_that_is_not_ascii_is_proven(
    kind: str, exported: Callable[[str, str], Exported]
) -> None:
    """Some loaders of torch take no such path (pytorch issue 75171)."""
    _, bundle = exported(kind, "learned")
    assert not str(bundle).isascii()
    with open_bundle(bundle) as opened:
        assert opened.manifest.parity is not None
        assert opened.manifest.parity["verdict"] == "proven"
        hidden = open_bare(opened.model_path, kind)(np.array([[1, 2, 3]]))
    assert hidden.shape == (1, 3, 12)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("position", POSITIONS)
def test_a_bundle_is_proven_on_cuda_at_every_optimisation_level(
    position: str, precision: str, tmp_path: Path
) -> None:
    model = small_model(position=position, d_model=64, num_heads=4)
    export_onnx(model, tmp_path / "bundle", precision=precision)
    report = verify(tmp_path / "bundle", model, device="cuda")
    assert report.device == "cuda"
    assert report.proven, report.first_failure


def test_a_raised_max_len_is_right_up_to_its_end(tmp_path: Path) -> None:
    model = small_model(position="sinusoidal")
    export_onnx(model, tmp_path / "bundle", max_len=40)
    raised = CausalEncoder(dataclasses.replace(model.config, max_len=40))
    raised.load_state_dict(model.state_dict())
    ids = np.arange(40)[None] % model.config.vocab_size
    hidden = EncoderSession(tmp_path / "bundle", "cpu").run(ids)
    assert np.abs(hidden - reference(raised, ids)).max() < 1e-5


def test_a_model_in_training_mode_is_exported_without_its_dropout(tmp_path: Path) -> None:
    model = small_model(dropout=0.9).train()
    for kind, export in EXPORTERS.items():
        manifest = export(model, tmp_path / kind)
        assert not any("dropout" in name.lower() for name in manifest.operators)
        assert manifest.parity is not None
        assert manifest.parity["verdict"] == "proven"
    assert verify(tmp_path / "program", model, device="cpu").proven
    assert model.training
