"""What only a GPU can show: the numbers, and that graphs and streams behave as they must.

`benchmarks/gpu.sh` runs these and measures.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from causal_encoder.export import export_onnx, verify
from causal_encoder.export.artifact import open_bare
from causal_encoder.export.subject import RELATIVE_ERROR_LIMITS, relative_distance
from causal_encoder.serve import EncoderSession, open_bundle
from causal_encoder.serve.graphs import MAX_BUCKETS
from causal_encoder.serve.manifest import TARGETS
from tests.bundles import small_model

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
V, L, D = 101, 130, 64
PRECISIONS = ("fp32", "fp16", "bf16")
FORMS = [(precision, target) for precision in PRECISIONS for target in TARGETS if target != "cpu"]
# fp32 in another order of additions, without TF32.
LIMITS = {"fp32": 1e-4} | RELATIVE_ERROR_LIMITS
GROWTH_LIMIT_BYTES = 2**25
MODEL = small_model(vocab_size=V, max_len=L, d_model=D, num_heads=4)
Bundles = Callable[[str, str], Path]
every_form = pytest.mark.parametrize(("precision", "target"), FORMS)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    """(precision, target) -> the bundle of MODEL."""
    made: dict[tuple[str, str], Path] = {}
    root = tmp_path_factory.mktemp("bundles")

    def get(precision: str, target: str) -> Path:
        key = precision, target
        if key not in made:
            made[key] = root / f"{precision}-{target}"
            export_onnx(MODEL, made[key], precision=precision, target=target)
        return made[key]

    return get


def random_ids(batch: int, length: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(batch * 1000 + length).integers(0, V, (batch, length))


def expected(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    with torch.no_grad():
        return MODEL(torch.from_numpy(ids)).numpy()


@every_form
def test_every_check_holds_on_cuda(precision: str, target: str, bundles: Bundles) -> None:
    report = verify(bundles(precision, target), MODEL, device=DEVICE)
    assert report.device == DEVICE
    assert report.verdict == "proven", report.first_failure


@every_form
def test_every_node_runs_on_cuda(precision: str, target: str, bundles: Bundles) -> None:
    placement = EncoderSession(bundles(precision, target), DEVICE).placement
    assert (placement.device, placement.off_device) == (DEVICE, ())


@every_form
def test_the_bare_file_gives_nan_from_a_bad_id_on(
    precision: str, target: str, bundles: Bundles
) -> None:
    """CUDA's Gather reads zeros for an id out of range, and raises nothing."""
    with open_bundle(bundles(precision, target)) as opened:
        run = open_bare(opened.model_path, "onnx", DEVICE)
    for token in (-1, -V - 1, V, V + 1, 2**31, 2**40, -(2**63), 2**63 - 1):
        ids = random_ids(2, 40)
        ids[1, 7] = token
        try:
            hidden = run(ids)
        except Exception:  # noqa: BLE001  # ONNX Runtime has no public base class
            continue  # refused, as some of them are on CPU
        assert np.isfinite(hidden[0]).all(), token
        assert np.isnan(hidden[1, 7:]).all(), token
    assert np.isnan(run(random_ids(1, L + 1))[:, L:]).all()


@every_form
def test_cuda_graphs_give_the_numbers_of_plain_runs(
    precision: str, target: str, bundles: Bundles
) -> None:
    plain = EncoderSession(bundles(precision, target), DEVICE)
    graphs = EncoderSession(bundles(precision, target), DEVICE, cuda_graphs=True)
    for batch, length in [(1, 16), (1, 5), (2, 16), (1, 16), (3, 100), (4, 128), (1, 5), (8, L)]:
        ids = random_ids(batch, length)
        error = relative_distance(graphs.run(ids), plain.run(ids))
        assert error <= LIMITS[precision], (batch, length)
        assert relative_distance(graphs.run(ids), expected(ids)) <= LIMITS[precision]


def test_ids_and_result_stay_on_the_device(bundles: Bundles) -> None:
    session = EncoderSession(bundles("fp32", "cuda"), DEVICE)
    ids = random_ids(3, 50)
    on_device = torch.from_numpy(ids).to(DEVICE)
    torch.cuda.synchronize()
    hidden = torch.from_dlpack(session.run_on_device(on_device))
    assert hidden.device.type == DEVICE
    np.testing.assert_array_equal(hidden.cpu().numpy(), session.run(ids))


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_a_session_runs_on_the_stream_it_is_given(cuda_graphs: bool, bundles: Bundles) -> None:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    session = EncoderSession(
        bundles("fp32", "cuda"), DEVICE, cuda_stream=stream.cuda_stream, cuda_graphs=cuda_graphs
    )
    ids = random_ids(4, 100)
    for _ in range(20):
        with torch.cuda.stream(stream):  # the ids are ready when the kernels before are done
            on_device = torch.from_numpy(ids).to(DEVICE, non_blocking=True) * 1
            hidden = torch.from_dlpack(session.run_on_device(on_device)).cpu().numpy()
        assert relative_distance(hidden, expected(ids)) <= LIMITS["fp32"]
    assert relative_distance(session.run(ids), expected(ids)) <= LIMITS["fp32"]


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_memory_stays_as_it_is_over_2000_shapes(cuda_graphs: bool, bundles: Bundles) -> None:
    session = EncoderSession(bundles("fp16", "cuda"), DEVICE, cuda_graphs=cuda_graphs)
    random = np.random.default_rng(0)
    session.run(random_ids(64, L))
    free_bytes = []
    for _ in range(4):
        for batch, length in zip(
            random.integers(1, 65, 500), random.integers(1, L + 1, 500), strict=True
        ):
            session.run(random_ids(int(batch), int(length)))
        free_bytes.append(torch.cuda.mem_get_info()[0])
    assert free_bytes[1] - free_bytes[-1] < GROWTH_LIMIT_BYTES
    if session._graphs is not None:
        assert len(session._graphs._buckets) <= MAX_BUCKETS
