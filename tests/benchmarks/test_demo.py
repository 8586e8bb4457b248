"""The demo: training learns, and the whole way from text to a measured bundle works."""

import importlib
import io
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from rich.console import Console

from causal_encoder import bench
from causal_encoder.model import EncoderConfig, load_checkpoint
from causal_encoder.serve import open_bundle

DEMO = Path(__file__).parents[2] / "benchmarks" / "demo"
CONFIG = EncoderConfig(vocab_size=256, d_model=16, num_heads=2, num_layers=1, max_len=32)


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(DEMO)
    return importlib.import_module("train")


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(DEMO)
    return importlib.import_module("demo")


def test_the_text_is_python_and_the_parts_do_not_overlap(train: ModuleType) -> None:
    text, held_out = train.read_text(200_000)
    assert len(text) == 180_000
    assert len(held_out) == 20_000
    assert b"import " in text
    assert held_out not in text


def test_training_lowers_the_loss_on_text_it_has_not_seen(train: ModuleType) -> None:
    text, held_out = train.read_text(200_000)
    bits = [
        train.bits_per_byte(train.train(CONFIG, text, steps=steps, batch_size=4), held_out)
        for steps in (1, 80)
    ]
    assert bits[1] < bits[0]
    assert bits[1] < 0.8 * train.UNIFORM_BITS


def test_training_again_gives_the_same_weights(train: ModuleType) -> None:
    text, _ = train.read_text(50_000)
    first, second = (train.train(CONFIG, text, steps=3, batch_size=2) for _ in range(2))
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name


def test_training_reports_every_step(train: ModuleType) -> None:
    calls = []
    text, _ = train.read_text(50_000)
    train.train(
        CONFIG, text, steps=3, batch_size=2, progress=lambda step, *at: calls.append((step, at))
    )
    assert [at for _, at in calls] == [(1, 3), (2, 3), (3, 3)]
    assert all("bits a byte" in step for step, _ in calls)


def test_the_head_is_the_scaled_embedding(train: ModuleType) -> None:
    hidden, embedding = torch.randn(2, 3, 4), torch.randn(5, 4)
    expected = np.einsum("btd,vd->btv", hidden.numpy(), embedding.numpy()) / 2
    np.testing.assert_allclose(train.next_byte_logits(hidden, embedding), expected, atol=1e-6)


@pytest.mark.slow
def test_the_demo_ends_with_bundles_pictures_and_agreement(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    monkeypatch.setattr(demo, "FOLDER", tmp_path / "demo")
    monkeypatch.setattr(demo, "TEXT_BYTES", 100_000)
    monkeypatch.setattr(demo, "TRAINED_LEN", 16)
    monkeypatch.setattr(demo, "EXPORTED_LEN", {"sinusoidal": 24})
    monkeypatch.setattr(demo, "SNIPPET_LEN", 10)
    monkeypatch.setattr(demo, "STEPS", 2)
    monkeypatch.setattr(demo, "SEQ_LENS", (8, 24))
    monkeypatch.setattr(bench, "ROUNDS", 1)
    monkeypatch.setattr(bench, "TURN_S", 0.002)
    monkeypatch.setattr(bench, "available_cpus", lambda: 1)
    text = io.StringIO()
    assert demo.main(Console(file=text, width=100))
    folder = tmp_path / "demo" / "sinusoidal"
    assert load_checkpoint(folder / "checkpoint").config.max_len == 16
    for format in ("onnx", "torchscript"):  # noqa: A001  # the word of the manifest
        with open_bundle(folder / format) as bundle:
            assert bundle.manifest.max_len == 24
    assert (folder / "positions.png").exists()
    assert (tmp_path / "demo" / "latency.png").exists()
    assert "100.00%" in text.getvalue()
    assert "refuted" not in text.getvalue()
    assert "causal-encoder inspect demo/sinusoidal/onnx" in text.getvalue()
