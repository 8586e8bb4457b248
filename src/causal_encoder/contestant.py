"""One contestant of a benchmark: a process that loads a model and times it when asked.

Thread pools inside one process disturb each other, so each contestant has its own. It is
asleep while it waits for its next turn, and ends when its standard input does: a
benchmark that was killed leaves no process behind.

It reads one JSON object a line and answers with one:

    a Job                                   -> {"device": .., "placement": ..}
    {"ids": [[..]]}                         -> {"cold_ms": ..}, the first run of this shape
    {"turn_s": .., "min_runs": ..}          -> {"times_ms": [..], "waited_ms": ..}
    whatever fails                          -> {"error": {"type": .., "message": ..}}

A turn runs the last ids until both the time and the number of runs are reached.
`waited_ms` is how long it waited meanwhile for a CPU that other programs used; null if
the system does not tell.
"""

import contextlib
import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

import numpy as np
import numpy.typing as npt

from causal_encoder import errors
from causal_encoder.errors import CausalEncoderError, CheckpointError, DeviceError
from causal_encoder.serve import EncoderSession, open_bundle
from causal_encoder.serve.placement import first_line

if TYPE_CHECKING:  # torch is loaded only by the contestants that run in it
    from torch import Tensor

Ids = npt.NDArray[np.int64]
Run = Callable[[], object]

_SCHEDULER_STATISTICS = Path("/proc/thread-self/schedstat")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What a contestant is to load.

    Attributes:
        contestant: "bundle", "eager", "torchscript" or "compile".
        bundle: folder of the bundle.
        checkpoint: folder of the checkpoint it was exported from; not used for "bundle".
        device: "cpu", "cuda" or "auto".
        threads: threads of one run on CPU.
    """

    contestant: str
    bundle: str
    checkpoint: str | None
    device: str
    threads: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contestant:
    """A contestant as the benchmark sees it; `entered` starts one.

    Attributes:
        name: what messages call it.
        process: the process, its standard input and output connected.
        log: what it wrote to standard error.
    """

    name: str
    process: "subprocess.Popen[str]"
    log: IO[str]

    def ask(self, command: Mapping[str, Any], step: str) -> dict[str, Any]:
        """Give a command and wait for the answer, as `answer`."""
        self.give(command)
        return self.answer(step)

    def give(self, command: Mapping[str, Any]) -> None:
        """Give a command and do not wait."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died: `answer` says of what
            print(json.dumps(command), file=self.process.stdin, flush=True)

    def answer(self, step: str) -> dict[str, Any]:
        """Wait for the answer to the command that was given.

        Raises:
            CausalEncoderError: the command failed, or the process ended. Our own errors
                come back as what they are, others are named together with the step.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise CausalEncoderError(f"{self.name} ended at {step}: {self._cause_of_death()}")
        fields: dict[str, Any] = json.loads(line)
        if "error" in fields:
            kind, message = fields["error"]["type"], fields["error"]["message"]
            own = getattr(errors, kind, None)
            if isinstance(own, type) and issubclass(own, CausalEncoderError):
                raise own(message)
            raise CausalEncoderError(f"{self.name} failed at {step}: {kind}: {message}")
        return fields

    def _cause_of_death(self) -> str:
        code = self.process.wait()
        if code == -signal.SIGKILL:
            return "it was killed, as happens when memory runs out; measure smaller shapes"
        if code < 0:
            return f"it was ended by {signal.Signals(-code).name}"
        self.log.seek(0)
        lines = [line.strip() for line in self.log if line.strip()]
        return f"exit code {code}" + (f", {lines[-1]}" if lines else "")


@contextlib.contextmanager
def entered(name: str, job: Job) -> Iterator[Contestant]:
    """Start a contestant with its job; afterwards it is gone, with all it started.

    Its answer to the job is still to be received, so that several can load at once.
    """
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(  # noqa: S603  # this module, with nothing of the user's
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            process_group=0,  # Ctrl-C is for the benchmark, which ends its contestants
        )
        try:
            contestant = Contestant(name=name, process=process, log=log)
            contestant.give(dataclasses.asdict(job))
            yield contestant
        finally:
            _kill_group(process)
            process.communicate()  # closes the pipes and waits


def _kill_group(process: "subprocess.Popen[str]") -> None:
    if sys.platform == "win32":
        process.kill()
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runner:
    """A loaded model.

    Attributes:
        device: "cpu" or "cuda", where it runs.
        placement: the same in words, with the proof there is.
        prepare: puts ids (B, T) on the device; calling the result runs the model once and
            returns when the output is complete.
    """

    device: str
    placement: str
    prepare: Callable[[Ids], Run]


def load(job: Job) -> Runner:
    """Load what the job names.

    Raises:
        BundleError: the bundle is damaged.
        CheckpointError: the checkpoint is damaged, or not the one that was exported.
        DeviceError: the device cannot be used.
    """
    if job.contestant != "bundle":
        return _load_checkpoint(job)
    with open_bundle(job.bundle) as opened:
        if opened.manifest.format != "onnx":
            return _load_torch_file(opened.model_path, opened.manifest.format, job)
    return _load_session(job)


def _load_session(job: Job) -> Runner:
    import onnxruntime

    session = EncoderSession(job.bundle, job.device, threads=job.threads)
    placement = session.placement
    nodes = ", ".join(f"{count} nodes on {name}" for name, count in placement.nodes.items())

    def prepare(ids: Ids) -> Run:
        if placement.device == "cpu":
            return lambda: session.run(ids)
        on_device = onnxruntime.OrtValue.ortvalue_from_numpy(ids, "cuda", 0)
        # ONNX Runtime waits for its stream before it returns.
        return lambda: session.run_on_device(on_device)

    return Runner(
        device=placement.device,
        placement=nodes + (f" ({placement.reason})" if placement.reason else ""),
        prepare=prepare,
    )


def _load_torch_file(path: Path, format: str, job: Job) -> Runner:  # noqa: A002
    import torch
    from torch.export.passes import move_to_device_pass

    device = _set_up_torch(job)
    with path.open("rb") as file:
        if format == "torchscript":
            scripted = torch.jit.load(file, map_location=device)  # type: ignore[no-untyped-call]
            return _torch_runner(scripted, device)
        loaded = torch.export.load(file)
        program = move_to_device_pass(loaded, device)
        return _torch_runner(program.module(), device)


def _load_checkpoint(job: Job) -> Runner:
    import torch

    from causal_encoder.export.prepare import prepare
    from causal_encoder.model import fingerprint, load_checkpoint

    assert job.checkpoint is not None
    with open_bundle(job.bundle) as opened:
        manifest = opened.manifest
    # The bundle's own max_len, which export may have raised.
    model = prepare(load_checkpoint(job.checkpoint), manifest.max_len)
    if fingerprint(model) != manifest.checkpoint_sha256:
        raise CheckpointError(
            f"{job.bundle} was not exported from {job.checkpoint}; name its own checkpoint"
        )
    device = _set_up_torch(job)
    model.to(device)
    if job.contestant == "torchscript":
        return _torch_runner(torch.jit.script(model), device)
    if job.contestant == "compile":
        # At its limit torch would go on in eager mode, silently.
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        return _torch_runner(torch.compile(model, dynamic=True), device)
    return _torch_runner(model, device)


def _set_up_torch(job: Job) -> str:
    """Give torch what the session has, and say which device it is to use."""
    import torch

    if job.device == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            f"torch {torch.__version__} cannot use CUDA here; install a CUDA build or measure "
            "with device 'cpu'"
        )
    torch.set_num_threads(job.threads)
    torch.set_float32_matmul_precision("highest")  # no TF32, as in the session
    torch.backends.cudnn.allow_tf32 = False
    return "cuda" if job.device != "cpu" and torch.cuda.is_available() else "cpu"


def _torch_runner(module: "Callable[[Tensor], Tensor]", device: str) -> Runner:
    import torch

    def prepare(ids: Ids) -> Run:
        on_device = torch.from_numpy(ids).to(device)

        def run() -> None:
            with torch.inference_mode():
                module(on_device)
            if device == "cuda":
                torch.cuda.synchronize()

        return run

    name = torch.cuda.get_device_name() if device == "cuda" else device
    return Runner(device=device, placement=f"torch on {name}", prepare=prepare)


def _time_ms(run: Run) -> float:
    start_ns = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - start_ns) / 1e6


def _take_turn(run: Run, turn_s: float, min_runs: int) -> dict[str, Any]:
    times_ms: list[float] = []
    gc.collect()
    gc.disable()
    waited_before_ms = _waited_ms()
    try:
        end_s = time.perf_counter() + turn_s
        while len(times_ms) < min_runs or time.perf_counter() < end_s:
            times_ms.append(_time_ms(run))
    finally:
        gc.enable()
    waited_ms = _waited_ms()
    if waited_ms is not None and waited_before_ms is not None:
        waited_ms -= waited_before_ms
    return {"times_ms": times_ms, "waited_ms": waited_ms}


def _waited_ms() -> float | None:
    """How long the main thread has been ready to run and did not get a CPU."""
    try:
        return int(_SCHEDULER_STATISTICS.read_text().split()[1]) / 1e6
    except (OSError, IndexError, ValueError):
        return None


def _answers(commands: TextIO, answer: Callable[[dict[str, Any]], None]) -> None:
    runner = load(Job(**json.loads(commands.readline())))
    answer({"device": runner.device, "placement": runner.placement})
    run: Run = lambda: None  # noqa: E731
    for line in commands:
        command = json.loads(line)
        if "ids" in command:
            run = runner.prepare(np.array(command["ids"], np.int64))
            answer({"cold_ms": _time_ms(run)})
        else:
            answer(_take_turn(run, **command))


def main() -> None:
    """Read commands from standard input until it ends."""
    # Libraries that print must not write into the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    warnings.simplefilter("ignore")

    def answer(fields: dict[str, Any]) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    try:
        _answers(sys.stdin, answer)
    except Exception as error:  # noqa: BLE001  # told to the benchmark, whatever it is
        answer({"error": {"type": type(error).__name__, "message": first_line(error)}})


if __name__ == "__main__":
    main()
