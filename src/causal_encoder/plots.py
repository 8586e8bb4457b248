"""Pictures: a model's positions, and latency over sequence length.

Needs matplotlib (`pip install 'causal-encoder[plot]'`). Figures are drawn without pyplot,
so nothing global is touched and no display is needed.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from causal_encoder.bench import Benchmark
from causal_encoder.errors import ConfigError
from causal_encoder.files import write_whole

if TYPE_CHECKING:  # a plot of latencies needs no torch
    from causal_encoder.model import CausalEncoder

_DOTS_PER_INCH = 150
_CURVES = 4
_CURVE_POSITIONS = 64  # more waves than these cannot be told apart
# Okabe and Ito's colours, which people with any colour vision can tell apart.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def plot_positions(model: "CausalEncoder", path: str | os.PathLike[str]) -> None:
    """Draw the vectors that a model adds to its embedding, one a position.

    A heat map of the whole table (position by dimension) above the curves of a few
    dimensions over the first positions. For "sinusoidal+learned" it is the sum that is
    drawn, which is what the model adds.

    Args:
        model: a model with positions.
        path: the file; its ending says the format, for example .png, .svg or .pdf.

    Raises:
        ConfigError: the model has no positions, or the ending is not known.
        CausalEncoderError: the file cannot be written.
    """
    config = model.config
    table_LD = _position_table(model)
    figure = Figure(figsize=(10, 7.5), dpi=_DOTS_PER_INCH, layout="constrained")
    figure.suptitle(
        f"{config.position.capitalize()} positions: {config.max_len} rows, "
        f"{config.d_model} dimensions",
        fontsize=14,
    )
    heat, curves = figure.subplots(2, 1, height_ratios=(5, 3))
    _draw_heat_map(heat, table_LD)
    _draw_curves(curves, table_LD[:_CURVE_POSITIONS])
    _save(figure, path)


def plot_latency(benchmark: Benchmark, path: str | os.PathLike[str]) -> None:
    """Draw latency over sequence length, one panel a batch size, one line a contestant.

    Args:
        benchmark: what was measured.
        path: the file; its ending says the format, for example .png, .svg or .pdf.

    Raises:
        ConfigError: the ending is not known.
        CausalEncoderError: the file cannot be written.
    """
    batch_sizes = tuple(dict.fromkeys(row.batch_size for row in benchmark.rows))
    width = max(7.0, 4.6 * len(batch_sizes))
    figure = Figure(figsize=(width, 5.2), dpi=_DOTS_PER_INCH, layout="constrained")
    figure.suptitle(f"Latency over sequence length, {benchmark.hardware}", fontsize=14)
    panels = figure.subplots(1, len(batch_sizes), sharey=True, squeeze=False)[0]
    for panel, batch_size in zip(panels, batch_sizes, strict=True):
        _draw_latencies(panel, benchmark, batch_size)
    panels[0].set_ylabel("milliseconds a run")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, frameon=False, loc="outside right upper")
    figure.supxlabel(
        "Line: median. Band: fastest run to 90th percentile.\n"
        f"{benchmark.conditions}\n{benchmark.warning}",
        fontsize=8,
        color="#b00000" if benchmark.warning else "#555555",
    )
    _save(figure, path)


def _position_table(model: "CausalEncoder") -> npt.NDArray[np.float32]:
    """(L, D), the sum of the tables that the model has."""
    positions = model.positions
    tables = [table for table in (positions.sinusoidal, positions.learned) if table is not None]
    if not tables:
        raise ConfigError("the model has position 'none': there are no position vectors to draw")
    return np.asarray(sum(table.detach().cpu().float().numpy() for table in tables))


def _draw_heat_map(axes: Axes, table_LD: npt.NDArray[np.float32]) -> None:
    largest = float(np.abs(table_LD).max())
    # A few outliers must not bleach a learned table: most values decide, if they differ.
    limit = min(largest, 1.2 * float(np.quantile(np.abs(table_LD), 0.999))) or 1.0
    image = axes.imshow(table_LD, aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit)
    axes.set(xlabel="dimension", ylabel="position")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    clipped = largest > limit
    bar = axes.figure.colorbar(image, ax=axes, pad=0.01, extend="both" if clipped else "neither")
    bar.set_label("value")


def _draw_curves(axes: Axes, table_LD: npt.NDArray[np.float32]) -> None:
    for number, dimension in enumerate(_selected_dimensions(table_LD.shape[1])):
        axes.plot(
            table_LD[:, dimension],
            color=_COLORS[number],
            label=f"dimension {dimension}",
            marker="o",
            markersize=2.5,
        )
    axes.set(xlabel=f"position (the first {len(table_LD)})", ylabel="value")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.01)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=_CURVES)


def _selected_dimensions(d_model: int) -> list[int]:
    """A few even columns of the first half, where sinusoidal waves are not yet too long."""
    return sorted({2 * (number * d_model // (4 * _CURVES)) for number in range(_CURVES)})


def _draw_latencies(axes: Axes, benchmark: Benchmark, batch_size: int) -> None:
    for name, color in zip(benchmark.contestants, _COLORS, strict=False):
        rows = sorted(
            (r for r in benchmark.rows if (r.contestant, r.batch_size) == (name, batch_size)),
            key=lambda row: row.seq_len,
        )
        lengths = [row.seq_len for row in rows]
        axes.plot(lengths, [r.p50_ms for r in rows], color=color, marker="o", ms=4, label=name)
        axes.fill_between(
            lengths,
            [row.min_ms for row in rows],
            [row.p90_ms for row in rows],
            color=color,
            alpha=0.15,
            linewidth=0,
        )
    axes.set(xscale="log", yscale="log", title=f"batch {batch_size}", xlabel="sequence length")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(color="#dddddd", linewidth=0.6)


def _save(figure: Figure, path: str | os.PathLike[str]) -> None:
    ending = Path(path).suffix.lstrip(".").lower()
    known: dict[str, Any] = figure.canvas.get_supported_filetypes()
    if ending not in known:
        raise ConfigError(f"{path} ends in none of {', '.join('.' + name for name in known)}")
    write_whole(path, lambda stream: figure.savefig(stream, format=ending))
