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
    taken: dict[Path, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        try:
            target = Path(path).absolute()
            real = Path("-") if path == "-" else target.resolve()
        except (OSError, ValueError, RuntimeError) as error:  # a link to itself, a zero byte
            raise click.BadParameter(f"{path}: {error}", param_hint=option) from error
        if real in taken and not _is_device(target):
            raise click.BadParameter(
                f"{path} is taken by {taken[real]}; choose another", param_hint=option
            )
        taken[real] = option
        if path == "-":
            continue
        if _is_bundle(real.parent):
            raise click.BadParameter(
                f"{path} is in a bundle, which another file would make invalid; choose another "
                "folder",
                param_hint=option,
            )
        if not _is_device(target) and not target.parent.is_dir():
            raise click.BadParameter(
                f"{path}: there is no folder {target.parent}; make it first", param_hint=option
            )
        if not os.access(target if _is_device(target) else real.parent, os.W_OK):
            raise click.BadParameter(f"{path} cannot be written", param_hint=option)


def _is_device(path: Path) -> bool:
    return path.exists() and not path.is_file()


def _is_bundle(folder: Path) -> bool:
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        return {"schema_version", "files", "digest"} <= set(manifest)
    except (OSError, ValueError, TypeError, RecursionError):
        return False
