"""Loading what a benchmark times: bundles, PyTorch in its forms, and rival runtimes.

Every one gets the same number of threads, float32 products without TF32 on CUDA, and ids
that are already where it runs.
"""

import dataclasses
import multiprocessing
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from causal_encoder.errors import CheckpointError, DeviceError
from causal_encoder.serve import EncoderSession, open_bundle
from causal_encoder.serve.placement import CPU_PROVIDER, CUDA_OPTIONS, CUDA_PROVIDER, cuda_problem

if TYPE_CHECKING:  # torch is loaded only by the contestants that run in it
    from torch import Tensor

    from causal_encoder.model import CausalEncoder

Ids = npt.NDArray[np.int64]
Run = Callable[[], object]

# What it multiplies in, by the name of the contestant.
OPENVINO = {"openvino": "f32", "openvino-bf16": "bf16"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What a contestant is to load.

    Attributes:
        contestant: "bundle", or one of bench.RIVALS.
        bundle: folder of the bundle; of the one to be compared with for a rival.
        checkpoint: folder of the checkpoint it was exported from; not used for "bundle" and
            OPENVINO.
        device: "cpu", "cuda" or "auto".
        threads: threads of one run on CPU.
    """

    contestant: str
    bundle: str
    checkpoint: str | None
    device: str
    threads: int


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
    if job.contestant == "naive":
        return _load_naive(job)
    if job.contestant in OPENVINO:
        return _load_openvino(job)
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

    def prepare(ids: Ids) -> Run:
        if placement.device == "cpu":
            return lambda: session.run(ids)
        on_device = onnxruntime.OrtValue.ortvalue_from_numpy(ids, "cuda", 0)
        # ONNX Runtime waits for its stream before it returns.
        return lambda: session.run_on_device(on_device)

    return Runner(
        device=placement.device,
        placement=_in_words(placement.nodes)
        + (f" ({placement.reason})" if placement.reason else ""),
        prepare=prepare,
    )


def _in_words(nodes: Mapping[str, int]) -> str:
    return ", ".join(f"{count} nodes on {name}" for name, count in nodes.items())


def _load_naive(job: Job) -> Runner:
    """The export that PyTorch's documentation shows first, on ONNX Runtime as it comes."""
    import onnxruntime

    if job.device == "cuda" and (problem := cuda_problem()):
        raise DeviceError(f"CUDA cannot be used: {problem}")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = job.threads
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    cuda = [(CUDA_PROVIDER, dict(CUDA_OPTIONS))] if job.device == "cuda" else []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        # In a process of its own, so that neither torch's threads nor its memory stay here.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
            other.submit(_export_naively, job, path).result()
        session = onnxruntime.InferenceSession(path, options, providers=[*cuda, CPU_PROVIDER])
    name = session.get_inputs()[0].name

    def prepare(ids: Ids) -> Run:
        if job.device == "cpu":
            return lambda: session.run(None, {name: ids})
        binding = session.io_binding()
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(ids, "cuda", 0))

        def run() -> None:
            binding.bind_output(session.get_outputs()[0].name, "cuda")
            session.run_with_iobinding(binding)

        return run

    nodes: Counter[str] = Counter()
    for subgraph in session.get_provider_graph_assignment_info():
        nodes[subgraph.ep_name] += len(subgraph.get_nodes())
    return Runner(
        device=job.device,
        placement=f"torch.onnx.export with its defaults, {_in_words(nodes)}",
        prepare=prepare,
    )


def _export_naively(job: Job, path: Path) -> None:
    import torch

    model = _model_of(job)
    example = torch.zeros((2, min(3, model.config.max_len)), dtype=torch.int64)
    axes = {0: "batch", 1: "sequence"}
    torch.onnx.export(model, (example,), path, dynamo=True, dynamic_shapes=(axes,))


def _load_openvino(job: Job) -> Runner:
    import openvino

    if job.device != "cpu":
        raise DeviceError("openvino is measured on CPU alone; pass device 'cpu'")
    settings: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": job.threads,
        "INFERENCE_PRECISION_HINT": OPENVINO[job.contestant],
    }
    with open_bundle(job.bundle) as opened:
        compiled = openvino.Core().compile_model(str(opened.model_path), "CPU", settings)
    request = compiled.create_infer_request()
    return Runner(
        device="cpu",
        placement=f"OpenVINO {openvino.get_version()} on CPU, {job.bundle}",
        # Shared: OpenVINO is not to pay for copies that ONNX Runtime does not make.
        prepare=lambda ids: lambda: request.infer([ids], share_inputs=True, share_outputs=True),
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

    model = _model_of(job)
    device = _set_up_torch(job)
    model.to(device)
    if job.contestant == "torchscript":
        return _torch_runner(torch.jit.script(model), device)
    if job.contestant == "compile":
        # At its limit torch would go on in eager mode, silently.
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        return _torch_runner(torch.compile(model, dynamic=True), device)
    return _torch_runner(model, device)


def _model_of(job: Job) -> "CausalEncoder":
    """The model that was exported, with the bundle's own max_len."""
    from causal_encoder.export.prepare import prepare
    from causal_encoder.model import fingerprint, load_checkpoint

    assert job.checkpoint is not None
    with open_bundle(job.bundle) as opened:
        manifest = opened.manifest
    loaded = load_checkpoint(job.checkpoint)
    if fingerprint(loaded) != manifest.checkpoint_sha256:
        raise CheckpointError(
            f"{job.bundle} was not exported from {job.checkpoint}; name its own checkpoint"
        )
    return prepare(loaded, manifest.max_len)


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
