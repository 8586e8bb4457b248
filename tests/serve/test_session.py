"""Running a bundle: the numbers, threads, processes, options, and outputs that overflow."""

import dataclasses
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from causal_encoder.errors import (
    BundleError,
    CausalEncoderError,
    ConfigError,
    NonFiniteOutputError,
)
from causal_encoder.serve import EncoderSession, open_bundle
from tests.bundles import tampered

Array = npt.NDArray[np.float32]
Reference = Callable[[object], Array]

# Put before a program, this makes an install without the extras of it.
WITHOUT_EXTRAS = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "onnx", "onnxscript", "safetensors", "matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
"""


def python(program: str, *arguments: object) -> str:
    """Run a program in a fresh process; what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def random_ids(seed: int) -> npt.NDArray[np.int64]:
    """A batch of a shape and content of its own."""
    generator = np.random.default_rng(seed)
    shape = generator.integers(1, 9), generator.integers(1, 25)
    return generator.integers(0, 37, shape)


# A manifest that says something else than the file.


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"precision": "int8"}, "precision fp32"), ({"target": "cpu"}, "target portable")],
    ids=str,
)
def test_a_file_that_says_something_else_of_itself_is_refused(
    changes: dict[str, Any], what: str, bundle: Path, tmp_path: Path
) -> None:
    copy = tampered(bundle, tmp_path / "copy", lambda _: None, **changes)
    with pytest.raises(BundleError, match=f"says of itself {what}"):
        EncoderSession(copy, "cpu")


@pytest.mark.parametrize("kind", ["inputs", "outputs"])
def test_a_manifest_with_another_type_is_refused(kind: str, bundle: Path, tmp_path: Path) -> None:
    with open_bundle(bundle) as opened:
        (tensor,) = getattr(opened.manifest, kind)
    changes: dict[str, Any] = {kind: (dataclasses.replace(tensor, dtype="float16"),)}
    copy = tampered(bundle, tmp_path / "copy", lambda _: None, **changes)
    with pytest.raises(BundleError, match=f"has {kind[:-1]}"):
        EncoderSession(copy, "cpu")


# What is imported.


def test_serving_needs_neither_torch_nor_onnx(bundle: Path) -> None:
    program = """
from causal_encoder.serve import EncoderSession
print(EncoderSession(sys.argv[1], "cpu").run([[1, 2, 3]]).shape)
print(sorted(name for name in sys.modules if name.startswith("causal_encoder.")))
"""
    shape, modules = python(WITHOUT_EXTRAS + program, bundle).splitlines()
    assert shape == "(1, 3, 12)"
    assert "causal_encoder.model" not in modules
    assert "causal_encoder.export" not in modules


def test_serving_imports_no_torch_though_it_is_there(bundle: Path) -> None:
    program = """
import sys
from causal_encoder.serve import EncoderSession
session = EncoderSession(sys.argv[1])
session.run([[1, 2, 3]])
session.encode([[1], [2, 3]])
print([name for name in ("torch", "onnx", "causal_encoder.model") if name in sys.modules])
"""
    assert python(program, bundle) == "[]\n"


# The numbers.


def test_changing_shapes_in_one_session_equal_the_trained_model(
    session: EncoderSession, reference: Reference
) -> None:
    for seed in range(60):
        ids = random_ids(seed)
        np.testing.assert_allclose(session.run(ids), reference(ids), atol=1e-5)


def test_a_prefix_gives_the_prefix_of_the_output(session: EncoderSession) -> None:
    ids = np.random.default_rng(0).integers(0, 37, (2, 24))
    whole = session.run(ids)
    for length in range(1, 24):
        np.testing.assert_allclose(
            session.run(ids[:, :length]), whole[:, :length], atol=1e-5, err_msg=f"length {length}"
        )


def test_the_same_ids_give_the_same_bits(session: EncoderSession, bundle: Path) -> None:
    ids = random_ids(1)
    hidden = session.run(ids)
    np.testing.assert_array_equal(session.run(ids), hidden)
    np.testing.assert_array_equal(EncoderSession(bundle, "cpu").run(ids), hidden)


def test_ids_left_on_the_device_give_the_same_numbers(session: EncoderSession) -> None:
    ids = random_ids(2)
    value = onnxruntime.OrtValue.ortvalue_from_numpy(ids)
    np.testing.assert_array_equal(session.run_on_device(value).numpy(), session.run(ids))


def test_the_session_knows_its_bundle(session: EncoderSession) -> None:
    assert session.manifest.max_len == 24
    assert session.manifest.vocab_size == 37


# Threads and processes.


@pytest.mark.parametrize("threads", [1, 2])
def test_many_threads_with_mixed_shapes_each_get_their_own_numbers(
    bundle: Path, reference: Reference, threads: int
) -> None:
    session = EncoderSession(bundle, "cpu", threads=threads)
    expected = [reference(random_ids(seed)) for seed in range(16)]
    start = threading.Barrier(16)

    def work(seed: int) -> float:
        start.wait()
        worst = 0.0
        for turn in range(20):
            other = (seed + turn) % 16
            hidden = session.run(random_ids(other))
            (row,) = session.encode([random_ids(other)[0]])
            worst = max(
                worst,
                float(np.abs(hidden - expected[other]).max()),
                float(np.abs(row - expected[other][0]).max()),
            )
        return worst

    with ThreadPoolExecutor(16) as pool:
        assert max(pool.map(work, range(16))) < 1e-5


def test_sessions_can_be_opened_by_many_threads_at_once(bundle: Path, reference: Reference) -> None:
    ids = random_ids(3)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: EncoderSession(bundle, "cpu").run(ids), range(16)))
    for hidden in results:
        np.testing.assert_allclose(hidden, reference(ids), atol=1e-5)


def test_a_forked_child_is_told_to_open_a_session_of_its_own(bundle: Path) -> None:
    program = """
import os, sys, warnings
from causal_encoder.errors import DeviceError
from causal_encoder.serve import EncoderSession
import onnxruntime, numpy
warnings.simplefilter("ignore")  # that forking a process with threads is dangerous
session = EncoderSession(sys.argv[1], "cpu", threads=2)
session.run([[1]])
on_device = onnxruntime.OrtValue.ortvalue_from_numpy(numpy.zeros((1, 1), numpy.int64))
child = os.fork()
if child == 0:
    try:
        for call in (
            lambda: session.run([[1]]),
            lambda: session.encode([[1], [2, 3]]),
            lambda: session.run_on_device(on_device),
        ):
            try:
                call()
            except DeviceError as error:
                print(error, flush=True)
        print(EncoderSession(sys.argv[1], "cpu", threads=2).run([[1]]).shape, flush=True)
    finally:
        os._exit(0)
os.waitpid(child, 0)
print(session.run([[1]]).shape)
"""
    *messages, in_child, in_parent = python(program, bundle).splitlines()
    assert len(messages) == 3
    for message in messages:
        assert "fork" in message
        assert "open a session in each process" in message
    assert in_child == in_parent == "(1, 1, 12)"


def test_the_bundle_is_not_needed_once_the_session_is_open(copy: Path) -> None:
    session = EncoderSession(copy, "cpu")
    expected = session.run([[1, 2, 3]])
    for path in copy.iterdir():
        path.write_bytes(b"overwritten")
    np.testing.assert_array_equal(session.run([[1, 2, 3]]), expected)


# Options.


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("device", "CUDA", "auto, cpu, cuda"),
        ("device", "gpu", "auto, cpu, cuda"),
        ("device", "cuda:0", "auto, cpu, cuda"),
        ("device", "", "auto, cpu, cuda"),
        ("device", None, "auto, cpu, cuda"),
        ("device", 0, "auto, cpu, cuda"),
        ("device", ["cpu"], "auto, cpu, cuda"),
        ("overflow", "ignore", "error, truncate"),
        ("overflow", None, "error, truncate"),
        ("overflow", True, "error, truncate"),
        *(
            (name, value, "whole number of at least 1")
            for name in ("threads", "gpu_memory_limit_bytes")
            for value in (0, -1, True, False, 1.5, 2.0, "2", [2], float("nan"))
        ),
    ],
)
def test_an_option_outside_its_limits_is_named_with_them(
    bundle: Path, option: str, value: Any, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        EncoderSession(bundle, **{"device": "cpu", option: value})
    assert isinstance(caught.value, ValueError)
    message = str(caught.value)
    assert message.startswith(f"{option} is {value!r}")
    assert expected in message


@pytest.mark.parametrize("threads", [2**31, 2**40, 2**70])
def test_more_threads_than_a_machine_can_have_are_refused(bundle: Path, threads: int) -> None:
    with pytest.raises(ConfigError, match="threads"):
        EncoderSession(bundle, "cpu", threads=threads)


def test_an_option_is_checked_before_the_bundle_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="threads"):
        EncoderSession(tmp_path / "missing", "cpu", threads=0)


def test_the_options_that_are_allowed_change_no_number(
    bundle: Path, session: EncoderSession
) -> None:
    ids = random_ids(4)
    other = EncoderSession(
        bundle, "cpu", threads=2, gpu_memory_limit_bytes=2**30, check_finite=False
    )
    np.testing.assert_allclose(other.run(ids), session.run(ids), atol=1e-6)


def test_options_are_given_by_name(bundle: Path) -> None:
    with pytest.raises(TypeError):
        EncoderSession(bundle, "cpu", 2)  # type: ignore[call-arg]


def test_a_bundle_of_another_format_is_refused_by_name(scripted_bundle: Path) -> None:
    with pytest.raises(BundleError, match="torchscript") as caught:
        EncoderSession(scripted_bundle, "cpu")
    assert "causal-encoder export onnx" in str(caught.value)


# Outputs that are not finite.


def set_weight(name: str, value: float) -> Callable[[onnx.ModelProto], None]:
    def edit(proto: onnx.ModelProto) -> None:
        (tensor,) = (t for t in proto.graph.initializer if t.name.endswith(name))
        content = numpy_helper.to_array(tensor)
        tensor.CopyFrom(
            numpy_helper.from_array(np.full_like(content, value, content.dtype), tensor.name)
        )

    return edit


@pytest.fixture(scope="session")
def last_norm(bundle: Path) -> str:
    """Name of the scale of the last layer norm in the file: the one before the output."""
    nodes = onnx.load(bundle / "model.onnx").graph.node
    name: str = [node for node in nodes if node.op_type == "LayerNormalization"][-1].input[1]
    return name


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38], ids=["nan", "inf", "huge"])
def test_weights_that_give_nan_or_infinity_are_reported_with_the_remedy(
    bundle: Path, tmp_path: Path, last_norm: str, value: float
) -> None:
    poisoned = tampered(bundle, tmp_path / "poisoned", set_weight(last_norm, value))
    session = EncoderSession(poisoned, "cpu")
    for call in (lambda: session.run([[1, 2, 3]]), lambda: session.encode([[1, 2, 3], [4]])):
        with pytest.raises(NonFiniteOutputError) as caught:
            call()
        assert isinstance(caught.value, CausalEncoderError)
        assert not isinstance(caught.value, ValueError)
        assert "verify the bundle" in str(caught.value)
        assert "check_finite=False" in str(caught.value)


def test_one_poisoned_token_is_reported_only_where_it_occurs(bundle: Path, tmp_path: Path) -> None:
    def edit(proto: onnx.ModelProto) -> None:
        (tensor,) = (t for t in proto.graph.initializer if t.name == "token_embedding")
        content = numpy_helper.to_array(tensor).copy()
        content[5] = np.nan
        tensor.CopyFrom(numpy_helper.from_array(content, tensor.name))

    session = EncoderSession(tampered(bundle, tmp_path / "poisoned", edit), "cpu")
    assert np.isfinite(session.run([[1, 2, 3]])).all()
    with pytest.raises(NonFiniteOutputError):
        session.run([[1, 2, 5]])
    with pytest.raises(NonFiniteOutputError):
        session.encode([[1], [2, 5, 3]])


def test_check_finite_false_shows_the_values(bundle: Path, tmp_path: Path, last_norm: str) -> None:
    poisoned = tampered(bundle, tmp_path / "poisoned", set_weight(last_norm, float("nan")))
    session = EncoderSession(poisoned, "cpu", check_finite=False)
    assert np.isnan(session.run([[1, 2, 3]])).all()
    assert np.isnan(session.encode([[1, 2, 3]])[0]).all()


def test_huge_outputs_that_are_finite_are_not_refused(
    bundle: Path, tmp_path: Path, model: Any
) -> None:
    bias = model.final_norm.bias.detach().numpy()
    scale = model.final_norm.weight.detach().numpy()

    def edit(proto: onnx.ModelProto) -> None:
        for tensor in proto.graph.initializer:
            content = numpy_helper.to_array(tensor)
            if np.array_equal(content, bias):
                tensor.CopyFrom(numpy_helper.from_array(content * 0 + 3e38, tensor.name))
            if np.array_equal(content, scale):
                tensor.CopyFrom(numpy_helper.from_array(content * 0, tensor.name))

    session = EncoderSession(tampered(bundle, tmp_path / "huge", edit), "cpu")
    hidden = session.run(np.zeros((8, 24), int))  # their sum is over the largest float32
    assert hidden.min() == hidden.max() == np.float32(3e38)
