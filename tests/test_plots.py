"""Pictures: they are whole image files, they show their subject, and nothing is half written."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import numpy.typing as npt
import pytest

from causal_encoder.bench import Benchmark
from causal_encoder.errors import CausalEncoderError, ConfigError
from causal_encoder.plots import plot_latency, plot_positions, spread
from tests.bundles import small_model
from tests.test_bench import drawn, renamed


def pixels(path: Path) -> npt.NDArray[np.uint32]:
    """(height, width), each pixel's red, green, blue and alpha as one number."""
    channels = np.asarray(matplotlib.image.imread(path))
    return np.ascontiguousarray(channels * 255, dtype=np.uint8).view(np.uint32)[..., 0]


def svg_size(path: Path) -> tuple[float, float]:
    """Width and height."""
    found = re.search(r'viewBox="0 0 ([0-9.]+) ([0-9.]+)"', path.read_text())
    assert found is not None
    return float(found[1]), float(found[2])


@pytest.fixture
def benchmark() -> Benchmark:
    return drawn()


def test_the_positions_of_each_scheme_are_drawn_and_look_different(tmp_path: Path) -> None:
    images = []
    for position in ("sinusoidal", "learned", "sinusoidal+learned"):
        plot_positions(small_model(position=position), tmp_path / "positions.png")
        images.append(pixels(tmp_path / "positions.png"))
        assert len(np.unique(images[-1])) > 100
    assert not any(np.array_equal(images[i], images[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize("sizes", [{"max_len": 1}, {"d_model": 1, "num_heads": 1}])
def test_the_smallest_tables_are_drawn_too(sizes: dict[str, int], tmp_path: Path) -> None:
    plot_positions(small_model(**sizes), tmp_path / "positions.png")
    assert pixels(tmp_path / "positions.png").size


def test_a_model_without_positions_has_none_to_draw(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'none'"):
        plot_positions(small_model(position="none"), tmp_path / "positions.png")
    assert list(tmp_path.iterdir()) == []


def test_latency_and_ratios_are_drawn(benchmark: Benchmark, tmp_path: Path) -> None:
    plot_latency(benchmark, tmp_path / "latency.png")
    image = pixels(tmp_path / "latency.png")
    assert min(image.shape) > 500
    assert len(np.unique(image)) > 100


def test_one_contestant_alone_has_no_ratios_to_draw(benchmark: Benchmark, tmp_path: Path) -> None:
    alone = dataclasses.replace(
        benchmark, contestants=benchmark.contestants[:1], rows=benchmark.rows[::2], crossovers=()
    )
    plot_latency(alone, tmp_path / "alone.svg")
    plot_latency(benchmark, tmp_path / "both.svg")
    heights = [svg_size(tmp_path / f"{name}.svg")[1] for name in ("alone", "both")]
    assert heights[0] < heights[1]


def test_what_is_not_stable_is_drawn_hollow(tmp_path: Path) -> None:
    images = []
    for stable in (True, False):
        plot_latency(drawn(stable=stable), tmp_path / "latency.svg")
        images.append((tmp_path / "latency.svg").read_text())
    assert [image.count("fill: #ffffff; stroke: #0072b2") for image in images] == [0, 1]
    # The rival's ratio rests on the base's median too.
    assert [image.count("fill: #ffffff; stroke: #d55e00") for image in images] == [0, 1]


def test_a_name_that_reads_as_mathematics_is_drawn_as_it_is(tmp_path: Path) -> None:
    name = r"onnx fp32 (x$\bad$y)"
    plot_latency(renamed(name), tmp_path / "latency.svg")
    assert f"<!-- {name} -->" in (tmp_path / "latency.svg").read_text()


@pytest.mark.parametrize("factor", [1.0, 100.0], ids=["near", "far"])
def test_many_contestants_batch_sizes_and_a_single_length_are_drawn(
    factor: float, benchmark: Benchmark, tmp_path: Path
) -> None:
    first, rival = benchmark.contestants
    names = [f"a bundle with a long name ({number})" for number in range(9)]
    rows = [
        dataclasses.replace(row, contestant=name, batch_size=batch, seq_len=64, ratio_high=factor)
        for batch in (1, 2, 3)
        for row, name in zip(
            (benchmark.rows[0], *benchmark.rows[1:2] * 9), ("onnx fp32", *names), strict=True
        )
    ]
    contestants = (first, *(dataclasses.replace(rival, name=name) for name in names))
    many = dataclasses.replace(benchmark, contestants=contestants, rows=tuple(rows))
    plot_latency(many, tmp_path / "latency.png")
    assert len(np.unique(pixels(tmp_path / "latency.png"))) > 100


def test_labels_of_lengths_do_not_touch() -> None:
    assert spread([16, 64, 256, 1024]) == [16, 64, 256, 1024]
    assert spread([7]) == [7]
    kept = spread(range(1, 1001))
    assert len(kept) <= 10
    assert kept[-1] == 1000


def test_the_ending_says_the_format(benchmark: Benchmark, tmp_path: Path) -> None:
    plot_latency(benchmark, tmp_path / "latency.svg")
    assert "<svg" in (tmp_path / "latency.svg").read_text()


@pytest.mark.parametrize("name", ["latency", "latency.jpeg2000"])
def test_an_unknown_ending_is_refused(name: str, benchmark: Benchmark, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends in none of .*\.png"):
        plot_latency(benchmark, tmp_path / name)


def test_a_path_that_cannot_be_written_is_one_line(benchmark: Benchmark, tmp_path: Path) -> None:
    with pytest.raises(CausalEncoderError, match=r"missing.*cannot be written") as raised:
        plot_latency(benchmark, tmp_path / "missing" / "latency.png")
    assert "\n" not in str(raised.value)


def test_an_old_picture_is_replaced(benchmark: Benchmark, tmp_path: Path) -> None:
    path = tmp_path / "latency.png"
    path.write_bytes(b"old")
    plot_latency(benchmark, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]


def test_drawing_latency_needs_neither_torch_nor_a_display() -> None:
    program = (
        "import sys, causal_encoder.plots; "
        "print(sorted({'torch', 'matplotlib.pyplot'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
