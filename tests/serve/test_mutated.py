"""Bundles damaged at random: one process opens them all, and never dies of one.

Hashes and digests guard against accidents alone, so most of these bundles have hashes that
fit: then the graph itself reaches ONNX Runtime.
"""

import hashlib
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import onnx
import pytest
from hypothesis import strategies as st

from tests.bundles import reseal
from tests.mutations import GRAPH_MUTATIONS, damaged_bytes
from tests.opener import Opener

ERRORS = {"BundleError", "DeviceError", "NonFiniteOutputError"}
SEEDS = st.integers(0, 2**32 - 1)


def examples(number: int) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=number,
        phases=[hypothesis.Phase.generate],  # seeds do not shrink to anything simpler
        suppress_health_check=[
            hypothesis.HealthCheck.function_scoped_fixture,
            hypothesis.HealthCheck.differing_executors,
        ],
    )


@pytest.fixture(scope="module")
def opener() -> Iterator[Opener]:
    """One process for the whole module."""
    opener = Opener()
    yield opener
    opener.close()


@pytest.fixture(scope="module")
def split(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle with its weights in a file beside the graph; alone in a folder."""
    folder = shutil.copytree(bundle, tmp_path_factory.mktemp("split") / "bundle")
    proto = onnx.load(folder / "model.onnx")
    onnx.save_model(
        proto,
        folder / "model.onnx",
        save_as_external_data=True,
        location="model.onnx.data",
        size_threshold=64,
    )
    reseal(folder)
    return folder


def test_the_process_answers_for_the_bundle_as_it_was(
    opener: Opener, bundle: Path, split: Path
) -> None:
    for whole in (bundle, split):
        assert opener.open(whole) == {"outcome": "answered", "detail": ""}


@pytest.mark.parametrize("kind", GRAPH_MUTATIONS)
@hypothesis.given(seed=SEEDS)
@examples(14)
def test_a_damaged_graph_is_refused_or_answers_as_documented(
    kind: str, opener: Opener, copy: Path, bundle: Path, seed: int
) -> None:
    proto = onnx.load(bundle / "model.onnx")
    GRAPH_MUTATIONS[kind](proto, random.Random(seed))
    (copy / "model.onnx").write_bytes(proto.SerializeToString())
    reseal(copy)
    found = opener.open(copy)
    assert found["outcome"] in {"answered", *ERRORS}, found


@hypothesis.given(seed=SEEDS)
@examples(80)
def test_a_model_of_damaged_bytes_is_refused_or_answers_as_documented(
    opener: Opener, copy: Path, bundle: Path, seed: int
) -> None:
    content = (bundle / "model.onnx").read_bytes()
    (copy / "model.onnx").write_bytes(damaged_bytes(content, random.Random(seed)))
    reseal(copy)
    found = opener.open(copy)
    assert found["outcome"] in {"answered", *ERRORS}, found


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "manifest.json"])
@hypothesis.given(seed=SEEDS)
@examples(25)
def test_damage_that_no_hash_was_fitted_to_is_a_bundle_error(
    name: str, opener: Opener, split: Path, seed: int
) -> None:
    content = (split / name).read_bytes()
    damaged = damaged_bytes(content, random.Random(seed))
    hypothesis.assume(damaged != content)
    try:
        (split / name).write_bytes(damaged)
        found = opener.open(split)
    finally:
        (split / name).write_bytes(content)
    assert found["outcome"] == "BundleError", found
    assert name in found["detail"]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in parsed JSON, containers too."""
    keys = (
        list(value)
        if isinstance(value, dict)
        else range(len(value))
        if isinstance(value, list)
        else []
    )
    return [path, *(leaf for key in keys for leaf in leaves(value[key], (*path, key)))][
        not path :  # the whole manifest is not one of its fields
    ]


VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 5, 24, 37, 2**31, 2**63 - 1, 2**63, 10**400, 0.5, -0.0, "", "x",
    "onnx", "torchscript", "bf16", "batch", "../x", "/", "\0", "\ud800", "0" * 64, [], [1], {},
    {"name": "x", "dtype": "y", "axes": []}, {"size_bytes": 0, "sha256": "0" * 64},
)  # fmt: skip


@hypothesis.given(seed=SEEDS)
@examples(150)
def test_a_changed_manifest_with_a_fitting_digest_is_refused_or_answers_as_documented(
    opener: Opener, copy: Path, bundle: Path, seed: int
) -> None:
    draw = random.Random(seed)
    fields = json.loads((bundle / "manifest.json").read_text())
    del fields["digest"]
    if draw.random() < 0.2:  # both places where a limit stands
        name = draw.choice(("max_len", "vocab_size"))
        fields[name] = fields["config"][name] = draw.choice(VALUES)
    for _ in range(draw.choice((1, 1, 2))):
        *parents, last = draw.choice(leaves(fields))
        holder = fields
        for key in parents:
            holder = holder[key]
        if draw.random() < 0.2:
            del holder[last]
        else:
            holder[last] = draw.choice(VALUES)
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    (copy / "manifest.json").write_text(json.dumps(fields | {"digest": digest}))
    found = opener.open(copy)
    assert found["outcome"] in {
        "answered", "SequenceTooLongError", "TokenOutOfRangeError", *ERRORS,
    }, found  # fmt: skip


def test_the_process_lives_after_all_of_it(opener: Opener, bundle: Path) -> None:
    assert opener.open(bundle)["outcome"] == "answered"
    assert opener.starts == 1
