"""Pictures: a model's positions, and latency over sequence length.

Needs matplotlib (`pip install 'causal-encoder[plot]'`). Figures are drawn without pyplot,
so nothing global is touched and no display is needed.
"""

import math
import os
import textwrap
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullLocator

from causal_encoder.bench import Benchmark
from causal_encoder.errors import ConfigError
from causal_encoder.files import write_whole
from causal_encoder.timing import Measurement

if TYPE_CHECKING:  # a plot of latencies needs no torch
    from causal_encoder.model import CausalEncoder

_DOTS_PER_INCH = 150
_CURVES = 4
_CURVE_POSITIONS = 64  # more waves than these cannot be told apart
# Okabe and Ito's colours, which people with any colour vision can tell apart.
_COLORS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"),
    "#8C8C8C",  # an eighth
)
_MARKERS = "osD^vPX*"
_FONT = 12
_WIDE_RATIOS = 4  # from here on a linear axis hides the small ones
_MOST_LABELS = 9
_ASIDE = 1.04
_HOLLOW = "Hollow: did not become stable, or waited for CPUs; not to be relied on."


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
    figure.supxlabel(
        "What the model adds to the embedding of the token at each position: every dimension "
        "above, a few of them as curves below.",
        fontsize=9,
        color="#555555",
    )
    _save(figure, path)


def plot_latency(benchmark: Benchmark, path: str | os.PathLike[str]) -> None:
    """Draw latency over sequence length, one panel a batch size, one line a contestant.

    With several contestants a second row of panels shows their ratios to the first.

    Args:
        benchmark: what was measured.
        path: the file; its ending says the format, for example .png, .svg or .pdf.

    Raises:
        ConfigError: the ending is not known.
        CausalEncoderError: the file cannot be written.
    """
    batch_sizes = tuple(dict.fromkeys(row.batch_size for row in benchmark.rows))
    base, *rivals = benchmark.names
    heights = (3, 2) if rivals else (1,)
    width, height = max(9.0, 4.8 * len(batch_sizes)), 8.6 if rivals else 6.0
    figure = Figure(figsize=(width, height), dpi=_DOTS_PER_INCH)
    panels = figure.subplots(
        len(heights),
        len(batch_sizes),
        sharex="col",
        sharey="row",
        squeeze=False,
        height_ratios=heights,
    )
    for column, batch_size in enumerate(batch_sizes):
        _draw_latencies(panels[0, column], benchmark, batch_size)
        if rivals:
            _draw_ratios(panels[1, column], benchmark, batch_size)
        panels[-1, column].set_xlabel("sequence length, tokens", fontsize=_FONT)
    panels[0, 0].set_ylabel("milliseconds a run", fontsize=_FONT)
    if rivals:
        panels[1, 0].set_ylabel(f"times the latency\nof {base}", fontsize=_FONT)
    _write_around(figure, benchmark, *panels[0, 0].get_legend_handles_labels())
    _save(figure, path)


def _write_around(
    figure: Figure, benchmark: Benchmark, handles: list[Artist], names: list[str]
) -> None:
    """Title and legend above the panels, the conditions below them, each in its own room."""
    width, height = figure.get_size_inches()
    lines = math.ceil(len(names) / max(1, int(width / (0.7 + 0.1 * max(map(len, names))))))
    columns = math.ceil(len(names) / lines)
    captions = [
        f"Lines: medians{', their ratios with 95 % intervals' * (len(names) > 1)}. "
        "Bands: 10th to 90th percentile.",
        "" if all(row.stable for row in benchmark.rows) else _HOLLOW,
        benchmark.conditions,
        benchmark.warning,
    ]
    caption = "\n".join(textwrap.fill(line, int(14 * width)) for line in captions if line)
    top_in = 0.85 + 0.27 * lines
    bottom_in = 0.2 + 0.17 * len(caption.splitlines())
    rect = (0, bottom_in / height, 1, 1 - (top_in + bottom_in) / height)
    figure.set_layout_engine(ConstrainedLayoutEngine(rect=rect))
    title = "Latency over sequence length"
    figure.text(0.5, 1 - 0.12 / height, title, ha="center", va="top", fontsize=16)
    hardware = benchmark.hardware
    figure.text(0.5, 1 - 0.48 / height, hardware, ha="center", va="top", fontsize=_FONT)
    figure.legend(
        handles,
        names,
        frameon=False,
        loc="upper center",
        bbox_to_anchor=(0.5, 1 - 0.72 / height),
        ncols=columns,
        fontsize=_FONT,
    )
    color = "#b00000" if benchmark.warning else "#555555"
    figure.text(0.5, 0.1 / height, caption, ha="center", va="bottom", fontsize=9, color=color)


def check_ending(path: str | os.PathLike[str]) -> str:
    """The format that a file's ending says, for example "png".

    Raises:
        ConfigError: the ending is not known.
    """
    known: dict[str, Any] = FigureCanvasBase.get_supported_filetypes()
    ending = Path(path).suffix.lstrip(".").lower()
    if ending not in known:
        raise ConfigError(f"{path} ends in none of {', '.join('.' + name for name in known)}")
    return ending


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
    for name, style in _styles(benchmark):
        rows = _rows(benchmark, name, batch_size)
        lengths = [row.seq_len for row in rows]
        axes.plot(lengths, [row.p50_ms for row in rows], label=name, **style)
        shaky = [row for row in rows if not row.stable]
        _draw_hollow(axes, [row.seq_len for row in shaky], [row.p50_ms for row in shaky], style)
        axes.fill_between(
            lengths,
            [row.p10_ms for row in rows],
            [row.p90_ms for row in rows],
            color=style["color"],
            alpha=0.15,
            linewidth=0 if len(lengths) > 1 else 2,  # a line is the band of a single length
        )
    axes.set_title(f"batch {batch_size}", fontsize=_FONT + 1)
    axes.set_yscale("log")
    _plain_ticks(axes.yaxis, LogLocator(subs=(1, 2, 5)))
    _lengths_below(axes, benchmark)


def _draw_ratios(axes: Axes, benchmark: Benchmark, batch_size: int) -> None:
    """Medians as multiples of the base's, with their intervals."""
    base, *_ = benchmark.names
    edges = [1.0]
    axes.axhline(1, color="black", linewidth=1)
    for number, (name, style) in enumerate(_styles(benchmark)[1:]):
        rows = _rows(benchmark, name, batch_size)
        aside = _ASIDE ** (number - (len(benchmark.names) - 2) / 2)  # bars beside each other
        ratios = np.array([(row.ratio, row.ratio_low, row.ratio_high) for row in rows], float)
        middle, low, high = ratios.T
        # A median outside its interval is possible, a bar of negative length is not.
        bars = np.maximum((middle - low, high - middle), 0)
        lengths = np.array([row.seq_len * aside for row in rows])
        axes.errorbar(lengths, middle, bars, capsize=4, **style)
        both = ((row, benchmark.row(base, batch_size, row.seq_len)) for row in rows)
        shaky = np.array([not (row.stable and of_base.stable) for row, of_base in both])
        _draw_hollow(axes, lengths[shaky], middle[shaky], style)
        edges += [*low, *high]
    if max(edges) > _WIDE_RATIOS * min(edges):
        axes.set_yscale("log")
        _plain_ticks(axes.yaxis, LogLocator(subs=(1, 2, 5)))
    else:
        _plain_ticks(axes.yaxis, MaxNLocator(6))
    axes.margins(y=0.12)
    axes.set_title(f"above 1: {base} is faster", loc="right", fontsize=10, color="#555555")
    _lengths_below(axes, benchmark)


def _draw_hollow(axes: Axes, x: Any, y: Any, style: dict[str, Any]) -> None:
    """Over the points of a line that are not to be relied on."""
    axes.plot(x, y, **style | {"linestyle": "none", "markerfacecolor": "white", "zorder": 3})


def _rows(benchmark: Benchmark, name: str, batch_size: int) -> list[Measurement]:
    """Of one contestant and batch size, from the shortest length on."""
    wanted = (name, batch_size)
    rows = [row for row in benchmark.rows if (row.contestant, row.batch_size) == wanted]
    return sorted(rows, key=lambda row: row.seq_len)


def _styles(benchmark: Benchmark) -> list[tuple[str, dict[str, Any]]]:
    """How each contestant is drawn: no two alike, in black and white neither."""
    return [
        (
            name,
            {
                "color": _COLORS[number % len(_COLORS)],
                "marker": _MARKERS[number % len(_MARKERS)],
                "linestyle": "solid" if number < len(_COLORS) else "dashed",
                "linewidth": 2,
                "markersize": 6,
            },
        )
        for number, name in enumerate(benchmark.names)
    ]


def _plain_ticks(axis: Axis, locator: Locator) -> None:
    axis.set_major_locator(locator)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _lengths_below(axes: Axes, benchmark: Benchmark) -> None:
    lengths = spread({row.seq_len for row in benchmark.rows})
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.tick_params(labelsize=_FONT - 1)
    axes.grid(color="#dddddd", linewidth=0.6)


def spread(lengths: Collection[int]) -> list[int]:
    """Those of some lengths whose labels do not touch on a logarithmic axis."""
    room = (max(lengths) / min(lengths)) ** (1 / _MOST_LABELS)
    kept: list[int] = []
    for length in sorted(lengths, reverse=True):
        if not kept or kept[-1] / length >= room:
            kept.append(length)
    return kept[::-1]


def _save(figure: Figure, path: str | os.PathLike[str]) -> None:
    ending = check_ending(path)
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # names of folders may hold what reads as mathematics
    write_whole(path, lambda stream: figure.savefig(stream, format=ending))
