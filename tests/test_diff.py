"""Two bundles side by side."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from causal_encoder import bench, diff
from causal_encoder.cli import main
from causal_encoder.diff import compare
from causal_encoder.errors import BundleError, DeviceError
from causal_encoder.export import export_onnx, export_torchscript
from tests.bundles import small_model


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Paths of a few bundles of one model, and of strangers."""
    root = tmp_path_factory.mktemp("a b é日本")  # paths need not be in ASCII
    model = small_model()
    export_onnx(model, root / "onnx")
    export_onnx(model, root / "fp16", precision="fp16", max_len=12)
    export_torchscript(model, root / "torchscript")
    export_torchscript(small_model(layer_norm_eps=1e-2), root / "other weights")
    export_torchscript(small_model(d_model=6), root / "narrow")
    return lambda name: str(root / name)


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "TURN_S", 0.001)
    for module in (bench, diff):
        monkeypatch.setattr(module, "ROUNDS", 1)


@pytest.fixture
def no_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that load torch take seconds; other tests here measure truly."""
    row = diff.Latency(batch_size=1, seq_len=16, a_ms=1.0, b_ms=2.0, ratio=2.0)
    monkeypatch.setattr(diff, "_latency", lambda *_: (row,))


def test_two_forms_of_one_model_agree_within_both_budgets(bundles: Callable[[str], str]) -> None:
    found = compare(bundles("onnx"), bundles("torchscript"), device="cpu")
    assert found.parity.measure == "absolute"
    assert 0 < found.parity.largest <= found.parity.limit < 1e-4
    assert found.facts["format"] == ("onnx", "torchscript")
    assert found.facts["operator Attention"] == (2, None)
    assert found.facts["max_len"] == (17, 17)
    assert [(row.batch_size, row.seq_len) for row in found.latency] == [(1, 16), (1, 17), (8, 17)]
    assert all(row.a_ms > 0 and row.ratio == row.b_ms / row.a_ms for row in found.latency)


def test_a_lower_precision_is_measured_against_its_own_budget(
    bundles: Callable[[str], str],
) -> None:
    found = compare(bundles("onnx"), bundles("fp16"), device="cpu")
    assert found.parity.measure == "relative L2"
    assert 1e-5 < found.parity.largest <= found.parity.limit == 1e-2
    assert found.parity.seq_len <= 12
    size_a, size_b = found.facts["size_bytes"]
    assert size_b < size_a


@pytest.mark.usefixtures("no_latency")
def test_other_weights_are_refuted_with_exit_code_1(bundles: Callable[[str], str]) -> None:
    result = CliRunner().invoke(main, ["diff", bundles("torchscript"), bundles("other weights")])
    assert result.exit_code == 1
    assert "Error: outputs differ by" in result.stderr
    assert "checkpoint" in result.stdout


def test_bundles_of_another_kind_of_model_are_refused(bundles: Callable[[str], str]) -> None:
    with pytest.raises(BundleError, match=r"d_model is 12 in .* and 6 in "):
        compare(bundles("torchscript"), bundles("narrow"))


def test_cuda_is_never_quietly_the_cpu(bundles: Callable[[str], str]) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError):
            compare(bundles("onnx"), bundles("fp16"), device="cuda")
    with pytest.raises(DeviceError):
        compare(bundles("torchscript"), bundles("onnx"), device="cuda")


def test_json_is_pure_and_documented(bundles: Callable[[str], str]) -> None:
    arguments = ["diff", bundles("onnx"), bundles("torchscript"), "--device", "cpu", "--json"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0
    fields = json.loads(result.stdout)
    assert set(fields) == {"schema_version", "facts", "parity", "latency"}
    assert fields["facts"]["format"] == {"a": "onnx", "b": "torchscript"}
    assert fields["parity"]["passed"] is True
    assert set(fields["latency"][0]) == {"batch_size", "seq_len", "a_ms", "b_ms", "ratio"}


@pytest.mark.usefixtures("no_latency")
def test_a_bundle_beside_itself_differs_in_nothing(bundles: Callable[[str], str]) -> None:
    result = CliRunner().invoke(main, ["diff", bundles("torchscript"), bundles("torchscript")])
    assert result.exit_code == 0
    assert result.stdout.startswith(f"A: {bundles('torchscript')}\nB: {bundles('torchscript')}\n")
    assert "are alike" in result.stdout
    assert "difference 0 of" in result.stdout


def test_a_missing_bundle_is_one_line(tmp_path: Path, bundles: Callable[[str], str]) -> None:
    result = CliRunner().invoke(main, ["diff", str(tmp_path / "no"), bundles("onnx")])
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
