"""Ids that are on the device already: taken without a copy, or refused by name."""

from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from causal_encoder.errors import (
    EmptySequenceError,
    InputError,
    InvalidInputError,
    SequenceTooLongError,
)
from causal_encoder.serve import EncoderSession
from causal_encoder.serve.device import check_on_device

IDS = np.arange(10).reshape(2, 5)


@pytest.mark.parametrize(
    "ids",
    [torch.from_numpy(IDS), IDS, onnxruntime.OrtValue.ortvalue_from_numpy(IDS)],
    ids=["torch", "numpy", "OrtValue"],
)
def test_a_tensor_with_dlpack_and_an_ortvalue_are_taken_and_give_the_same_numbers(
    ids: Any, session: EncoderSession
) -> None:
    hidden = session.run_on_device(ids)
    np.testing.assert_array_equal(hidden.numpy(), session.run(IDS))


def test_ids_are_taken_and_the_result_is_given_without_a_copy(session: EncoderSession) -> None:
    ids = torch.from_numpy(IDS)
    assert check_on_device(ids, session.manifest, "cpu").data_ptr() == ids.data_ptr()
    hidden = session.run_on_device(ids)
    tensor = torch.from_dlpack(hidden)
    assert tensor.data_ptr() == hidden.data_ptr()
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.float32, (2, 5, 12))
    expected = session.run(IDS)
    del hidden, ids  # the tensor keeps its memory
    np.testing.assert_array_equal(tensor.numpy(), expected)


@pytest.mark.parametrize(
    ("ids", "error", "words"),
    [
        (torch.from_numpy(IDS).int(), InvalidInputError, r"tensor\(int32\), expected tensor\(int"),
        (torch.from_numpy(IDS).double(), InvalidInputError, r"tensor\(double\), expected tensor"),
        (torch.ones(2, 5, dtype=torch.bool), InvalidInputError, r"cannot be taken|tensor\(bool\)"),
        (torch.ones(2, 5, dtype=torch.bfloat16), InvalidInputError, r"tensor\(bfloat16\)"),
        (torch.from_numpy(IDS)[0], InvalidInputError, "two axes"),
        (torch.from_numpy(IDS)[None], InvalidInputError, "two axes"),
        (torch.tensor(3), InvalidInputError, "two axes"),
        (torch.from_numpy(IDS).T, InvalidInputError, "not contiguous"),
        (torch.from_numpy(IDS)[:, ::2], InvalidInputError, "not contiguous"),
        (IDS.astype(">i8"), InvalidInputError, "native byte order"),
        (IDS.tolist(), InvalidInputError, "ids are list, expected an OrtValue or a tensor"),
        (None, InvalidInputError, "ids are NoneType"),
        (torch.zeros(2, 0, dtype=torch.int64), EmptySequenceError, "0 tokens"),
        (torch.zeros(2, 25, dtype=torch.int64), SequenceTooLongError, "length 25 is over max_len"),
    ],
)
def test_what_cannot_be_taken_as_it_is_is_refused_in_one_line(
    ids: Any, error: type[InputError], words: str, session: EncoderSession
) -> None:
    with pytest.raises(error, match=words) as told:
        session.run_on_device(ids)
    assert "\n" not in str(told.value)


def test_ids_on_another_device_are_refused(session: EncoderSession) -> None:
    with pytest.raises(InvalidInputError, match="ids are on cpu:0 and the session on cuda:0"):
        check_on_device(torch.from_numpy(IDS), session.manifest, "cuda")


def test_an_empty_batch_gives_an_empty_result(session: EncoderSession) -> None:
    hidden = session.run_on_device(torch.zeros(0, 5, dtype=torch.int64))
    assert tuple(hidden.shape()) == (0, 5, 12)


def test_a_session_that_cuts_does_not_cut_on_the_device(cutting_session: EncoderSession) -> None:
    with pytest.raises(SequenceTooLongError):
        cutting_session.run_on_device(torch.zeros(2, 25, dtype=torch.int64))
