"""What is checked of an artifact: one function a check, two tables at the end."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from causal_encoder.errors import (
    EmptySequenceError,
    InputError,
    InvalidInputError,
    SequenceTooLongError,
    TokenOutOfRangeError,
)
from causal_encoder.export.artifact import OPTIMIZATION_LEVELS
from causal_encoder.export.prepare import INPUT, MIN_ONNXRUNTIME, metadata, output_of, tool_versions
from causal_encoder.export.subject import Array, Subject, grid_lengths
from causal_encoder.export.wrapper import ATTENTION_OPSET
from causal_encoder.model import fingerprint
from causal_encoder.serve.cpu import available_cpus

# No tensor twice: parameters and tables, and a little for the graph itself.
SIZE_FACTOR = 1.05
SIZE_FLOOR_BYTES = 64 * 2**10
BYTES_PER_WEIGHT = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 4}
BYTES_PER_MATRIX_WEIGHT = BYTES_PER_WEIGHT | {"int8": 1}  # of those in the layers

# The versions that decide what a trace looks like.
_TRACING_TOOLS = ("causal-encoder", "torch", "onnx", "onnxscript")
_RANDOM_OPERATORS = ("dropout", "random", "bernoulli", "multinomial", "rand")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """What a check found.

    Attributes:
        measured, limit: the number, and what it may be at most.
        detail: the first failing case; the check holds if there is none.
        unchecked: why it could not be decided here; empty if it could.
    """

    measured: float | None = None
    limit: float | None = None
    detail: str = ""
    unchecked: str = ""


# A check gives None where it does not apply to the format, and then is no row of the report.
CheckFunction = Callable[["Subject"], Finding | None]


def source(subject: Subject) -> Finding:
    """The bundle names the weights that it is checked against."""
    if subject.manifest.checkpoint_sha256 == fingerprint(subject.model):
        return Finding()
    return Finding(
        detail="the bundle was exported from other weights than these; name its own checkpoint, "
        "or export it again"
    )


def weights_exact(subject: Subject) -> Finding:
    """Every tensor is in the file under its name, bit for bit in the file's precision."""
    stored = subject.facts.weights
    values = set(stored.values())
    for name, digest in subject.expected.weights.items():
        # Another version of the exporter may name or merge tensors otherwise.
        if stored.get(name) != digest if name in stored else digest not in values:
            return Finding(detail=f"{name} is not in the file as the model has it")
    return Finding()


def graph_as_traced(subject: Subject) -> Finding:
    """The file computes what a fresh export of the model computes, node by node.

    The checks that run the file try many shapes, but a file that was made to fail on one
    shape that they do not try passes them all. This one leaves no room for such an edit.
    """
    found, expected = subject.facts.graph, subject.expected.graph
    if found == expected:
        return Finding()
    made_with, here = subject.manifest.tools, tool_versions()
    for tool in _TRACING_TOOLS:
        if made_with.get(tool) != here[tool]:
            return Finding(
                unchecked=f"the graph is not the one that {tool} {here[tool]} gives, and the "
                f"manifest says it was made with {made_with.get(tool)}; verify it under the "
                "versions in the manifest, or export it again"
            )
    line = next((a for a, b in zip(found, expected, strict=False) if a != b), "its length")
    return Finding(detail=f"the graph is not as exported: it differs in {line[:120]}")


def facts_agree(subject: Subject) -> Finding:
    """The model file says of itself what the manifest says of it."""
    manifest, facts = subject.manifest, subject.facts
    if manifest.format != "onnx" and (manifest.precision, manifest.target) != ("fp32", "portable"):
        form = f"{manifest.precision} for {manifest.target}"
        return Finding(detail=f"a {manifest.format} bundle says {form}, expected fp32 for portable")
    pairs: Mapping[str, tuple[object, object]] = {
        "operators": (dict(facts.operators), dict(manifest.operators)),
        "opset": (facts.opset, manifest.opset),
        "ir_version": (facts.ir_version, manifest.ir_version),
        "inputs": ((INPUT,), manifest.inputs),
        "outputs": ((output_of(subject.model.config),), manifest.outputs),
        "min_onnxruntime": (
            MIN_ONNXRUNTIME if manifest.format == "onnx" else None,
            manifest.min_onnxruntime,
        ),
        **{
            key: (facts.metadata.get(key), value)
            for key, value in metadata(
                subject.model.config, manifest.precision, manifest.target
            ).items()
            if not key.endswith(".version")
        },
    }
    for name, (found, expected) in pairs.items():
        if found != expected:
            return Finding(detail=f"{name} is {found!r} in the file, expected {expected!r}")
    return Finding()


def axes_dynamic(subject: Subject) -> Finding:
    """Batch and sequence are still open in the file."""
    config, facts = subject.model.config, subject.facts
    output = output_of(config).axes
    expected: tuple[str | int, ...] = INPUT.axes
    if subject.manifest.format == "program" and config.max_len == 1:
        expected = (INPUT.axes[0], 1)  # the only length there is
    for name, found, wanted in (
        ("input", facts.input_axes, expected),
        ("output", facts.output_axes, output),
    ):
        if found is not None and found != wanted:
            return Finding(detail=f"{name} axes are {found}, expected {wanted}")
    return Finding()


def nothing_random(subject: Subject) -> Finding:
    """No dropout and no random operator is left."""
    for operator in subject.facts.operators:
        if any(word in operator.lower() for word in _RANDOM_OPERATORS):
            return Finding(detail=f"operator {operator} is in the graph")
    return Finding()


def attention_whole(subject: Subject) -> Finding | None:
    """Where the opset has an Attention operator, there is one in each layer."""
    opset, num_layers = subject.facts.opset, subject.model.config.num_layers
    if opset is None or opset < ATTENTION_OPSET:
        return None
    count = subject.facts.operators["Attention"]
    if count == num_layers:
        return Finding()
    return Finding(detail=f"{count} Attention operators, expected {num_layers}, one a layer")


def stored_once(subject: Subject) -> Finding | None:
    """An ONNX file is as large as its weights and tables, and little more."""
    if subject.manifest.format != "onnx":
        return None  # the other archives hold code, which grows with the layers
    config = subject.model.config
    precision, layers = subject.manifest.precision, subject.model.blocks.state_dict().values()
    matrices = sum(tensor.numel() for tensor in layers if tensor.dim() == 2)
    weights = sum(tensor.numel() for tensor in subject.model.state_dict().values()) - matrices
    tables = config.max_len * config.d_model * config.has_sinusoidal
    guards = config.max_len + 3 * config.d_model
    scales = (4 * config.d_model + config.d_ff) * config.num_layers + config.d_model
    size = BYTES_PER_MATRIX_WEIGHT[precision] * matrices
    size += BYTES_PER_WEIGHT[precision] * (weights + tables + guards + scales)
    limit = SIZE_FACTOR * size + SIZE_FLOOR_BYTES
    detail = f"{subject.model_bytes:,} bytes, expected at most {int(limit):,}"
    return Finding(
        measured=subject.model_bytes,
        limit=limit,
        detail=detail if subject.model_bytes > limit else "",
    )


def repeatable(subject: Subject) -> Finding:
    """A second run, and the file loaded once more, give the same bits."""
    ids = subject.property_ids
    first = subject.run(ids)
    if not np.array_equal(subject.run(ids), first, equal_nan=True):
        return Finding(detail=f"two runs on the same {ids.shape} ids differ")
    if not np.array_equal(subject.reopen("all", available_cpus())(ids), first, equal_nan=True):
        return Finding(detail=f"the file loaded again differs on the same {ids.shape} ids")
    return Finding()


def settings_agree(subject: Subject) -> Finding | None:
    """Every graph optimisation level and thread count gives the same, within the budget."""
    if subject.manifest.format != "onnx":
        return None
    ids = subject.property_ids
    usual = subject.run(ids)
    cases = []
    for level in OPTIMIZATION_LEVELS:
        for threads in sorted({1, available_cpus()}):
            subject.tick(f"{level}, {threads} threads")
            difference = subject.distance(subject.reopen(level, threads)(ids), usual)
            cases.append((difference, f"at optimisation level {level} with {threads} threads"))
    return _largest(cases, subject.invariance_limit, "outputs move by")


def parity(subject: Subject) -> Finding:
    """Every cell of the grid is as near to the reference as eager fp32 is, by the budget."""
    worst = max(cell.error for cell in subject.grid)
    failing = next((cell for cell in subject.grid if cell.error > subject.limit), None)
    detail = (
        f"error {failing.error:.3g} is over {subject.limit:.3g} "
        f"at batch {failing.batch}, sequence {failing.length}"
        if failing
        else ""
    )
    return Finding(measured=worst, limit=subject.limit, detail=detail)


def finite(subject: Subject) -> Finding:
    """No NaN and no infinity is in any cell of the grid."""
    for cell in subject.grid:
        if not cell.finite:
            where = f"at batch {cell.batch}, sequence {cell.length}"
            return Finding(detail=f"NaN or infinity is in the output {where}")
    return Finding()


def causal(subject: Subject) -> Finding:
    """Changing a token changes no earlier output."""
    ids = subject.property_ids
    vocab_size, length = subject.model.config.vocab_size, ids.shape[1]
    before = subject.run(ids)
    cases = []
    for position in sorted({1, length // 2, length - 1} - {0}):
        changed = ids.copy()
        changed[:, position:] = (changed[:, position:] + 1) % vocab_size
        difference = subject.distance(subject.run(changed)[:, :position], before[:, :position])
        cases.append((difference, f"when tokens from position {position} on change"))
    return _largest(cases, subject.invariance_limit, "earlier outputs move by")


def batch_invariant(subject: Subject) -> Finding:
    """A row alone gives what it gives among others."""
    ids = subject.property_ids
    together = subject.run(ids)
    cases = [
        (
            subject.distance(subject.run(ids[row : row + 1].copy()), together[row : row + 1]),
            f"in row {row}",
        )
        for row in range(len(ids))
    ]
    return _largest(cases, subject.invariance_limit, "a row alone and in a batch differ by")


def padding_invariant(subject: Subject) -> Finding:
    """Padding on the right changes no real position."""
    ids = subject.property_ids
    cases = []
    for length in grid_lengths(ids.shape[1]):
        padded = ids.copy()
        padded[:, length:] = 0
        difference = subject.distance(
            subject.run(padded)[:, :length], subject.run(ids[:, :length].copy())
        )
        cases.append((difference, f"at length {length}, padded to {ids.shape[1]}"))
    return _largest(cases, subject.invariance_limit, "rows move by")


def refuses_too_long(subject: Subject) -> Finding:
    """T > L is refused, and never answered by the bare file."""
    max_len = subject.model.config.max_len
    for length in (max_len + 1, max_len + 2, 2 * max_len + 1):
        ids = np.zeros((2, length), np.int64)
        if detail := _answered(subject, ids, SequenceTooLongError, (slice(None), max_len)):
            return Finding(detail=f"sequence length {length}: {detail}")
    return Finding()


def refuses_empty(subject: Subject) -> Finding:
    """T = 0 is refused."""
    detail = _answered(subject, np.zeros((2, 0), np.int64), EmptySequenceError, None)
    return Finding(detail=f"sequence length 0: {detail}" if detail else "")


def refuses_wrong_rank(subject: Subject) -> Finding:
    """Ids that are not (batch, sequence) are refused."""
    for shape in ((2,), (1, 1, 1), (2, 1, 1)):
        ids = np.zeros(shape, np.int64)
        if detail := _answered(subject, ids, InvalidInputError, None):
            return Finding(detail=f"ids of shape {shape}: {detail}")
    return Finding()


def refuses_bad_ids(subject: Subject) -> Finding:
    """An id outside 0..V-1 is refused, and from there on never answered by the bare file."""
    vocab_size = subject.model.config.vocab_size
    for token in (-1, -vocab_size - 1, -(2**40), vocab_size, vocab_size + 1, 2**40, 2**63 - 1):
        for column in {0, subject.property_ids.shape[1] - 1}:
            ids = subject.property_ids
            ids[1, column] = token
            if detail := _answered(subject, ids, TokenOutOfRangeError, (slice(1, 2), column)):
                return Finding(detail=f"id {token} at column {column}: {detail}")
    return Finding()


def _largest(cases: list[tuple[float, str]], limit: float, what: str) -> Finding:
    failing = next((case for case in cases if case[0] > limit), None)
    return Finding(
        measured=max((difference for difference, _ in cases), default=0.0),
        limit=limit,
        detail=f"{what} {failing[0]:.3g}, over {limit:.3g}, {failing[1]}" if failing else "",
    )


def _answered(
    subject: Subject,
    ids: Array,
    expected: type[InputError],
    poisoned: tuple[slice, int] | None,
) -> str:
    """Empty if the artifact refuses the ids, else what it did.

    Args:
        subject: the artifact.
        ids: what it must refuse.
        expected: the error of an EncoderSession.
        poisoned: (rows, column) from where on the bare file, if it answers, must give NaN.
    """
    try:
        hidden = subject.bare(ids)
    except Exception:  # noqa: BLE001  # any error of the runtime is a refusal
        hidden = None
    if hidden is not None:
        rest = hidden if poisoned is None else hidden[poisoned[0], poisoned[1] :]
        if rest.size == 0 or not np.isnan(rest).all(axis=-1).all():
            return f"the file answers with shape {hidden.shape}, expected an error or NaN"
    if subject.manifest.format == "onnx":
        try:
            subject.run(ids)
        except expected:
            return ""
        except Exception as error:  # noqa: BLE001  # the wrong refusal is a finding
            return f"the session raises {type(error).__name__}, expected {expected.__name__}"
        return f"the session answers, expected {expected.__name__}"
    return ""


FILE_CHECKS: dict[str, CheckFunction] = {
    "source": source,
    "weights": weights_exact,
    "graph": graph_as_traced,
    "facts": facts_agree,
    "axes": axes_dynamic,
    "no random operators": nothing_random,
    "attention": attention_whole,
    "stored once": stored_once,
}
RUN_CHECKS: dict[str, CheckFunction] = {
    "parity": parity,
    "finite": finite,
    "repeatable": repeatable,
    "settings": settings_agree,
    "causality": causal,
    "batch invariance": batch_invariant,
    "padding invariance": padding_invariant,
    "refuses too long": refuses_too_long,
    "refuses empty": refuses_empty,
    "refuses wrong rank": refuses_wrong_rank,
    "refuses bad ids": refuses_bad_ids,
}
