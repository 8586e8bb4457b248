"""Benchmarks: every contestant on every shape, refusals, and no process left behind."""

import contextlib
import csv
import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from causal_encoder import bench
from causal_encoder.bench import Benchmark, Measurement, print_benchmark, run_benchmark
from causal_encoder.errors import (
    BundleError,
    CausalEncoderError,
    CheckpointError,
    ConfigError,
    DeviceError,
    SequenceTooLongError,
)
from causal_encoder.export import export_onnx, export_program, export_torchscript
from causal_encoder.machine import Machine
from causal_encoder.model import CausalEncoder, save_checkpoint
from causal_encoder.serve.placement import cuda_problem
from tests.bundles import small_model

MAX_LEN = 40  # raised by export
SHAPES = ((1, 1), (1, MAX_LEN), (3, 1), (3, MAX_LEN))


@pytest.fixture(scope="module")
def model() -> CausalEncoder:
    return small_model()


@pytest.fixture(scope="module")
def checkpoint(model: CausalEncoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(model, folder)
    return folder


@pytest.fixture(scope="module")
def bundle(model: CausalEncoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("onnx") / "bundle"
    export_onnx(model, folder, max_len=MAX_LEN)
    return folder


@pytest.fixture(scope="module")
def scripted_bundle(model: CausalEncoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torchscript") / "bundle"
    export_torchscript(model, folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def _short() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "ROUNDS", 2)
        patch.setattr(bench, "TURN_S", 0.002)
        # On a busy machine threads would wait for each other longer than they compute.
        patch.setattr(bench, "available_cpus", lambda: 1)
        yield


@pytest.fixture(scope="module")
def measured(bundle: Path, checkpoint: Path) -> Benchmark:
    return run_benchmark(
        bundle,
        checkpoint,
        batch_sizes=(1, 3),
        seq_lens=(1, MAX_LEN),
        against=("eager", "torchscript"),
        device="cpu",
    )


def drawn(**changes: float | None) -> Benchmark:
    """A benchmark that nobody measured."""
    bundle = Measurement(
        contestant="onnx",
        batch_size=8,
        seq_len=64,
        cold_ms=40.0,
        n=100,
        min_ms=4.5,
        p50_ms=5.0,
        p90_ms=6.0,
        p99_ms=7.0,
        waited=0.001,
        ratio_to_bundle=None,
    )
    eager = dataclasses.replace(
        bundle, contestant="eager", p50_ms=1234.5, p99_ms=2000.0, ratio_to_bundle=246.9
    )
    return Benchmark(
        bundle="bundle",
        contestants=("onnx", "eager"),
        device="cpu",
        precision="fp32",
        tf32=False,
        residency="in main memory",
        config={},
        placement={"onnx": "36 nodes on CPUExecutionProvider", "eager": "torch on cpu"},
        machine=Machine(cpu="A processor", cpus=2, gpu="", versions={"onnxruntime": "1.2.3"}),
        rows=(dataclasses.replace(bundle, **changes), eager),  # type: ignore[arg-type]
    )


def printed(benchmark: Benchmark) -> str:
    text = io.StringIO()
    print_benchmark(benchmark, Console(file=text, width=100))
    return text.getvalue()


def contestants() -> list[int]:
    """Process ids of the contestants that this process started and that still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"contestant" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return sorted(found)


def test_every_contestant_has_a_row_for_every_shape(measured: Benchmark) -> None:
    rows = [(row.contestant, row.batch_size, row.seq_len) for row in measured.rows]
    names = ("onnx", "eager", "torchscript")
    assert rows == [(name, *shape) for shape in SHAPES for name in names]
    assert measured.contestants == names
    assert measured.shapes == SHAPES


def test_the_numbers_of_a_row_fit_together(measured: Benchmark) -> None:
    for row in measured.rows:
        assert 0 < row.min_ms <= row.p50_ms <= row.p90_ms <= row.p99_ms
        assert row.n >= bench.ROUNDS * bench.MIN_RUNS
        assert row.cold_ms > 0
        assert row.waited is None or row.waited >= 0


def test_ratios_are_medians_over_the_bundles_median(measured: Benchmark) -> None:
    for row in measured.rows:
        bundle_ms = measured.row("onnx", row.batch_size, row.seq_len).p50_ms
        expected = None if row.contestant == "onnx" else row.p50_ms / bundle_ms
        assert row.ratio_to_bundle == expected


def test_the_result_says_under_which_conditions_it_was_measured(measured: Benchmark) -> None:
    assert measured.device == "cpu"
    assert measured.precision == "fp32"
    assert not measured.tf32
    assert "main memory" in measured.residency
    assert measured.config["max_len"] == MAX_LEN
    assert "CPUExecutionProvider" in measured.placement["onnx"]
    assert measured.placement["eager"] == "torch on cpu"
    assert measured.machine.cpus >= 1
    assert {"python", "torch", "onnxruntime", "causal-encoder"} <= set(measured.machine.versions)


def test_json_keeps_everything(measured: Benchmark) -> None:
    fields = json.loads(json.dumps(measured.to_dict()))
    assert fields["schema_version"] == 1
    assert fields["rows"] == [dataclasses.asdict(row) for row in measured.rows]
    assert fields["machine"]["versions"] == dict(measured.machine.versions)


def test_csv_has_one_line_a_row(measured: Benchmark) -> None:
    lines = list(csv.DictReader(io.StringIO(measured.to_csv())))
    assert [line["contestant"] for line in lines] == [row.contestant for row in measured.rows]
    assert [float(line["p50_ms"]) for line in lines] == [row.p50_ms for row in measured.rows]
    assert lines[0]["ratio_to_bundle"] == ""


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
def test_compiled_pytorch_can_be_measured(bundle: Path, checkpoint: Path) -> None:
    result = run_benchmark(
        bundle, checkpoint, batch_sizes=(2,), seq_lens=(5,), against=("compile",), device="cpu"
    )
    assert [row.contestant for row in result.rows] == ["onnx", "compile"]


def test_a_torchscript_bundle_is_measured_by_itself(scripted_bundle: Path) -> None:
    result = run_benchmark(scripted_bundle, batch_sizes=(2,), seq_lens=(5,), device="cpu")
    assert [row.contestant for row in result.rows] == ["torchscript"]
    assert result.placement == {"torchscript": "torch on cpu"}


def test_a_program_is_measured_by_itself(model: CausalEncoder, tmp_path: Path) -> None:
    export_program(model, tmp_path / "bundle")
    result = run_benchmark(tmp_path / "bundle", batch_sizes=(2,), seq_lens=(5,), device="cpu")
    assert [row.contestant for row in result.rows] == ["program"]
    assert result.placement == {"program": "torch on cpu"}


def test_progress_counts_up_to_its_total(bundle: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    run_benchmark(
        bundle,
        batch_sizes=(1,),
        seq_lens=(2, 3),
        device="cpu",
        progress=lambda *call: calls.append(call),
    )
    done = [call[1] for call in calls]
    assert done == sorted(done)
    assert {call[2] for call in calls} == {done[-1]}
    assert any("sequence 3" in call[0] for call in calls)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        pytest.param({"seq_lens": (4, 41)}, SequenceTooLongError, "41 is over max_len 40", id="T"),
        pytest.param({"seq_lens": ()}, ConfigError, "no sequence length", id="no T"),
        pytest.param({"batch_sizes": (0,)}, ConfigError, "batch size is 0", id="B"),
        pytest.param({"batch_sizes": (True,)}, ConfigError, "batch size is True", id="bool"),
        pytest.param({"device": "tpu"}, ConfigError, "'tpu', expected one of auto", id="device"),
        pytest.param({"against": ("jax",)}, ConfigError, "'jax', expected some of eager", id="jax"),
        pytest.param({"against": ("eager",)}, ConfigError, "needs the checkpoint", id="checkpoint"),
        pytest.param({"bundle": "nowhere"}, BundleError, "nowhere", id="bundle"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    changes: dict[str, object], error: type[Exception], words: str, bundle: Path
) -> None:
    arguments = {"bundle": bundle, "batch_sizes": (1,), "seq_lens": (4,)} | changes
    with pytest.raises(error, match=words) as raised:
        run_benchmark(**arguments)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


def test_a_bundle_does_not_compete_with_itself(scripted_bundle: Path, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="leave torchscript out"):
        run_benchmark(
            scripted_bundle,
            checkpoint,
            batch_sizes=(1,),
            seq_lens=(4,),
            against=("torchscript",),
        )


def test_another_models_checkpoint_is_refused(bundle: Path, tmp_path: Path) -> None:
    save_checkpoint(small_model(num_layers=1), tmp_path)
    with pytest.raises(CheckpointError, match="was not exported from"):
        run_benchmark(bundle, tmp_path, batch_sizes=(1,), seq_lens=(4,), against=("eager",))
    assert contestants() == []


@pytest.mark.skipif(cuda_problem() is None, reason="CUDA works here")
def test_cuda_that_cannot_be_used_is_said(bundle: Path) -> None:
    with pytest.raises(DeviceError, match="CUDA cannot be used"):
        run_benchmark(bundle, batch_sizes=(1,), seq_lens=(4,), device="cuda")


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.parametrize(
    ("sent", "words"),
    [(signal.SIGKILL, "memory runs out"), (signal.SIGSEGV, "ended by SIGSEGV")],
)
def test_a_contestant_that_dies_is_named_with_the_shape(
    sent: signal.Signals, words: str, bundle: Path
) -> None:
    def kill_at_the_second_round(_step: str, done: int, _total: int) -> None:
        if done == 2:
            os.kill(contestants()[0], sent)

    with pytest.raises(CausalEncoderError, match=f"onnx ended at batch 2, sequence 4: .*{words}"):
        run_benchmark(
            bundle, batch_sizes=(2,), seq_lens=(4,), progress=kill_at_the_second_round, device="cpu"
        )
    assert contestants() == []


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_an_interrupted_benchmark_leaves_no_process_behind(bundle: Path) -> None:
    running: list[int] = []

    def interrupt(_step: str, done: int, _total: int) -> None:
        if done == 1:
            running.extend(contestants())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_benchmark(bundle, batch_sizes=(1,), seq_lens=(4,), progress=interrupt)
    assert len(running) == 1
    assert contestants() == []


def test_a_contestant_ends_when_its_benchmark_is_gone(bundle: Path) -> None:
    job = {"contestant": "bundle", "bundle": str(bundle), "checkpoint": None}
    result = subprocess.run(
        [sys.executable, "-m", "causal_encoder.contestant"],
        input=json.dumps(job | {"device": "cpu", "threads": 1}) + "\n",
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert json.loads(result.stdout)["device"] == "cpu"


def test_benchmarking_an_onnx_bundle_never_loads_torch() -> None:
    program = "import sys, causal_encoder.bench; print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "False"


def test_the_printed_table_compares_medians_with_the_bundle() -> None:
    text = printed(drawn())
    assert "1234 (246.90x)" in text
    assert "how many times as fast onnx is" in text
    assert "A processor, 2 threads" in text
    assert "36 nodes on CPUExecutionProvider" in text
    assert "Not to be trusted" not in text


def test_a_busy_machine_is_told_to_the_reader() -> None:
    assert "up to 40% of the time went by waiting for a CPU" in printed(drawn(waited=0.4))


def test_a_system_that_does_not_tell_waiting_gives_no_warning() -> None:
    assert drawn(waited=None).warning == ""
