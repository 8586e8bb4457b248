"""What ONNX Runtime's CUDA provider makes of our exports, on a machine without a GPU.

It decides on the host which node runs where, what is copied, which kernels are launched and
whether a graph may be captured, so all of that shows over a stand-in for the CUDA libraries
(stub.c). What kernels compute does not; the tests marked gpu look at that.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest

import causal_encoder.export.publish as publish_module
from causal_encoder.export import export_onnx
from causal_encoder.export.verify import Report
from tests.bundles import POSITIONS, small_model, tampered
from tests.cuda import stub
from tests.cuda.probe import CROWD, SHAPES, Event, Request, Seen, watch

if reason := stub.unavailable():  # anything else that is missing fails
    pytest.skip(reason, allow_module_level=True)

D = 64  # with 4 heads of 16: flash attention wants a head size that 8 divides
# Each scheme in each precision; one scheme has two layers, to tell a layer from the rest.
CASES: dict[str, dict[str, Any]] = {
    f"{precision} {position}": {
        "precision": precision,
        "position": position,
        "num_layers": 2 if position == "sinusoidal" else 1,
    }
    for precision in ("fp32", "fp16", "bf16")
    for position in POSITIONS
} | {
    "fp16 gelu_tanh": {"precision": "fp16", "activation": "gelu_tanh", "num_layers": 1},
    "fp16 relu": {"precision": "fp16", "activation": "relu", "num_layers": 1},
    "fp16 post": {"precision": "fp16", "norm": "post", "num_layers": 2},
}
FOR_CUDA: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32", "num_layers": 2},
    "fp16": {"precision": "fp16", "num_layers": 2},
    "bf16 gelu_tanh": {"precision": "bf16", "activation": "gelu_tanh", "num_layers": 1},
    "fp16 relu": {"precision": "fp16", "activation": "relu", "num_layers": 1},
    "bf16 post": {"precision": "bf16", "norm": "post", "num_layers": 2},
    "fp16 no bias": {"precision": "fp16", "bias": False, "num_layers": 1},
}
CASES |= {f"{name} for cuda": case | {"target": "cuda"} for name, case in FOR_CUDA.items()}
every_case = pytest.mark.parametrize("case", CASES)
# Kernels of a layer and of the rest, besides 4 matrix products a layer; by target, activation
# and norm. More of them is a regression, and fewer an improvement to be written down here.
KERNELS = {
    ("portable", "gelu", "pre"): (10, 2),
    ("portable", "gelu_tanh", "pre"): (10, 2),
    ("portable", "relu", "pre"): (11, 2),
    ("portable", "gelu", "post"): (6, 3),
    ("cuda", "gelu", "pre"): (6, 4),
    ("cuda", "gelu_tanh", "pre"): (6, 4),
    ("cuda", "relu", "pre"): (7, 4),
    ("cuda", "gelu", "post"): (6, 3),
}
MATRIX_PRODUCTS = 4
MEMORY_LIMIT_BYTES = 2**30


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """What a process needs to load the stand-in."""
    return stub.build(tmp_path_factory.mktemp("standin"))


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Every case, one in opset 18, and one with a node that CUDA has no kernel for."""
    root = tmp_path_factory.mktemp("bundles")
    with pytest.MonkeyPatch.context() as patch:
        # Their numbers are verified in tests/export, which takes much longer than exporting.
        unverified = Report(format="onnx", device="cpu", checks=())
        patch.setattr(publish_module, "verify_prepared", lambda *_: unverified)
        for name, case in CASES.items():
            form = {key: case[key] for key in ("precision", "target") if key in case}
            fields = {key: value for key, value in case.items() if key not in form}
            model = small_model(d_model=D, num_heads=4, max_len=9, **fields)
            export_onnx(model, root / name, **form)
        export_onnx(small_model(num_layers=1), root / "opset 18", opset=18)
    tampered(root / "fp32 none", root / "foreign node", add_foreign_node)
    return {path.name: path for path in root.iterdir()}


def add_foreign_node(proto: onnx.ModelProto) -> None:
    """Put one more operator before the output, of a type without a kernel for CUDA."""
    (output,) = proto.graph.output
    proto.graph.node[-1].output[0] = "almost"
    node = onnx.helper.make_node("Asinh", ["almost"], [output.name], name="the_foreign_one")
    proto.graph.node.append(node)


@pytest.fixture(scope="module")
def seen(environment: Mapping[str, str], bundles: Mapping[str, Path]) -> Mapping[str, Seen]:
    """What every bundle did, all in one process."""
    requests = {name: Request(bundle=str(bundles[name])) for name in CASES} | {
        "cuda": Request(bundle=str(bundles["fp32 none"]), device="cuda"),
        "limited": Request(
            bundle=str(bundles["fp32 none"]), gpu_memory_limit_bytes=MEMORY_LIMIT_BYTES
        ),
        "opset 18": Request(bundle=str(bundles["opset 18"]), device="cuda"),
        "opset 18 auto": Request(bundle=str(bundles["opset 18"])),
        "foreign node": Request(bundle=str(bundles["foreign node"]), device="cuda"),
        "stress": Request(
            bundle=str(bundles["fp32 none"]), gpu_memory_limit_bytes=2**24, stress=True
        ),
    }
    return dict(zip(requests, watch(environment, list(requests.values())), strict=True))


def count(events: Iterable[Event], kind: str) -> Counter[str]:
    """How often each name occurs among the events of a kind."""
    return Counter(name for event, name, _ in events if event == kind)


@every_case
def test_auto_takes_cuda_and_every_node_runs_there(case: str, seen: Mapping[str, Seen]) -> None:
    assert seen[case].error == ""
    assert seen[case].device == "cuda"
    assert set(seen[case].nodes) == {"CUDAExecutionProvider"}
    assert seen[case].executed
    assert {node.split()[0] for node in seen[case].executed} == {"CUDAExecutionProvider"}


def test_cuda_can_be_asked_for_by_name(seen: Mapping[str, Seen]) -> None:
    assert (seen["cuda"].error, seen["cuda"].device) == ("", "cuda")
    assert seen["cuda"].nodes == seen["fp32 none"].nodes


@every_case
def test_no_node_copies_between_host_and_device(case: str, seen: Mapping[str, Seen]) -> None:
    assert not [node for node in seen[case].executed if "Memcpy" in node]


@every_case
def test_a_run_copies_the_ids_in_and_the_result_out_and_nothing_else(
    case: str, seen: Mapping[str, Seen]
) -> None:
    assert len(seen[case].runs) == len(SHAPES)
    for (batch, length), events in zip(SHAPES, seen[case].runs, strict=True):
        copies = [(name, size) for kind, name, size in events if kind == "copy" and name != "D2D"]
        assert copies == [("H2D", batch * length * 8), ("D2H", batch * length * D * 4)]


@every_case
def test_attention_is_one_fused_kernel_a_layer(case: str, seen: Mapping[str, Seen]) -> None:
    kernel = "attention_kernel_batched_impl" if case.startswith("fp32") else "flash_fwd_kernel"
    for events in seen[case].runs:
        kernels = count(events, "kernel")
        fused = {name: number for name, number in kernels.items() if kernel in name}
        assert sum(fused.values()) == CASES[case]["num_layers"]
        assert not [name for name in kernels if "softmax" in name.lower() and name not in fused]


@every_case
def test_a_layer_launches_as_many_kernels_as_ever(case: str, seen: Mapping[str, Seen]) -> None:
    fields = {"target": "portable", "activation": "gelu", "norm": "pre"} | CASES[case]
    per_layer, rest = KERNELS[fields["target"], fields["activation"], fields["norm"]]
    per_layer -= not fields.get("bias", True)  # that of q, k and v
    rest += fields["precision"] != "fp32"  # the cast of the output
    for events in seen[case].runs:
        assert count(events, "kernel").total() == per_layer * fields["num_layers"] + rest
        assert count(events, "gemm").total() == MATRIX_PRODUCTS * fields["num_layers"]


@every_case
def test_the_guard_against_bad_ids_runs_on_cuda(case: str, seen: Mapping[str, Seen]) -> None:
    assert "CUDAExecutionProvider Clip" in seen[case].executed
    for events in seen[case].runs:
        assert len([name for name in count(events, "kernel") if "_Clip" in name]) == 1


@every_case
def test_a_run_can_be_captured_and_replayed_as_one_launch(
    case: str, seen: Mapping[str, Seen]
) -> None:
    capture = [(kind, name) for kind, name, _ in seen[case].capture]
    start, end = capture.index(("graph", "begin")), capture.index(("graph", "end"))
    captured = Counter(kind for kind, _ in capture[start:end])
    launched = Counter(kind for kind, _, _ in seen[case].runs[0])
    assert (captured["kernel"], captured["gemm"]) == (launched["kernel"], launched["gemm"])
    assert captured["refused"] == 0
    replay = [(kind, name) for kind, name, _ in seen[case].replay if kind != "sync"]
    assert replay == [("graph", "launch")]


@every_case
def test_the_stand_in_knows_every_call(case: str, seen: Mapping[str, Seen]) -> None:
    assert seen[case].unknown == []


def test_fp32_is_not_rounded_to_tf32_and_memory_grows_as_needed(seen: Mapping[str, Seen]) -> None:
    options = seen["fp32 none"].options
    assert options["use_tf32"] == "0"
    assert options["arena_extend_strategy"] == "kSameAsRequested"


def test_a_memory_limit_reaches_the_provider(seen: Mapping[str, Seen]) -> None:
    assert seen["limited"].options["gpu_mem_limit"] == str(MEMORY_LIMIT_BYTES)
    assert seen["fp32 none"].options["gpu_mem_limit"] == str(2**64 - 1)


def test_memory_stays_as_it_is_over_many_shapes(seen: Mapping[str, Seen]) -> None:
    """Each shape that is new finds room in what the longer and wider ones have left."""
    assert 0 < seen["stress"].held[0] <= 2**24
    assert len(set(seen["stress"].held[2:])) == 1


def test_too_little_memory_is_told_with_the_batch_and_the_session_works_on(
    seen: Mapping[str, Seen],
) -> None:
    batch, length = CROWD
    assert len(seen["stress"].crowded) == 3
    for error in seen["stress"].crowded:
        assert error.startswith(f"cuda could not run a batch of {batch} x {length}: ")
        assert "Available memory of" in error
        assert error.endswith("try a smaller one")
    assert ("D2H", 2 * 8 * D * 4) in [(name, size) for _, name, size in seen["stress"].recovered]


def test_ids_on_the_device_of_another_type_or_rank_or_on_cpu_are_refused(
    seen: Mapping[str, Seen],
) -> None:
    misused = dict(seen["stress"].misused)
    assert "ids are on cpu:0 and the session on cuda:0" in misused.pop("on CPU")
    assert "two axes" in misused.pop("one axis")
    assert misused
    assert all("expected tensor(int64)" in error for error in misused.values()), misused


def test_a_node_without_a_kernel_for_cuda_is_refused_by_name(seen: Mapping[str, Seen]) -> None:
    error = seen["foreign node"].error
    assert error.startswith("1 nodes are not on CUDA")
    assert "Asinh the_foreign_one" in error


def test_opset_18_is_refused_on_cuda_because_its_shape_nodes_stay_on_cpu(
    seen: Mapping[str, Seen],
) -> None:
    error = seen["opset 18"].error
    assert "nodes are not on CUDA" in error
    assert "Concat" in error
    assert "default opset" in error
    assert seen["opset 18 auto"].device == "cpu"


@pytest.mark.parametrize("bundle", ["fp32 none", "bf16 none"])
def test_doctor_finds_cuda_in_order(
    bundle: str, environment: Mapping[str, str], bundles: Mapping[str, Path]
) -> None:
    program = "from causal_encoder.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", program, "doctor", "--json", bundles[bundle]],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    assert report["ok"]
    levels = {finding["what"]: finding["level"] for finding in report["findings"]}
    assert levels["CUDA ran a node"] == "ok"
    assert levels["driver for CUDA 13.0, ONNX Runtime for CUDA 13.0"] == "ok"
    assert report["findings"][-1]["what"].startswith(str(bundles[bundle]))
