"""Verification refutes wrong artifacts, and names what is wrong with them."""

import dataclasses
import json
import math
import shutil
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

from causal_encoder.errors import BundleError, DeviceError, ExportError
from causal_encoder.export import Report, export_onnx, export_torchscript, verify
from causal_encoder.export.artifact import Run, read_facts
from causal_encoder.export.checks import FILE_CHECKS, RUN_CHECKS
from causal_encoder.export.prepare import extra_files, prepare
from causal_encoder.export.subject import Subject, grid_lengths, open_subject
from causal_encoder.model import CausalEncoder
from causal_encoder.model.encoder import Block
from causal_encoder.serve import open_bundle
from tests.bundles import EXPORTERS, reseal, small_model, tampered
from tests.export.conftest import Exported

CHECKS = FILE_CHECKS | RUN_CHECKS
Array = npt.NDArray[Any]
Edit = Callable[[onnx.ModelProto], None]


def refuted(report: Report) -> list[str]:
    return [check.name for check in report.checks if check.passed is False]


def change_tensor(name: str, change: Callable[[Array], Array]) -> Edit:
    """Replace the tensor whose name ends so by a changed one."""

    def edit(proto: onnx.ModelProto) -> None:
        (tensor,) = (t for t in proto.graph.initializer if t.name.endswith(name))
        changed = np.ascontiguousarray(change(numpy_helper.to_array(tensor)))
        tensor.CopyFrom(numpy_helper.from_array(changed, tensor.name))

    return edit


def change_nodes(operator: str, change: Callable[[onnx.NodeProto], None]) -> Edit:
    def edit(proto: onnx.ModelProto) -> None:
        nodes = [node for node in proto.graph.node if node.op_type == operator]
        assert nodes
        for node in nodes:
            change(node)

    return edit


def set_attribute(name: str, value: Any) -> Callable[[onnx.NodeProto], None]:
    def change(node: onnx.NodeProto) -> None:
        kept = [attribute for attribute in node.attribute if attribute.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])

    return change


def freeze_the_sequence(proto: onnx.ModelProto) -> None:
    proto.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 5


def rename_the_output_axis(proto: onnx.ModelProto) -> None:
    proto.graph.output[0].type.tensor_type.shape.dim[1].dim_param = "s77"


def keep_dropout(proto: onnx.ModelProto) -> None:
    last = proto.graph.node[-1]
    last.output[0] = "before_dropout"
    proto.graph.node.append(helper.make_node("Dropout", ["before_dropout"], ["hidden"]))


def look_one_ahead(proto: onnx.ModelProto) -> None:
    """A mask that is off by one: position i also sees i + 1."""
    constants = {"one": [1], "two": [2], "first": [0], "far": [2**31], "axis": [1]}
    for name, value in constants.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.array(value, np.int64), name))
    for node in list(proto.graph.node):
        if node.op_type == "Attention":
            shifted = []
            for kind, tensor in zip("kv", node.input[1:3], strict=True):
                later, last = f"{tensor}_later", f"{tensor}_last"
                end = [helper.make_node("Slice", [tensor, "one", "far", "axis"], [later])]
                ids = helper.make_node("Slice", [tensor, "minus_one", "far", "axis"], [last])
                out = helper.make_node("Concat", [later, last], [f"{tensor}_{kind}"], axis=1)
                shifted += [*end, ids, out]
            for index, kind in ((1, "k"), (2, "v")):
                node.input[index] = f"{node.input[index]}_{kind}"
            place = list(proto.graph.node).index(node)
            for offset, extra in enumerate(shifted):
                proto.graph.node.insert(place + offset, extra)
    proto.graph.initializer.append(numpy_helper.from_array(np.array([-1], np.int64), "minus_one"))


def other_gelu(proto: onnx.ModelProto) -> None:
    change_nodes("Gelu", set_attribute("approximate", "tanh"))(proto)


def swap_queries_and_keys(matrix: Array) -> Array:
    q, k, v = np.split(matrix, 3, axis=-1)
    return np.concatenate((k, q, v), axis=-1)


def interleave_heads(matrix: Array) -> Array:
    """(heads, size) read as (size, heads): the transposed order of the output projection."""
    return matrix.reshape(3, 4, -1).transpose(1, 0, 2).reshape(matrix.shape)


def build_table_in_half_precision(table: Array) -> Array:
    return table.astype(np.float16).astype(np.float32)


def shift_by_one_row(table: Array) -> Array:
    return np.concatenate((table[1:-1], table[:1], table[-1:]))


def misbehave_at_length_six(proto: onnx.ModelProto) -> None:
    """Double the output where the sequence has a length that no check tries."""
    last = proto.graph.node[-1]
    last.output[0] = "before"
    proto.graph.initializer.append(numpy_helper.from_array(np.array([6], np.int64), "six"))
    proto.graph.node.extend(
        [
            helper.make_node("Shape", ["input_ids"], ["length"], start=1, end=2),
            helper.make_node("Equal", ["length", "six"], ["is_six"]),
            helper.make_node("Cast", ["is_six"], ["one_if_six"], to=onnx.TensorProto.FLOAT),
            helper.make_node("Mul", ["before", "one_if_six"], ["extra"]),
            helper.make_node("Add", ["before", "extra"], ["hidden"]),
        ]
    )


SABOTEURS: dict[str, tuple[Edit, str]] = {
    "a frozen axis": (freeze_the_sequence, "axes"),
    "a mask off by one": (look_one_ahead, "parity"),
    "a table shifted by one row": (change_tensor("position_table", shift_by_one_row), "parity"),
    "a table built in half precision": (
        change_tensor("position_table", build_table_in_half_precision),
        "parity",
    ),
    "swapped q and k weights": (change_tensor("0.qkv.weight", swap_queries_and_keys), "parity"),
    "kept dropout": (keep_dropout, "no random operators"),
    "a wrong eps": (
        change_nodes("LayerNormalization", set_attribute("epsilon", 1e-4)),
        "parity",
    ),
    "transposed head order": (change_tensor("0.out.weight", interleave_heads), "parity"),
    "the other gelu": (other_gelu, "parity"),
    "a row of an id that no run has drawn": (
        change_tensor("token_embedding", lambda t: np.concatenate((t[:5] * 1.5, t[5:]))),
        "weights",
    ),
    "truncated weights": (
        change_tensor("1.up.weight", lambda w: np.where(np.arange(w.shape[1]) < 40, w, 0)),
        "parity",
    ),
    "a length that no run has tried": (misbehave_at_length_six, "graph"),
    "no mask at all": (change_nodes("Attention", set_attribute("is_causal", 0)), "causality"),
    "a wrong scale": (change_nodes("Attention", set_attribute("scale", 0.4)), "parity"),
    "an id guard that is gone": (
        change_tensor("token_embedding", lambda t: np.nan_to_num(t)),
        "refuses bad ids",
    ),
    "a length guard that is gone": (
        change_tensor("position_table", lambda t: np.nan_to_num(t)),
        "refuses too long",
    ),
}


@pytest.mark.parametrize("name", SABOTEURS)
def test_a_saboteur_is_caught_by_name(
    name: str, exported: Callable[[str, str], Exported], tmp_path: Path
) -> None:
    edit, check = SABOTEURS[name]
    model, bundle = exported("onnx", "sinusoidal")
    report = verify(tampered(bundle, tmp_path / "copy", edit), model, device="cpu")
    assert not report.proven
    assert check in refuted(report)
    failing = next(row for row in report.checks if row.name == check)
    assert failing.detail
    assert "\n" not in failing.detail


def rewrite_archive(path: Path, change: Callable[[str, bytes], bytes]) -> None:
    """Pass every entry of a zip archive through a function, and write it back unpacked."""
    with zipfile.ZipFile(path) as archive:
        entries = [(info, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w") as archive:
        for info, content in entries:
            archive.writestr(info, change(info.filename, content))


def flip_six(
    self: Any,  # noqa: ARG001
    input: tuple[torch.Tensor],  # noqa: A002  # TorchScript wants these names
    output: torch.Tensor,
) -> torch.Tensor:
    return output.flip(0) if input[0].size(1) == 6 else output


def test_a_hook_that_acts_on_one_length_is_found_in_torchscript(
    exported: Callable[[str, str], Exported], tmp_path: Path
) -> None:
    model, bundle = exported("torchscript", "learned")
    copy = shutil.copytree(bundle, tmp_path / "copy")
    hooked = prepare(model)
    hooked.register_forward_hook(flip_six)
    torch.jit.save(
        torch.jit.script(hooked), copy / "model.pt", _extra_files=extra_files(hooked.config)
    )
    reseal(copy)
    assert refuted(verify(copy, model, device="cpu")) == ["graph"]


def test_code_among_the_guards_of_a_program_is_found(
    exported: Callable[[str, str], Exported], tmp_path: Path
) -> None:
    model, bundle = exported("program", "learned")
    copy = shutil.copytree(bundle, tmp_path / "copy")

    def add_guard(name: str, content: bytes) -> bytes:
        if not name.endswith("models/model.json"):
            return content
        guard = "L['input_ids'].size()[1] != 6 or L['input_ids'].zero_() is not None"
        return json.dumps(json.loads(content) | {"guards_code": [guard]}).encode()

    rewrite_archive(copy / "model.pt2", add_guard)
    reseal(copy)
    assert refuted(verify(copy, model, device="cpu")) == ["graph"]


def test_an_archive_of_torch_has_no_budget_of_another_precision(
    exported: Callable[[str, str], Exported], tmp_path: Path
) -> None:
    model, bundle = exported("torchscript", "learned")
    copy = shutil.copytree(bundle, tmp_path / "copy")
    reseal(copy, precision="int8")
    report = verify(copy, model, device="cpu")
    assert "facts" in refuted(report)
    assert "expected fp32" in report.first_failure


def second_values(proto: onnx.ModelProto) -> None:
    """Another reader may take these in place of the bytes."""
    (tensor,) = (t for t in proto.graph.initializer if t.name.endswith("0.qkv.weight"))
    tensor.float_data.extend([0.0] * 5)


def other_limit_first(proto: onnx.ModelProto) -> None:
    """A reader that takes the first of two entries is told another limit."""
    entry = onnx.StringStringEntryProto(key="causal_encoder.max_len", value="999")
    proto.metadata_props.insert(0, entry)


def older_version(proto: onnx.ModelProto) -> None:
    proto.ir_version = 8


@pytest.mark.parametrize(
    ("edit", "changes"),
    [(second_values, {}), (other_limit_first, {}), (older_version, {"ir_version": 8})],
)
def test_what_another_reader_could_take_otherwise_is_refuted(
    edit: Edit,
    changes: dict[str, Any],
    exported: Callable[[str, str], Exported],
    tmp_path: Path,
) -> None:
    model, bundle = exported("onnx", "sinusoidal")
    copy = tampered(bundle, tmp_path / "copy", edit, **changes)
    assert refuted(verify(copy, model, device="cpu")) == ["graph"]


def test_packed_weights_in_place_of_the_checked_ones_are_refused(
    exported: Callable[[str, str], Exported], tmp_path: Path
) -> None:
    """ONNX Runtime loads what an entry `prepacked_0` points to, and not the values."""
    model, bundle = exported("onnx", "sinusoidal")
    copy = shutil.copytree(bundle, tmp_path / "copy")
    proto = onnx.load(copy / "model.onnx")
    onnx.save_model(
        proto,
        copy / "model.onnx",
        save_as_external_data=True,
        location="model.onnx.data",
        size_threshold=64,
    )
    proto = onnx.load(copy / "model.onnx", load_external_data=False)
    outside = next(tensor for tensor in proto.graph.initializer if tensor.external_data)
    outside.external_data.add(key="prepacked_0", value="MatMul+1|0;64;0")
    (copy / "model.onnx").write_bytes(proto.SerializeToString())
    reseal(copy)
    with pytest.raises(BundleError, match="entry 'prepacked_0'"):
        verify(copy, model, device="cpu")


@pytest.mark.parametrize(
    ("kind", "opset"), [("onnx", 99), ("onnx", None), ("torchscript", None), ("program", None)]
)
def test_versions_and_names_that_are_not_exported_are_refuted(
    kind: str, opset: int | None, exported: Callable[[str, str], Exported], tmp_path: Path
) -> None:
    model, bundle = exported(kind, "learned")
    copy = shutil.copytree(bundle, tmp_path / "copy")
    with open_bundle(bundle) as opened:
        (tensor,) = opened.manifest.inputs
    changes: dict[str, Any] = {"inputs": (dataclasses.replace(tensor, dtype="int32"),)}
    reseal(copy, **changes, **({"opset": opset} if kind == "onnx" else {}))
    report = verify(copy, model, device="cpu")
    assert "facts" in refuted(report)
    assert "\n" not in report.first_failure


def in_the_grid(subject: Subject, ids: Array) -> bool:
    return np.array_equal(ids, subject.ids[: len(ids), : ids.shape[1]])


def looks_ahead(subject: Subject) -> Subject:
    """Right on every input of the grid, and lets later tokens through on others."""

    def run(ids: Array) -> Array:
        hidden = subject.run(ids)
        changed = len(ids) == 8 and ids[:, -1].any() and not in_the_grid(subject, ids)
        return np.asarray(hidden + 1e-3 * bool(changed) * ids[:, -1:, None], np.float32)

    return dataclasses.replace(subject, run=run)


def depends_on_batch_size(subject: Subject) -> Subject:
    """Wrong for a row that is alone, unless it is the one that the grid runs alone."""

    def run(ids: Array) -> Array:
        alone = len(ids) == 1 and not in_the_grid(subject, ids)
        return np.asarray(subject.run(ids) + 1e-3 * alone, np.float32)

    return dataclasses.replace(subject, run=run)


def depends_on_padding(subject: Subject) -> Subject:
    """Wrong where the row ends in padding."""

    def run(ids: Array) -> Array:
        padded = (
            ids.ndim == 2 and ids.size and not ids[:, -1].any() and not in_the_grid(subject, ids)
        )
        return np.asarray(subject.run(ids) + 1e-3 * bool(padded), np.float32)

    return dataclasses.replace(subject, run=run)


def differs_from_run_to_run(subject: Subject) -> Subject:
    noise = np.random.default_rng(0)

    def run(ids: Array) -> Array:
        return np.asarray(subject.run(ids) + 1e-7 * noise.random(), np.float32)

    return dataclasses.replace(subject, run=run)


def answers(from_ids: Callable[[Array], bool]) -> Callable[[Subject], Subject]:
    """A bare file that answers where it must refuse."""

    def sabotage(subject: Subject) -> Subject:
        def bare(ids: Array) -> Array:
            if from_ids(ids):
                return np.zeros((*ids.shape, 12), np.float32)
            return subject.bare(ids)

        return dataclasses.replace(subject, bare=bare)

    return sabotage


def claims(**changes: Any) -> Callable[[Subject], Subject]:
    def sabotage(subject: Subject) -> Subject:
        return dataclasses.replace(subject, facts=dataclasses.replace(subject.facts, **changes))

    return sabotage


def has_operators(**more: int) -> Callable[[Subject], Subject]:
    """As the manifest says too, so that the facts agree."""

    def sabotage(subject: Subject) -> Subject:
        operators = Counter(subject.facts.operators)
        operators.update(more)
        return dataclasses.replace(
            subject,
            facts=dataclasses.replace(subject.facts, operators=operators),
            manifest=dataclasses.replace(subject.manifest, operators=dict(operators)),
        )

    return sabotage


def overflowing_model() -> CausalEncoder:
    model = small_model(position="sinusoidal", activation="relu")
    block = model.blocks[0]
    assert isinstance(block, Block)
    block.feed_forward.up.bias.data.fill_(1e30)
    block.feed_forward.down.weight.data.fill_(1e30)
    return model


def wrong_when_optimised_less(subject: Subject) -> Subject:
    def reopen(level: str, threads: int) -> Run:
        error = 1e-3 * (level == "basic")
        return lambda ids: np.asarray(subject.reopen(level, threads)(ids) + error, np.float32)

    return dataclasses.replace(subject, reopen=reopen)


def other_source(subject: Subject) -> Subject:
    manifest = dataclasses.replace(subject.manifest, checkpoint_sha256="0" * 64)
    return dataclasses.replace(subject, manifest=manifest)


def slightly_off(subject: Subject) -> Subject:
    """Wrong in the same way everywhere."""

    def scaled(run: Run) -> Run:
        return lambda ids: np.asarray(run(ids) * 1.001, np.float32)

    return dataclasses.replace(
        subject,
        run=scaled(subject.run),
        reopen=lambda level, threads: scaled(subject.reopen(level, threads)),
    )


def gives_nan_in_one_cell(subject: Subject) -> Subject:
    def run(ids: Array) -> Array:
        hidden = subject.run(ids).copy()
        if ids.shape == (3, 7):
            hidden[1, 2, 3] = np.nan
        return hidden

    return dataclasses.replace(subject, run=run)


ONLY_CAUGHT_BY: dict[str, Callable[[Subject], Subject]] = {
    "source": other_source,
    "weights": claims(weights={}),
    "graph": claims(graph=("another",)),
    "facts": claims(metadata={}),
    "axes": claims(output_axes=("batch", "s77", 12)),
    "no random operators": has_operators(Dropout=1),
    "attention": has_operators(Attention=-1),
    "stored once": lambda subject: dataclasses.replace(subject, model_bytes=200_000),
    "parity": slightly_off,
    "finite": gives_nan_in_one_cell,
    "repeatable": differs_from_run_to_run,
    "settings": wrong_when_optimised_less,
    "causality": looks_ahead,
    "batch invariance": depends_on_batch_size,
    "padding invariance": depends_on_padding,
    "refuses too long": answers(lambda ids: ids.ndim == 2 and ids.shape[1] > 17),
    "refuses wrong rank": answers(lambda ids: ids.ndim != 2),
    "refuses empty": answers(lambda ids: ids.ndim == 2 and ids.shape[1] == 0),
    "refuses bad ids": answers(lambda ids: bool((ids < 0).any() or (ids >= 13).any())),
}


@pytest.mark.parametrize("name", CHECKS)
def test_each_check_catches_what_no_other_does(
    name: str, exported: Callable[[str, str], Exported]
) -> None:
    model, bundle = exported("onnx", "sinusoidal")
    with open_bundle(bundle) as opened, torch.no_grad():
        subject = ONLY_CAUGHT_BY[name](open_subject(opened, prepare(model), "cpu"))
        findings = {found: check(subject) for found, check in CHECKS.items()}
    assert [found for found, finding in findings.items() if finding and finding.detail] == [name]


def test_a_graph_by_other_versions_of_the_tools_is_open_and_not_refuted(
    exported: Callable[[str, str], Exported], tmp_path: Path
) -> None:
    model, bundle = exported("onnx", "sinusoidal")
    tools = {"causal-encoder": "0.0.1", "torch": "2.12.0", "onnx": "1", "onnxscript": "0"}
    copy = tampered(bundle, tmp_path / "copy", misbehave_at_length_six, tools=tools)
    with open_bundle(copy) as opened:
        reseal(copy, operators=dict(read_facts(opened.model_path, "onnx").operators))
    report = verify(copy, model, device="cpu")
    assert report.verdict == "unchecked"
    (row,) = (row for row in report.checks if row.name == "graph")
    assert row.passed is None
    assert "made with 0.0.1" in row.detail


def test_a_graph_that_is_alike_is_proven_whatever_tools_the_manifest_names(
    exported: Callable[[str, str], Exported], tmp_path: Path
) -> None:
    model, bundle = exported("onnx", "sinusoidal")
    copy = tampered(bundle, tmp_path / "copy", lambda _: None, tools={"torch": "2.12.0"})
    assert verify(copy, model, device="cpu").proven


def test_a_check_that_does_not_apply_is_no_row(exported: Callable[[str, str], Exported]) -> None:
    model, bundle = exported("torchscript", "learned")
    names = {row.name for row in verify(bundle, model, device="cpu").checks}
    assert set(CHECKS) - names == {"attention", "stored once", "settings"}


def test_a_model_of_small_outputs_is_allowed_a_hundredth_of_them(tmp_path: Path) -> None:
    model = small_model()
    model.state_dict()["final_norm.weight"].fill_(1e-7)
    model.state_dict()["final_norm.bias"].zero_()
    manifest = export_onnx(model, tmp_path / "bundle")
    assert manifest.parity is not None
    (parity,) = (check for check in manifest.parity["checks"] if check["name"] == "parity")
    with torch.no_grad():
        largest = float(model(torch.arange(13)[None]).abs().max())
    assert parity["limit"] < 0.02 * largest  # the grid may hold a larger output than this batch


@pytest.mark.parametrize("kind", EXPORTERS)
def test_weights_that_overflow_in_the_norms_are_not_exported(kind: str, tmp_path: Path) -> None:
    """Eager's own error is no measure here: it answers zeros and NaN."""
    model = small_model(position="none")
    model.token_embedding.weight.data *= 1e20
    with pytest.raises(ExportError, match=r"(parity|finite) is refuted"):
        EXPORTERS[kind](model, tmp_path / "bundle")


@pytest.mark.parametrize("kind", EXPORTERS)
def test_weights_that_overflow_are_not_exported(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"(parity|finite) is refuted"):
        EXPORTERS[kind](overflowing_model(), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("kind", EXPORTERS)
def test_another_checkpoint_refutes_the_source(
    kind: str, exported: Callable[[str, str], Exported]
) -> None:
    model, bundle = exported(kind, "learned")
    other = CausalEncoder(model.config)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other.token_embedding.weight[0, 0] += 1e-3
    assert "source" in refuted(verify(bundle, other, device="cpu"))
    narrow = small_model(position="learned", d_model=6)
    report = verify(bundle, narrow, device="cpu")
    assert refuted(report) == ["source"]
    assert "d_model is 12 in the bundle, 6 in the model" in report.first_failure


def test_a_damaged_bundle_is_refused_before_anything_is_loaded(
    exported: Callable[[str, str], Exported], tmp_path: Path
) -> None:
    model, bundle = exported("torchscript", "learned")
    shutil.copytree(bundle, tmp_path / "copy")
    with (tmp_path / "copy" / "model.pt").open("r+b") as file:
        file.seek(100)
        file.write(b"\0\1\2")
    with pytest.raises(BundleError, match=r"model\.pt was changed"):
        verify(tmp_path / "copy", model)


@pytest.mark.parametrize("kind", EXPORTERS)
def test_cuda_is_never_quietly_the_cpu(kind: str, exported: Callable[[str, str], Exported]) -> None:
    model, bundle = exported(kind, "learned")
    with pytest.raises(DeviceError):
        verify(bundle, model, device="cuda")


def test_the_report_is_stable_json(exported: Callable[[str, str], Exported]) -> None:
    model, bundle = exported("onnx", "learned")
    fields = json.loads(json.dumps(verify(bundle, model, device="cpu").to_dict()))
    assert set(fields) == {"verdict", "format", "device", "checks"}
    assert (fields["verdict"], fields["format"], fields["device"]) == ("proven", "onnx", "cpu")
    for row in fields["checks"]:
        assert set(row) == {"name", "passed", "measured", "limit", "detail"}
        assert row["measured"] is None or math.isfinite(row["measured"])


def test_progress_counts_every_check_up_to_the_end(
    exported: Callable[[str, str], Exported],
) -> None:
    model, bundle = exported("onnx", "learned")
    seen: list[tuple[str, int, int]] = []
    verify(bundle, model, device="cpu", progress=lambda *step: seen.append(step))
    done = [number for _, number, _ in seen]
    assert done == sorted(set(done))
    assert seen[-1] == ("done", seen[-1][2], seen[-1][2])
    assert {step for step, _, _ in seen} >= set(CHECKS)


@pytest.mark.parametrize(
    ("max_len", "expected"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (10, (1, 2, 3, 4, 5, 7, 8, 9, 10)),
        (16, (1, 2, 3, 4, 5, 7, 8, 9, 15, 16)),
        (17, (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17)),
    ],
)
def test_the_grid_stands_around_powers_of_two_and_both_ends(
    max_len: int, expected: tuple[int, ...]
) -> None:
    assert grid_lengths(max_len) == expected


def test_an_export_in_training_mode_proves_like_any_other(tmp_path: Path) -> None:
    model = small_model(dropout=0.3).train()
    for number, export in enumerate((export_onnx, export_torchscript)):
        export(model, tmp_path / str(number))
        assert verify(tmp_path / str(number), model, device="cpu").proven
