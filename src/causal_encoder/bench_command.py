"""The command `bench`: what is asked for and where it goes is checked before measuring."""

import shlex
from pathlib import Path

import click
from click.core import ParameterSource
from rich.console import Console

from causal_encoder.errors import ConfigError
from causal_encoder.options import check_outputs, device_option, json_option
from causal_encoder.terminal import positive_list, progress_bar, write_json, write_text


@click.command()
@click.argument(
    "bundles", metavar="BUNDLE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="Needed for --against, but for openvino.",
)
@click.option("--batch-size", default="1,8", show_default=True, help="Comma-separated.")
@click.option("--seq-len", help="Comma-separated; 16,64,256,1024 up to max_len if not given.")
@click.option(
    "--against",
    default="",
    help="Comma-separated, of: eager, torchscript, compile, naive (a plain torch.onnx.export), "
    "openvino and openvino-bf16 (run the first portable fp32 ONNX bundle).",
)
@device_option
@json_option
@click.option(
    "--csv",
    "csv_path",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Write rows as CSV to this file; - is standard output.",
)
@click.option(
    "--markdown",
    "markdown_path",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Write a page with command, machine, tables and conditions; - is standard output.",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(dir_okay=False),
    help="Draw latencies and ratios; the ending says the format, for example .png or .svg.",
)
@click.pass_context
def bench(
    context: click.Context,
    bundles: tuple[Path, ...],
    checkpoint: Path | None,
    batch_size: str,
    seq_len: str | None,
    against: str,
    device: str,
    json_path: str | None,
    csv_path: str | None,
    markdown_path: str | None,
    plot_path: str | None,
) -> None:
    """Measure latency over batch sizes and sequence lengths, side by side.

    Several BUNDLEs of one model are compared with the first, and so are the rivals of
    --against. Each contestant runs in a process of its own, they take turns until the
    numbers are stable, and ratios come with a 95 % interval.

    \b
    Examples:
      causal-encoder bench bundle/ --checkpoint ckpt/ --against eager,torchscript
      causal-encoder bench bundle/ bundle-fp16/ --markdown latency.md --plot latency.png
    """  # noqa: D301  # click's backslash-b keeps it from rewrapping the examples
    from causal_encoder import bench, bench_report

    rivals = tuple(name.strip() for name in against.split(",") if name.strip())
    for name in rivals:
        if name not in bench.RIVALS:
            known = ", ".join(bench.RIVALS)
            raise click.BadParameter(f"{name!r} is not one of {known}", param_hint="--against")
    if set(rivals) - set(bench.OPENVINO) and checkpoint is None:
        raise click.UsageError("--against needs --checkpoint")
    check_outputs(
        {"--json": json_path, "--csv": csv_path, "--markdown": markdown_path, "--plot": plot_path}
    )
    _check_picture(plot_path)
    with progress_bar() as progress:
        result = bench.run_benchmark(
            bundles,
            checkpoint,
            batch_sizes=positive_list(batch_size, "--batch-size"),
            seq_lens=(
                bench.usual_seq_lens(bundles)
                if seq_len is None
                else positive_list(seq_len, "--seq-len")
            ),
            against=rivals,
            device=device,
            progress=progress,
        )
    # With a result on standard output, the tables must not mix with it.
    on_stdout = "-" in (json_path, csv_path, markdown_path)
    bench_report.print_benchmark(result, Console(stderr=on_stdout))
    if json_path is not None:
        write_json(json_path, result.to_dict())
    if csv_path is not None:
        write_text(csv_path, bench_report.to_csv(result))
    if markdown_path is not None:
        write_text(markdown_path, bench_report.to_markdown(result, typed(context)))
    if plot_path is not None:
        from causal_encoder.plots import plot_latency

        plot_latency(result, plot_path)


def typed(context: click.Context) -> str:
    """The command as it can be typed again."""
    words = context.command_path.split()
    for parameter in context.command.params:
        value = context.params.get(str(parameter.name))
        if context.get_parameter_source(str(parameter.name)) != ParameterSource.COMMANDLINE:
            continue
        if isinstance(parameter, click.Argument):
            words += map(str, value or ())
        else:
            words += [parameter.opts[0], str(value)]
    return shlex.join(words)


def _check_picture(path: str | None) -> None:
    if path is not None:
        from causal_encoder.plots import check_ending

        try:
            check_ending(path)
        except ConfigError as error:
            raise click.BadParameter(str(error), param_hint="--plot") from error
