"""What a person reads on the terminal: reports and manifests as tables, findings as lines."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from causal_encoder.diff import Difference
    from causal_encoder.doctor import Finding
    from causal_encoder.export import Report
    from causal_encoder.serve import Manifest


_RESULTS = {True: "[green]proven[/]", False: "[red]refuted[/]", None: "[yellow]unchecked[/]"}
CHECKS_IN_BYTES = {"stored once"}


def summary(manifest: "Manifest") -> str:
    """What the verification at export found, in a line."""
    assert manifest.parity is not None
    checks = {check["name"]: check for check in manifest.parity["checks"]}
    open_checks = sum(check["passed"] is None for check in checks.values())
    text = f"{len(checks) - open_checks} checks proven"
    if open_checks:
        return f"{text}, {open_checks} not made, because they need CUDA: verify it where CUDA is"
    parity = checks.get("parity", {"measured": None, "limit": None})
    if parity["measured"] is None or parity["limit"] is None:
        return text
    return f"{text}, largest error {parity['measured']:.2g} of {parity['limit']:.2g} allowed"


_LEVEL_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "red"}


def print_report(report: "Report", console: Console) -> None:
    """One row a check, then the first failing case of each that does not hold."""
    where = "not run here" if report.device == "none" else f"on {report.device}"
    table = Table(title=f"{report.format} {where}")
    for heading in ("check", "result", "measured", "limit"):
        table.add_column(heading, justify="right" if heading in ("measured", "limit") else "left")
    for check in report.checks:
        result = _RESULTS[check.passed]
        numbers = (
            "" if n is None else _number(check.name, n) for n in (check.measured, check.limit)
        )
        table.add_row(check.name, result, *numbers)
    console.print(table)
    for check in report.checks:
        if check.passed is False:
            console.print(f"{check.name}: {check.detail}", markup=False, soft_wrap=True)
    reasons: dict[str, list[str]] = {}
    for check in report.checks:
        if check.passed is None:
            reasons.setdefault(check.detail, []).append(check.name)
    for reason, names in reasons.items():
        console.print(f"unchecked: {', '.join(names)}: {reason}", markup=False, soft_wrap=True)
    if report.proven:
        console.print(f"proven: {len(report.checks)} checks", highlight=False)


def _number(check: str, value: float) -> str:
    return f"{value:,.0f} bytes" if check in CHECKS_IN_BYTES else f"{value:.3g}"


def print_findings(findings: "Sequence[Finding]", console: Console) -> None:
    """One line a finding: its level, what was found, why it matters, and the fix."""
    for finding in findings:
        level = Text(f"{finding.level:<9}", _LEVEL_STYLES[finding.level])
        fix = f"; fix: {finding.fix}" * bool(finding.fix)
        line = " ".join(f"{finding.what} ({finding.why}){fix}".split())  # a path may hold breaks
        # No markup and no wrapping: the fixes hold brackets, and are there to be copied.
        console.print(level + line, soft_wrap=True)


def print_manifest(name: str, manifest: "Manifest", console: Console) -> None:
    """Everything that is known of a bundle, one fact a row."""
    console.print(name, markup=False, highlight=False, emoji=False, soft_wrap=True)
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in _manifest_rows(manifest):
        table.add_row(*map(Text, row))
    console.print(table)


def _manifest_rows(manifest: "Manifest") -> Iterator[tuple[str, str]]:
    versions = f"opset {manifest.opset}, IR {manifest.ir_version}, " if manifest.opset else ""
    oldest = f", ONNX Runtime {manifest.min_onnxruntime} or later" * bool(manifest.min_onnxruntime)
    yield (
        "format",
        f"{manifest.format}, {versions}{manifest.precision}, target {manifest.target}{oldest}",
    )
    for kind, tensors in (("input", manifest.inputs), ("output", manifest.outputs)):
        for tensor in tensors:
            yield kind, f"{tensor.name} {tensor.dtype} ({', '.join(map(str, tensor.axes))})"
    yield "max_len", f"{manifest.max_len} ({manifest.position} positions)"
    yield "config", ", ".join(f"{key}={value}" for key, value in manifest.config.items())
    yield "operators", ", ".join(f"{name} {count}" for name, count in manifest.operators.items())
    if manifest.warm_up:
        yield "warm-up", ", ".join(f"{batch}x{length}" for batch, length in manifest.warm_up)
    for name, file in manifest.files.items():
        yield "file", f"{name} {file.size_bytes:,} bytes, SHA-256 {file.sha256}"
    yield "checkpoint", manifest.checkpoint_sha256
    yield "made with", ", ".join(f"{name} {version}" for name, version in manifest.tools.items())
    if manifest.parity is not None:
        checks = manifest.parity["checks"]
        yield "verified", f"on export: {summary(manifest)}"
        for check in checks:
            if check["measured"] is not None and check["limit"] is not None:
                name = check["name"]
                measured, limit = (_number(name, check[key]) for key in ("measured", "limit"))
                yield "", f"{name}: {measured} of {limit} allowed"


def print_difference(a: str, b: str, difference: "Difference", console: Console) -> None:
    """What differs between two bundles, row by row; what is alike is left out."""
    for letter, name in (("A", a), ("B", b)):
        console.print(f"{letter}: {name}", markup=False, highlight=False, soft_wrap=True)
    table = Table("", "A", "B", title="what differs")
    for name, values in difference.facts.items():
        if values[0] != values[1]:
            table.add_row(*(Text("none" if v is None else str(v)) for v in (name, *values)))
    console.print(table if table.row_count else "format, versions, sizes and operators are alike")
    table = Table(
        "shape", "A, ms", "B, ms", "B / A", title="median milliseconds a run, roughly; see bench"
    )
    for row in difference.latency:
        shape = f"{row.batch_size} x {row.seq_len}"
        table.add_row(shape, f"{row.a_ms:.3g}", f"{row.b_ms:.3g}", f"{row.ratio:.2f}")
    console.print(table)
    parity = difference.parity
    console.print(
        f"outputs: largest {parity.measure} difference {parity.largest:.3g} of "
        f"{parity.limit:.3g} allowed, at {parity.batch_size} x {parity.seq_len}",
        highlight=False,
    )
