"""A bundle says which ONNX Runtime it was tested with; an older one must not run it."""

import hashlib
from pathlib import Path

import onnxruntime
import pytest

from causal_encoder.errors import BundleError
from causal_encoder.serve import EncoderSession, Manifest, open_bundle
from causal_encoder.serve.bundle import check_runtime
from causal_encoder.serve.manifest import File, Tensor


def write_bundle(folder: Path, min_onnxruntime: str | None) -> Path:
    """A whole bundle around a model file that no runtime could read."""
    folder.mkdir()
    (folder / "model.onnx").write_bytes(b"not a model")
    manifest = Manifest(
        format="onnx",
        config={"vocab_size": 3, "max_len": 4, "d_model": 2, "position": "none"},
        precision="fp32",
        target="portable",
        inputs=(Tensor(name="input_ids", dtype="int64", axes=("batch", "sequence")),),
        outputs=(Tensor(name="hidden", dtype="float32", axes=("batch", "sequence", 2)),),
        operators={},
        opset=23,
        ir_version=10,
        min_onnxruntime=min_onnxruntime,
        tools={},
        checkpoint_sha256="0" * 64,
        files={
            "model.onnx": File(size_bytes=11, sha256=hashlib.sha256(b"not a model").hexdigest())
        },
        warm_up=(),
        parity=None,
    )
    (folder / "manifest.json").write_text(manifest.to_json())
    return folder


def refusal(folder: Path, installed: str) -> str:
    """Why an installed version is refused; empty if it is not."""
    with open_bundle(folder) as bundle:
        try:
            check_runtime(bundle, installed)
        except BundleError as error:
            return str(error)
    return ""


def test_a_session_refuses_a_bundle_for_a_newer_runtime_before_reading_the_model(
    tmp_path: Path,
) -> None:
    bundle = write_bundle(tmp_path / "bundle", "99.1.0")
    with pytest.raises(BundleError) as refused:
        EncoderSession(bundle, "cpu")
    message = str(refused.value)
    assert message.startswith(f"{bundle} needs ONNX Runtime 99.1.0 or later, ")
    assert f"{onnxruntime.__version__} is installed" in message
    assert "pip install --upgrade 'onnxruntime-gpu>=99.1.0'" in message
    assert "\n" not in message


def test_a_session_lets_the_runtime_it_was_tested_with_read_the_model(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle", onnxruntime.__version__)
    with pytest.raises(BundleError, match=r"model\.onnx: "):  # read, and found to be no model
        EncoderSession(bundle, "cpu")


@pytest.mark.parametrize(
    "installed", ["1.28.0", "1.28.1", "1.100.0", "2.0.0", "1.29.0.dev20260101"]
)
def test_the_same_and_newer_versions_are_taken(installed: str, tmp_path: Path) -> None:
    assert refusal(write_bundle(tmp_path / "bundle", "1.28.0"), installed) == ""


@pytest.mark.parametrize("installed", ["1.27.9", "1.9.0", "0.99.0", "1.27.0.dev20260101"])
def test_versions_are_compared_by_number_not_by_letter(installed: str, tmp_path: Path) -> None:
    message = refusal(write_bundle(tmp_path / "bundle", "1.28.0"), installed)
    assert f"1.28.0 or later, {installed} is installed" in message


def test_a_bundle_that_names_no_version_is_taken(tmp_path: Path) -> None:
    assert refusal(write_bundle(tmp_path / "bundle", None), "0.1.0") == ""
