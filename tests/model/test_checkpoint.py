"""Checkpoints: what is saved comes back bit for bit, and nothing damaged is ever loaded."""

import dataclasses
import errno
import json
import logging
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from causal_encoder.errors import CheckpointError
from causal_encoder.model import (
    CausalEncoder,
    EncoderConfig,
    checkpoint,
    fingerprint,
    load_checkpoint,
    save_checkpoint,
)
from tests import tiny

CONFIG, WEIGHTS, PICKLED = "config.json", "model.safetensors", "model.pt"
SMALL = tiny.config(num_layers=1, d_model=4, d_ff=3, max_len=3, vocab_size=3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of one small block."""
    save_checkpoint(tiny.model(SMALL), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture
def state() -> dict[str, Tensor]:
    """The weights that are in `folder`."""
    return tiny.model(SMALL).state_dict()


def refusal(folder: Path | str) -> str:
    """The message with which a checkpoint is refused; anything but our error fails."""
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def replace_weights(folder: Path, state: dict[str, Tensor], name: str = WEIGHTS) -> None:
    """Weights as another tool writes them, without our config inside."""
    (folder / WEIGHTS).unlink(missing_ok=True)
    if name == WEIGHTS:
        safetensors.torch.save_file(state, folder / WEIGHTS)
    else:
        torch.save(state, folder / PICKLED)


def assert_same_weights(actual: CausalEncoder, expected: CausalEncoder) -> None:
    assert list(actual.state_dict()) == list(expected.state_dict())
    for name, tensor in expected.state_dict().items():
        found = actual.state_dict()[name]
        assert found.dtype == tensor.dtype, name
        assert torch.equal(found.view(torch.int32), tensor.view(torch.int32)), name


# ------------------------------------------------------------------------- round trip


@pytest.mark.parametrize("position", ["sinusoidal", "learned", "sinusoidal+learned", "none"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": "post", "activation": "relu", "dropout": 0.25},
        {"bias": False, "activation": "gelu_tanh", "final_norm": False, "layer_norm_eps": 1e-12},
        {"d_model": 7, "num_heads": 1, "max_len": 1, "num_layers": 11},
    ],
    ids=["default", "post", "no bias", "odd"],
)
def test_a_saved_model_comes_back_bit_for_bit(
    tmp_path: Path, position: str, changes: dict[str, object]
) -> None:
    model = tiny.model(tiny.config(position=position, **changes))
    save_checkpoint(model, tmp_path)
    loaded = load_checkpoint(tmp_path)
    assert loaded.config == model.config
    assert_same_weights(loaded, model)
    ids = tiny.ids(model.config, 2, model.config.max_len)
    assert torch.equal(loaded(ids), model(ids))
    assert fingerprint(loaded) == fingerprint(model)


def test_values_that_compare_equal_or_unequal_keep_their_bits(tmp_path: Path) -> None:
    """Minus zero, the smallest subnormal, infinity and a NaN with a payload."""
    bits = torch.tensor([-(2**31), 1, 0x7F800000, 0x7FC00123], dtype=torch.int32)
    model = tiny.model(SMALL)
    with torch.no_grad():
        model.final_norm.get_parameter("weight").copy_(bits.view(torch.float32))
    save_checkpoint(model, tmp_path)
    assert_same_weights(load_checkpoint(tmp_path), model)


def test_a_folder_holds_exactly_the_two_documented_files(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG, WEIGHTS]
    assert json.loads((folder / CONFIG).read_text()) == SMALL.to_dict()
    assert set(safetensors.torch.load_file(folder / WEIGHTS)) == set(tiny.model(SMALL).state_dict())


def test_a_loaded_model_is_in_eval_mode(tmp_path: Path) -> None:
    save_checkpoint(tiny.model(tiny.config(dropout=0.5)).train(), tmp_path)
    loaded = load_checkpoint(tmp_path)
    assert not any(module.training for module in loaded.modules())


def test_saving_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = tiny.model(SMALL).train()
    before = fingerprint(model)
    save_checkpoint(model, tmp_path)
    assert model.training
    assert fingerprint(model) == before
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_loaded_model_no_longer_needs_its_files(folder: Path) -> None:
    loaded = load_checkpoint(folder)
    size = (folder / WEIGHTS).stat().st_size
    (folder / WEIGHTS).write_bytes(b"\0" * size)
    assert_same_weights(loaded, tiny.model(SMALL))


@pytest.mark.parametrize("name", ["with space", "é日本", "a'b\"c", "dots..in.name"])
@pytest.mark.parametrize("as_type", [str, Path])
def test_any_path_will_do(tmp_path: Path, name: str, as_type: Callable[[Path], Any]) -> None:
    path = as_type(tmp_path / "not yet there" / name)
    save_checkpoint(tiny.model(SMALL), path)
    assert_same_weights(load_checkpoint(path), tiny.model(SMALL))


def test_a_newer_save_replaces_an_older_one(folder: Path) -> None:
    newer = tiny.model(dataclasses.replace(SMALL, position="learned", vocab_size=5))
    save_checkpoint(newer, folder)
    assert load_checkpoint(folder).config == newer.config
    assert_same_weights(load_checkpoint(folder), newer)
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG, WEIGHTS]


def test_files_get_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    """Not those of a temporary file, which no other user may read."""
    old = os.umask(0o027)
    try:
        save_checkpoint(tiny.model(SMALL), tmp_path)
    finally:
        os.umask(old)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}


# ---------------------------------------------------------------------- interrupted saves


def test_a_save_that_cannot_move_its_files_leaves_the_old_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    newer = tiny.model(dataclasses.replace(SMALL, vocab_size=5))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(CheckpointError, match=r"checkpoint cannot be written: .*No space left"):
            save_checkpoint(newer, folder)
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG, WEIGHTS]
    assert_same_weights(load_checkpoint(folder), tiny.model(SMALL))


@pytest.mark.parametrize("failing", [1, 2], ids=["first file", "second file"])
@pytest.mark.parametrize("changes", [{}, {"vocab_size": 5}], ids=["same config", "other config"])
def test_a_full_disk_during_a_save_leaves_the_old_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch, failing: int, changes: dict[str, Any]
) -> None:
    """No old file may be replaced before all new ones are written."""
    calls = 0

    def full(_descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(errno.ENOSPC, "No space left on device")

    newer = tiny.model(dataclasses.replace(SMALL, **changes))
    tiny.randomize(newer, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="No space left"):
            save_checkpoint(newer, folder)
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG, WEIGHTS]
    assert_same_weights(load_checkpoint(folder), tiny.model(SMALL))


def test_a_save_cut_off_between_its_two_files_is_never_loaded_as_a_mixture(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """num_heads changes no shape, so only the config inside the weights can tell."""
    moved: list[object] = []
    replace = os.replace

    def cut_off(source: str, target: str) -> None:
        if moved:
            raise KeyboardInterrupt
        moved.append(target)
        replace(source, target)

    newer = tiny.model(dataclasses.replace(SMALL, num_heads=4))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", cut_off)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(newer, folder)
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG, WEIGHTS]
    message = refusal(folder)
    assert "num_heads" in message
    assert "save_checkpoint" in message


@pytest.mark.parametrize("place", ["file", "below a file"])
def test_a_place_that_cannot_be_a_folder_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("kept")
    path = tmp_path / ("file" if place == "file" else "file/checkpoint")
    with pytest.raises(CheckpointError, match=r"file.* cannot be written"):
        save_checkpoint(tiny.model(SMALL), path)
    assert (tmp_path / "file").read_text() == "kept"


# --------------------------------------------------------------------- missing, damaged


@pytest.mark.parametrize(
    "name",
    ["missing", CONFIG, "a" * 300, "nul\0byte"],
    ids=["missing", "a file", "too long a name", "nul byte"],
)
def test_a_path_that_is_no_folder_is_named(folder: Path, name: str) -> None:
    message = refusal(folder / name)
    assert name in message


def test_an_empty_folder_misses_its_config(tmp_path: Path) -> None:
    assert f"{tmp_path / CONFIG} is missing" in refusal(tmp_path)


def test_a_bundle_in_place_of_a_checkpoint_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    assert refusal(tmp_path) == (
        f"{tmp_path} is a bundle, not a checkpoint; pass the folder with config.json"
    )


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert f"{folder / name} is missing" in refusal(folder)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, PICKLED])
def test_a_folder_in_place_of_a_file_is_named(folder: Path, name: str) -> None:
    if name != CONFIG:
        (folder / WEIGHTS).unlink()
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    assert f"{folder / name} is not a regular file" in refusal(folder)


def test_a_layer_that_is_used_twice_is_saved_twice(tmp_path: Path) -> None:
    model = tiny.model(tiny.config(num_layers=2))
    model.blocks[1] = model.blocks[0]
    save_checkpoint(model, tmp_path / "c")
    assert_same_weights(load_checkpoint(tmp_path / "c"), model)


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind the superuser")
@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, PICKLED])
def test_a_file_that_may_not_be_read_is_named_with_the_reason(
    folder: Path, state: dict[str, Tensor], name: str
) -> None:
    if name != WEIGHTS:
        replace_weights(folder, state, PICKLED)
    (folder / name).chmod(0)
    message = refusal(folder)
    assert str(folder / name) in message
    assert "Permission denied" in message


def test_a_dangling_link_is_a_missing_file(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "elsewhere")
    (folder / WEIGHTS).symlink_to(folder / "elsewhere")
    assert_same_weights(load_checkpoint(folder), tiny.model(SMALL))
    (folder / "elsewhere").unlink()
    assert f"{folder / WEIGHTS} is missing" in refusal(folder)


def test_weights_cut_off_anywhere_are_refused(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    for length in [*range(0, len(whole), 5), len(whole) - 1]:
        (folder / WEIGHTS).write_bytes(whole[:length])
        assert f"{folder / WEIGHTS} cannot be read" in refusal(folder), f"{length} bytes"


def test_weights_with_more_bytes_than_announced_are_refused(folder: Path) -> None:
    with (folder / WEIGHTS).open("ab") as file:
        file.write(b"\0" * 8)
    assert f"{folder / WEIGHTS} cannot be read" in refusal(folder)


def test_a_flipped_bit_in_the_header_is_refused_or_harmless(folder: Path) -> None:
    """Harmless is for example another name for the entry that repeats the config."""
    whole = (folder / WEIGHTS).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    refused = 0
    places = range(0, header, 3)
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place % 8)
        (folder / WEIGHTS).write_bytes(damaged)
        try:
            loaded = load_checkpoint(folder)
        except CheckpointError:
            refused += 1
        else:
            assert_same_weights(loaded, tiny.model(SMALL))
            assert loaded.config == SMALL, f"byte {place}"
    assert refused > 0.98 * len(places)


def test_a_flipped_bit_in_a_weight_is_refused(folder: Path) -> None:
    """Nothing in the shape of the file gives it away; the numbers would just be wrong."""
    whole = bytearray((folder / WEIGHTS).read_bytes())
    whole[-3] ^= 0x40
    (folder / WEIGHTS).write_bytes(whole)
    assert str(folder / WEIGHTS) in refusal(folder)


GARBAGE = {
    "empty": b"",
    "one byte": b"x",
    "zeros": bytes(1000),
    "noise": random.Random(0).randbytes(1000),
    "header longer than the file": (2**62).to_bytes(8, "little") + b"{}",
    "header of length 0": bytes(8),
    "git lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
    "web page": b"<!doctype html><title>404</title>",
    "zip magic": b"PK\x03\x04",
    "pickle start": b"\x80\x02",
    "pickled list": pickle.dumps([1, 2], 2),
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("name", [WEIGHTS, PICKLED])
def test_a_file_of_something_else_is_refused(folder: Path, name: str, content: bytes) -> None:
    (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(content)
    assert str(folder / name) in refusal(folder)


def test_formats_under_each_others_names_are_refused(
    folder: Path, state: dict[str, Tensor]
) -> None:
    (folder / WEIGHTS).rename(folder / PICKLED)
    assert str(folder / PICKLED) in refusal(folder)
    torch.save(state, folder / PICKLED)
    (folder / PICKLED).rename(folder / WEIGHTS)
    assert f"{folder / WEIGHTS} cannot be read" in refusal(folder)


# -------------------------------------------------------------------------- config.json


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"3",
        b'"text"',
        b"\xff\xfe\x00{}",
        b"{'vocab_size': 3}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"{}",
        b'{"vocab_size": 3, "n_heads": 2}',
        b'{"vocab_size": null}',
        b'{"vocab_size": 3.0}',
        b'{"vocab_size": true}',
        b'{"vocab_size": "3"}',
        b'{"vocab_size": 3, "num_heads": 7}',
        b'{"vocab_size": 3, "dropout": NaN}',
        b'{"vocab_size": 3, "layer_norm_eps": Infinity}',
        b'{"vocab_size": 3, "layer_norm_eps": 1' + b"0" * 400 + b"}",
        b'{"vocab_size": 1' + b"0" * 5000 + b"}",
    ],
    ids=lambda content: repr(content[:40]),
)
def test_a_config_that_is_none_is_named(folder: Path, content: bytes) -> None:
    (folder / CONFIG).write_bytes(content)
    assert str(folder / CONFIG) in refusal(folder)


def test_a_config_cut_off_anywhere_is_named(folder: Path) -> None:
    whole = (folder / CONFIG).read_bytes().rstrip()
    for length in range(len(whole)):
        (folder / CONFIG).write_bytes(whole[:length])
        assert str(folder / CONFIG) in refusal(folder), f"{length} bytes"


def test_a_wrong_value_is_explained_with_file_field_and_limit(folder: Path) -> None:
    (folder / CONFIG).write_text(json.dumps(SMALL.to_dict() | {"num_layers": 0}))
    message = refusal(folder)
    assert f"{folder / CONFIG}: num_layers is 0, expected" in message


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": 4},
        {"d_model": 8},
        {"num_heads": 1},
        {"num_layers": 2},
        {"d_ff": 4},
        {"max_len": 4},
        {"position": "none"},
        {"activation": "relu"},
        {"norm": "post"},
        {"dropout": 0.5},
        {"layer_norm_eps": 1e-6},
        {"bias": False},
        {"final_norm": False},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_config_that_was_not_saved_with_the_weights_is_refused(
    folder: Path, change: dict[str, object]
) -> None:
    """Half of these change no shape: without the check the numbers would be wrong."""
    ((name, value),) = change.items()
    (folder / CONFIG).write_text(json.dumps(SMALL.to_dict() | change))
    message = refusal(folder)
    assert name in message
    assert repr(value) in message
    assert repr(getattr(SMALL, name)) in message


@pytest.mark.parametrize(
    "metadata",
    [
        *("", "{", "[]", "null", "{}", '{"config": {}}', '{"config": [], "sha256": ""}'),
        *('{"config": {"vocab_size": 0}, "sha256": ""}', "[" * 100_000, '{"a":' * 100_000),
    ],
    ids=lambda text: repr(text[:20]),
)
def test_a_damaged_config_inside_the_weights_is_refused(
    folder: Path, state: dict[str, Tensor], metadata: str
) -> None:
    safetensors.torch.save_file(state, folder / WEIGHTS, metadata={"causal_encoder": metadata})
    assert str(folder / WEIGHTS) in refusal(folder)


@pytest.mark.parametrize("name", [WEIGHTS, PICKLED])
@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": 2**60},
        {"vocab_size": 10**30},
        {"d_model": 2**40},
        {"d_ff": 2**62},
        {"max_len": 2**50},
        {"max_len": 10**30},
    ],
    ids=str,
)
def test_sizes_beyond_any_memory_are_refused(
    folder: Path, state: dict[str, Tensor], name: str, change: dict[str, int]
) -> None:
    """Weights of another tool have no config inside to compare with."""
    replace_weights(folder, state, name)
    (folder / CONFIG).write_text(json.dumps(SMALL.to_dict() | change))
    assert str(folder) in refusal(folder)


@pytest.fixture
def built_on(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices on which models were built."""
    devices: list[str] = []

    def build(config: EncoderConfig) -> CausalEncoder:
        model = CausalEncoder(config)
        devices.append(model.token_embedding.weight.device.type)
        return model

    monkeypatch.setattr(checkpoint, "CausalEncoder", build)
    return devices


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vocab_size": 10**12}, "token_embedding.weight has shape (3, 4)"),
        ({"d_ff": 10**12}, "blocks.0.feed_forward.down.weight has shape (4, 3)"),
        ({"max_len": 10**12, "position": "learned"}, "1 missing (first: positions.learned)"),
        ({"num_layers": 1000}, "11988 missing"),
    ],
    ids=str,
)
def test_a_size_that_the_weights_do_not_have_is_named_before_memory_is_taken(
    folder: Path,
    state: dict[str, Tensor],
    built_on: list[str],
    change: dict[str, object],
    named: str,
) -> None:
    replace_weights(folder, state)
    (folder / CONFIG).write_text(json.dumps(SMALL.to_dict() | change))
    assert named in refusal(folder)
    assert built_on == ["meta"]


@pytest.mark.parametrize("max_len", [2**28 + 1, 10**12, 10**17])
def test_a_position_table_beyond_any_use_is_refused_with_the_longest_that_is_taken(
    folder: Path, state: dict[str, Tensor], built_on: list[str], max_len: int
) -> None:
    replace_weights(folder, state)
    (folder / CONFIG).write_text(json.dumps(SMALL.to_dict() | {"max_len": max_len}))
    message = refusal(folder)
    assert f"max_len {max_len}" in message
    assert f"lower it to {2**28} or less" in message
    assert built_on == ["meta"]


def test_without_positions_max_len_takes_no_memory(folder: Path, state: dict[str, Tensor]) -> None:
    replace_weights(folder, state)
    endless = {"max_len": 10**12, "position": "none"}
    (folder / CONFIG).write_text(json.dumps(SMALL.to_dict() | endless))
    assert load_checkpoint(folder).config.max_len == 10**12


def test_a_model_is_loaded_on_the_cpu_whatever_the_default_device_is(folder: Path) -> None:
    with torch.device("meta"):
        loaded = load_checkpoint(folder)
    assert_same_weights(loaded, tiny.model(SMALL))
    assert loaded.positions.sinusoidal is not None
    assert loaded.positions.sinusoidal.device.type == "cpu"


# ----------------------------------------------------------------- weights and their fit


def test_weights_of_another_tool_need_no_config_inside(
    folder: Path, state: dict[str, Tensor]
) -> None:
    replace_weights(folder, state)
    assert_same_weights(load_checkpoint(folder), tiny.model(SMALL))


def test_missing_and_unexpected_weights_are_counted_and_named(
    folder: Path, state: dict[str, Tensor]
) -> None:
    del state["final_norm.weight"], state["final_norm.bias"]
    state["head.weight"] = torch.zeros(1)
    replace_weights(folder, state)
    message = refusal(folder)
    assert "2 missing (first: final_norm.bias)" in message
    assert "1 unexpected (first: head.weight)" in message


@pytest.mark.parametrize("name", list(tiny.model(SMALL).state_dict()))
def test_no_weight_may_be_missing(folder: Path, state: dict[str, Tensor], name: str) -> None:
    del state[name]
    replace_weights(folder, state)
    assert f"1 missing (first: {name})" in refusal(folder)


def test_an_absurd_number_of_layers_is_refused_before_they_are_built(
    folder: Path, state: dict[str, Tensor]
) -> None:
    replace_weights(folder, state)
    fields = json.loads((folder / "config.json").read_text()) | {"num_layers": 10**9}
    (folder / "config.json").write_text(json.dumps(fields))
    assert "num_layers 1000000000" in refusal(folder)


def test_an_empty_file_of_weights_misses_them_all(folder: Path) -> None:
    replace_weights(folder, {})
    assert "15 missing" in refusal(folder)


@pytest.mark.parametrize("shape", [(3, 5), (4, 4), (4, 3), (12,), (3, 4, 1), ()], ids=str)
def test_a_weight_of_another_shape_is_named_with_both_shapes(
    folder: Path, state: dict[str, Tensor], shape: tuple[int, ...]
) -> None:
    state["token_embedding.weight"] = torch.zeros(shape)
    replace_weights(folder, state)
    message = refusal(folder)
    assert "token_embedding.weight" in message
    assert str(shape) in message
    assert "(3, 4)" in message


def test_a_learned_table_of_another_length_is_refused(folder: Path) -> None:
    learned = tiny.model(dataclasses.replace(SMALL, position="learned"))
    replace_weights(folder, learned.state_dict())
    (folder / CONFIG).write_text(json.dumps(learned.config.to_dict() | {"max_len": 2}))
    message = refusal(folder)
    assert "positions.learned" in message
    assert "(2, 4)" in message


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", [WEIGHTS, PICKLED])
def test_weights_of_other_float_types_become_float32(
    folder: Path, state: dict[str, Tensor], name: str, dtype: torch.dtype
) -> None:
    """Half precision is widened without loss."""
    narrow = {key: tensor.to(dtype) for key, tensor in state.items()}
    replace_weights(folder, narrow, name)
    loaded = load_checkpoint(folder).state_dict()
    for key, tensor in narrow.items():
        assert loaded[key].dtype == torch.float32
        assert torch.equal(loaded[key], tensor.float()), key


def test_a_float64_model_is_saved_as_it_is_and_loaded_in_float32(tmp_path: Path) -> None:
    model = tiny.model(SMALL, dtype=torch.float64)
    save_checkpoint(model, tmp_path)
    stored = safetensors.torch.load_file(tmp_path / WEIGHTS)
    loaded = load_checkpoint(tmp_path).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(stored[name], tensor)
        assert torch.equal(loaded[name], tensor.float())


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int32, torch.int64, torch.bool, torch.complex64], ids=str
)
@pytest.mark.parametrize("name", [WEIGHTS, PICKLED])
def test_weights_that_are_no_floats_are_refused(
    folder: Path, state: dict[str, Tensor], name: str, dtype: torch.dtype
) -> None:
    """Integers would have to be scaled back, and nothing says by how much."""
    state["final_norm.weight"] = state["final_norm.weight"].to(dtype)
    replace_weights(folder, state, name)
    message = refusal(folder)
    assert "final_norm.weight" in message
    assert str(dtype) in message


# ------------------------------------------------------------------------------ prefixes


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"module.{name}",
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module._orig_mod.{name}",
        lambda name: f"_orig_mod.module.{name}",
        lambda name: f"module.module._orig_mod.{name}",
        lambda name: name.replace("blocks.0.", "blocks.0._orig_mod."),
        lambda name: "module." + name.replace("blocks.0.", "blocks.0._orig_mod."),
        lambda name: name.replace("attention.", "attention._orig_mod.module."),
    ],
    ids=[
        "module",
        "_orig_mod",
        "module, _orig_mod",
        "_orig_mod, module",
        "three deep",
        "one compiled block",
        "all wrapped, one block compiled",
        "compiled attention",
    ],
)
@pytest.mark.parametrize("file", [WEIGHTS, PICKLED])
def test_prefixes_of_wrappers_are_stripped_and_reported(
    folder: Path,
    state: dict[str, Tensor],
    caplog: pytest.LogCaptureFixture,
    file: str,
    rename: Callable[[str], str],
) -> None:
    """DistributedDataParallel and torch.compile put them there."""
    wrapped = {rename(name): tensor for name, tensor in state.items()}
    replace_weights(folder, wrapped, file)
    with caplog.at_level(logging.WARNING):
        loaded = load_checkpoint(folder)
    assert_same_weights(loaded, tiny.model(SMALL))
    renamed = sum(name not in state for name in wrapped)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.name.startswith("causal_encoder")
    assert f"{renamed} of {len(state)}" in record.getMessage()


def test_without_prefixes_nothing_is_reported(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        load_checkpoint(folder)
    assert not caplog.records


def test_two_weights_that_are_one_without_prefixes_are_refused(
    folder: Path, state: dict[str, Tensor]
) -> None:
    state["module.final_norm.bias"] = torch.zeros(4)
    replace_weights(folder, state)
    message = refusal(folder)
    assert "final_norm.bias" in message
    assert "keep one" in message


@pytest.mark.parametrize("prefix", ["model.", "modules.", "module_", "encoder."])
def test_other_prefixes_are_not_guessed(
    folder: Path, state: dict[str, Tensor], prefix: str
) -> None:
    replace_weights(folder, {prefix + name: tensor for name, tensor in state.items()})
    message = refusal(folder)
    assert "15 missing" in message
    assert f"15 unexpected (first: {prefix}" in message


# ------------------------------------------------------------------------------ model.pt


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_state_dict_saved_by_torch_is_read(
    folder: Path, state: dict[str, Tensor], zipped: bool
) -> None:
    (folder / WEIGHTS).unlink()
    torch.save(state, folder / PICKLED, _use_new_zipfile_serialization=zipped)
    assert_same_weights(load_checkpoint(folder), tiny.model(SMALL))


def test_a_state_dict_of_parameters_is_read(folder: Path) -> None:
    replace_weights(folder, dict(tiny.model(SMALL).named_parameters()), PICKLED)
    assert_same_weights(load_checkpoint(folder), tiny.model(SMALL))


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_state_dict_cut_off_anywhere_is_refused(
    folder: Path, state: dict[str, Tensor], zipped: bool
) -> None:
    (folder / WEIGHTS).unlink()
    torch.save(state, folder / PICKLED, _use_new_zipfile_serialization=zipped)
    whole = (folder / PICKLED).read_bytes()
    for length in [*range(0, len(whole), 23), len(whole) - 1]:
        (folder / PICKLED).write_bytes(whole[:length])
        assert str(folder / PICKLED) in refusal(folder), f"{length} bytes"


class MakesFolder:
    """Unpickling it makes a folder: stands for any code an attacker wants to run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("form", ["zip", "legacy", "plain pickle"])
def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(
    folder: Path, state: dict[str, Tensor], tmp_path: Path, form: str
) -> None:
    target = tmp_path / "made by the pickle"
    content = dict(state) | {"extra": MakesFolder(target)}
    (folder / WEIGHTS).unlink()
    if form == "plain pickle":
        (folder / PICKLED).write_bytes(pickle.dumps(MakesFolder(target), 2))
        pickle.loads((folder / PICKLED).read_bytes())
        target.rmdir()  # so it does run when unpickled carelessly
    else:
        torch.save(content, folder / PICKLED, _use_new_zipfile_serialization=form == "zip")
    message = refusal(folder)
    assert str(folder / PICKLED) in message
    assert "model.state_dict()" in message
    assert not target.exists()


def test_a_whole_pickled_model_is_refused_with_the_remedy(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save(tiny.model(SMALL), folder / PICKLED)
    assert "save model.state_dict() alone" in refusal(folder)


@pytest.mark.parametrize(
    "content",
    [
        {"state_dict": {"a": torch.zeros(1)}, "epoch": 3},
        {"token_embedding.weight": [1.0, 2.0]},
        {1: torch.zeros(1)},
        [torch.zeros(1)],
        torch.zeros(1),
        None,
    ],
    ids=["training state", "list as weight", "number as name", "list", "tensor", "none"],
)
def test_what_is_no_state_dict_is_refused(folder: Path, content: object) -> None:
    (folder / WEIGHTS).unlink()
    torch.save(content, folder / PICKLED)
    assert f"{folder / PICKLED} is not a state dict" in refusal(folder)


@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_a_weight_without_all_its_numbers_is_refused(
    folder: Path, state: dict[str, Tensor], kind: str
) -> None:
    """Sparse, or saved before the weights were there (the meta device)."""
    embedding = state["token_embedding.weight"]
    state["token_embedding.weight"] = (
        embedding.to_sparse() if kind == "sparse" else embedding.to("meta")
    )
    replace_weights(folder, state, PICKLED)
    assert "token_embedding.weight" in refusal(folder)


def test_a_torchscript_archive_is_refused(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.jit.save(torch.jit.script(tiny.model(SMALL)), folder / PICKLED)
    assert str(folder / PICKLED) in refusal(folder)


def test_the_state_dict_of_a_scripted_model_is_read(folder: Path) -> None:
    replace_weights(folder, torch.jit.script(tiny.model(SMALL)).state_dict(), PICKLED)
    assert_same_weights(load_checkpoint(folder), tiny.model(SMALL))


def test_of_two_files_of_weights_neither_is_chosen(folder: Path, state: dict[str, Tensor]) -> None:
    torch.save(state, folder / PICKLED)
    message = refusal(folder)
    assert WEIGHTS in message
    assert PICKLED in message
    assert "remove" in message


# --------------------------------------------------------------------------- fingerprint


def test_a_fingerprint_is_a_sha256_and_the_same_every_time() -> None:
    first = fingerprint(tiny.model(SMALL))
    assert len(first) == 64
    assert set(first) <= set("0123456789abcdef")
    assert fingerprint(tiny.model(SMALL)) == first


def test_a_fingerprint_survives_saving_and_other_forms(
    folder: Path, state: dict[str, Tensor]
) -> None:
    expected = fingerprint(tiny.model(SMALL))
    assert fingerprint(load_checkpoint(folder)) == expected
    replace_weights(folder, {f"module.{name}": tensor for name, tensor in state.items()}, PICKLED)
    assert fingerprint(load_checkpoint(folder)) == expected


def test_a_fingerprint_does_not_depend_on_the_mode_or_on_gradients() -> None:
    model = tiny.model(SMALL)
    expected = fingerprint(model)
    model.train().requires_grad_(False)
    assert fingerprint(model) == expected


@pytest.mark.parametrize("name", list(tiny.model(SMALL).state_dict()))
def test_one_bit_of_any_weight_changes_the_fingerprint(name: str) -> None:
    model = tiny.model(SMALL)
    expected = fingerprint(model)
    bits = model.state_dict()[name].view(torch.int32).view(-1)
    bits[-1] ^= 1
    assert fingerprint(model) != expected


def test_weights_that_change_places_change_the_fingerprint() -> None:
    model = tiny.model(SMALL)
    expected = fingerprint(model)
    with torch.no_grad():
        first, second = (
            model.get_parameter("blocks.0.attention_norm.bias"),
            model.get_parameter("blocks.0.feed_forward_norm.bias"),
        )
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)
    assert fingerprint(model) != expected


@pytest.mark.parametrize(
    "change",
    [
        {"num_heads": 1},
        {"activation": "relu"},
        {"activation": "gelu_tanh"},
        {"norm": "post", "final_norm": True},
        {"layer_norm_eps": 1e-6},
        {"position": "none"},
        {"final_norm": False},
        {"bias": False},
    ],
    ids=str,
)
def test_any_choice_that_changes_the_numbers_changes_the_fingerprint(
    change: dict[str, Any],
) -> None:
    """Most of these leave every weight as it is."""
    other = CausalEncoder(dataclasses.replace(SMALL, **change))
    same_weights = tiny.model(SMALL)
    other.load_state_dict(same_weights.state_dict(), strict=False)
    assert fingerprint(other) != fingerprint(same_weights)


@pytest.mark.parametrize("position", ["sinusoidal", "none"])
def test_raising_max_len_or_dropout_keeps_the_fingerprint(position: str) -> None:
    """A bundle exported with a longer table still names the checkpoint it came from."""
    config = dataclasses.replace(SMALL, position=position)
    expected = fingerprint(tiny.model(config))
    assert fingerprint(tiny.model(dataclasses.replace(config, max_len=100))) == expected
    assert fingerprint(tiny.model(dataclasses.replace(config, dropout=0.1))) == expected


@pytest.mark.parametrize("position", ["learned", "sinusoidal+learned"])
def test_a_longer_learned_table_has_another_fingerprint(position: str) -> None:
    config = dataclasses.replace(SMALL, position=position)
    longer = dataclasses.replace(config, max_len=4)
    assert fingerprint(tiny.model(longer)) != fingerprint(tiny.model(config))


def test_weights_of_another_type_have_another_fingerprint() -> None:
    assert fingerprint(tiny.model(SMALL, dtype=torch.float64)) != fingerprint(tiny.model(SMALL))


def test_a_checkpoint_is_rebuilt_from_its_files_alone(folder: Path) -> None:
    assert load_checkpoint(folder).config == EncoderConfig.from_dict(SMALL.to_dict())
