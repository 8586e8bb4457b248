"""Arguments and options that several commands share."""

from pathlib import Path

import click

device_option = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="cuda refuses to be anything else; auto takes CUDA where it works.",
)
checkpoint_argument = click.argument("checkpoint", type=click.Path(path_type=Path))
bundle_argument = click.argument("bundle", type=click.Path(path_type=Path))
json_option = click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Write the result as JSON to this file; - is standard output.",
)
