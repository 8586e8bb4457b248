"""The floors of the GPU benchmark, counted by hand, and a dry run of it on CPU."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from causal_encoder.model import EncoderConfig

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
GPT2 = EncoderConfig(vocab_size=50257, d_model=768, num_heads=12, num_layers=12, max_len=1024)
TINY = EncoderConfig(vocab_size=5, d_model=2, num_heads=1, num_layers=1, d_ff=3, max_len=4)


@pytest.fixture
def roofline(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS / "gpu")
    return importlib.import_module("roofline")


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS / "gpu")
    return importlib.import_module("sweep")


def test_the_flop_of_a_tiny_model_are_those_counted_by_hand(roofline: ModuleType) -> None:
    # B = 1, T = 2. Of each token: q, k, v and out 4 * 2*2 and up and down 2 * 2*3 products.
    products = 2 * 2 * (4 * 4 + 2 * 6)
    # The first position sees 1 and the second 2: 3 scores of 2 products, and as much for V.
    attention = 3 * 2 * (2 + 2)
    assert roofline.count_flop(TINY, 1, 2) == products + attention == 136


def test_the_bytes_of_a_tiny_model_are_those_counted_by_hand(roofline: ModuleType) -> None:
    # Weights 16 + 12, biases 6 + 2 + 3 + 2, two norms of 2 * 2: 49 numbers.
    weights = 49
    positions = 2 * 2
    # A token of each kernel, in and out: D = 2 and F = 3.
    layer = (2 + 6) + (6 + 6) + (6 + 6) + (6 + 2) + (2 + 2) + (4 + 4) + (2 + 3) + (3 + 3)
    layer += (3 + 2) + (4 + 4)
    ends = 8 + 2 * 2 * 7 + 4 * 2
    expected = 2 * (weights + positions + 2 * layer) + 2 * ends
    assert roofline.count_bytes(TINY, 1, 2, 2) == expected


@pytest.mark.parametrize(
    ("batch", "length", "gflop"), [(1, 128, 22), (1, 1024, 193), (8, 512, 735), (32, 1024, 6185)]
)
def test_gpt_2_without_its_head_has_the_flop_of_the_usual_formula(
    batch: int, length: int, gflop: int, roofline: ModuleType
) -> None:
    tokens = batch * length
    usual = tokens * 12 * 24 * 768**2 + 4 * batch * length**2 * 768 * 12 / 2
    found = roofline.count_flop(GPT2, batch, length)
    assert found == pytest.approx(usual, rel=1e-2)
    assert round(found / 1e9) == gflop


def test_one_token_is_bound_by_reading_the_weights_and_many_by_arithmetic(
    roofline: ModuleType,
) -> None:
    one = roofline.floor(GPT2, "fp16", 1, 1)
    assert (one.bound, one.launches) == ("bytes", 125)
    assert one.floor_ms == pytest.approx(85e6 * 2 / 4.3e12 * 1e3, rel=0.01)
    many = roofline.floor(GPT2, "fp32", 32, 1024)
    assert (many.bound, many.launches) == ("FLOP", 124)
    assert many.floor_ms == pytest.approx(many.flop / 67e12 * 1e3)


def test_each_cell_comes_once_and_none_is_longer_than_its_model(sweep: ModuleType) -> None:
    cells = list(sweep.cells(sweep.MODELS))
    assert len(set(cells)) == len(cells)
    assert cells[0] == ("A", "fp16", 1, 128)
    assert {cell[3] for cell in cells if cell[0] == "A"} >= {16, 4096}
    assert max(cell[3] for cell in cells if cell[0] == "B") == 1024
    for model, batch, length in sweep.COMPILED:
        assert (model, sweep.COMPILED_PRECISION, batch, length) in cells


def test_a_contestant_that_fails_is_a_line_with_its_reason(
    sweep: ModuleType, tmp_path: Path
) -> None:
    def fail() -> None:
        raise RuntimeError("no kernel")

    one = sweep.Sweep(tmp_path, tmp_path, "cpu", 60.0, True)
    row = one.row(("A", "fp16", 2, 16), "ort", fail)
    assert (row.failure, row.p50_ms) == ("RuntimeError: no kernel", None)
    good = dataclasses.replace(row, failure="", contestant="eager", p50_ms=2.0, ratio_to_floor=4.0)
    good = dataclasses.replace(good, us_per_launch=3.0)
    faster = dataclasses.replace(good, contestant="ort", p50_ms=1.0)
    lines = sweep.table([row, good, faster], {"gpu": "some", "cpu": "", "versions": {}}).split("\n")
    assert lines[4:7] == [
        "| A | fp16 | 2 | 16 | ort | RuntimeError: no kernel |  |  |  |  |  |",
        "| A | fp16 | 2 | 16 | eager | 2.000 | 1.00 | 4.0 | bytes | 3.0 |  |",
        "| A | fp16 | 2 | 16 | ort | 1.000 | 0.50 | 4.0 | bytes | 3.0 |  |",
    ]


@pytest.mark.slow
def test_the_script_runs_dry(tmp_path: Path) -> None:
    done = subprocess.run(
        [BENCHMARKS / "gpu.sh", "--dry-run", tmp_path / "out"],
        env=os.environ | {"PYTHON": sys.executable, "SWEEP_SECONDS": "10"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "out" / "sweep.json").read_text())["rows"]
    assert {row["contestant"] for row in rows} >= {"eager", "ort", "ort graph", "torchscript"}
    assert [row["failure"] for row in rows if row["failure"]] == []
    assert (tmp_path / "out" / "sweep.md").read_text().count("\n") == len(rows) + 4
    assert "skipped" in (tmp_path / "out" / "tests.txt").read_text()
