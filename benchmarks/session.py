"""What an EncoderSession costs and saves on CPU: its checks, and its batching by length.

    python benchmarks/session.py [--markdown FILE]

Two questions, each a ratio or difference within one process and one thread pool:

- How much longer is `session.run` than the bare call of ONNX Runtime that it makes?
- How much faster is `session.encode` on sequences of different lengths than batches in the
  order of arrival, each padded to its longest sequence? Both give the same as one by one.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
import torch

from causal_encoder.export import export_onnx
from causal_encoder.machine import this_machine
from causal_encoder.model import CausalEncoder, EncoderConfig
from causal_encoder.serve import EncoderSession

CONFIG = EncoderConfig(vocab_size=1000, d_model=512, num_heads=8, num_layers=2, max_len=1024)
OVERHEAD_RUNS = 2000
SEQUENCES = 1000
MEDIAN_LENGTH, LONGEST = 60, 1000
BATCH_SIZE = 32
ROUNDS = 3

Rows = list[npt.NDArray[np.int64]]


@click.command(help=__doc__)
@click.option("--markdown", "path", type=click.Path(path_type=Path), help="Write the page here.")
def main(path: Path | None) -> None:
    """Measure both and print a page."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model = CausalEncoder(CONFIG).eval()
        export_onnx(model, Path(folder) / "bundle", target="cpu")
        session = EncoderSession(Path(folder) / "bundle", "cpu")
    machine = this_machine("cpu")
    lines = [
        "# What an EncoderSession costs and saves on CPU",
        "",
        f"`python benchmarks/session.py` on {machine.cpu}, {machine.cpus} threads; "
        + ", ".join(f"{name} {version}" for name, version in machine.versions.items())
        + f". d_model {CONFIG.d_model}, {CONFIG.num_heads} heads, {CONFIG.num_layers} layers.",
        "",
        *_overhead(session),
        "",
        *_batching(session),
    ]
    click.echo("\n".join(lines))
    if path is not None:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _overhead(session: EncoderSession) -> list[str]:
    """`run` and the bare call in turns, on the same thread pool."""
    bare = session._session  # another session would have other threads
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (1, 16))
    times_s: dict[str, list[float]] = {"run": [], "bare": []}
    for number in range(OVERHEAD_RUNS):
        for name in ("run", "bare") if number % 2 else ("bare", "run"):
            begin = time.perf_counter()
            if name == "run":
                session.run(ids)
            else:
                bare.run(["hidden"], {"input_ids": ids})
            times_s[name].append(time.perf_counter() - begin)
    run, direct = (1e6 * float(np.median(times_s[name])) for name in ("run", "bare"))
    return [
        f"`session.run` at 1 x 16: median {run:.0f} us, the bare call {direct:.0f} us, so its "
        f"checks take {run - direct:.0f} us ({OVERHEAD_RUNS} runs of each, in turns).",
    ]


def _batching(session: EncoderSession) -> list[str]:
    """`encode` and batches in the order of arrival, in turns."""
    random = np.random.default_rng(0)
    lengths = random.lognormal(np.log(MEDIAN_LENGTH), 1.0, SEQUENCES).clip(1, LONGEST)
    rows = [random.integers(0, CONFIG.vocab_size, int(length)) for length in lengths]
    roads: dict[str, Callable[[EncoderSession, Rows], Sequence[npt.NDArray[np.float32]]]] = {
        "encode": lambda session, rows: session.encode(rows),
        "arrival": _in_order_of_arrival,
    }
    times_s: dict[str, list[float]] = {name: [] for name in roads}
    results = {}
    for number in range(ROUNDS):
        for name in list(roads)[:: 1 if number % 2 else -1]:
            begin = time.perf_counter()
            results[name] = roads[name](session, rows)
            times_s[name].append(time.perf_counter() - begin)
    alone = [session.run(row[None])[0] for row in rows]
    largest = max(
        float(np.abs(found - expected).max())
        for found, expected in zip(results["encode"], alone, strict=True)
    )
    encode, arrival = (float(np.median(times_s[name])) for name in ("encode", "arrival"))
    tokens = sum(len(row) for row in rows)
    return [
        f"`session.encode` on {SEQUENCES} sequences ({tokens:,} tokens, log-normal lengths, median "
        f"{MEDIAN_LENGTH}, at most {LONGEST}): {tokens / encode:,.0f} tokens a second, "
        f"{arrival / encode:.2f} times as many as batches of {BATCH_SIZE} in the order of "
        f"arrival padded to their longest ({tokens / arrival:,.0f}). It is within {largest:.1e} "
        "of one sequence at a time.",
    ]


def _in_order_of_arrival(session: EncoderSession, rows: Rows) -> list[npt.NDArray[np.float32]]:
    results = []
    for start in range(0, len(rows), BATCH_SIZE):
        batch = rows[start : start + BATCH_SIZE]
        padded = np.zeros((len(batch), max(map(len, batch))), np.int64)
        for place, row in enumerate(batch):
            padded[place, : len(row)] = row
        hidden = session.run(padded)
        results += [hidden[place, : len(row)] for place, row in enumerate(batch)]
    return results


if __name__ == "__main__":
    main()
