"""Arguments and options that several commands share."""

import json
import os
from collections.abc import Mapping
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


def check_outputs(paths: Mapping[str, str | None]) -> None:
    """Refuse now what could not be written after minutes of work.

    Args:
        paths: the file of each option; None if it was not given, - for standard output.
    """
    for option, path in paths.items():
        if path is None or path == "-":
            continue
        target = Path(path).absolute()
        if _is_in_bundle(target):
            raise click.BadParameter(
                f"{path} is in a bundle, which another file would make invalid; choose another "
                "folder",
                param_hint=option,
            )
        is_device = target.exists() and not target.is_file()
        if not is_device and not target.parent.is_dir():
            raise click.BadParameter(
                f"{path}: there is no folder {target.parent}; make it first", param_hint=option
            )
        if not os.access(target if is_device else target.resolve().parent, os.W_OK):
            raise click.BadParameter(f"{path} cannot be written", param_hint=option)


def _is_in_bundle(path: Path) -> bool:
    try:
        manifest = json.loads((path.resolve().parent / "manifest.json").read_bytes())
        return {"schema_version", "files", "digest"} <= set(manifest)
    except (OSError, ValueError, TypeError, RecursionError):
        return False
