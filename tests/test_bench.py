"""Benchmarks: every contestant on every shape, refusals, and no process left behind."""

import contextlib
import csv
import dataclasses
import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from causal_encoder import bench, memory
from causal_encoder.bench import Benchmark, Entry, run_benchmark
from causal_encoder.bench_report import print_benchmark, to_csv, to_markdown
from causal_encoder.cli import main
from causal_encoder.errors import (
    BundleError,
    CausalEncoderError,
    CheckpointError,
    ConfigError,
    DeviceError,
    SequenceTooLongError,
)
from causal_encoder.export import export_onnx, export_program
from causal_encoder.machine import Machine
from causal_encoder.model import CausalEncoder, save_checkpoint
from causal_encoder.serve import Manifest
from causal_encoder.serve.bundle import read_manifest
from causal_encoder.serve.placement import cuda_problem
from causal_encoder.timing import Measurement
from tests.bundles import reseal, small_model

MAX_LEN = 40  # raised by export
SHAPES = ((3, 1), (3, MAX_LEN), (1, 1), (1, MAX_LEN))


@pytest.fixture(scope="module")
def model() -> CausalEncoder:
    return small_model(num_layers=1)


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
def program_bundle(model: CausalEncoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("program") / "bundle"
    export_program(model, folder, max_len=MAX_LEN)
    return folder


@pytest.fixture
def scripted_bundle(bundle: Path, tmp_path: Path) -> Path:
    """One that says it is TorchScript, for refusals that do not run it."""
    shutil.copytree(bundle, tmp_path / "scripted")
    (tmp_path / "scripted" / "model.onnx").rename(tmp_path / "scripted" / "model.pt")
    nothing = {"opset": None, "ir_version": None, "min_onnxruntime": None}
    reseal(tmp_path / "scripted", format="torchscript", **nothing)
    return tmp_path / "scripted"


@pytest.fixture(scope="module")
def manifest(bundle: Path) -> Manifest:
    return read_manifest(bundle)


@pytest.fixture(scope="module", autouse=True)
def _short() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "ROUNDS", 2)
        patch.setattr(bench, "TURN_S", 0.002)
        patch.setattr(bench, "_SETTLE_S", 0)
        # On a busy machine threads would wait for each other longer than they compute.
        patch.setattr(bench, "available_cpus", lambda: 1)
        yield


@pytest.fixture(scope="module")
def measured(bundle: Path, program_bundle: Path, checkpoint: Path) -> Benchmark:
    return run_benchmark(
        [bundle, program_bundle],
        checkpoint,
        batch_sizes=(3, 1),
        seq_lens=(1, MAX_LEN),
        against=("eager",),
        device="cpu",
    )


def drawn(**changes: object) -> Benchmark:
    """A benchmark that nobody measured; the changes are of its first row."""
    base = Measurement(
        contestant="onnx fp32",
        batch_size=8,
        seq_len=64,
        cold_ms=40.0,
        n=100,
        min_ms=4.5,
        mean_ms=5.5,
        p10_ms=4.7,
        p50_ms=5.0,
        p90_ms=6.0,
        p95_ms=6.5,
        p99_ms=7.0,
        rounds=5,
        stable=True,
        scratch_mib=12.25,
        waited=0.001,
    )
    rows = (
        dataclasses.replace(base, **changes),  # type: ignore[arg-type]
        _rival(base, p50_ms=6.65, ratio=1.33, ratio_low=1.30, ratio_high=1.37),
        dataclasses.replace(base, seq_len=512, p50_ms=1234.5),
        _rival(base, seq_len=512, p50_ms=1111.0, ratio=0.9, ratio_low=0.88, ratio_high=0.93),
    )
    entry = Entry(
        name="onnx fp32",
        kind="bundle",
        bundle="bundle",
        precision="fp32",
        placement="36 nodes on CPUExecutionProvider",
    )
    eager = dataclasses.replace(
        entry, name="eager", kind="eager", bundle=None, placement="torch on cpu"
    )
    return Benchmark(
        date="2026-11-30",
        contestants=(entry, eager),
        device="cpu",
        tf32=False,
        residency="in main memory",
        method="Some rounds.",
        config={},
        machine=Machine(
            cpu="A processor", cpus=2, gpu="", governor="powersave", versions={"torch": "1.2.3"}
        ),
        rows=rows,
        crossovers=bench.crossovers(("onnx fp32", "eager"), rows),
    )


def _rival(base: Measurement, **changes: object) -> Measurement:
    return dataclasses.replace(base, contestant="eager", **changes)  # type: ignore[arg-type]


def renamed(name: str) -> Benchmark:
    """The same, and the base has another name."""
    benchmark = drawn()
    entry = dataclasses.replace(benchmark.contestants[0], name=name)
    rows = tuple(
        dataclasses.replace(row, contestant=name) if row.contestant == "onnx fp32" else row
        for row in benchmark.rows
    )
    return dataclasses.replace(benchmark, contestants=(entry, benchmark.contestants[1]), rows=rows)


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
    names = ("onnx fp32", "program fp32", "eager")
    assert rows == [(name, *shape) for shape in SHAPES for name in names]
    assert measured.names == names
    assert measured.shapes == SHAPES


def test_the_numbers_of_a_row_fit_together(measured: Benchmark) -> None:
    for row in measured.rows:
        assert 0 < row.min_ms <= row.p10_ms <= row.p50_ms <= row.p90_ms <= row.p95_ms <= row.p99_ms
        assert row.min_ms <= row.mean_ms
        assert bench.ROUNDS <= row.rounds <= bench.most_rounds()
        assert row.stable or row.rounds >= 3
        assert row.n >= row.rounds * bench.MIN_RUNS
        assert row.cold_ms > 0
        assert row.waited is None or row.waited >= 0
        assert row.scratch_mib is None or 0 <= row.scratch_mib < 1000


def test_ratios_are_medians_over_the_first_bundles_median(measured: Benchmark) -> None:
    for row in measured.rows:
        if row.contestant == "onnx fp32":
            assert row.ratio is row.ratio_low is row.ratio_high is None
        else:
            base_ms = measured.row("onnx fp32", row.batch_size, row.seq_len).p50_ms
            assert row.ratio == pytest.approx(row.p50_ms / base_ms)
            assert 0 < row.ratio_low <= row.ratio_high  # type: ignore[operator]


def test_crossovers_are_told_for_every_rival_and_batch_size(measured: Benchmark) -> None:
    found = [(crossover.contestant, crossover.batch_size) for crossover in measured.crossovers]
    assert found == [(name, batch) for batch in (3, 1) for name in ("program fp32", "eager")]


def test_the_result_says_under_which_conditions_it_was_measured(
    measured: Benchmark, bundle: Path
) -> None:
    first, program, eager = measured.contestants
    assert measured.device == "cpu"
    assert not measured.tf32
    assert "main memory" in measured.residency
    assert "at least 2 rounds" in measured.method
    assert "at most 6" in measured.method
    assert "bootstrap" in measured.method
    assert measured.config["max_len"] == MAX_LEN
    assert (first.kind, first.bundle, first.precision) == ("bundle", str(bundle), "fp32")
    assert "CPUExecutionProvider" in first.placement
    assert program.placement == eager.placement == "torch on cpu"
    assert (eager.kind, eager.bundle) == ("eager", None)
    assert measured.machine.cpus >= 1
    assert {"python", "torch", "onnxruntime", "causal-encoder"} <= set(measured.machine.versions)


def test_json_keeps_everything(measured: Benchmark) -> None:
    fields = json.loads(json.dumps(measured.to_dict()))
    assert fields["schema_version"] == 2
    assert fields["rows"] == [dataclasses.asdict(row) for row in measured.rows]
    assert [entry["name"] for entry in fields["contestants"]] == list(measured.names)
    assert fields["crossovers"] == [dataclasses.asdict(found) for found in measured.crossovers]
    assert fields["warning"] == measured.warning
    assert fields["machine"]["versions"] == dict(measured.machine.versions)


def test_csv_has_one_line_a_row(measured: Benchmark) -> None:
    lines = list(csv.DictReader(io.StringIO(to_csv(measured))))
    assert [line["contestant"] for line in lines] == [row.contestant for row in measured.rows]
    assert [float(line["p50_ms"]) for line in lines] == [row.p50_ms for row in measured.rows]
    assert lines[0]["ratio"] == ""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
def test_compiled_pytorch_and_a_plain_export_can_be_measured(
    bundle: Path, checkpoint: Path
) -> None:
    result = run_benchmark(
        [bundle],
        checkpoint,
        batch_sizes=(2,),
        seq_lens=(5,),
        against=("compile", "naive"),
        device="cpu",
    )
    assert [row.contestant for row in result.rows] == ["onnx fp32", "compile", "naive"]
    assert "nodes on CPUExecutionProvider" in result.contestants[2].placement


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="needs openvino")
def test_openvino_runs_the_bundles_own_file_without_a_checkpoint(bundle: Path) -> None:
    result = run_benchmark(
        [bundle], batch_sizes=(2,), seq_lens=(5,), against=("openvino",), device="cpu"
    )
    assert str(bundle) in result.contestants[1].placement
    assert "openvino" in result.machine.versions


def test_bundles_are_named_by_what_tells_them_apart(manifest: Manifest) -> None:
    half = dataclasses.replace(manifest, precision="fp16")
    fused = dataclasses.replace(manifest, target="cpu")
    names = bench.bundle_names(["a", "b", "c"], [manifest, half, fused])
    assert names == ("onnx fp32", "onnx fp16", "onnx fp32 for cpu")
    names = bench.bundle_names(["old", "x/new", "c"], [manifest, manifest, half])
    assert names == ("onnx fp32 (old)", "onnx fp32 (new)", "onnx fp16")
    names = bench.bundle_names(["a/bundle", "b/bundle"], [manifest, manifest])
    assert names == ("onnx fp32 (a/bundle)", "onnx fp32 (b/bundle)")


@dataclasses.dataclass
class Scripted:
    """A contestant whose turns take times that are known."""

    name: str
    times_ms: list[float]

    def ask(self, command: dict[str, object], _step: str) -> dict[str, object]:
        if "ids" in command:
            return {"cold_ms": 1.0}
        return {"times_ms": [self.times_ms.pop(0)], "waited_ms": 0.0, "scratch_mib": None}


@pytest.mark.parametrize(
    ("growth", "most", "rounds", "stable"),
    [(1.0, None, 3, True), (1.02, None, 3, True), (1.1, None, 6, False), (1.0, 1, 1, False)],
)
def test_a_shape_is_measured_until_all_are_stable(
    growth: float, most: int | None, rounds: int, stable: bool
) -> None:
    steady = Scripted("steady", [2.0] * 10)
    other = Scripted("other", [growth**number for number in range(10)])
    base, rival = bench.measure(
        [steady, other],  # type: ignore[list-item]
        np.zeros((2, 3), np.int64),
        0,
        0,
        lambda *_: None,
        most,
    )
    assert base.rounds == rival.rounds == rounds
    assert rival.stable is stable
    assert (base.n, base.p50_ms, base.cold_ms) == (rounds, 2.0, 1.0)


def test_progress_counts_up_to_its_total(bundle: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    run_benchmark(
        [bundle],
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
        pytest.param(
            {"seq_lens": (4, 41)},
            SequenceTooLongError,
            "41 is over max_len 40 of .*bundle; measure lengths up to 40 .* larger --max-len",
            id="T",
        ),
        pytest.param({"seq_lens": ()}, ConfigError, "no sequence length", id="no T"),
        pytest.param({"batch_sizes": (0,)}, ConfigError, "batch size is 0", id="B"),
        pytest.param({"batch_sizes": (True,)}, ConfigError, "batch size is True", id="bool"),
        pytest.param({"device": "tpu"}, ConfigError, "'tpu', expected one of auto", id="device"),
        pytest.param({"against": ("jax",)}, ConfigError, "'jax', expected some of eager", id="jax"),
        pytest.param({"against": ("eager",)}, ConfigError, "needs the checkpoint", id="checkpoint"),
        pytest.param({"bundles": ("nowhere",)}, BundleError, "nowhere", id="bundle"),
        pytest.param({"bundles": ()}, ConfigError, "no bundle", id="no bundle"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    changes: dict[str, object], error: type[Exception], words: str, bundle: Path
) -> None:
    arguments = {"bundles": [bundle], "batch_sizes": (1,), "seq_lens": (4,)} | changes
    with pytest.raises(error, match=words) as raised:
        run_benchmark(**arguments)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


def test_a_bundle_given_twice_is_refused(bundle: Path) -> None:
    with pytest.raises(ConfigError, match="given twice"):
        run_benchmark([bundle, bundle / "."], batch_sizes=(1,), seq_lens=(4,))


def test_bundles_of_two_configurations_are_refused(
    bundle: Path, manifest: Manifest, tmp_path: Path
) -> None:
    shutil.copytree(bundle, tmp_path / "other")
    reseal(tmp_path / "other", config=dict(manifest.config) | {"num_heads": 4, "max_len": 7})
    with pytest.raises(ConfigError, match=r"num_heads is 3 in .* and 4 in .*other; only bundles"):
        run_benchmark([bundle, tmp_path / "other"], batch_sizes=(1,), seq_lens=(4,))


def test_the_shortest_bundle_limits_the_lengths(
    bundle: Path, manifest: Manifest, tmp_path: Path
) -> None:
    shutil.copytree(bundle, tmp_path / "short")
    reseal(tmp_path / "short", config=dict(manifest.config) | {"max_len": 7})
    assert bench.usual_seq_lens([bundle, tmp_path / "short"]) == (7,)
    with pytest.raises(SequenceTooLongError, match=r"8 is over max_len 7 of .*short"):
        run_benchmark([bundle, tmp_path / "short"], batch_sizes=(1,), seq_lens=(8,))


def test_openvino_that_is_not_installed_is_said_before_measuring(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install openvino"):
        run_benchmark([bundle], batch_sizes=(1,), seq_lens=(4,), against=("openvino",))


def test_openvino_needs_a_bundle_that_it_can_run(scripted_bundle: Path) -> None:
    with pytest.raises(ConfigError, match="openvino runs a portable fp32 onnx bundle"):
        run_benchmark([scripted_bundle], batch_sizes=(1,), seq_lens=(4,), against=("openvino",))


def test_a_bundle_does_not_compete_with_itself(scripted_bundle: Path, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="leave torchscript out"):
        run_benchmark(
            [scripted_bundle],
            checkpoint,
            batch_sizes=(1,),
            seq_lens=(4,),
            against=("torchscript",),
        )


def test_another_models_checkpoint_is_refused(bundle: Path, tmp_path: Path) -> None:
    save_checkpoint(small_model(), tmp_path)
    with pytest.raises(CheckpointError, match="was not exported from"):
        run_benchmark([bundle], tmp_path, batch_sizes=(1,), seq_lens=(4,), against=("eager",))
    assert contestants() == []


@pytest.mark.skipif(cuda_problem() is None, reason="CUDA works here")
def test_cuda_that_cannot_be_used_is_said(bundle: Path) -> None:
    with pytest.raises(DeviceError, match="CUDA cannot be used"):
        run_benchmark([bundle], batch_sizes=(1,), seq_lens=(4,), device="cuda")


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

    with pytest.raises(
        CausalEncoderError, match=f"onnx fp32 ended at batch 2, sequence 4: .*{words}"
    ):
        run_benchmark(
            [bundle],
            batch_sizes=(2,),
            seq_lens=(4,),
            progress=kill_at_the_second_round,
            device="cpu",
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
        run_benchmark([bundle], batch_sizes=(1,), seq_lens=(4,), progress=interrupt)
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


@pytest.mark.skipif(memory.resident_mib() is None, reason="the system does not tell")
def test_the_peak_of_memory_is_measured_from_when_it_was_forgotten() -> None:
    if not memory.forget_peak():
        pytest.skip("the system cannot forget a peak")
    before = memory.peak_resident_mib()
    np.ones(40 * 2**17).sum()  # 40 MiB of float64
    after = memory.peak_resident_mib()
    assert before is not None
    assert after is not None
    assert after - before > 30
    memory.forget_peak()
    assert memory.peak_resident_mib() < after  # type: ignore[operator]


def test_the_printed_table_compares_medians_with_the_base() -> None:
    text = printed(drawn())
    assert "1.33x [1.30, 1.37]" in text
    assert "0.90x [0.88, 0.93]" in text
    assert "onnx fp32 is 1.5 times as fast" in " ".join(text.split())
    assert "eager overtakes onnx fp32 from sequence 512 at batch 8" in text
    assert "A processor, 2 threads, governor powersave" in text
    assert "36 nodes on CPUExecutionProvider" in text
    assert "Not to be trusted" not in text
    assert "stable" not in text


def test_a_name_that_looks_like_markup_is_printed_as_it_is() -> None:
    name = "onnx fp32 ([/red] :smile: x[bold])"
    text = printed(renamed(name))
    assert f"{name} is 1.5 times as fast" in " ".join(text.split())


def test_a_busy_machine_is_told_above_the_table() -> None:
    text = printed(drawn(waited=0.4))
    assert text.startswith("Not to be trusted: up to 40% of the time went by waiting for a CPU")
    assert "**Not to be trusted" in to_markdown(drawn(waited=0.4), "bench")


def test_a_system_that_does_not_tell_waiting_gives_no_warning() -> None:
    assert drawn(waited=None).warning == ""


def test_an_unstable_shape_is_marked() -> None:
    assert "5*" in printed(drawn(stable=False)).split()
    assert "* did not become stable" in printed(drawn(stable=False))
    assert r"| 64\* |" in to_markdown(drawn(stable=False), "bench")


def test_who_is_faster_is_marked_where_it_rests_on_an_unstable_shape() -> None:
    said = "eager overtakes onnx fp32 from sequence 512 at batch 8"
    assert f"{said} *\n" in printed(drawn(stable=False))
    assert rf"- {said} \*" in to_markdown(drawn(stable=False), "bench").splitlines()
    assert f"{said}\n" in printed(drawn())


def test_a_ratio_of_hundreds_has_no_more_digits_than_its_medians() -> None:
    benchmark = drawn()
    far = dataclasses.replace(benchmark.rows[1], ratio=999.494, ratio_low=979.8, ratio_high=1035.7)
    rows = (benchmark.rows[0], far, *benchmark.rows[2:])
    assert "999x [980, 1036]" in printed(dataclasses.replace(benchmark, rows=rows))


def test_markdown_has_machine_command_table_crossover_and_conditions() -> None:
    lines = to_markdown(drawn(), "causal-encoder bench bundle").splitlines()
    assert lines[0] == "# Latency, 2026-11-30"
    assert "A processor, 2 threads, governor powersave; fp32, torch 1.2.3." in lines
    assert "fp32 without TF32" in dataclasses.replace(drawn(), device="cuda").conditions
    assert "causal-encoder bench bundle" in lines
    assert "| batch | sequence | onnx fp32 | eager |" in lines
    assert "| 8 | 64 | 5 | 6.65, 1.33x [1.30, 1.37] |" in lines
    assert "- eager overtakes onnx fp32 from sequence 512 at batch 8" in lines
    assert ("| 8 x 64 | onnx fp32 | 4.5 | 5.5 | 5 | 6 | 6.5 | 7 | 40 | 12.2 | 100 | 5 |") in lines
    assert "- Each run: in main memory." in lines


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments])


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "run_benchmark", lambda *_, **__: drawn())


@pytest.mark.usefixtures("unmeasured")
def test_the_command_writes_what_was_asked_for(tmp_path: Path) -> None:
    names = ("out.json", "out.csv", "out.md", "out.png")
    options = ("--json", "--csv", "--markdown", "--plot")
    outputs = [part for pair in zip(options, names, strict=True) for part in pair]
    with contextlib.chdir(tmp_path):
        result = command("a bundle", "--seq-len", "64,512", *outputs)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert (tmp_path / "out.json").read_text() == json.dumps(drawn().to_dict(), indent=2) + "\n"
    assert (tmp_path / "out.csv").read_text() == to_csv(drawn())
    typed = "bench 'a bundle' --seq-len 64,512 --json out.json --csv out.csv"
    assert typed in (tmp_path / "out.md").read_text()


@pytest.mark.usefixtures("unmeasured")
def test_csv_on_standard_output_is_alone_there() -> None:
    result = command("bundle", "--seq-len", "64", "--csv", "-")
    assert result.stdout == to_csv(drawn())
    assert "Median milliseconds" in result.stderr


@pytest.mark.usefixtures("unmeasured")
def test_a_page_on_standard_output_is_alone_there() -> None:
    result = command("bundle", "--seq-len", "64", "--markdown", "-")
    assert result.stdout == to_markdown(drawn(), "main bench bundle --seq-len 64 --markdown -")
    assert "Median milliseconds" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        pytest.param(("--plot", "x.foo"), 2, "ends in none of", id="ending"),
        pytest.param(("--plot", "missing/x.png"), 2, "there is no folder", id="plot"),
        pytest.param(("--json", "missing/x.json"), 2, "make it first", id="json"),
        pytest.param(("--csv", "missing/x.csv"), 2, "--csv", id="csv"),
        pytest.param(("--markdown", "missing/x.md"), 2, "--markdown", id="markdown"),
        pytest.param(("--json", "-", "--csv", "-"), 2, "- is taken by --json", id="both"),
        pytest.param(("--csv", "-", "--markdown", "-"), 2, "- is taken by --csv", id="page"),
        pytest.param(("--json", "x", "--csv", "./x"), 2, "./x is taken by --json", id="same"),
        pytest.param(("--json", "loop"), 2, "loop", id="link to itself"),
        pytest.param(("--seq-len", ""), 2, "whole numbers from 1 on", id="no lengths"),
        pytest.param(("--batch-size", "1_0"), 2, "whole numbers from 1 on", id="underscore"),
        pytest.param(("--batch-size", "\u0663"), 2, "whole numbers from 1 on", id="digits"),
        pytest.param(("--against", "jax"), 2, "eager, torchscript, compile, naive", id="rival"),
        pytest.param(("--against", "naive"), 2, "needs --checkpoint", id="checkpoint"),
        pytest.param(("--seq-len", "0"), 2, "whole numbers from 1 on", id="lengths"),
    ],
)
def test_what_cannot_be_done_is_refused_before_measuring(
    arguments: tuple[str, ...],
    code: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "run_benchmark", lambda *_, **__: pytest.fail("it measured"))
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    result = command("bundle", *arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert words in " ".join(result.stderr.split())


def test_matplotlib_that_is_missing_is_told_before_measuring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "run_benchmark", lambda *_, **__: pytest.fail("it measured"))
    monkeypatch.delitem(sys.modules, "causal_encoder.plots", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = command("bundle", "--plot", "x.png")
    assert result.exit_code == 1
    assert "pip install 'causal-encoder[plot]'" in result.stderr
