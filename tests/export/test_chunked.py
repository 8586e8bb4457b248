"""A layer in chunks is the same layer: at every boundary, with bad ids, and in less memory."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from causal_encoder.export import export_onnx, verify
from causal_encoder.export.artifact import OPTIMIZATION_LEVELS
from causal_encoder.export.chunked import CHUNK
from causal_encoder.export.prepare import prepare
from causal_encoder.export.trace import trace_onnx
from causal_encoder.model import CausalEncoder
from tests.bundles import operators_a_layer, random_ids, small_model

MAX_LEN = 1300
LENGTHS = (1, 2, 255, 256, 257, 258, 511, 512, 513, 514, 767, 769, 1024, 1025, 1280, 1300)


@pytest.fixture(scope="module")
def model() -> CausalEncoder:
    return small_model(max_len=MAX_LEN, num_layers=1)


@pytest.fixture(scope="module")
def file(model: CausalEncoder) -> bytes:
    with torch.no_grad():
        return trace_onnx(prepare(model), 23, "fp32", "cpu").SerializeToString()


@pytest.fixture(scope="module")
def session(file: bytes) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_equals_eager(
    length: int, model: CausalEncoder, session: onnxruntime.InferenceSession
) -> None:
    ids = random_ids(2, length)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).numpy()
    (found,) = session.run(None, {"input_ids": ids})
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_a_later_token_moves_no_earlier_output_in_any_chunk(
    session: onnxruntime.InferenceSession,
) -> None:
    ids = random_ids(1, 700)
    (before,) = session.run(None, {"input_ids": ids})
    for position in (1, 233, 234, 235, 467, 468, 469, 698, 699):  # 3 chunks of 234 rows, 2 padded
        changed = ids.copy()
        changed[:, position:] = (changed[:, position:] + 1) % 13
        (after,) = session.run(None, {"input_ids": changed})
        np.testing.assert_array_equal(after[:, :position], before[:, :position])
        assert (after[:, position] != before[:, position]).any()


@pytest.mark.parametrize("level", OPTIMIZATION_LEVELS)
def test_a_bad_id_is_nan_from_there_on_in_every_later_chunk(level: str, file: bytes) -> None:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = OPTIMIZATION_LEVELS[level]
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    for column in (0, 130, 599):
        ids = random_ids(2, 600)
        ids[0, column] = 13
        (hidden,) = session.run(None, {"input_ids": ids})
        assert np.isnan(hidden[0, column:]).all()
        assert np.isfinite(hidden[1]).all()


def test_a_sequence_over_the_limit_is_never_answered(session: onnxruntime.InferenceSession) -> None:
    (hidden,) = session.run(None, {"input_ids": random_ids(1, MAX_LEN + 1)})
    assert np.isnan(hidden[:, MAX_LEN]).all()
    with pytest.raises(Exception, match="broadcast"):
        session.run(None, {"input_ids": random_ids(1, MAX_LEN + 2)})


def test_the_runtime_has_nothing_to_warn_of(file: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for length in (1, 300, 1200):
        session.run(None, {"input_ids": random_ids(2, length)})
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "fields",
    [
        {"norm": "post", "num_layers": 3},
        {"norm": "post", "final_norm": True, "activation": "relu"},
        {"final_norm": False, "bias": False, "position": "none"},
        {"num_heads": 1, "position": "sinusoidal+learned", "activation": "gelu_tanh"},
        {"num_heads": 12, "num_layers": 1},
    ],
    ids=str,
)
def test_every_form_of_layer_can_be_cut(fields: dict[str, Any]) -> None:
    model = prepare(small_model(max_len=600, **fields))
    ids = random_ids(2, 600)
    with torch.no_grad():
        file = trace_onnx(model, 23, "fp32", "cpu").SerializeToString()
        expected = model(torch.from_numpy(ids)).numpy()
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"input_ids": ids})
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_each_precision_is_proven_in_chunks(precision: str, tmp_path: Path) -> None:
    model = small_model(max_len=CHUNK + 3, num_layers=1)
    manifest = export_onnx(model, tmp_path / "b", precision=precision, target="cpu")
    assert manifest.target == "cpu"
    assert manifest.parity is not None
    assert manifest.parity["verdict"] == "proven"
    if precision == "fp32":
        assert verify(tmp_path / "b", model, device="cpu").proven


def test_a_layer_has_as_many_operators_as_ever() -> None:
    """More of them is a regression, fewer an improvement to be written down here."""
    assert operators_a_layer("fp32", "cpu") == {
        "Loop": 1,
        "Gather": 1,
        "Identity": 1,
        "LayerNormalization": 2,
        "MatMul": 4,
        "Add": 6,
        "Split": 1,
        "Attention": 1,
        "Gelu": 1,
    }


PEAK = """
import sys, numpy, onnxruntime
def resident(key):
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(key)) / 1024
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
before = resident("VmRSS:")
session.run(None, {"input_ids": numpy.zeros((1, int(sys.argv[2])), numpy.int64)})
print(resident("VmHWM:") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_grows_with_the_length_and_not_with_its_square(tmp_path: Path) -> None:
    """The plain operator keeps 8 heads x 4096 x 4096 scores, which are 537 MB."""
    model = prepare(small_model(max_len=4096, num_layers=1, d_model=16, num_heads=8))
    with torch.no_grad():
        proto = trace_onnx(model, 23, "fp32", "cpu")
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())

    def peak_mib(length: int) -> float:
        command = [sys.executable, "-c", PEAK, str(tmp_path / "model.onnx"), str(length)]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert peak_mib(4096) < 150
