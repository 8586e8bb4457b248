"""The command line: each command parses, calls the library, and prints.

Everything heavy is imported inside the commands, so that --help is instant and `run`,
`inspect` and `doctor` work on an install without torch and onnx.
"""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from causal_encoder import __version__, render
from causal_encoder.bench_command import bench
from causal_encoder.errors import CheckpointError, ConfigError, DeviceError
from causal_encoder.options import (
    bundle_argument,
    check_outputs,
    checkpoint_argument,
    device_option,
    json_option,
)
from causal_encoder.terminal import Commands, progress_bar, write_json

if TYPE_CHECKING:
    from causal_encoder.serve import Manifest

EXIT_REFUSED = 1
EXIT_CANNOT_CHECK = 3


@click.group(cls=Commands)
@click.version_option(__version__, package_name="causal-encoder")
def main() -> None:
    """Export causal transformer encoders, prove the exports, run and measure them.

    \b
    A checkpoint is a folder with config.json and model.safetensors.
    A bundle is a folder with one exported model and its manifest.json.

    Exit codes: 0 done; 1 refused or refuted; 2 wrong usage; 3 could not be checked here.
    """


@main.command()
@checkpoint_argument
@click.option("--vocab-size", type=int, required=True, help="Number of token ids.")
@click.option("--d-model", type=int, default=512, show_default=True, help="Hidden width.")
@click.option("--num-heads", type=int, default=8, show_default=True, help="Attention heads.")
@click.option("--num-layers", type=int, default=6, show_default=True, help="Blocks.")
@click.option("--max-len", type=int, default=2048, show_default=True, help="Longest sequence.")
@click.option(
    "--position",
    type=click.Choice(["sinusoidal", "learned", "sinusoidal+learned", "none"]),
    default="sinusoidal",
    show_default=True,
    help="Position scheme.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Seed of the weights.",
)
def new(checkpoint: Path, seed: int, **fields: Any) -> None:
    """Make a checkpoint with random weights.

    \b
    Example:
      causal-encoder new ckpt/ --vocab-size 1000 --d-model 512 --num-layers 2
    """
    import torch

    from causal_encoder.model import CausalEncoder, EncoderConfig, save_checkpoint

    if checkpoint.exists():
        raise CheckpointError(f"{checkpoint} exists; choose another path")
    torch.manual_seed(seed)
    config = EncoderConfig(**fields)
    try:
        model = CausalEncoder(config)
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]  # torch adds a trace
        raise ConfigError(f"a model of these sizes cannot be built: {reason}") from error
    save_checkpoint(model, checkpoint)
    count = sum(parameter.numel() for parameter in model.parameters())
    click.echo(f"{checkpoint}: {count:,} parameters, random, seed {seed}")


@main.group()
def export() -> None:
    """Export a checkpoint to a bundle, verified before it appears."""


def _export_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--force", is_flag=True, help="Replace BUNDLE if it is a bundle."),
        click.option(
            "--max-len",
            type=int,
            help="Longest sequence of the export; cannot be changed for learned positions.",
        ),
        bundle_argument,
        checkpoint_argument,
    ):
        command = option(command)
    return command


@export.command("onnx")
@_export_options
@click.option(
    "--opset",
    type=click.IntRange(18, 23),
    default=23,
    show_default=True,
    help="ai.onnx operator set; from 23 on attention is one operator.",
)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "fp16", "bf16", "int8"]),
    default="fp32",
    show_default=True,
    help="Type of the weights; bf16 runs on CUDA alone, int8 is for CPU.",
)
@click.option(
    "--target",
    type=click.Choice(["portable", "cpu", "cuda"]),
    default="portable",
    show_default=True,
    help="portable: any ONNX runtime; cpu, cuda: faster there, ONNX Runtime alone.",
)
@click.option(
    "--warm-up",
    multiple=True,
    metavar="BxT",
    callback=lambda _context, _option, texts: [_shape(text) for text in texts],
    help="A shape that sessions with CUDA graphs capture when they open; can be repeated.",
)
def export_onnx_command(checkpoint: Path, bundle: Path, **options: Any) -> None:
    """Export to ONNX, for ONNX Runtime and every runtime that reads it.

    \b
    Example:
      causal-encoder export onnx ckpt/ bundle/
    """
    from causal_encoder.export import export_onnx

    _export(export_onnx, checkpoint, bundle, options)


def _shape(text: str) -> tuple[int, int]:
    sizes = re.fullmatch("([0-9]{1,9})x([0-9]{1,9})", text)
    if sizes is None:
        raise click.BadParameter(f"{text[:40]!r} is not a batch and a sequence such as 8x128")
    return int(sizes[1]), int(sizes[2])


@export.command("torchscript")
@_export_options
def export_torchscript_command(checkpoint: Path, bundle: Path, **options: Any) -> None:
    """Export to TorchScript, which PyTorch has deprecated; see `program`.

    \b
    Example:
      causal-encoder export torchscript ckpt/ bundle-ts/
    """
    from causal_encoder.export import export_torchscript

    _export(export_torchscript, checkpoint, bundle, options)


@export.command("program")
@_export_options
def export_program_command(checkpoint: Path, bundle: Path, **options: Any) -> None:
    """Export to a torch.export program (.pt2), the successor of TorchScript.

    \b
    Example:
      causal-encoder export program ckpt/ bundle-pt2/
    """
    from causal_encoder.export import export_program

    _export(export_program, checkpoint, bundle, options)


def _export(
    exporter: Callable[..., "Manifest"], checkpoint: Path, bundle: Path, options: dict[str, Any]
) -> None:
    from causal_encoder.model import load_checkpoint

    with progress_bar() as progress:
        manifest = exporter(load_checkpoint(checkpoint), bundle, progress=progress, **options)
    form = f" for {manifest.target}" * (manifest.target != "portable")
    size_bytes = sum(file.size_bytes for file in manifest.files.values())
    click.echo(
        f"{bundle}: {manifest.format} {manifest.precision}{form}, {size_bytes / 2**20:.1f} MiB, "
        f"max_len {manifest.max_len}; {render.summary(manifest)}"
    )


@main.command()
@bundle_argument
@checkpoint_argument
@device_option
@json_option
def verify(bundle: Path, checkpoint: Path, device: str, json_path: str | None) -> None:
    """Check BUNDLE against the CHECKPOINT it came from; changes nothing.

    Exit code 0: proven. 1: refuted. 3: could not be checked here, for want of CUDA.

    \b
    Example:
      causal-encoder verify bundle/ ckpt/
    """
    from causal_encoder.export import verify
    from causal_encoder.model import load_checkpoint
    from causal_encoder.serve import open_bundle

    if device == "cuda":
        with open_bundle(bundle) as opened:
            kind = opened.manifest.format
        if kind != "onnx":
            raise click.UsageError(
                f"--device cuda does not apply to {bundle}, a {kind} bundle; pass --device cpu"
            )
    check_outputs({"--json": json_path})
    with progress_bar() as progress:
        try:
            report = verify(bundle, load_checkpoint(checkpoint), device=device, progress=progress)
        except DeviceError as error:
            click.echo(f"Error: could not be checked here: {error}", err=True)
            raise click.exceptions.Exit(EXIT_CANNOT_CHECK) from error
    # With the JSON on standard output, the table must not mix with it.
    render.print_report(report, Console(stderr=json_path == "-"))
    if json_path is not None:
        write_json(json_path, report.to_dict())
    if report.verdict == "refuted":
        click.echo(f"Error: {report.first_failure}", err=True)
        raise click.exceptions.Exit(EXIT_REFUSED)
    if report.verdict == "unchecked":
        reason = next(check.detail for check in report.checks if check.passed is None)
        click.echo(f"Error: not all could be checked here: {reason}", err=True)
        raise click.exceptions.Exit(EXIT_CANNOT_CHECK)


@main.command()
@bundle_argument
@click.option("--ids", help='One sequence, for example "5 9 2".')
@click.option(
    "--input",
    "input_path",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Sequences: a .npy array, a .jsonl file with one list of ids a line, or - for JSON "
    "lines on standard input.",
)
@click.option(
    "--output",
    "output_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help=".npy for sequences of one length, .jsonl for any; JSON lines on standard output if "
    "not given.",
)
@click.option(
    "--overflow",
    type=click.Choice(["error", "truncate"]),
    default="error",
    show_default=True,
    help="What becomes of a sequence over max_len.",
)
@device_option
def run(
    bundle: Path,
    ids: str | None,
    input_path: str | None,
    output_path: Path | None,
    overflow: str,
    device: str,
) -> None:
    """Run an ONNX BUNDLE on token ids and write the hidden vectors.

    \b
    Examples:
      causal-encoder run bundle/ --ids "5 9 2"
      causal-encoder run bundle/ --input ids.npy --output hidden.npy
    """
    from causal_encoder import run as road
    from causal_encoder.serve import EncoderSession

    if (ids is None) == (input_path is None):
        raise click.UsageError("pass either --ids or --input")
    if output_path is not None and output_path.suffix not in (".npy", ".jsonl"):
        raise click.BadParameter(
            f"{str(output_path)!r} ends neither in .npy nor in .jsonl", param_hint="--output"
        )
    check_outputs({"--output": None if output_path is None else str(output_path)})
    rows = road.parse_ids(ids) if ids is not None else road.read_rows(str(input_path))
    session = EncoderSession(bundle, device, overflow=overflow)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hidden = road.encode(session, rows)
    if caught:
        more = f" (and {len(caught) - 1} more like it)" if len(caught) > 1 else ""
        click.echo(f"Warning: {caught[0].message}{more}", err=True)
    road.write_hidden(hidden, output_path)
    if output_path is not None:
        click.echo(f"{output_path}: {road.describe(hidden)}")


main.add_command(bench)


@main.command()
@bundle_argument
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def inspect(bundle: Path, as_json: bool) -> None:
    """Show what a BUNDLE is, after checking that it is whole.

    \b
    Example:
      causal-encoder inspect bundle/
    """
    from causal_encoder.serve import open_bundle

    with open_bundle(bundle) as opened:
        manifest = opened.manifest
    if as_json:
        click.echo(manifest.to_json(), nl=False)
        return
    render.print_manifest(str(bundle), manifest, Console())


@main.command()
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(bundle: Path | None, as_json: bool) -> None:
    """Examine this installation, and whether it can run BUNDLE: a line a finding, with its fix.

    Exit code 1: something is broken. CUDA that does not work counts as broken only where it
    is expected: where ONNX Runtime is compiled with it and something shows a GPU, which is a
    file of the NVIDIA driver, its library, or NVIDIA_VISIBLE_DEVICES.

    \b
    Example:
      causal-encoder doctor bundle/
    """
    from causal_encoder.doctor import diagnose, healthy, to_dict
    from causal_encoder.doctor_facts import gather

    findings = diagnose(gather(bundle))
    if as_json:
        write_json("-", to_dict(findings))
    else:
        render.print_findings(findings, Console())
    if not healthy(findings):
        raise click.exceptions.Exit(EXIT_REFUSED)


@main.command()
@click.argument("bundle_a", type=click.Path(path_type=Path))
@click.argument("bundle_b", type=click.Path(path_type=Path))
@device_option
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def diff(bundle_a: Path, bundle_b: Path, device: str, as_json: bool) -> None:
    """Compare two bundles, before one replaces the other.

    Outputs over the grid of verify, latency, size, operators, versions and placement, under
    the runtime that is installed here. Exit code 1 if the outputs are further apart than the
    budgets of both allow.

    \b
    Example:
      causal-encoder diff bundle/ bundle-new/
    """
    from causal_encoder.diff import compare

    with progress_bar() as progress:
        difference = compare(bundle_a, bundle_b, device=device, progress=progress)
    if as_json:
        write_json("-", difference.to_dict())
    else:
        render.print_difference(str(bundle_a), str(bundle_b), difference, Console())
    if not difference.parity.passed:
        click.echo(
            f"Error: outputs differ by {difference.parity.largest:.3g}, over "
            f"{difference.parity.limit:.3g}; verify both against their checkpoints",
            err=True,
        )
        raise click.exceptions.Exit(EXIT_REFUSED)


@main.group()
def plot() -> None:
    """Draw pictures of a model."""


@plot.command("positions")
@checkpoint_argument
@click.option(
    "-o", "--output", required=True, type=click.Path(dir_okay=False), help="PNG file to write."
)
def plot_positions_command(checkpoint: Path, output: str) -> None:
    """Draw the position table: a heat map and the curves of selected dimensions.

    \b
    Example:
      causal-encoder plot positions ckpt/ -o positions.png
    """
    from causal_encoder.model import load_checkpoint
    from causal_encoder.plots import plot_positions

    check_outputs({"--output": output})
    plot_positions(load_checkpoint(checkpoint), Path(output))
    click.echo(output)
