"""fp16 and bf16 files: the guards of the bare file, and what is refused in words."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
import torch

from causal_encoder.errors import DeviceError, ExportError
from causal_encoder.export import export_onnx
from causal_encoder.export.artifact import OPTIMIZATION_LEVELS, Run, open_onnx
from causal_encoder.export.subject import RELATIVE_ERROR_LIMITS, relative_distance
from causal_encoder.serve import EncoderSession, open_bundle
from tests.bundles import POSITIONS, small_model

Ids = npt.NDArray[np.int64]
Hidden = npt.NDArray[np.float32]
L, V = 9, 13
BAD_IDS = (
    -1, -2, -V, -V - 1, -(2**31) - 1, -(2**31), -(2**32), -(2**40), -(2**63),
    V, V + 1, 65504, 65536, 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**40, 2**63 - 1,
)  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, int], Path]:
    """(position, max_len) -> an fp16 model.onnx."""
    found = {}
    for position in POSITIONS:
        for max_len, layers in ((L, 2), (1, 1)):
            model = small_model(vocab_size=V, position=position, max_len=max_len, num_layers=layers)
            folder = tmp_path_factory.mktemp("fp16") / "bundle"
            export_onnx(model, folder, precision="fp16")
            found[position, max_len] = folder / "model.onnx"
    return found


def answer(run: Run, ids: Ids) -> Hidden | None:
    """What the bare file gives; None if it refuses."""
    try:
        hidden: Hidden = run(ids)
    except Exception:  # noqa: BLE001  # ONNX Runtime has no public base class for its errors
        return None
    assert hidden.dtype == np.float32
    return hidden


def is_nan_from(hidden: Hidden | None, row: int, column: int) -> bool:
    """An error, or nothing but NaN in that row from that column on."""
    if hidden is None:
        return True
    return hidden.shape[1] > column and bool(np.isnan(hidden[row, column:]).all())


@pytest.mark.parametrize("level", OPTIMIZATION_LEVELS)
@pytest.mark.parametrize("position", POSITIONS)
def test_a_bad_id_is_never_answered_and_moves_no_other_row(
    position: str, level: str, files: Mapping[tuple[str, int], Path]
) -> None:
    run = open_onnx(files[position, L], "cpu", level, 1)
    good = np.arange(3 * L).reshape(3, L) % V
    clean = answer(run, good)
    assert clean is not None
    assert np.isfinite(clean).all()
    for token in BAD_IDS:
        for column in (0, L // 2, L - 1):
            ids = good.copy()
            ids[1, column] = token
            hidden = answer(run, ids)
            assert is_nan_from(hidden, 1, column), f"id {token} at column {column}"
            if hidden is not None:
                others = relative_distance(hidden[[0, 2]], clean[[0, 2]].astype(np.float64))
                assert others <= RELATIVE_ERROR_LIMITS["fp16"], "another row of the batch moved"


@pytest.mark.parametrize("level", OPTIMIZATION_LEVELS)
@pytest.mark.parametrize("max_len", [1, L])
@pytest.mark.parametrize("position", POSITIONS)
def test_a_sequence_over_max_len_is_never_answered(
    position: str, max_len: int, level: str, files: Mapping[tuple[str, int], Path]
) -> None:
    run = open_onnx(files[position, max_len], "cpu", level, 1)
    whole = answer(run, np.arange(2 * max_len).reshape(2, max_len) % V)
    assert whole is not None
    assert np.isfinite(whole).all()
    for length in (*range(max_len + 1, 2 * max_len + 3), 50, 257):
        hidden = answer(run, np.zeros((2, length), np.int64))
        for row in (0, 1):
            assert is_nan_from(hidden, row, max_len), f"length {length}"


@pytest.mark.parametrize("level", OPTIMIZATION_LEVELS)
@pytest.mark.parametrize("position", POSITIONS)
def test_a_bad_id_alone_in_a_sequence_of_one_is_never_answered(
    position: str, level: str, files: Mapping[tuple[str, int], Path]
) -> None:
    run = open_onnx(files[position, 1], "cpu", level, 1)
    for token in BAD_IDS:
        hidden = answer(run, np.array([[3], [token]]))
        assert is_nan_from(hidden, 1, 0), f"id {token}"
        assert hidden is None or np.isfinite(hidden[0]).all()


def test_ids_and_output_keep_their_types(files: Mapping[tuple[str, int], Path]) -> None:
    for path in files.values():
        proto = onnx.load(path)
        (given,), (made,) = proto.graph.input, proto.graph.output
        assert given.type.tensor_type.elem_type == onnx.TensorProto.INT64
        assert made.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
        wide = [t.name for t in proto.graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
        assert wide == [], "a weight is stored in float32"
        hidden = EncoderSession(path.parent, "cpu").run([[1], [2]])
        assert hidden.dtype == np.float32
        assert hidden.shape == (2, 1, 12)


def test_scores_far_below_zero_give_no_nan_and_stay_causal(tmp_path: Path) -> None:
    """A mask of the smallest finite number overflows in fp16 where a score is added to it."""
    model = small_model(num_layers=1, position="none", bias=False)
    with torch.no_grad():
        model.state_dict()["blocks.0.attention.qkv.weight"][:24] *= 30.0
    lowest: list[float] = []

    def record(_module: torch.nn.Module, _inputs: object, qkv: torch.Tensor) -> None:
        q, k, _ = (part.view(1, V, 3, 4).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        lowest.append(float((q @ k.transpose(-1, -2) / 2).min()))

    with (
        torch.no_grad(),
        model.blocks[0].get_submodule("attention.qkv").register_forward_hook(record),
    ):
        model(torch.arange(V)[None])
    assert lowest[0] < -1e4
    export_onnx(model, tmp_path / "bundle", precision="fp16")
    ids = np.arange(2 * V).reshape(2, V) % V
    for level in OPTIMIZATION_LEVELS:
        run = open_onnx(tmp_path / "bundle" / "model.onnx", "cpu", level, 1)
        whole = run(ids)
        assert np.isfinite(whole).all()
        for length in (1, 2, 7):
            difference = relative_distance(run(ids[:, :length].copy()), whole[:, :length])
            assert difference <= RELATIVE_ERROR_LIMITS["fp16"]


@pytest.mark.parametrize("value", [65520.0, -7e4, 3e38])
def test_a_weight_beyond_the_range_of_fp16_is_refused_by_name(value: float, tmp_path: Path) -> None:
    model = small_model()
    with torch.no_grad():
        model.state_dict()["blocks.1.feed_forward.up.weight"][3, 4] = value
    with pytest.raises(
        ExportError, match=r"blocks\.1\.feed_forward\.up\.weight holds .*fp16 range of 6\.55e\+04"
    ):
        export_onnx(model, tmp_path / "bundle", precision="fp16")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_fit_fp16_and_overflow_in_its_arithmetic_are_not_published(
    tmp_path: Path,
) -> None:
    model = small_model(num_layers=1, max_len=2)
    with torch.no_grad():
        model.token_embedding.weight.fill_(65504.0)
    with pytest.raises(ExportError, match="not published, because parity is refuted"):
        export_onnx(model, tmp_path / "bundle", precision="fp16")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("opset", [18, 22])
def test_an_opset_without_attention_is_refused_for_lower_precisions(
    opset: int, precision: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=f"{precision}.* needs opset 23.*opset {opset} was asked"):
        export_onnx(small_model(), tmp_path / "bundle", opset=opset, precision=precision)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("precision", ["fp8", "FP16", "", "float16", None])
def test_a_precision_that_there_is_not_is_named(precision: Any, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="expected one of fp32, fp16, bf16"):
        export_onnx(small_model(), tmp_path / "bundle", precision=precision)


def test_a_bf16_bundle_is_no_bundle_for_cpu(tmp_path: Path) -> None:
    export_onnx(small_model(num_layers=1, max_len=2), tmp_path / "bundle", precision="bf16")
    with pytest.raises(DeviceError, match="bf16 bundle runs on CUDA alone"):
        EncoderSession(tmp_path / "bundle", "cpu")
    if not torch.cuda.is_available():
        for device in ("auto", "cuda"):
            with pytest.raises(DeviceError, match="CUDA cannot be used"):
                EncoderSession(tmp_path / "bundle", device)
        with open_bundle(tmp_path / "bundle") as opened:
            assert opened.manifest.parity is not None
            assert opened.manifest.parity["verdict"] == "unchecked"
