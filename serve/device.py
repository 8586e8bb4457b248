"""Runs on ids that are already on the session's device, without a copy in or out."""

from typing import Any

import onnxruntime

from causal_encoder import errors
from causal_encoder.serve.manifest import Manifest
from causal_encoder.serve.placement import first_line

# DLPack's (kind of device, number) of the one device a session runs on.
_DLPACK_DEVICES = {"cpu": (1, 0), "cuda": (2, 0)}


def check_on_device(ids: Any, manifest: Manifest, device: str) -> onnxruntime.OrtValue:
    """Check everything but the values, which are not read.

    Args:
        ids: (B, T) int64, contiguous, on the device: an OrtValue, or anything with
            `__dlpack__`, such as a tensor of torch or cupy.
        manifest: names the limit max_len.
        device: "cpu" or "cuda".

    Returns:
        The same memory as an OrtValue.

    Raises:
        InputError: one of its kinds, though never TokenOutOfRangeError.
    """
    value = ids if isinstance(ids, onnxruntime.OrtValue) else _from_dlpack(ids)
    if value.data_type() != "tensor(int64)":
        raise errors.InvalidInputError(
            f"ids on the device are {value.data_type()}, expected tensor(int64), and nothing is "
            "converted there; convert them, or call run"
        )
    where = tuple(value.__dlpack_device__())
    if where != _DLPACK_DEVICES[device]:
        raise errors.InvalidInputError(
            f"ids are on {value.device_name()}:{where[1]} and the session on {device}:0; move "
            "them there, or call run"
        )
    shape = tuple(value.shape())
    if len(shape) != 2:
        raise errors.invalid_rank(shape)
    if shape[1] == 0:
        raise errors.empty_sequence()
    if shape[1] > manifest.max_len:
        raise errors.sequence_too_long(shape[1], manifest.max_len, manifest.position)
    return value


def bound_run(
    session: onnxruntime.InferenceSession,
    manifest: Manifest,
    ids: onnxruntime.OrtValue,
    device: str,
    options: onnxruntime.RunOptions | None = None,
) -> onnxruntime.OrtValue:
    """(B, T) int64 on the device -> (B, T, D) float32 there, complete when this returns."""
    binding = session.io_binding()
    binding.bind_ortvalue_input(manifest.inputs[0].name, ids)
    binding.bind_output(manifest.outputs[0].name, device)
    session.run_with_iobinding(binding, options)
    return binding.get_outputs()[0]


def _from_dlpack(ids: Any) -> onnxruntime.OrtValue:
    if not hasattr(ids, "__dlpack__"):
        raise errors.InvalidInputError(
            f"ids are {type(ids).__name__}, expected an OrtValue or a tensor with __dlpack__; "
            "call run with lists"
        )
    try:
        return onnxruntime.OrtValue.from_dlpack(ids)
    except Exception as error:  # each library refuses with an error of its own
        reason = first_line(error)
        if "IsContiguous" in reason:
            reason = "they are not contiguous; make them so, for example with ids.contiguous()"
        raise errors.InvalidInputError(f"ids cannot be taken as they are: {reason}") from error
