"""EncoderSession: run an ONNX bundle in this process, without torch."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from causal_encoder.errors import (
    BundleError,
    CausalEncoderError,
    ConfigError,
    DeviceError,
    InvalidInputError,
    NonFiniteOutputError,
)
from causal_encoder.serve.batching import plan_batches
from causal_encoder.serve.buckets import Shape
from causal_encoder.serve.bundle import check_runtime, open_bundle
from causal_encoder.serve.cpu import available_cpus
from causal_encoder.serve.device import bound_run, check_on_device
from causal_encoder.serve.graphs import GraphRunner
from causal_encoder.serve.inputs import OVERFLOWS, Ids, check_batch, check_ragged
from causal_encoder.serve.manifest import Manifest
from causal_encoder.serve.placement import CUDA_OPTIONS, DEVICES, Placement, first_line, open_on

Hidden = npt.NDArray[np.float32]

_MAX_THREADS = 4096
_ORT_LOG_FATAL = 4  # the exceptions carry the same text
_ORT_TYPES = {"tensor(int64)": "int64", "tensor(float)": "float32"}

_forks = 0  # between this process and the one that loaded the module; cheaper than getpid


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_count_fork)


class EncoderSession:
    """A bundle, checked whole and ready to run. Safe to call from many threads.

    Args:
        bundle: folder of an ONNX bundle.
        device: "cpu"; "cuda", which refuses to be anything else; or "auto", CUDA where it
            works and otherwise CPU, which `placement` and a log line then say.
        threads: threads of one call on CPU; by default what the container allows.
        gpu_memory_limit_bytes: cap on ONNX Runtime's CUDA arena; by default none. The arena
            grows by what is asked of it, and keeps what it has for the next runs.
        cuda_graphs: on CUDA, make each run of a small batch one launch in place of one an
            operator; see serve/graphs.py. Batches are padded inside to powers of two, runs
            take their turn on one thread, and up to 32 shapes keep their buffers as long as
            the session, on top of the arena. The shapes in the manifest's `warm_up` are
            captured here; call the method of that name with others before other threads use
            the GPU.
        cuda_stream: address of the CUDA stream to run on, such as `stream.cuda_stream` of a
            `torch.cuda.Stream()`; by default one of ONNX Runtime's own. The default stream,
            0 in torch, cannot be it.
        overflow: "error" refuses a sequence over max_len, "truncate" cuts it and warns.
        check_finite: raise instead of returning NaN or infinity.

    Raises:
        BundleError: the bundle is damaged, or is not an ONNX bundle.
        DeviceError: "cuda" was asked for and is not truly used.
        ConfigError: an option is outside its limits.
    """

    def __init__(
        self,
        bundle: str | os.PathLike[str],
        device: str = "auto",
        *,
        threads: int | None = None,
        gpu_memory_limit_bytes: int | None = None,
        cuda_graphs: bool = False,
        cuda_stream: int | None = None,
        overflow: str = "error",
        check_finite: bool = True,
    ) -> None:
        _check_choice("device", device, DEVICES)
        _check_choice("overflow", overflow, OVERFLOWS)
        _check_whole("threads", threads, _MAX_THREADS)
        _check_whole("gpu_memory_limit_bytes", gpu_memory_limit_bytes, 2**63 - 1)
        _check_whole("cuda_stream", cuda_stream, 2**64 - 1)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(threads or available_cpus())
        options.inter_op_num_threads = 1
        options.log_severity_level = _ORT_LOG_FATAL
        cuda_options = CUDA_OPTIONS | {"enable_cuda_graph": str(int(bool(cuda_graphs)))}
        if gpu_memory_limit_bytes is not None:
            cuda_options["gpu_mem_limit"] = str(gpu_memory_limit_bytes)
        if cuda_stream is not None:
            cuda_options["user_compute_stream"] = str(cuda_stream)
        with open_bundle(bundle) as opened:
            if opened.manifest.format != "onnx":
                raise BundleError(
                    f"{bundle} holds a {opened.manifest.format} model, a session runs onnx; "
                    "export the checkpoint with 'causal-encoder export onnx'"
                )
            check_runtime(opened, onnxruntime.__version__)
            requested = device
            if opened.manifest.precision == "bf16":
                if device == "cpu":
                    raise DeviceError(
                        "a bf16 bundle runs on CUDA alone, ONNX Runtime has no bf16 kernels for "
                        "CPU; pass device='cuda' (--device cuda), or export fp32 or fp16"
                    )
                device = "cuda"
            try:
                self._session, self._placement = open_on(
                    device, _utf_8(opened.model_path), options, cuda_options
                )
            except DeviceError as error:
                if opened.manifest.precision != "bf16" or requested == "cuda":
                    raise
                raise DeviceError(
                    f"a bf16 bundle runs on CUDA alone, and {error}; or export fp32 or fp16"
                ) from error
            except CausalEncoderError:
                raise
            except Exception as error:  # ONNX Runtime has no public base class for its errors
                raise BundleError(f"{opened.model_path}: {first_line(error)}") from error
            _check_fits(self._session, opened.manifest, str(opened.model_path))
        self._manifest = opened.manifest
        graphs = cuda_graphs and self._placement.device == "cuda"
        self._graphs = GraphRunner(self._session, opened.manifest) if graphs else None
        self._names = [opened.manifest.outputs[0].name], opened.manifest.inputs[0].name
        self._overflow = overflow
        self._check_finite = check_finite
        self._forks = _forks
        self._process = os.getpid()
        self.warm_up(self._manifest.warm_up if self._graphs else ())

    @property
    def manifest(self) -> Manifest:
        """What is known of the bundle."""
        return self._manifest

    @property
    def placement(self) -> Placement:
        """What was asked for, what is in use, and the nodes on each provider."""
        return self._placement

    def run(self, ids: Any) -> Hidden:
        """Encode a batch of equally long sequences.

        Args:
            ids: (B, T), integers of any width and byte order, 1 <= T <= max_len, values
                in 0..vocab_size-1. B = 0 gives an empty result.

        Returns:
            (B, T, D) float32.

        Raises:
            InputError: one of its four kinds, before anything reaches ONNX Runtime.
            NonFiniteOutputError: the weights produced NaN or infinity.
            DeviceError: ONNX Runtime failed, for example for want of memory.
        """
        return self._run(check_batch(ids, self._manifest, self._overflow))

    def encode(self, rows: Iterable[Any]) -> list[Hidden]:
        """Encode sequences of different lengths, batched by length inside.

        Rows are padded on the right, which changes nothing for a causal model: no real
        position sees a later one.

        Args:
            rows: one sequence of ids each, of 1 to max_len tokens.

        Returns:
            One (len_i, D) float32 array a row, in the order of the rows.

        Raises:
            InputError: as `run`, naming the row.
            NonFiniteOutputError: as `run`.
        """
        checked = check_ragged(rows, self._manifest, self._overflow)
        results: list[Hidden] = [np.empty((0, 0), np.float32)] * len(checked)
        for batch in plan_batches([len(row) for row in checked]):
            padded = np.zeros((len(batch), max(len(checked[i]) for i in batch)), np.int64)
            for place, i in enumerate(batch):
                padded[place, : len(checked[i])] = checked[i]
            hidden = self._run(padded)
            for place, i in enumerate(batch):
                results[i] = hidden[place, : len(checked[i])].copy()  # frees the padded batch
        return results

    def run_on_device(self, ids: Any) -> onnxruntime.OrtValue:
        """Run on ids that are on the session's device and leave the result there.

        Nothing is copied, and no value is read: an id out of range gives NaN from its
        position on, or an error, by the guard in the file. Whatever writes the ids must have
        finished, or be ahead on the session's `cuda_stream`. With `cuda_graphs` it waits its
        turn, and runs without a graph.

        Args:
            ids: (B, T) int64, contiguous, 1 <= T <= max_len: an OrtValue, or anything with
                `__dlpack__`, such as a tensor of torch or cupy.

        Returns:
            (B, T, D) float32 on the same device, complete. It has `__dlpack__` itself: for
            example `torch.from_dlpack` takes it without a copy.

        Raises:
            InputError: type, shape or device of ids is another; there is no truncation.
            DeviceError: as `run`.
        """
        self._check_process()
        device = self._placement.device
        value = check_on_device(ids, self._manifest, device)
        shape = tuple(value.shape())
        if shape[0] == 0:
            empty = (*shape, self._manifest.d_model)
            return onnxruntime.OrtValue.ortvalue_from_shape_and_type(empty, np.float32, device, 0)
        try:
            if self._graphs is not None:
                return self._graphs.run_on_device(value)
            return bound_run(self._session, self._manifest, value, device)
        except Exception as error:
            raise _failed(device, shape, error) from error

    def warm_up(self, shapes: Iterable[Shape]) -> None:
        """Run each (batch, sequence) shape once, so that no caller waits for a first run.

        That is when memory is taken, kernels are loaded and CUDA graphs are captured.

        Raises:
            InputError: a shape that `run` would refuse.
        """
        for shape in shapes:
            try:
                ids = np.zeros(shape, np.int64)
            except (TypeError, ValueError, MemoryError) as error:
                raise InvalidInputError(
                    f"warm_up cannot make ids of shape {shape!r} ({error}); pass pairs of batch "
                    "and sequence"
                ) from error
            self.run(ids)

    def _run(self, ids: Ids) -> Hidden:
        self._check_process()
        if ids.shape[0] == 0:  # ONNX Runtime's attention refuses empty tensors
            return np.empty((*ids.shape, self._manifest.d_model), np.float32)
        try:
            hidden = self._execute(ids)
        except Exception as error:
            raise _failed(self._placement.device, ids.shape, error) from error
        expected = (*ids.shape, self._manifest.d_model)
        if hidden.shape != expected:  # ONNX Runtime only warns of axes that are not as declared
            raise BundleError(
                f"the model returned shape {hidden.shape}, expected {expected}; "
                "export the bundle again"
            )
        if self._check_finite and not np.isfinite(hidden).all():
            raise NonFiniteOutputError(
                "the model returned NaN or infinity for valid ids: its weights overflow or "
                "are damaged; verify the bundle, or pass check_finite=False to see the values"
            )
        return hidden

    def _execute(self, ids: Ids) -> Hidden:
        if self._graphs is not None:
            return self._graphs.run(ids)
        if self._placement.device == "cpu":
            hidden: Hidden
            outputs, name = self._names
            (hidden,) = self._session.run(outputs, {name: ids})
            return hidden
        on_device = onnxruntime.OrtValue.ortvalue_from_numpy(ids, "cuda", 0)
        return bound_run(self._session, self._manifest, on_device, "cuda").numpy()

    def _check_process(self) -> None:
        if _forks != self._forks:
            raise DeviceError(
                f"this session was opened in process {self._process} and its threads did not "
                "survive the fork; open a session in each process"
            )


def _utf_8(path: Path) -> str:
    """The path as ONNX Runtime takes it; it does not say so when it does not."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise BundleError(
            f"{path}: ONNX Runtime opens no path that is not UTF-8; rename the folder"
        ) from error
    return str(path)


def _failed(device: str, shape: tuple[int, ...], error: Exception) -> DeviceError:
    """For what ONNX Runtime raises on valid ids: above all, for too little memory."""
    return DeviceError(
        f"{device} could not run a batch of {shape[0]} x {shape[1]}: {first_line(error)}; "
        "try a smaller one"
    )


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}, expected one of {', '.join(choices)}")


def _check_whole(name: str, value: object, most: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 1 <= value <= most:
        raise ConfigError(
            f"{name} is {value!r}, expected a whole number of at least 1 and at most {most}"
        )


def _check_fits(session: onnxruntime.InferenceSession, manifest: Manifest, path: str) -> None:
    """The model takes and gives what the manifest says, so that no run can surprise."""
    for kind, found, expected, dtype in (
        ("input", session.get_inputs(), manifest.inputs, "int64"),
        ("output", session.get_outputs(), manifest.outputs, "float32"),
    ):
        in_model = [
            (value.name, _ORT_TYPES.get(value.type, value.type), tuple(value.shape))
            for value in found
        ]
        in_manifest = [(tensor.name, tensor.dtype, tensor.axes) for tensor in expected]
        if in_model != in_manifest or {tensor.dtype for tensor in expected} != {dtype}:
            raise BundleError(
                f"{path} has {kind} {in_model}, the manifest says {in_manifest}; "
                "export the bundle again"
            )
    of_itself = session.get_modelmeta().custom_metadata_map
    for name in ("precision", "target", "max_len", "vocab_size"):
        in_model, in_manifest = of_itself.get(f"causal_encoder.{name}"), getattr(manifest, name)
        if in_model != str(in_manifest):
            raise BundleError(
                f"{path} says of itself {name} {in_model}, the manifest says {in_manifest}; "
                "export the bundle again"
            )
    if manifest.outputs[0].axes[-1:] != (manifest.d_model,):
        raise BundleError(
            f"{path} has output width {manifest.outputs[0].axes[-1:]}, config says d_model "
            f"{manifest.d_model}; export the bundle again"
        )
