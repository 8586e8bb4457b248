"""A process that opens one bundle after another, as a server would, and outlives them all."""

import json
import queue
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

import numpy as np

from causal_encoder.errors import CausalEncoderError
from causal_encoder.serve import EncoderSession

_ROOT = Path(__file__).parents[1]
_MEMORY_BYTES = 8 * 2**30  # of address space: a huge size in a file must not take the machine
_SHAPES = ((1, 1), (2, 5), (3, 2), (0, 4))


class Opener:
    """The process, asked from outside.

    Args:
        timeout: seconds a bundle may take.
    """

    def __init__(self, timeout: float = 30.0) -> None:
        self.timeout = timeout
        self.starts = 0
        self._start()

    def _start(self) -> None:
        self.starts += 1
        self._answers: queue.Queue[str] = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from tests.opener import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
        )
        self._reader = threading.Thread(
            target=_read, args=(self._process.stdout, self._answers), daemon=True
        )
        self._reader.start()

    def open(self, bundle: Path) -> dict[str, str]:
        """What opening and running a bundle gave: {"outcome": .., "detail": ..}.

        The outcome is "answered", the name of one of our errors, or "wrong": another
        error, an output of another shape or type, the death of the process, or no answer.
        After the last two another process is started.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(str(bundle)) + "\n")
        self._process.stdin.flush()
        try:
            line = self._answers.get(timeout=self.timeout)
            detail = "" if line else f"the process died: {self._process.wait()}"
        except queue.Empty:
            detail = f"no answer within {self.timeout} s"
        if detail:
            self._process.kill()
            self.close()
            self._start()
            return {"outcome": "wrong", "detail": detail}
        answer: dict[str, str] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=self.timeout)
        self._reader.join()
        self._process.stdout.close()


def _read(lines: IO[str], answers: queue.Queue[str]) -> None:
    for line in lines:
        answers.put(line)
    answers.put("")


def serve() -> None:
    """Answer every line on standard input; runs in the process."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    for line in sys.stdin:
        print(json.dumps(_outcome(json.loads(line))), flush=True)


def _outcome(path: str) -> dict[str, str]:
    try:
        session = EncoderSession(path, "cpu", threads=2)
        manifest = session.manifest
        for batch, length in _SHAPES:
            ids = np.arange(batch * length).reshape(batch, length) % min(manifest.vocab_size, 13)
            hidden: Any = session.run(ids)
            wanted = (batch, length, manifest.d_model)
            if not isinstance(hidden, np.ndarray):
                return {"outcome": "wrong", "detail": f"a {type(hidden).__name__}"}
            if hidden.shape != wanted or hidden.dtype != np.float32:
                found = f"{hidden.shape} {hidden.dtype}, expected {wanted} float32"
                return {"outcome": "wrong", "detail": found}
    except CausalEncoderError as error:
        lines = str(error).splitlines()
        if len(lines) != 1:
            return {"outcome": "wrong", "detail": f"{len(lines)} lines: {error}"}
        return {"outcome": type(error).__name__, "detail": str(error)}
    except Exception as error:  # noqa: BLE001  # whatever it is, it is not ours
        return {"outcome": "wrong", "detail": f"{type(error).__name__}: {error}"}
    return {"outcome": "answered", "detail": ""}
