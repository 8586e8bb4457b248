"""CUDA graphs: all launches of a run as one, in buckets of batch size and length.

At small batches a GPU waits for its launches, 10 a layer, more than for its arithmetic. A
captured graph replays them as one, but only for the shape and the very buffers it was captured
with: with any others ONNX Runtime replays it all the same, and answers with what the old ids
gave. So each bucket has a graph and buffers of its own, which nothing else can touch. Ids are
padded into them on the right, which changes nothing for a causal model, and the result is cut
out of theirs.

ONNX Runtime captures anew for each thread that runs, so one thread of ours makes all the runs
of a session; handing it a run takes some 20 microseconds. While it captures, no other thread of
the process may copy from or to the GPU or take its memory: sessions with graphs take turns.

Shapes: B batch, T sequence length, D d_model, L max_len.
"""

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import onnxruntime

from causal_encoder.serve.buckets import MAX_BUCKETS, Shape, bucket_of
from causal_encoder.serve.device import bound_run
from causal_encoder.serve.inputs import Ids
from causal_encoder.serve.manifest import Manifest

Hidden = npt.NDArray[np.float32]
_UNCAPTURED = -1
_turn = threading.RLock()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bucket:
    """What is fixed for one shape.

    Attributes:
        ids: (B, T) int64 on the device.
        hidden: (B, T, D) float32 on the device.
        replay: computes hidden from ids; the first call captures.
    """

    ids: onnxruntime.OrtValue
    hidden: onnxruntime.OrtValue
    replay: Callable[[], None]


class GraphRunner:
    """Makes the runs of one session, by a graph where the shape has a bucket.

    Args:
        session: opened with `enable_cuda_graph`.
        manifest: of its bundle.
        device: "cuda"; on "cpu", for tests, a replay is a run.
    """

    def __init__(
        self, session: onnxruntime.InferenceSession, manifest: Manifest, device: str = "cuda"
    ) -> None:
        self._session = session
        self._manifest = manifest
        self._device = device
        self._buckets: dict[Shape, Bucket] = {}
        self._graphs = 0  # ids given; none is given twice, even if a capture failed
        self._thread = ThreadPoolExecutor(1, "causal-encoder-graphs")

    def run(self, ids: Ids) -> Hidden:
        """(B, T) int64 -> (B, T, D) float32, both in host memory."""
        return self._thread.submit(self._run, ids).result()

    def run_on_device(self, ids: onnxruntime.OrtValue) -> onnxruntime.OrtValue:
        """The same on the device and without a graph: these buffers are the caller's."""
        return self._thread.submit(self._run_uncaptured, ids).result()

    def _run(self, ids: Ids) -> Hidden:
        with _turn:
            shape = bucket_of(ids.shape, self._manifest.max_len)
            bucket = self._bucket(shape) if shape else None
            if bucket is None:
                on_device = onnxruntime.OrtValue.ortvalue_from_numpy(ids, self._device, 0)
                return self._run_uncaptured(on_device).numpy()
            rows, length = ids.shape
            padded = np.zeros(bucket.ids.shape(), np.int64)
            padded[:rows, :length] = ids
            bucket.ids.update_inplace(padded)
            bucket.replay()
            hidden: Hidden = bucket.hidden.numpy()  # from a GPU, a copy
        return np.ascontiguousarray(hidden[:rows, :length])

    def _run_uncaptured(self, ids: onnxruntime.OrtValue) -> onnxruntime.OrtValue:
        options = _run_options(_UNCAPTURED)
        with _turn:
            return bound_run(self._session, self._manifest, ids, self._device, options)

    def _bucket(self, shape: Shape) -> Bucket | None:
        """The bucket of a shape, captured if it is new; None if there are too many."""
        if shape not in self._buckets and len(self._buckets) < MAX_BUCKETS:
            bucket = self._new_bucket(shape)
            bucket.replay()
            self._buckets[shape] = bucket  # only now: one whose capture failed is not kept
        return self._buckets.get(shape)

    def _new_bucket(self, shape: Shape) -> Bucket:
        session, manifest = self._session, self._manifest
        self._graphs += 1
        ids = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.int64), self._device, 0)
        hidden = onnxruntime.OrtValue.ortvalue_from_shape_and_type(
            (*shape, manifest.d_model), np.float32, self._device, 0
        )
        binding = session.io_binding()
        binding.bind_ortvalue_input(manifest.inputs[0].name, ids)
        binding.bind_ortvalue_output(manifest.outputs[0].name, hidden)
        options = _run_options(self._graphs)
        return Bucket(
            ids=ids,
            hidden=hidden,
            replay=lambda: session.run_with_iobinding(binding, options),
        )


def _run_options(graph: int) -> onnxruntime.RunOptions:
    """Options that name the graph to capture or to replay; -1 does neither."""
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph))
    return options
