"""The manifest of a bundle: what it says, and reading it with every field checked."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from causal_encoder.errors import BundleError
from causal_encoder.serve.buckets import MAX_BUCKETS, Shape, bucket_of

MANIFEST_FILE = "manifest.json"
SCHEMA_VERSION = 1
FORMATS = ("onnx", "torchscript", "program")
MODEL_FILES = {"onnx": "model.onnx", "torchscript": "model.pt", "program": "model.pt2"}
PRECISIONS = ("fp32", "fp16", "bf16", "int8")
TARGETS = ("portable", "cpu", "cuda")
_REPORT_ROW = {"name", "passed", "measured", "limit", "detail"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """An input or output: its name, NumPy dtype, and axes (named ones are dynamic)."""

    name: str
    dtype: str
    axes: tuple[str | int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class File:
    """What a file of the bundle must be."""

    size_bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is known of a bundle.

    Attributes:
        format: "onnx", "torchscript" or "program".
        config: the EncoderConfig fields, with max_len as exported.
        precision: type of the weights and of the arithmetic, one of PRECISIONS.
        target: what the graph is written for: "portable" is ai.onnx alone, "cpu" and "cuda"
            are for those execution providers of ONNX Runtime.
        inputs, outputs: names, dtypes and axes.
        operators: number of operators of each type in the model file.
        opset, ir_version, min_onnxruntime: for onnx: versions of the file, and the oldest
            ONNX Runtime it was tested with.
        tools: versions of what made the bundle.
        checkpoint_sha256: fingerprint of the weights it came from.
        files: every file of the bundle other than the manifest.
        warm_up: (batch, sequence) shapes to capture as CUDA graphs when a session that uses
            them opens; at most MAX_BUCKETS, each small enough for a bucket.
        parity: the report of the verification made before publishing.
    """

    format: str
    config: Mapping[str, Any]
    precision: str
    target: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    operators: Mapping[str, int]
    opset: int | None
    ir_version: int | None
    min_onnxruntime: str | None
    tools: Mapping[str, str]
    checkpoint_sha256: str
    files: Mapping[str, File]
    warm_up: tuple[Shape, ...]
    parity: Mapping[str, Any] | None

    @property
    def vocab_size(self) -> int:
        """V; valid ids are 0..V-1."""
        return int(self.config["vocab_size"])

    @property
    def max_len(self) -> int:
        """L, the longest sequence."""
        return int(self.config["max_len"])

    @property
    def d_model(self) -> int:
        """D, the width of the output."""
        return int(self.config["d_model"])

    @property
    def position(self) -> str:
        """The position scheme."""
        return str(self.config["position"])

    def to_json(self) -> str:
        """The text of manifest.json, sealed with a digest of itself."""
        fields = {
            "schema_version": SCHEMA_VERSION,
            "max_len": self.max_len,
            "vocab_size": self.vocab_size,
            **dataclasses.asdict(self),
        }
        return json.dumps(fields | {"digest": _digest(fields)}, indent=2) + "\n"


def parse_manifest(text: bytes, path: Path) -> Manifest:
    """The manifest that a file holds.

    Args:
        text: what is in the file.
        path: its name, for errors.

    Raises:
        BundleError: it is not JSON, edited, or of another schema.
    """
    try:
        fields = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BundleError(f"{path} holds {type(fields).__name__}, expected a JSON object")
    version = fields.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise BundleError(
            f"{path} has schema_version {version!r}, this version reads {SCHEMA_VERSION}; "
            "export the bundle again or install a matching causal-encoder"
        )
    digest = fields.pop("digest", None)
    try:
        untouched = digest == _digest(fields)
    except RecursionError as error:
        raise BundleError(f"{path} is nested too deeply") from error
    if not untouched:
        raise BundleError(f"{path} was changed after it was written: its digest does not match")
    return _Reader(path).manifest(fields)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Another reader of a name that is there twice may take the other value."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name is there twice in one object")
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _digest(fields: Mapping[str, Any]) -> str:
    """Over the values, not the layout of the text; a guard against accident, not attack."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _is_moderate(number: float | None) -> bool:
    return number is None or abs(number) <= 1e300


class _Reader:
    """Turns parsed JSON into a Manifest, naming the first field that is not as it must be."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def manifest(self, fields: Mapping[str, Any]) -> Manifest:
        names = {field.name for field in dataclasses.fields(Manifest)}
        derived = {"schema_version", "max_len", "vocab_size"}
        if set(fields) != names | derived:
            odd = sorted(set(fields) ^ (names | derived))[0]
            self.refuse(odd, "unknown" if odd in fields else "missing")
        manifest = Manifest(
            format=self.choice(fields, "format", FORMATS),
            config=self.config(fields["config"]),
            precision=self.choice(fields, "precision", PRECISIONS),
            target=self.choice(fields, "target", TARGETS),
            inputs=self.tensors(fields, "inputs"),
            outputs=self.tensors(fields, "outputs"),
            operators={
                name: self.whole(f"operators.{name}", count, 1)
                for name, count in self.mapping(fields, "operators").items()
            },
            opset=self.optional_whole(fields, "opset"),
            ir_version=self.optional_whole(fields, "ir_version"),
            min_onnxruntime=self.optional_version(fields, "min_onnxruntime"),
            tools={
                name: self.text(f"tools.{name}", version)
                for name, version in self.mapping(fields, "tools").items()
            },
            checkpoint_sha256=self.sha256("checkpoint_sha256", fields["checkpoint_sha256"]),
            files={
                name: self.file(name, entry)
                for name, entry in self.mapping(fields, "files").items()
            },
            warm_up=self.shapes(fields, "warm_up"),
            parity=None if fields["parity"] is None else self.parity(fields["parity"]),
        )
        for name in ("max_len", "vocab_size"):
            if self.whole(name, fields[name], 1) != manifest.config[name]:
                self.refuse(name, f"{fields[name]!r}, but config says {manifest.config[name]!r}")
        for shape in manifest.warm_up:
            if shape[1] > manifest.max_len or not bucket_of(shape, manifest.max_len):
                self.refuse("warm_up", f"{list(shape)}, which no CUDA graph takes")
        if MODEL_FILES[manifest.format] not in manifest.files:
            self.refuse("files", f"without {MODEL_FILES[manifest.format]}")
        return manifest

    def config(self, value: Any) -> Mapping[str, Any]:
        """Only what serving relies on; the whole config is checked where a model is built."""
        if not isinstance(value, dict):
            self.refuse("config", f"{type(value).__name__}, expected an object")
        for name in ("vocab_size", "max_len", "d_model"):
            self.whole(f"config.{name}", value.get(name), 1)
        self.text("config.position", value.get("position"))
        return value

    def tensors(self, fields: Mapping[str, Any], name: str) -> tuple[Tensor, ...]:
        value = fields[name]
        if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], dict):
            self.refuse(name, "not a list of one object")
        if set(value[0]) != {"name", "dtype", "axes"} or not isinstance(value[0]["axes"], list):
            self.refuse(name, f"{value[0]!r}, expected name, dtype and axes")
        for axis in value[0]["axes"]:
            if not isinstance(axis, str):
                self.whole(f"{name}.axes", axis, 1)
        return (
            Tensor(
                name=self.text(f"{name}.name", value[0]["name"]),
                dtype=self.text(f"{name}.dtype", value[0]["dtype"]),
                axes=tuple(value[0]["axes"]),
            ),
        )

    def shapes(self, fields: Mapping[str, Any], name: str) -> tuple[Shape, ...]:
        value = fields[name]
        if not isinstance(value, list) or len(value) > MAX_BUCKETS:
            self.refuse(name, f"not a list of at most {MAX_BUCKETS} shapes")
        for shape in value:
            if not isinstance(shape, list) or len(shape) != 2:
                self.refuse(name, f"{shape!r}, expected batch and sequence")
            for size in shape:
                self.whole(name, size, 1)
        return tuple((batch, sequence) for batch, sequence in value)

    def parity(self, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, dict) or not isinstance(value.get("checks"), list):
            self.refuse("parity", "not a report with its checks")
        self.text("parity.verdict", value.get("verdict"))
        for check in value["checks"]:
            if not isinstance(check, dict) or not set(check) >= _REPORT_ROW:
                self.refuse(
                    "parity.checks", f"{check!r}, expected {', '.join(sorted(_REPORT_ROW))}"
                )
            self.text("parity.checks.name", check["name"])
            for number in ("measured", "limit"):
                if not isinstance(check[number], int | float | None) or not _is_moderate(
                    check[number]
                ):
                    self.refuse(f"parity.checks.{number}", f"{check[number]!r}, expected a number")
        return value

    def file(self, name: str, value: Any) -> File:
        if name in ("", ".", "..", MANIFEST_FILE) or "/" in name or "\\" in name or "\0" in name:
            self.refuse("files", f"{name!r}, expected a plain file name")
        if not isinstance(value, dict) or set(value) != {"size_bytes", "sha256"}:
            self.refuse(f"files.{name}", f"{value!r}, expected size_bytes and sha256")
        return File(
            size_bytes=self.whole(f"files.{name}.size_bytes", value["size_bytes"], 0),
            sha256=self.sha256(f"files.{name}.sha256", value["sha256"]),
        )

    def choice(self, fields: Mapping[str, Any], name: str, choices: tuple[str, ...]) -> str:
        value = fields[name]
        if not isinstance(value, str) or value not in choices:
            self.refuse(name, f"{value!r}, expected one of {', '.join(choices)}")
        return value

    def mapping(self, fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        value = fields[name]
        if not isinstance(value, dict):
            self.refuse(name, f"{type(value).__name__}, expected an object")
        return value

    def whole(self, name: str, value: Any, least: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
            self.refuse(name, f"{value!r}, expected a whole number from {least} to 2^63 - 1")
        return value

    def optional_whole(self, fields: Mapping[str, Any], name: str) -> int | None:
        return None if fields[name] is None else self.whole(name, fields[name], 1)

    def text(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            self.refuse(name, f"{value!r}, expected text")
        return value

    def optional_version(self, fields: Mapping[str, Any], name: str) -> str | None:
        if fields[name] is None:
            return None
        text = self.text(name, fields[name])
        if not re.fullmatch(r"\d{1,6}(\.\d{1,6}){1,3}", text):
            self.refuse(name, f"{text[:40]!r}, expected a version such as 1.28.0")
        return text

    def sha256(self, name: str, value: Any) -> str:
        text = self.text(name, value)
        if len(text) != 64 or set(text) - set("0123456789abcdef"):
            self.refuse(name, f"{text!r}, expected 64 hexadecimal digits")
        return text

    def refuse(self, name: str, found: str) -> NoReturn:
        raise BundleError(f"{self.path}: {name} is {found}")
