"""Verification: does an exported file compute what the model computes?

The table of what is checked is in causal_encoder.export.checks.
"""

import dataclasses
import itertools
import math
import os
from collections.abc import Callable
from typing import Any

from causal_encoder.errors import BundleError, ConfigError
from causal_encoder.export.artifact import Facts
from causal_encoder.export.checks import FILE_CHECKS, RUN_CHECKS, CheckFunction, Finding
from causal_encoder.export.prepare import (
    check_encoder,
    exact_arithmetic,
    exported_config,
    in_a_line,
    prepare,
)
from causal_encoder.export.subject import Subject, count_ticks, open_subject
from causal_encoder.model import CausalEncoder, EncoderConfig
from causal_encoder.serve import open_bundle

# Called with (step, steps done, steps in all).
Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One row of a report.

    Attributes:
        name: what was checked.
        passed: whether it holds; None if it could not be checked here.
        measured, limit: the number, and what it may be at most, where there is a finite one.
        detail: the first failing case, or why it could not be checked; empty if it holds.
    """

    name: str
    passed: bool | None
    measured: float | None
    limit: float | None
    detail: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What verification found, check by check."""

    format: str
    device: str
    checks: tuple[Check, ...]

    @property
    def verdict(self) -> str:
        """One of proven, refuted, unchecked: what was checked holds, but not all could be."""
        outcomes = {check.passed for check in self.checks}
        return "refuted" if False in outcomes else "unchecked" if None in outcomes else "proven"

    @property
    def proven(self) -> bool:
        """Whether every check holds."""
        return self.verdict == "proven"

    @property
    def first_failure(self) -> str:
        """Name and detail of the first check that does not hold; empty if all do."""
        for check in self.checks:
            if check.passed is False:
                return f"{check.name} is refuted: {check.detail}"
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; the README documents them."""
        return {
            "verdict": self.verdict,
            "format": self.format,
            "device": self.device,
            "checks": [dataclasses.asdict(check) for check in self.checks],
        }


def verify(
    bundle: str | os.PathLike[str],
    model: CausalEncoder,
    *,
    device: str = "auto",
    progress: Progress | None = None,
) -> Report:
    """Check a bundle against the model it was exported from. Changes nothing on disk.

    Args:
        bundle: folder of the bundle.
        model: the model, for example from load_checkpoint.
        device: "cpu", "cuda" or "auto" for ONNX; the other formats are checked on CPU.
        progress: called with (step, done, total).

    Returns:
        Every check with its number and its first failing case.

    Raises:
        BundleError: the bundle is damaged.
        ExportError: model is no CausalEncoder.
        DeviceError: "cuda" was asked for and cannot be used here.
    """
    check_encoder(model)
    with open_bundle(bundle) as opened:
        manifest = opened.manifest
    try:
        config = EncoderConfig.from_dict(manifest.config)
    except ConfigError as error:
        raise BundleError(f"{bundle}: config in the manifest: {error}") from error
    own = exported_config(model.config, None)
    alike = own if own.has_learned else dataclasses.replace(own, max_len=config.max_len)
    if config != alike:
        name, theirs = next(
            (name, value)
            for name, value in config.to_dict().items()
            if value != getattr(alike, name)
        )
        difference = (
            f"{name} is {theirs!r} in the bundle, {getattr(alike, name)!r} in the model; name its "
            "own checkpoint"
        )
        return Report(
            format=manifest.format,
            device="cpu",
            checks=(_row("source", Finding(detail=difference)),),
        )
    return verify_prepared(bundle, prepare(model, config.max_len), device, progress)


def verify_prepared(
    bundle: str | os.PathLike[str],
    model: CausalEncoder,
    device: str,
    progress: Progress | None,
    traced: Facts | None = None,
) -> Report:
    """As `verify`, for a prepared model that has the bundle's config.

    The exporter passes what it has just traced, which is not traced again then.
    """
    total = len(FILE_CHECKS) + len(RUN_CHECKS) + count_ticks(model.config.max_len)
    steps = itertools.count()

    def tick(step: str) -> None:
        if progress is not None:
            progress(step, next(steps), total)

    with open_bundle(bundle) as opened:
        subject = open_subject(opened, model, device, tick, traced)
    rows = []
    with exact_arithmetic():
        for name, check in (FILE_CHECKS | RUN_CHECKS).items():
            tick(name)
            if name in RUN_CHECKS and subject.device == "none":
                rows.append(_row(name, Finding(unchecked="needs CUDA, which is not here")))
            elif (finding := _find(check, subject)) is not None:
                rows.append(_row(name, finding))
    if progress is not None:
        progress("done", total, total)
    return Report(format=opened.manifest.format, device=subject.device, checks=tuple(rows))


def _find(check: CheckFunction, subject: Subject) -> Finding | None:
    try:
        return check(subject)
    except Exception as error:  # noqa: BLE001  # whatever an artifact raises on valid input refutes it
        return Finding(detail=in_a_line(error))


def _row(name: str, finding: Finding) -> Check:
    return Check(
        name=name,
        passed=None if finding.unchecked else not finding.detail,
        measured=finding.measured if math.isfinite(finding.measured or 0.0) else None,
        limit=finding.limit if math.isfinite(finding.limit or 0.0) else None,
        detail=finding.detail or finding.unchecked,
    )
