"""A bundle is opened whole or refused by name, whatever happened to it on the way.

The digest of the manifest is computed here a second time, without the code under test: a
tampered manifest with a digest that fits reaches the checks behind the digest.
"""

import contextlib
import hashlib
import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import onnx
import pytest
from hypothesis import strategies as st

from causal_encoder.errors import BundleError
from causal_encoder.serve import EncoderSession, Manifest, open_bundle
from tests.bundles import reseal

FILES = ("manifest.json", "model.onnx")
GONE = object()  # a field to take away

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def opened(folder: str | os.PathLike[str]) -> Manifest:
    with open_bundle(folder) as found:
        return found.manifest


def refused(folder: str | os.PathLike[str]) -> str:
    """The reason why a bundle is not opened, which is one line."""
    with pytest.raises(BundleError) as caught:
        opened(folder)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def fields_of(folder: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    del fields["digest"]
    return fields


def seal(folder: Path, fields: dict[str, Any]) -> None:
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(fields | {"digest": digest}))


def change(folder: Path, where: str, value: Any) -> None:
    """Set the field at a dotted path, or take it away, and seal the manifest again."""
    fields = fields_of(folder)
    *parents, last = where.split("/")
    inner: Any = fields
    for name in parents:
        inner = inner[int(name)] if isinstance(inner, list) else inner[name]
    if value is GONE:
        del inner[last]
    elif isinstance(inner, list):
        inner[int(last)] = value
    else:
        inner[last] = value
    seal(folder, fields)


# What a whole bundle is.


def test_a_whole_bundle_opens_and_tells_what_it_is(bundle: Path) -> None:
    with open_bundle(bundle) as found:
        assert found.folder == bundle
        assert found.model_path == bundle / "model.onnx"
        manifest = found.manifest
    assert (manifest.format, manifest.precision) == ("onnx", "fp32")
    assert (manifest.vocab_size, manifest.max_len, manifest.d_model) == (37, 24, 12)
    assert manifest.position == "sinusoidal"
    assert manifest.inputs[0].axes == ("batch", "sequence")
    assert manifest.outputs[0].axes == ("batch", "sequence", 12)
    assert (manifest.inputs[0].dtype, manifest.outputs[0].dtype) == ("int64", "float32")


def test_the_manifest_names_size_and_hash_of_every_other_file(bundle: Path) -> None:
    files = opened(bundle).files
    assert set(files) == {path.name for path in bundle.iterdir()} - {"manifest.json"}
    for name, file in files.items():
        content = (bundle / name).read_bytes()
        assert file.size_bytes == len(content)
        assert file.sha256 == hashlib.sha256(content).hexdigest()


def test_the_manifest_carries_the_report_made_before_it_was_published(bundle: Path) -> None:
    parity = opened(bundle).parity
    assert parity is not None
    assert parity["verdict"] == "proven"
    assert all(check["passed"] for check in parity["checks"])


def test_a_manifest_is_written_as_it_was_read(bundle: Path) -> None:
    text = (bundle / "manifest.json").read_text()
    assert opened(bundle).to_json() == text


def test_a_bundle_sealed_by_the_tests_own_digest_opens(copy: Path) -> None:
    seal(copy, fields_of(copy))
    opened(copy)


def test_opening_changes_nothing_on_the_disk(copy: Path) -> None:
    before = {path: path.read_bytes() for path in copy.iterdir()}
    opened(copy)
    assert {path: path.read_bytes() for path in copy.iterdir()} == before
    assert list(copy.parent.iterdir()) == [copy]


@pytest.mark.parametrize(
    "name", ["with spaces", "日本語", "é", "[v2]", "%s{}", "-x", "a'b\"c", "v1.0"]
)
def test_a_bundle_may_have_any_name(copy: Path, name: str) -> None:
    renamed = copy.rename(copy.parent / name)
    assert EncoderSession(renamed, "cpu").run([[1]]).shape == (1, 1, 12)
    (renamed / "model.onnx").unlink()
    assert str(renamed) in refused(renamed)


def test_a_bundle_opens_by_relative_path_and_as_the_working_folder(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copy.parent)
    for path in ("bundle", "./bundle/", "../home/bundle", Path("bundle")):
        assert opened(path).max_len == 24
    assert EncoderSession("bundle", "cpu").run([[1]]).shape == (1, 1, 12)
    monkeypatch.chdir(copy)
    assert opened(".").max_len == 24


def test_a_bundle_opens_through_linked_folders(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "parent").symlink_to(copy.parent)
    (tmp_path / "current").symlink_to(copy)
    assert opened(tmp_path / "parent" / "bundle").max_len == 24
    assert EncoderSession(tmp_path / "current", "cpu").run([[1]]).shape == (1, 1, 12)


def test_a_hard_linked_file_is_as_good_as_a_copy(copy: Path, tmp_path: Path) -> None:
    os.link(copy / "model.onnx", tmp_path / "other name")
    assert (copy / "model.onnx").stat().st_nlink == 2
    opened(copy)


# Damage to the files.


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_refused(copy: Path, name: str) -> None:
    path = copy / name
    content = path.read_bytes()
    positions = {*range(0, len(content), len(content) // 40), len(content) - 1}
    for position in sorted(positions):
        damaged = bytearray(content)
        # In the text, this bit makes every digit a letter: no flip is lost in rounding.
        damaged[position] ^= 0x40 if name == "manifest.json" else 1 << position % 8
        path.write_bytes(damaged)
        assert str(path) in refused(copy), f"byte {position}"
    path.write_bytes(content)
    opened(copy)


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_at_any_length_is_refused(copy: Path, name: str) -> None:
    path = copy / name
    content = path.read_bytes()
    size = len(content)
    for length in sorted({0, 1, 2, 100, *range(size // 30, size, size // 30), size - 2, size - 1}):
        if content[:length].rstrip() == content.rstrip():
            continue  # the line break at the end of the manifest says nothing
        path.write_bytes(content[:length])
        message = refused(copy)
        assert str(path) in message
        if name == "model.onnx":
            assert f"{length} bytes" in message
            assert f"expected {size}" in message


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("tail", [b"\0", b"{}", b"x" * 5000], ids=["nul", "json", "long"])
def test_a_file_with_something_after_its_end_is_refused(copy: Path, name: str, tail: bytes) -> None:
    path = copy / name
    path.write_bytes(path.read_bytes() + tail)
    assert str(path) in refused(copy)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("byte", [b"\0", b"\xff", b" "], ids=["zeros", "ones", "spaces"])
def test_a_file_filled_with_one_byte_is_refused_though_its_size_fits(
    copy: Path, name: str, byte: bytes
) -> None:
    path = copy / name
    path.write_bytes(byte * path.stat().st_size)
    assert str(path) in refused(copy)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    assert f"{copy / name} is missing" in refused(copy)


@pytest.mark.parametrize("name", FILES)
def test_a_renamed_file_is_named_by_the_name_it_should_have(copy: Path, name: str) -> None:
    (copy / name).rename(copy / "renamed")
    assert f"{copy / name} is missing" in refused(copy)


@pytest.mark.parametrize("name", ["readme.txt", ".DS_Store", "model.onnx.data", "Manifest.json"])
def test_a_file_that_does_not_belong_is_named(copy: Path, name: str) -> None:
    (copy / name).write_text("stray")
    message = refused(copy)
    assert str(copy / name) in message
    assert "remove it" in message


def test_a_folder_that_does_not_belong_is_named(copy: Path) -> None:
    (copy / "__pycache__").mkdir()
    assert str(copy / "__pycache__") in refused(copy)


def test_the_model_of_another_bundle_is_refused(copy: Path, scripted_bundle: Path) -> None:
    shutil.copy(scripted_bundle / "model.pt", copy / "model.onnx")
    assert str(copy / "model.onnx") in refused(copy)


def test_the_manifest_of_another_bundle_is_refused(copy: Path, scripted_bundle: Path) -> None:
    shutil.copy(scripted_bundle / "manifest.json", copy)
    assert f"{copy / 'model.pt'} is missing" in refused(copy)


def test_a_model_that_is_not_onnx_is_refused_even_if_its_hash_fits(copy: Path) -> None:
    for content in (b"", b"not a protobuf", bytes(1000), (copy / "model.onnx").read_bytes()[:900]):
        (copy / "model.onnx").write_bytes(content)
        reseal(copy)
        with pytest.raises(BundleError) as caught:
            EncoderSession(copy, "cpu")
        assert str(copy / "model.onnx") in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("field", "value"), [("ir_version", 99), ("opset", 99)])
def test_a_model_too_new_for_the_runtime_is_refused(copy: Path, field: str, value: int) -> None:
    proto = onnx.load(copy / "model.onnx")
    if field == "opset":
        proto.opset_import[0].version = value
    else:
        proto.ir_version = value
    (copy / "model.onnx").write_bytes(proto.SerializeToString())
    reseal(copy)
    with pytest.raises(BundleError, match=str(value)):
        EncoderSession(copy, "cpu")


# Weights in a second file.


@pytest.fixture
def split(copy: Path) -> Path:
    """A bundle whose weights lie in a data file beside the model."""
    proto = onnx.load(copy / "model.onnx")
    (copy / "model.onnx").unlink()
    onnx.save_model(
        proto,
        copy / "model.onnx",
        save_as_external_data=True,
        location="model.onnx.data",
        size_threshold=256,
    )
    assert (copy / "model.onnx.data").stat().st_size > 1000
    reseal(copy)
    return copy


def test_a_bundle_with_a_data_file_gives_the_same_numbers(
    split: Path, session: EncoderSession
) -> None:
    ids = [[3, 1, 4, 1, 5]]
    np.testing.assert_array_equal(EncoderSession(split, "cpu").run(ids), session.run(ids))


def test_a_data_file_of_zeros_is_refused_though_its_size_fits(split: Path) -> None:
    data = split / "model.onnx.data"
    data.write_bytes(bytes(data.stat().st_size))
    message = refused(split)
    assert str(data) in message
    assert "SHA-256" in message


def test_a_data_file_left_behind_in_a_copy_is_named(split: Path) -> None:
    (split / "model.onnx.data").unlink()
    assert f"{split / 'model.onnx.data'} is missing" in refused(split)


# Links and things that are not files.


@pytest.mark.parametrize("name", FILES)
def test_a_link_to_a_file_elsewhere_is_refused(copy: Path, tmp_path: Path, name: str) -> None:
    (copy / name).rename(tmp_path / name)
    (copy / name).symlink_to(tmp_path / name)
    message = refused(copy)
    assert str(copy / name) in message
    assert "not a regular file" in message


def test_a_dangling_link_is_refused(copy: Path, tmp_path: Path) -> None:
    for name in FILES:
        content = (copy / name).read_bytes()
        (copy / name).unlink()
        (copy / name).symlink_to(tmp_path / "nowhere")
        assert str(copy / name) in refused(copy)
        (copy / name).unlink()
        (copy / name).write_bytes(content)


@pytest.mark.parametrize("name", FILES)
def test_a_folder_in_place_of_a_file_is_refused(copy: Path, name: str) -> None:
    (copy / name).unlink()
    (copy / name).mkdir()
    assert "not a regular file" in refused(copy)


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_in_place_of_a_file_is_refused_and_never_read(copy: Path, name: str) -> None:
    (copy / name).unlink()
    os.mkfifo(copy / name)
    assert "not a regular file" in refused(copy)


def test_a_socket_in_place_of_a_file_is_refused(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy / "model.onnx").unlink()
    monkeypatch.chdir(copy)  # the path of a socket may not be long
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("model.onnx")
        assert "not a regular file" in refused(copy)


# Paths that are no bundle.


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "bundle"
    assert str(missing) in refused(missing)
    assert not missing.parent.exists()


def test_a_file_is_not_a_bundle(bundle: Path) -> None:
    assert "not a folder" in refused(bundle / "manifest.json")
    assert "not a folder" in refused(bundle / "model.onnx" / "below")


def test_an_empty_folder_is_not_a_bundle(tmp_path: Path) -> None:
    assert "manifest.json is missing" in refused(tmp_path)


def test_the_root_folder_is_not_a_bundle() -> None:
    refused("/")


def test_a_link_to_itself_is_not_a_bundle(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "loop" in refused(tmp_path / "loop")


def test_a_name_longer_than_the_file_system_takes_is_not_a_bundle(tmp_path: Path) -> None:
    refused(tmp_path / ("x" * 300))


def test_a_path_with_a_zero_byte_is_not_a_bundle(tmp_path: Path) -> None:
    refused(f"{tmp_path}/a\0b")


needs_permissions = pytest.mark.skipif(
    os.geteuid() == 0, reason="permissions do not bind the superuser"
)


@needs_permissions
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_may_not_be_read_is_named(copy: Path, name: str) -> None:
    (copy / name).chmod(0)
    message = refused(copy)
    assert str(copy / name) in message
    assert "Permission denied" in message


@needs_permissions
@pytest.mark.parametrize("mode", [0o000, 0o400, 0o100])
def test_a_folder_that_may_not_be_read_is_named(copy: Path, mode: int) -> None:
    copy.chmod(mode)
    try:
        message = refused(copy)
        assert str(copy) in message
        assert "Permission denied" in message
    finally:
        copy.chmod(0o700)


@needs_permissions
def test_a_parent_folder_that_may_not_be_entered_is_one_line(copy: Path) -> None:
    copy.parent.chmod(0)
    try:
        assert "Permission denied" in refused(copy)
    finally:
        copy.parent.chmod(0o700)


@needs_permissions
def test_a_bundle_in_a_folder_that_may_be_entered_but_not_listed_opens(copy: Path) -> None:
    copy.parent.chmod(0o100)
    try:
        opened(copy)
    finally:
        copy.parent.chmod(0o700)


@needs_permissions
def test_a_bundle_opens_where_nothing_may_be_written(copy: Path) -> None:
    for path in (*copy.iterdir(), copy, copy.parent):
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        opened(copy)
    finally:
        for path in (copy.parent, copy):
            path.chmod(0o700)


# The text of the manifest.


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"max_len": 24', '"max_len": 48'),
        ('"vocab_size": 37', '"vocab_size": 38'),
        ('"precision": "fp32"', '"precision": "fp16"'),
        ('"opset": 23', '"opset": 22'),
        ('"verdict": "proven"', '"verdict": "checked"'),
        ('"passed": true', '"passed": false'),
    ],
)
def test_an_edited_value_is_refused(copy: Path, old: str, new: str) -> None:
    text = (copy / "manifest.json").read_text()
    assert old in text
    (copy / "manifest.json").write_text(text.replace(old, new))
    message = refused(copy)
    assert str(copy / "manifest.json") in message
    assert "digest" in message


def test_another_layout_of_the_same_values_is_accepted(copy: Path) -> None:
    fields = json.loads((copy / "manifest.json").read_text())
    backwards = dict(reversed(fields.items()))
    (copy / "manifest.json").write_text(json.dumps(backwards, separators=(",", ":")))
    opened(copy)


@pytest.mark.parametrize("version", [0, 2, 99, "1", 1.5, None, [], {}, True, 1.0, GONE])
def test_another_schema_version_is_refused_with_the_remedy(copy: Path, version: Any) -> None:
    change(copy, "schema_version", version)
    message = refused(copy)
    assert "schema_version" in message
    assert "export the bundle again" in message


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b" ",
        b"{",
        b"not json",
        b"\xff\xfe",
        b"\0" * 100,
        b"{'a': 1}",
        b"{} {}",
        b'{"schema_version": 1',
        b'{"schema_version": ' + b"1" * 5000 + b"}",
    ],
    ids=lambda content: repr(content[:12]),
)
def test_a_manifest_that_is_not_json_is_refused(copy: Path, content: bytes) -> None:
    (copy / "manifest.json").write_bytes(content)
    message = refused(copy)
    assert str(copy / "manifest.json") in message
    assert "not JSON" in message


@pytest.mark.parametrize(
    ("content", "kind"),
    [("[]", "list"), ('"text"', "str"), ("1", "int"), ("null", "NoneType")],
)
def test_a_manifest_that_is_not_an_object_is_refused(copy: Path, content: str, kind: str) -> None:
    (copy / "manifest.json").write_text(content)
    assert f"holds {kind}" in refused(copy)


@pytest.mark.parametrize("bracket", ["[]", "{}"])
def test_deep_nesting_is_refused(copy: Path, bracket: str) -> None:
    opening = "[" if bracket == "[]" else '{"a":'
    # Just below where the parser gives up, and above it.
    for depth in (10, 500, *range(900, 1010), 10_000, 200_000):
        nested = opening * depth + "1" + bracket[1] * depth
        (copy / "manifest.json").write_text('{"schema_version": 1, "parity": ' + nested + "}")
        assert str(copy / "manifest.json") in refused(copy)


def test_a_huge_manifest_is_refused_unread(copy: Path) -> None:
    with (copy / "manifest.json").open("r+b") as file:
        file.truncate(2**40)  # sparse: reading it would fill the memory
    message = refused(copy)
    assert str(copy / "manifest.json") in message
    assert "bytes" in message


def test_a_key_given_twice_cannot_change_a_value(copy: Path) -> None:
    text = (copy / "manifest.json").read_text()
    assert text.endswith("\n}\n")
    (copy / "manifest.json").write_text(text[:-3] + ',\n  "max_len": 48\n}\n')
    assert "twice" in refused(copy)


@hypothesis.given(value=json_values)
@hypothesis.settings(
    max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_no_json_but_a_manifest_is_a_manifest(copy: Path, value: Any) -> None:
    (copy / "manifest.json").write_text(json.dumps(value))
    refused(copy)


# Fields, behind a digest that fits.

TOP_LEVEL = (
    "max_len",
    "vocab_size",
    "format",
    "config",
    "precision",
    "target",
    "inputs",
    "outputs",
    "operators",
    "opset",
    "ir_version",
    "min_onnxruntime",
    "tools",
    "checkpoint_sha256",
    "files",
    "warm_up",
    "parity",
)


def test_the_list_of_fields_here_is_complete(bundle: Path) -> None:
    assert set(TOP_LEVEL) == set(fields_of(bundle)) - {"schema_version"}


@pytest.mark.parametrize("name", TOP_LEVEL)
def test_a_missing_field_is_named(copy: Path, name: str) -> None:
    change(copy, name, GONE)
    message = refused(copy)
    assert f"{name} is missing" in message
    assert str(copy / "manifest.json") in message


@pytest.mark.parametrize("name", ["author", "", "Format", "config.vocab_size"])
def test_an_unknown_field_is_named(copy: Path, name: str) -> None:
    change(copy, name, 1)
    assert f"{name} is unknown" in refused(copy)


NOT_TEXT: tuple[Any, ...] = (None, 1, True, [], {})
NOT_A_COUNT: tuple[Any, ...] = (None, 0, -1, True, 1.0, 1.5, "1", [], {}, 2**63)
NOT_AN_OBJECT: tuple[Any, ...] = (None, 1, True, "text", [], [[]])
NOT_A_HASH = (None, 1, "", "0" * 63, "0" * 65, "g" * 64, "A" * 64, "0" * 63 + "\n", ["0" * 64])

BAD_FIELDS: list[tuple[str, str, tuple[Any, ...]]] = [
    # where, what the message names, values
    ("format", "format", (*NOT_TEXT, "", "ONNX", "tflite", "../onnx")),
    ("target", "target", (*NOT_TEXT, "", "CPU", "gpu")),
    ("precision", "precision", (*NOT_TEXT, "", "FP32", "fp64")),
    ("max_len", "max_len", (*NOT_A_COUNT, 23, 25)),
    ("vocab_size", "vocab_size", (*NOT_A_COUNT, 36, 38)),
    ("config", "config", NOT_AN_OBJECT),
    ("config/vocab_size", "config.vocab_size", (*NOT_A_COUNT, GONE)),
    ("config/max_len", "config.max_len", (*NOT_A_COUNT, GONE)),
    ("config/max_len", "max_len", (23, 25, 10**9)),
    ("config/vocab_size", "vocab_size", (36, 38)),
    ("config/d_model", "config.d_model", (*NOT_A_COUNT, GONE)),
    ("config/position", "config.position", (*NOT_TEXT, GONE)),
    ("inputs", "inputs", (*NOT_AN_OBJECT, {}, [{}], [1])),
    ("outputs", "outputs", (*NOT_AN_OBJECT, {}, [{}], [1])),
    ("inputs/0/name", "inputs", (*NOT_TEXT, GONE)),
    ("inputs/0/dtype", "inputs", (*NOT_TEXT, GONE)),
    ("inputs/0/axes", "inputs", (None, 1, "batch", {}, GONE)),
    ("inputs/0/axes/0", "inputs", (None, 0, -1, True, 1.5, [], {})),
    ("inputs/0/extra", "inputs", (1,)),
    ("outputs/0/name", "outputs", (*NOT_TEXT, GONE)),
    ("outputs/0/dtype", "outputs", (*NOT_TEXT, GONE)),
    ("outputs/0/axes/2", "outputs", (None, 0, -1, True, 12.0)),
    ("operators", "operators", NOT_AN_OBJECT),
    ("operators/Add", "operators.Add", NOT_A_COUNT),
    ("opset", "opset", (0, -1, True, 23.0, "23", [])),
    ("ir_version", "ir_version", (0, -1, True, 10.0, "10", {})),
    ("min_onnxruntime", "min_onnxruntime", (1, 1.28, True, [], {})),
    ("tools", "tools", NOT_AN_OBJECT),
    ("tools/torch", "tools.torch", NOT_TEXT),
    ("checkpoint_sha256", "checkpoint_sha256", NOT_A_HASH),
    ("files", "files", (*NOT_AN_OBJECT, {})),
    ("files/model.onnx", "files", (GONE,)),
    ("files/model.onnx", "files.model.onnx", (None, 1, "text", [], {}, {"sha256": "0" * 64})),
    ("files/model.onnx/size_bytes", "size_bytes", (None, -1, True, 1.5, "1", 2**63, GONE)),
    ("files/model.onnx/sha256", "sha256", (*NOT_A_HASH, GONE)),
    ("files/model.onnx/mode", "files.model.onnx", (0o644,)),
    (
        "warm_up",
        "warm_up",
        (None, 1, {}, "1x2", [1], [[1]], [[129, 24]], [[2**62, 24]], [[1, 2, 3]], [[1, 2]] * 33),
    ),
    ("warm_up", "warm_up", tuple([[1, size]] for size in (*NOT_A_COUNT, 25))),
    ("warm_up", "warm_up", tuple([[size, 1]] for size in NOT_A_COUNT)),
    ("parity", "parity", (1, True, "proven", [])),
]


@pytest.mark.parametrize(
    ("where", "named", "value"),
    [
        pytest.param(
            where, named, value, id=f"{where}={'gone' if value is GONE else ascii(value)[:20]}"
        )
        for where, named, values in BAD_FIELDS
        for value in values
    ],
)
def test_a_field_that_is_not_as_it_must_be_is_named(
    copy: Path, where: str, named: str, value: Any
) -> None:
    change(copy, where, value)
    message = refused(copy)
    assert named in message
    assert str(copy / "manifest.json") in message


@pytest.mark.parametrize("name", ["max_len", "vocab_size"])
@pytest.mark.parametrize(("number", "like_it"), [(1, True), (24, 24.0)])
def test_only_a_whole_number_is_a_whole_number(
    copy: Path, name: str, number: int, like_it: object
) -> None:
    change(copy, f"config/{name}", number)
    change(copy, name, like_it)
    assert name in refused(copy)


@pytest.mark.parametrize(
    "name", ["../model.onnx", "/etc/passwd", "sub/model.onnx", "..", ".", "", "a\\b", "a\0b"]
)
def test_a_file_name_that_leads_elsewhere_is_refused(copy: Path, name: str) -> None:
    fields = fields_of(copy)
    fields["files"][name] = {"size_bytes": 1, "sha256": "0" * 64}
    seal(copy, fields)
    message = refused(copy)
    assert "files" in message
    assert "plain file name" in message


def test_the_manifest_cannot_list_itself(copy: Path) -> None:
    change(copy, "files/manifest.json", {"size_bytes": 1, "sha256": "0" * 64})
    assert "files" in refused(copy)


def test_a_file_name_of_unpaired_surrogates_is_refused(copy: Path) -> None:
    change(copy, "files/\ud800", {"size_bytes": 1, "sha256": "0" * 64})
    refused(copy)


@pytest.mark.parametrize(
    "parity",
    [
        {},
        {"verdict": "proven"},
        {"verdict": "proven", "checks": 5},
        {"verdict": "proven", "checks": [1]},
        {"verdict": "proven", "checks": [{}]},
        {"verdict": "proven", "checks": [{"name": "x", "measured": "y", "limit": None}]},
    ],
    ids=str,
)
def test_a_parity_report_without_its_parts_is_refused(copy: Path, parity: Any) -> None:
    change(copy, "parity", parity)
    assert "parity" in refused(copy)


def test_a_bundle_without_a_parity_report_opens(copy: Path) -> None:
    change(copy, "parity", None)
    assert opened(copy).parity is None


@pytest.mark.parametrize(
    ("where", "value"),
    [("inputs/0/name", "tokens"), ("outputs/0/name", "logits"), ("config/d_model", 13)],
)
def test_a_manifest_that_does_not_fit_the_model_is_refused_when_a_session_opens(
    copy: Path, where: str, value: Any
) -> None:
    change(copy, where, value)
    with pytest.raises(BundleError):
        EncoderSession(copy, "cpu")


@hypothesis.given(name=st.sampled_from(TOP_LEVEL), value=json_values)
@hypothesis.settings(
    max_examples=150, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_whatever_a_field_holds_nothing_but_a_bundle_error_comes_out(
    copy: Path, bundle: Path, name: str, value: Any
) -> None:
    seal(copy, fields_of(bundle) | {name: value})
    with contextlib.suppress(BundleError):
        opened(copy).to_json()
