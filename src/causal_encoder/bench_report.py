"""What a benchmark looks like: tables on the terminal, Markdown to commit, CSV."""

import csv
import dataclasses
import io
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from causal_encoder.bench import Benchmark
from causal_encoder.timing import UNSTABLE, Measurement, faster

_MEMORY = "MiB: memory above the loaded model"
_DETAILS = ("min", "mean", "p50", "p90", "p95", "p99", "first", "MiB", "runs", "rounds")
_LEFT_OUT = ("mean", "p95", "rounds")  # on a terminal, where 80 columns are to do


def print_benchmark(benchmark: Benchmark, console: Console) -> None:
    """What a person reads: medians side by side, who is faster, every number, the conditions."""
    if benchmark.warning:
        console.print(benchmark.warning, style="yellow", highlight=False)
    console.print(latency_table(benchmark))
    for crossover in benchmark.crossovers:
        console.print(crossover.text, highlight=False, markup=False)
    console.print(_detail_table(benchmark))
    for line in _footnotes(benchmark):
        console.print(line, highlight=False, markup=False)


def latency_table(benchmark: Benchmark) -> Table:
    """A section a shape: the median of each contestant, and the ratio to the base's."""
    base = benchmark.names[0]
    # Text, because names of folders may hold what rich would read as markup.
    table = Table(title=Text(f"Median milliseconds a run\n{benchmark.hardware}"))
    table.caption = Text("\n".join(_captions(benchmark)))
    table.add_column("batch x sequence")
    table.add_column("contestant", overflow="fold")
    table.add_column("median", justify="right", no_wrap=True)
    if len(benchmark.names) > 1:
        table.add_column("ratio to the first", no_wrap=True)
    colors = {base: "green", None: ""}
    for row in benchmark.rows:
        first, last = (row.contestant == benchmark.names[end] for end in (0, -1))
        ratio = Text(_ratio(row), colors.get(faster(row, base), "red") if row.ratio else "")
        median = f"{_short(row.p50_ms)}{'' if row.stable else UNSTABLE}"
        cells = [_row_head(row)[0] * first, row.contestant, median]
        table.add_row(*map(Text, cells), *([ratio] * (len(benchmark.names) > 1)), end_section=last)
    return table


def to_markdown(benchmark: Benchmark, command: str) -> str:
    """A page to commit: what was measured, with which command, on what, and the numbers.

    Args:
        benchmark: what was measured.
        command: what was typed to measure it.
    """
    medians = [
        [*_shape_cells(benchmark, shape)]
        + [_median_with_ratio(benchmark.row(name, *shape)) for name in benchmark.names]
        for shape in benchmark.shapes
    ]
    parts = [
        f"# Latency, {benchmark.date}",
        f"**{benchmark.warning}**" * bool(benchmark.warning),
        f"{benchmark.hardware}; {benchmark.conditions}.",
        f"```\n{command}\n```",
        _escaped(" ".join(("Median milliseconds a run.", *_captions(benchmark)))),
        _markdown_table(("batch", "sequence", *benchmark.names), medians, left=0),
        "\n".join(f"- {_escaped(crossover.text)}" for crossover in benchmark.crossovers),
        f"In detail, milliseconds a run; {_MEMORY}:",
        _markdown_table(
            ("shape", "contestant", *_DETAILS),
            [[*_row_head(row), *_row_details(row)] for row in benchmark.rows],
            left=2,
        ),
        "\n".join(f"- {line}" for line in _footnotes(benchmark)[:-1]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def to_csv(benchmark: Benchmark) -> str:
    """The rows, with the names of the fields as the first line."""
    text = io.StringIO()
    names = [field.name for field in dataclasses.fields(Measurement)]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(dataclasses.asdict(row) for row in benchmark.rows)
    return text.getvalue()


def _detail_table(benchmark: Benchmark) -> Table:
    """One row a measurement: its spread, its first run, its memory, and the number of runs."""
    table = Table(
        title=f"In detail, milliseconds a run; {_MEMORY}",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("shape", no_wrap=True)
    table.add_column("contestant", min_width=11)
    shown = [heading for heading in _DETAILS if heading not in _LEFT_OUT]
    for heading in shown:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in benchmark.rows:
        details = dict(zip(_DETAILS, _row_details(row), strict=True))
        cells = [*_row_head(row), *(details[heading] for heading in shown)]
        table.add_row(*map(Text, cells), end_section=row.contestant == benchmark.names[-1])
    return table


def _captions(benchmark: Benchmark) -> list[str]:
    captions = []
    if len(benchmark.names) > 1:
        base = benchmark.names[0]
        captions.append(f"1.50x [95 % interval] would mean: {base} is 1.5 times as fast.")
    if not all(row.stable for row in benchmark.rows):
        captions.append(
            f"{UNSTABLE} did not become stable, or waited for CPUs: not to be relied on, nor is "
            "what is said of who is faster there."
        )
    return captions


def _footnotes(benchmark: Benchmark) -> list[str]:
    """Who the contestants were, how it was measured, and the versions as the last line."""
    return [
        *(f"{entry.name}: {entry.placement}" for entry in benchmark.contestants),
        f"Each run: {benchmark.residency}.",
        benchmark.method,
        benchmark.conditions,
    ]


def _shape_cells(benchmark: Benchmark, shape: tuple[int, int]) -> tuple[str, str]:
    stable = all(benchmark.row(name, *shape).stable for name in benchmark.names)
    return str(shape[0]), f"{shape[1]}{'' if stable else UNSTABLE}"


def _row_head(row: Measurement) -> tuple[str, str]:
    return f"{row.batch_size} x {row.seq_len}", row.contestant


def _row_details(row: Measurement) -> list[str]:
    times_ms = (row.min_ms, row.mean_ms, row.p50_ms, row.p90_ms, row.p95_ms, row.p99_ms)
    return [
        *map(_short, (*times_ms, row.cold_ms)),
        "" if row.scratch_mib is None else f"{row.scratch_mib:.1f}",
        str(row.n),
        f"{row.rounds}{'' if row.stable else UNSTABLE}",
    ]


def _median_with_ratio(row: Measurement) -> str:
    return f"{_short(row.p50_ms)}, {_ratio(row)}" if row.ratio else _short(row.p50_ms)


def _ratio(row: Measurement) -> str:
    """As "1.33x [1.30, 1.37]"; empty for the base."""
    if row.ratio is None:
        return ""
    assert row.ratio_low is not None
    assert row.ratio_high is not None
    return f"{_times(row.ratio)}x [{_times(row.ratio_low)}, {_times(row.ratio_high)}]"


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """The first `left` columns are aligned to the left, the others to the right."""
    rule = ["---" if number < left else "---:" for number in range(len(header))]
    lines = (
        " | ".join(_escaped(cell).replace("|", "\\|") for cell in row)
        for row in (header, rule, *rows)
    )
    return "\n".join(f"| {line} |" for line in lines)


def _escaped(text: str) -> str:
    """For Markdown, where an asterisk begins emphasis."""
    return text.replace(UNSTABLE, f"\\{UNSTABLE}")


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else _short(ratio)


def _short(value: float) -> str:
    """Three digits, and never an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
