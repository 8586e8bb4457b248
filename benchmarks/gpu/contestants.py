"""What the sweep times: a file in ONNX Runtime, with and without CUDA graphs, and PyTorch.

Ids and result stay on the device on all sides, and a run returns when its result is complete.
TF32 is off everywhere.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import torch

from causal_encoder.export.prepare import INPUT, OUTPUT_NAME, exact_arithmetic, prepare
from causal_encoder.export.trace import trace_onnx
from causal_encoder.export.wrapper import DTYPES
from causal_encoder.model import CausalEncoder
from causal_encoder.serve.placement import CPU_PROVIDER, CUDA_OPTIONS, CUDA_PROVIDER

Ids = npt.NDArray[np.int64]
Array = npt.NDArray[np.float32]
# A run, and what reads the result of the last one.
Prepared = tuple[Callable[[], object], Callable[[], Array]]
Contestant = Callable[[Ids], Prepared]
OPSET = 23


def onnx_file(
    model: CausalEncoder, folder: Path, precision: str, target: str, device: str, graphs: bool
) -> Contestant:
    """The exported graph in a session of its own.

    Not through a bundle: to verify one of this size takes longer than the whole sweep. The
    results are compared with PyTorch's instead.
    """
    path = folder / f"{precision}-{target}.onnx"
    if not path.exists():
        with exact_arithmetic():
            onnx.save_model(trace_onnx(prepare(model), OPSET, precision, target), path)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    cuda = (CUDA_PROVIDER, CUDA_OPTIONS | {"enable_cuda_graph": str(int(graphs))})
    session = onnxruntime.InferenceSession(
        path, options, providers=[cuda if device == "cuda" else CPU_PROVIDER], enable_fallback=0
    )
    if device == "cuda" and session.get_providers()[0] != CUDA_PROVIDER:
        raise RuntimeError("ONNX Runtime does not use CUDA here")
    used = 0

    def prepared(ids: Ids) -> Prepared:
        nonlocal used
        used += 1  # one graph, with buffers of its own, for each shape
        binding = session.io_binding()
        on_device = onnxruntime.OrtValue.ortvalue_from_numpy(ids, device, 0)
        shape = (*ids.shape, model.config.d_model)
        hidden = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, np.float32, device, 0)
        binding.bind_ortvalue_input(INPUT.name, on_device)
        binding.bind_ortvalue_output(OUTPUT_NAME, hidden)
        run_options = onnxruntime.RunOptions()
        run_options.add_run_config_entry("gpu_graph_id", str(used if graphs else -1))
        return lambda: session.run_with_iobinding(binding, run_options), hidden.numpy

    return prepared


def torch_module(
    model: CausalEncoder, precision: str, device: str, form: str, mode: str | None = None
) -> Contestant:
    """PyTorch: "eager" with its own fused attention, "torchscript" or "compile"."""
    lower = CausalEncoder(model.config, DTYPES[precision]).eval()
    lower.load_state_dict(model.state_dict())
    lower.requires_grad_(False).to(device)
    module: Callable[[torch.Tensor], torch.Tensor] = lower
    if form == "torchscript":
        module = torch.jit.script(lower)
    elif form == "compile":
        module = torch.compile(lower, mode=mode, dynamic=False)

    def prepared(ids: Ids) -> Prepared:
        on_device = torch.from_numpy(ids).to(device)
        hidden = torch.empty(0)

        def run() -> None:
            nonlocal hidden
            with torch.inference_mode():
                hidden = module(on_device)
            if device == "cuda":
                torch.cuda.synchronize()

        return run, lambda: hidden.float().cpu().numpy()

    return prepared
