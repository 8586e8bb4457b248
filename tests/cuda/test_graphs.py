"""Sessions with CUDA graphs and with ids on the device, over the stand-in for CUDA.

What is launched and copied shows there; the numbers are tested in tests/serve/test_graphs.py,
on CPU, and by the tests marked gpu.
"""

from collections.abc import Iterable

import pytest

import causal_encoder.export.publish as publish_module
from causal_encoder.export import export_onnx
from causal_encoder.export.verify import Report
from tests.bundles import small_model
from tests.cuda import stub
from tests.cuda.graphs_probe import LARGE, SHAPES, STREAM, THREADS, TURNS, Seen, watch
from tests.cuda.probe import Event

if reason := stub.unavailable():
    pytest.skip(reason, allow_module_level=True)

D, HEADS, LAYERS, L = 128, 2, 1, 600
BUCKETS = ((1, 16), (2, 16), (1, 64), (4, 128))  # of the first SHAPES, in this order
AGAIN = ((1, 16), (4, 128), (2, 16), (1, 64))  # of the others
WARM_UP = ((1, 200), (8, 16), (1, 256))  # in two buckets that are none of these
KERNELS = 6 * LAYERS + 5  # of a run, see test_cuda.py


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    bundle = tmp_path_factory.mktemp("bundle") / "fp16"
    with pytest.MonkeyPatch.context() as patch:
        unverified = Report(format="onnx", device="cpu", checks=())
        patch.setattr(publish_module, "verify_prepared", lambda *_: unverified)
        model = small_model(d_model=D, num_heads=HEADS, num_layers=LAYERS, max_len=L)
        export_onnx(model, bundle, precision="fp16", target="cuda", warm_up=WARM_UP)
    return watch(stub.build(tmp_path_factory.mktemp("standin")), str(bundle))


def names(events: Iterable[Event], kind: str) -> list[str]:
    return [name for event, name, _ in events if event == kind]


def launched(events: Iterable[Event]) -> list[int]:
    """Which captured graphs were launched."""
    return [graph for kind, name, graph in events if (kind, name) == ("graph", "launch")]


def host_copies(events: Iterable[Event]) -> list[tuple[str, int]]:
    return [(name, size) for kind, name, size in events if kind == "copy" and name != "D2D"]


def test_the_shapes_in_the_manifest_are_captured_when_the_session_opens(seen: Seen) -> None:
    assert names(seen.opening, "graph").count("begin") == 2
    first, _, second, _, again = launched(seen.opening)
    assert again == first != second


def test_a_shape_in_a_new_bucket_is_captured_once(seen: Seen) -> None:
    for events in seen.runs[: len(BUCKETS)]:
        assert names(events, "graph").count("begin") == 1
        assert names(events, "refused") == []


def test_a_shape_in_a_known_bucket_is_one_launch_of_its_own_graph(seen: Seen) -> None:
    graphs = {}
    for bucket, events in zip(BUCKETS, seen.runs, strict=False):
        captured, replayed = launched(events)
        assert captured == replayed
        graphs[bucket] = replayed
    assert len(set(graphs.values())) == len(BUCKETS)
    for bucket, events in zip(AGAIN, seen.runs[len(BUCKETS) :], strict=True):
        assert launched(events) == [graphs[bucket]]
        assert names(events, "kernel") == names(events, "gemm") == names(events, "take") == []


def test_a_run_copies_the_padded_ids_in_and_the_padded_result_out(seen: Seen) -> None:
    assert len(BUCKETS + AGAIN) == len(SHAPES)
    for (batch, length), events in zip(BUCKETS + AGAIN, seen.runs, strict=True):
        size = batch * length
        assert host_copies(events)[-2:] == [("H2D", size * 8), ("D2H", size * D * 4)]


def test_the_result_is_copied_out_when_the_graph_is_done(seen: Seen) -> None:
    """A copy runs on a stream of its own, and would not wait for the graph's by itself."""
    for events in seen.runs[len(BUCKETS) :]:
        assert [kind for kind, _, _ in events] == ["copy", "sync", "graph", "sync", "copy"]


def test_a_result_is_the_callers_own(seen: Seen) -> None:
    assert not seen.shared


def test_a_large_batch_runs_without_a_graph(seen: Seen) -> None:
    assert names(seen.large, "graph") == []
    assert len(names(seen.large, "kernel")) == KERNELS
    batch, length = LARGE
    size = batch * length
    assert host_copies(seen.large) == [("H2D", size * 8), ("D2H", size * D * 4)]


def test_32_threads_capture_each_bucket_once(seen: Seen) -> None:
    """ONNX Runtime captures anew for each thread that runs, so that only one may."""
    assert names(seen.threads, "graph").count("begin") == len(BUCKETS)
    assert len(launched(seen.threads)) == THREADS * TURNS + len(BUCKETS)
    assert len(set(launched(seen.threads))) == len(BUCKETS)
    assert names(seen.threads, "refused") == []


def test_attention_is_split_where_one_long_sequence_would_leave_the_gpu_idle(seen: Seen) -> None:
    """Three launches more a layer, which flash attention finds worth it."""
    alone, many = seen.long
    assert len(names(alone, "kernel")) == KERNELS + LAYERS
    assert len(names(alone, "memset")) == 2 * LAYERS
    assert len([n for n in names(alone, "kernel") if "flash_fwd_splitkv_combine" in n]) == LAYERS
    assert len(names(many, "kernel")) == KERNELS
    assert names(many, "memset") == []
    assert len([n for n in names(many, "kernel") if "flash_fwd_kernel" in n]) == LAYERS


def test_ids_on_the_device_run_without_a_copy(seen: Seen) -> None:
    for events in (seen.plain_device, seen.device):
        assert host_copies(events) == []
        assert len(names(events, "kernel")) == KERNELS
        assert names(events, "graph") == []
    assert seen.result == [2, 0]  # a GPU, the first


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("on CPU", "InvalidInputError: ids are on cpu:0 and the session on cuda:0"),
        ("numpy", "InvalidInputError: ids are on cpu:0 and the session on cuda:0"),
        ("int32", "InvalidInputError: ids on the device are tensor(int32)"),
        ("one axis", "InvalidInputError: ids have shape (8,), expected two axes"),
        ("too long", "SequenceTooLongError: sequence length 601 is over max_len 600"),
        ("empty", "EmptySequenceError: the sequence has 0 tokens"),
    ],
    ids=lambda value: value.partition(":")[0],
)
def test_ids_that_cannot_be_taken_as_they_are_are_refused(
    kind: str, error: str, seen: Seen
) -> None:
    assert seen.refused[kind].startswith(error)


def test_a_stream_reaches_the_provider(seen: Seen) -> None:
    assert seen.options["user_compute_stream"] == str(STREAM)
    assert seen.options["has_user_compute_stream"] == "1"
    kind, _, stream = seen.plain_device[-1]
    assert (kind, stream) == ("sync", STREAM)  # so the result is complete


def test_the_stand_in_knows_every_call(seen: Seen) -> None:
    assert seen.unknown == []
