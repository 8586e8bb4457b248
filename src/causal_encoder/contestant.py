"""One contestant of a benchmark: a process that loads a model and times it when asked.

Thread pools inside one process disturb each other, so each contestant has its own. It is
asleep while it waits for its next turn, and ends when its standard input does: a
benchmark that was killed leaves no process behind.

It reads one JSON object a line and answers with one:

    a Job                                   -> {"device": .., "placement": ..}
    {"ids": [[..]]}                         -> {"cold_ms": ..}, the first run of this shape
    {"turn_s": .., "min_runs": ..}          -> {"times_ms": [..], "waited_ms": ..,
                                                "scratch_mib": ..}, a timing.Turn
    whatever fails                          -> {"error": {"type": .., "message": ..}}

A turn runs the last ids until both the time and the number of runs are reached.
`waited_ms` is how long it waited meanwhile for a CPU that other programs used.
`scratch_mib` is the peak of its resident memory above what was resident after loading,
since the first run of this shape ended. Both are null if the system does not tell.
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
from typing import IO, Any, TextIO

import numpy as np

from causal_encoder import errors, memory
from causal_encoder.errors import CausalEncoderError
from causal_encoder.runners import Job, Run, load
from causal_encoder.serve.placement import first_line

_SCHEDULER_STATISTICS = Path("/proc/thread-self/schedstat")


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
    loaded_mib = memory.resident_mib()
    answer({"device": runner.device, "placement": runner.placement})
    run: Run = lambda: None  # noqa: E731
    peak_is_known = False
    for line in commands:
        command = json.loads(line)
        if "ids" in command:
            run = runner.prepare(np.array(command["ids"], np.int64))
            answer({"cold_ms": _time_ms(run)})
            gc.collect()
            gc.freeze()  # what is loaded stays: going through it before each turn takes long
            # From here on: a compiler at work in the first run is not what a run takes. Main
            # memory says nothing of a model on a GPU.
            peak_is_known = runner.device == "cpu" and memory.forget_peak()
        else:
            turn = _take_turn(run, **command)
            scratch_mib = _peak_above_mib(loaded_mib) if peak_is_known else None
            answer(turn | {"scratch_mib": scratch_mib})


def _peak_above_mib(loaded_mib: float | None) -> float | None:
    peak_mib = memory.peak_resident_mib()
    return None if peak_mib is None or loaded_mib is None else max(0.0, peak_mib - loaded_mib)


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
