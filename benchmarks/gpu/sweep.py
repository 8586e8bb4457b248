"""A sweep over batch size and length on a GPU, the most telling cells first, in a time box.

    python benchmarks/gpu/sweep.py OUT [--seconds 270] [--dry-run]

Writes OUT/sweep.json and OUT/sweep.md after every cell, so that nothing measured is lost if it
is stopped. --dry-run does the same with tiny models on CPU, to try the script.
"""

import dataclasses
import gc
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from contestants import Array, Contestant, Prepared, onnx_file, torch_module
from roofline import Floor, floor

from causal_encoder.export.subject import relative_distance
from causal_encoder.machine import this_machine
from causal_encoder.model import CausalEncoder, EncoderConfig

MODELS = {
    "A": EncoderConfig(vocab_size=1000, d_model=512, num_heads=8, num_layers=2, max_len=4096),
    "B": EncoderConfig(vocab_size=50257, d_model=768, num_heads=12, num_layers=12, max_len=1024),
}
TINY = {
    name: dataclasses.replace(config, vocab_size=50, d_model=32, num_heads=4, d_ff=64, max_len=64)
    for name, config in MODELS.items()
}
LENGTHS = (128, 16, 512, 1024, 4096, 32, 64, 256, 2048)
BATCHES = (1, 8, 32)
PRECISIONS = ("fp16", "fp32", "bf16")
MAX_TOKENS = 2**16
TELLING = frozenset(LENGTHS[:4])
# torch.compile takes up to half a minute a shape, so it is asked for few.
COMPILED = (("A", 1, 16), ("B", 1, 128), ("A", 1, 128), ("B", 8, 512))
COMPILED_PRECISION = "fp16"
CELL_SECONDS = 0.3
MIN_RUNS, MAX_RUNS, WARM_UPS = 5, 500, 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One contestant in one cell.

    Attributes:
        p10_ms, p50_ms, p90_ms: of n runs.
        error: largest relative L2 error of a position against eager fp32; None if it is eager
            fp32 itself, or not compared.
        ratio_to_floor: p50 as a multiple of the roofline's.
        us_per_launch: p50 over the launches of the ONNX graph.
        failure: why there is no number; empty if there is one.
    """

    model: str
    precision: str
    batch: int
    length: int
    contestant: str
    n: int = 0
    p10_ms: float | None = None
    p50_ms: float | None = None
    p90_ms: float | None = None
    error: float | None = None
    floor: Floor
    ratio_to_floor: float | None = None
    us_per_launch: float | None = None
    failure: str = ""


Cell = tuple[str, str, int, int]


def cells(models: Mapping[str, EncoderConfig]) -> Iterator[Cell]:
    """(model, precision, batch, length), the most telling first."""
    for precision in PRECISIONS:
        for length in LENGTHS:
            for batch in BATCHES:
                for name, config in models.items():
                    if length <= config.max_len and batch * length <= MAX_TOKENS:
                        yield name, precision, batch, length


def contestants(
    model: CausalEncoder, folder: Path, precision: str, device: str
) -> dict[str, Callable[[], Contestant]]:
    """By name, what loads each; the reference of the ratios first."""
    return {
        "eager": lambda: torch_module(model, precision, device, "eager"),
        "ort": lambda: onnx_file(model, folder, precision, "cuda", device, False),
        "ort graph": lambda: onnx_file(model, folder, precision, "cuda", device, True),
        "ort portable": lambda: onnx_file(model, folder, precision, "portable", device, False),
        "torchscript": lambda: torch_module(model, precision, device, "torchscript"),
    }


def compiled(model: CausalEncoder, device: str) -> dict[str, Callable[[], Contestant]]:
    """torch.compile in two modes."""
    return {
        f"compile {mode}": lambda mode=mode: torch_module(  # type: ignore[misc]
            model, COMPILED_PRECISION, device, "compile", mode
        )
        for mode in ("default", "reduce-overhead")
    }


def times_ms(run: Callable[[], object], seconds: float) -> list[float]:
    """Each of some runs, after a few that do not count."""
    for _ in range(WARM_UPS):
        run()
    end = time.perf_counter() + seconds
    found: list[float] = []
    while len(found) < MIN_RUNS or (time.perf_counter() < end and len(found) < MAX_RUNS):
        start = time.perf_counter()
        run()
        found.append((time.perf_counter() - start) * 1e3)
    return found


def measure(row: Row, prepared: Prepared, reference: Array | None, seconds: float) -> Row:
    """The row with its numbers."""
    run, read = prepared
    found = times_ms(run, seconds)
    p10, p50, p90 = (float(value) for value in np.percentile(found, (10, 50, 90)))
    return dataclasses.replace(
        row,
        n=len(found),
        p10_ms=p10,
        p50_ms=p50,
        p90_ms=p90,
        error=None if reference is None else relative_distance(read(), reference),
        ratio_to_floor=p50 / row.floor.floor_ms,
        us_per_launch=p50 * 1e3 / row.floor.launches,
    )


class Sweep:
    """Loaded models and contestants, and the rows so far."""

    def __init__(self, out: Path, folder: Path, device: str, seconds: float, tiny: bool) -> None:
        self.out, self.folder, self.device = out, folder, device
        self.configs = TINY if tiny else MODELS
        self.cell_seconds = 0.01 if tiny else CELL_SECONDS
        self.end = time.monotonic() + seconds
        self.rows: list[Row] = []
        self.models: dict[str, CausalEncoder] = {}
        self.loaded: dict[tuple[str, str, str], Contestant] = {}

    def model(self, name: str) -> CausalEncoder:
        """The weights that a seed gives."""
        if name not in self.models:
            torch.manual_seed(0)
            self.models[name] = CausalEncoder(self.configs[name]).eval().requires_grad_(False)
        return self.models[name]

    def run(self) -> None:
        """As much as the time box has room for: telling cells, torch.compile, the others."""
        shapes = list(cells(self.configs))
        telling = [c for c in shapes if c[1] == COMPILED_PRECISION and c[3] in TELLING]
        self.run_cells(telling, lambda cell: self.common(cell))
        limit = max(config.max_len for config in self.configs.values())
        few = [(m, COMPILED_PRECISION, b, min(t, limit)) for m, b, t in COMPILED]
        self.run_cells(few, lambda cell: compiled(self.model(cell[0]), self.device))
        self.run_cells([c for c in shapes if c not in telling], lambda cell: self.common(cell))

    def common(self, cell: Cell) -> dict[str, Callable[[], Contestant]]:
        """The contestants of every cell."""
        name, precision, *_ = cell
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return contestants(self.model(name), folder, precision, self.device)

    def run_cells(
        self,
        some: list[Cell],
        entrants: Callable[[Cell], dict[str, Callable[[], Contestant]]],
    ) -> None:
        """Measure each contestant in each cell until the time is up."""
        for cell in some:
            for contestant, load in entrants(cell).items():
                if time.monotonic() > self.end:
                    return
                self.rows.append(self.row(cell, contestant, load))
                self.write()

    def row(self, cell: Cell, contestant: str, load: Callable[[], Contestant]) -> Row:
        """One row; a contestant that fails has its reason in it."""
        name, precision, batch, length = cell
        config = self.configs[name]
        row = Row(
            model=name,
            precision=precision,
            batch=batch,
            length=length,
            contestant=contestant,
            floor=floor(config, precision, batch, length),
        )
        ids = np.random.default_rng(0).integers(0, config.vocab_size, (batch, length), np.int64)
        try:
            key = name, precision, contestant
            if key not in self.loaded:
                self.loaded[key] = load()
            reference = self.reference(name, ids) if batch == 1 else None
            return measure(row, self.loaded[key](ids), reference, self.cell_seconds)
        except Exception as error:  # noqa: BLE001  # the other contestants are to be measured
            traceback.print_exc()
            return dataclasses.replace(row, failure=f"{type(error).__name__}: {error}"[:300])
        finally:
            gc.collect()

    def reference(self, name: str, ids: Any) -> Array:
        """Eager fp32 on the same device."""
        key = name, "fp32", "eager"
        if key not in self.loaded:
            self.loaded[key] = torch_module(self.model(name), "fp32", self.device, "eager")
        run, read = self.loaded[key](ids)
        run()
        return read()

    def write(self) -> None:
        """Everything so far, as JSON and as a table."""
        machine = dataclasses.asdict(this_machine(self.device))
        if self.device == "cuda":
            machine["gpu"] = torch.cuda.get_device_name()
        content = {
            "machine": machine,
            "models": {name: config.to_dict() for name, config in self.configs.items()},
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }
        (self.out / "sweep.json").write_text(json.dumps(content, indent=1) + "\n")
        (self.out / "sweep.md").write_text(table(self.rows, machine))


def table(rows: list[Row], machine: Mapping[str, Any]) -> str:
    """Markdown: a line a row, its median beside eager's and the floor's."""
    eager = {
        (row.model, row.precision, row.batch, row.length): row.p50_ms
        for row in rows
        if row.contestant == "eager"
    }
    lines = [
        f"{machine['gpu'] or machine['cpu']}; {machine['versions']}",
        "",
        "| model | precision | batch | length | contestant | ms | of eager | of the floor | bound "
        "| us a launch | error |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        base = eager.get((row.model, row.precision, row.batch, row.length))
        of_eager = f"{row.p50_ms / base:.2f}" if row.p50_ms and base else ""
        numbers = (
            [row.failure, "", "", "", "", ""]
            if row.p50_ms is None
            else [
                f"{row.p50_ms:.3f}",
                of_eager,
                f"{row.ratio_to_floor:.1f}",
                row.floor.bound,
                f"{row.us_per_launch:.1f}",
                "" if row.error is None else f"{row.error:.1e}",
            ]
        )
        first = [row.model, row.precision, row.batch, row.length, row.contestant]
        lines.append("| " + " | ".join(map(str, first + numbers)) + " |")
    return "\n".join(lines) + "\n"


@click.command()
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--seconds", default=270.0, show_default=True, help="Time box.")
@click.option("--dry-run", is_flag=True, help="Tiny models, on CPU.")
def main(out: Path, seconds: float, dry_run: bool) -> None:
    """Measure ONNX Runtime and PyTorch on a GPU and write the results into OUT."""
    if not dry_run and not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device; pass --dry-run to try the script without one")
    torch.set_float32_matmul_precision("highest")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        device = "cpu" if dry_run else "cuda"
        sweep = Sweep(out, Path(folder), device, seconds, dry_run)
        sweep.run()
    measured = sum(row.p50_ms is not None for row in sweep.rows)
    print(f"{measured} of {len(sweep.rows)} rows measured, see {out / 'sweep.md'}")


if __name__ == "__main__":
    main()
