"""From text to a served model: train, export, verify, run, measure. Takes a few minutes.

    python benchmarks/demo/demo.py

Everything is written into the folder demo/ of the repository, which may be deleted.
"""

import contextlib
import logging
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from train import UNIFORM_BITS, VOCAB_SIZE, bits_per_byte, read_text, train

from causal_encoder.bench import run_benchmark
from causal_encoder.bench_report import latency_table
from causal_encoder.errors import CausalEncoderError
from causal_encoder.export import export_onnx, export_torchscript
from causal_encoder.model import CausalEncoder, EncoderConfig, save_checkpoint
from causal_encoder.plots import plot_latency, plot_positions
from causal_encoder.render import CHECKS_IN_BYTES
from causal_encoder.serve import EncoderSession, Manifest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "demo"
TRAINED_LEN = 128
# A sinusoidal table goes on past the lengths of training; a learned one ends with them.
EXPORTED_LEN = {"sinusoidal": 512, "learned": TRAINED_LEN}
TEXT_BYTES = 2_000_000
STEPS = 800
BATCH_SIZE = 4
AGREEMENT_PIECES = 64
SNIPPET_LEN = 60
SEQ_LENS = (16, 64, 256, 512)
SECONDS_BETWEEN_LINES = 5.0

Floats = npt.NDArray[np.float32]


def main(console: Console) -> bool:
    """Run every step; whether ONNX Runtime and PyTorch agreed."""
    text, held_out = read_text(TEXT_BYTES)
    console.print(
        f"\n[bold]1. Train[/] two small encoders to guess the next byte of Python's own library: "
        f"{len(text):,} bytes, and {len(held_out):,} held out."
    )
    models = {position: _train(position, text, held_out, console) for position in EXPORTED_LEN}

    console.print(
        "\n[bold]2. Export[/] each to ONNX and TorchScript. Every file is verified against "
        "PyTorch in float64 before it is published."
    )
    manifests = {
        (position, format): _export(position, format, model, console)
        for position, model in models.items()
        for format in ("onnx", "torchscript")  # noqa: A001  # the word of the manifest
    }
    console.print(_verification_table(manifests))

    console.print("\n[bold]3. Serve[/] the held-out text from ONNX Runtime, and compare.")
    agreed = [
        _compare(position, model, manifests[position, "onnx"], held_out, console)
        for position, model in models.items()
    ]
    for position, model in models.items():
        _compare_int8(position, model, held_out, console)

    console.print("\n[bold]4. Measure[/] latency; each contestant has its own process.")
    with _progress(console, "measuring") as progress:
        benchmark = run_benchmark(
            [FOLDER / "sinusoidal" / "onnx"],
            FOLDER / "sinusoidal" / "checkpoint",
            batch_sizes=(1, 8),
            seq_lens=SEQ_LENS,
            against=("eager", "torchscript"),
            progress=progress,
        )
    if benchmark.warning:
        console.print(benchmark.warning, style="yellow")
    console.print(latency_table(benchmark))
    for crossover in benchmark.crossovers:
        console.print(crossover.text, highlight=False)
    plot_latency(benchmark, FOLDER / "latency.png")

    _print_ending(console)
    return all(agreed)


def _train(position: str, text: bytes, held_out: bytes, console: Console) -> CausalEncoder:
    config = EncoderConfig(
        vocab_size=VOCAB_SIZE,
        d_model=128,
        num_heads=4,
        num_layers=2,
        max_len=TRAINED_LEN,
        position=position,
    )
    with _progress(console, f"training, {position}") as progress:
        model = train(config, text, steps=STEPS, batch_size=BATCH_SIZE, progress=progress)
    console.print(
        f"{position}: [bold]{bits_per_byte(model, held_out):.2f}[/] bits a byte on the "
        f"held-out text, {UNIFORM_BITS:.0f} if nothing was learned"
    )
    save_checkpoint(model, FOLDER / position / "checkpoint")
    plot_positions(model, FOLDER / position / "positions.png")
    return model


def _export(position: str, format: str, model: CausalEncoder, console: Console) -> Manifest:  # noqa: A002
    export = {"onnx": export_onnx, "torchscript": export_torchscript}[format]
    with _progress(console, f"exporting, {position}, {format}") as progress:
        return export(
            model,
            FOLDER / position / format,
            max_len=EXPORTED_LEN[position],
            force=True,
            progress=progress,
        )


def _verification_table(manifests: Mapping[tuple[str, str], Manifest]) -> Table:
    """One row a check, one column a bundle; a number is the largest error or difference."""
    table = Table(
        title="Verification; numbers are the largest differences, all within their limits "
        "where green; blank: does not apply to the format",
        box=box.SIMPLE,
    )
    table.add_column("check", no_wrap=True)
    for position, format in manifests:  # noqa: A001  # the word of the manifest
        table.add_column(f"{position}\n{format}", justify="right")
    reports = [
        {check["name"]: check for check in (manifest.parity or {"checks": []})["checks"]}
        for manifest in manifests.values()
    ]
    for name in dict.fromkeys(name for report in reports for name in report):
        # A check that does not apply to a format is no row of its report.
        table.add_row(
            name, *(_verdict(report[name]) if name in report else "" for report in reports)
        )
    table.add_section()
    longest = [f"{manifest.max_len}" for manifest in manifests.values()]
    table.add_row("longest sequence", *longest)
    sizes = [sum(f.size_bytes for f in m.files.values()) / 2**20 for m in manifests.values()]
    table.add_row("size", *(f"{size:.1f} MiB" for size in sizes))
    return table


def _verdict(check: Mapping[str, object]) -> str:
    color = "green" if check["passed"] else "red"
    word = "proven" if check["passed"] else "refuted"
    in_bytes = check["name"] in CHECKS_IN_BYTES  # the size is a row of its own
    shown = word if check["measured"] is None or in_bytes else format(check["measured"], ".1g")
    return f"[{color}]{shown}[/]"


def _compare(
    position: str, model: CausalEncoder, manifest: Manifest, text: bytes, console: Console
) -> bool:
    """Next-byte guesses of ONNX Runtime and of eager PyTorch on the same real text."""
    session = EncoderSession(FOLDER / position / "onnx")
    ids = np.frombuffer(text, np.uint8)[: AGREEMENT_PIECES * TRAINED_LEN].reshape(-1, TRAINED_LEN)
    embedding = model.token_embedding.weight.detach().numpy()
    with torch.inference_mode():
        eager = _logits(model(torch.from_numpy(ids.astype(np.int64))).numpy(), embedding)
    served = _logits(session.run(ids), embedding)

    same = served.argmax(-1) == eager.argmax(-1)
    best, second = np.sort(eager, axis=-1)[..., ::-1][..., :2].transpose(2, 0, 1)
    explained = same | (best - second <= _rounding_margin(manifest, embedding))
    hits = float((served.argmax(-1)[:, :-1] == ids[:, 1:]).mean())
    _print_snippet(position, ids, served.argmax(-1), eager.argmax(-1), console)
    console.print(
        f"ONNX Runtime ({session.placement.device}) and PyTorch agree on "
        f"[bold]{same.mean():.2%}[/] of {same.size:,} guesses; {hits:.0%} are right"
    )
    if not explained.all():
        console.print(f"[red]{(~explained).sum()} differ by more than rounding explains[/]")
    return bool(explained.all())


def _compare_int8(position: str, model: CausalEncoder, text: bytes, console: Console) -> None:
    """The same guesses with matrix products in 8-bit integers."""
    folder = FOLDER / position / "onnx-int8"
    with _progress(console, f"exporting, {position}, int8") as progress:
        export_onnx(model, folder, precision="int8", target="cpu", force=True, progress=progress)
    ids = np.frombuffer(text, np.uint8)[: AGREEMENT_PIECES * TRAINED_LEN].reshape(-1, TRAINED_LEN)
    embedding = model.token_embedding.weight.detach().numpy()
    guesses = [
        _logits(EncoderSession(path, "cpu").run(ids), embedding).argmax(-1)
        for path in (FOLDER / position / "onnx", folder)
    ]
    same = float((guesses[0] == guesses[1]).mean())
    console.print(
        f"{position}: int8 and fp32 agree on [bold]{same:.2%}[/] of {guesses[0].size:,} guesses"
    )


def _logits(hidden: Floats, embedding: Floats) -> Floats:
    """(.., D) hidden vectors -> (.., V), by the tied head of training."""
    return hidden @ embedding.T / np.float32(math.sqrt(embedding.shape[1]))


def _rounding_margin(manifest: Manifest, embedding: Floats) -> float:
    """How near the two best logits must be for rounding to decide between them.

    Verification limits the error of a hidden value. Each side may be off by that, and
    each of the two logits by as much as all values of its embedding pass on.
    """
    assert manifest.parity is not None
    (limit,) = (c["limit"] for c in manifest.parity["checks"] if c["name"] == "parity")
    passed_on = float(np.abs(embedding).sum(axis=1).max()) / math.sqrt(embedding.shape[1])
    return 2 * 2 * float(limit) * passed_on


def _print_snippet(
    position: str,
    ids: npt.NDArray[np.uint8],
    served: npt.NDArray[np.int64],
    eager: npt.NDArray[np.int64],
    console: Console,
) -> None:
    """Some text, and below each byte what was guessed from the bytes before it."""
    middle = slice(TRAINED_LEN - SNIPPET_LEN, TRAINED_LEN)
    before = slice(middle.start - 1, middle.stop - 1)
    table = Table(title=f"{position}: each byte guessed from those before it", show_header=False)
    table.add_row("text", _readable(ids[1, middle]))
    table.add_row("ONNX Runtime", _readable(served[1, before]))
    table.add_row("PyTorch", _readable(eager[1, before]))
    console.print(table, markup=False)


def _readable(values: npt.NDArray[np.integer]) -> str:
    return "".join(chr(v) if 32 <= v < 127 else "⏎" if v == 10 else "?" for v in values.tolist())


@contextlib.contextmanager
def _progress(console: Console, title: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal; elsewhere a line now and then."""
    if not console.is_terminal:
        next_line_s = 0.0

        def report(step: str, done: int, total: int) -> None:
            nonlocal next_line_s
            if time.monotonic() >= next_line_s:
                next_line_s = time.monotonic() + SECONDS_BETWEEN_LINES
                console.print(f"{title}: {done} of {total}, {step}", highlight=False)

        yield report
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda step, done, total: bar.update(
            task, description=f"{title}: {step}", completed=done, total=total
        )


def _print_ending(console: Console) -> None:
    console.print("\n[bold]Made[/]")
    folder = FOLDER.relative_to(ROOT)
    for position in EXPORTED_LEN:
        console.print(
            f"  {folder}/{position}/  checkpoint, onnx, onnx-int8, torchscript, positions.png"
        )
    console.print(f"  {folder}/latency.png")
    console.print("[bold]Try next[/], in the folder of the repository")
    tool = _command_line_tool()
    for command in (
        f"inspect {folder}/sinusoidal/onnx",
        f"verify {folder}/learned/onnx {folder}/learned/checkpoint",
        f'run {folder}/sinusoidal/onnx --ids "100 101 102 32"',
        f"bench {folder}/learned/onnx --seq-len 16,128",
    ):
        console.print(f"  {tool} {command}", highlight=False, soft_wrap=True)


def _command_line_tool() -> str:
    """What to type: its name, or its path if its environment is not activated."""
    if shutil.which("causal-encoder"):
        return "causal-encoder"
    tool = Path(sys.executable).with_name("causal-encoder")
    return str(tool.relative_to(ROOT) if tool.is_relative_to(ROOT) else tool)


if __name__ == "__main__":
    # Where the sessions run is part of what is printed.
    logging.getLogger("causal_encoder").setLevel(logging.ERROR)
    # So small a model gains little from threads, and on a busy machine they wait for each other.
    torch.set_num_threads(1)
    try:
        agreed = main(Console())
    except CausalEncoderError as error:
        sys.exit(f"Error: {error}")
    sys.exit(None if agreed else "Error: ONNX Runtime and PyTorch disagree")
