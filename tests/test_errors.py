"""One family of errors; each message is one line with the value, the limit and the remedy."""

import inspect
import pickle
import subprocess
import sys

import pytest

from causal_encoder import errors
from causal_encoder.errors import CausalEncoderError

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and value.__module__ == errors.__name__
]
INPUT_ERRORS = {
    errors.InvalidInputError,
    errors.EmptySequenceError,
    errors.SequenceTooLongError,
    errors.TokenOutOfRangeError,
}

BUILT = {
    "dtype": (errors.invalid_dtype("float32"), errors.InvalidInputError),
    "rank": (errors.invalid_rank((2, 3, 4)), errors.InvalidInputError),
    "empty": (errors.empty_sequence(), errors.EmptySequenceError),
    "empty row": (errors.empty_sequence(7), errors.EmptySequenceError),
    "too long": (errors.sequence_too_long(99, 24, "sinusoidal"), errors.SequenceTooLongError),
    "no position": (errors.sequence_too_long(99, 24, "none"), errors.SequenceTooLongError),
    "learned": (errors.sequence_too_long(99, 24, "learned"), errors.SequenceTooLongError),
    "sum": (errors.sequence_too_long(99, 24, "sinusoidal+learned"), errors.SequenceTooLongError),
    "id": (errors.token_out_of_range(-5, 3, 8, 37), errors.TokenOutOfRangeError),
}


@pytest.mark.parametrize("error", CLASSES)
def test_every_error_has_the_one_base(error: type[Exception]) -> None:
    assert issubclass(error, CausalEncoderError)
    assert error.__doc__


def test_the_errors_of_the_caller_are_value_errors_and_the_others_are_not() -> None:
    mistakes = {error.__name__ for error in CLASSES if issubclass(error, ValueError)}
    kinds = {error.__name__ for error in INPUT_ERRORS}
    assert mistakes == {*kinds, "InputError", "ConfigError"}


def test_input_error_covers_the_four_kinds_and_nothing_else() -> None:
    kinds = {e for e in CLASSES if issubclass(e, errors.InputError)} - {errors.InputError}
    assert kinds == INPUT_ERRORS


def test_the_tree_in_the_documentation_is_the_tree() -> None:
    lines = [line for line in inspect.getdoc(errors).splitlines() if "Error" in line]  # type: ignore[union-attr]
    tree = [line for line in lines if line.lstrip(" |").startswith(("+--", "CausalEncoderError"))]
    documented = {}
    path: list[str] = []
    for line in tree:
        depth = (len(line) - len(line.lstrip(" |+-"))) // 4
        name = line.lstrip(" |+-").split()[0]
        path[depth - 1 :] = [name]
        documented[name] = path[-2] if len(path) > 1 else "Exception"
    assert documented == {error.__name__: error.__bases__[0].__name__ for error in CLASSES}


@pytest.mark.parametrize("kind", BUILT)
def test_a_message_is_one_line_of_the_class_it_is_built_for(kind: str) -> None:
    error, expected = BUILT[kind]
    assert type(error) is expected
    assert "\n" not in str(error)
    assert len(str(error)) < 250


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("dtype", ["float32", "expected integers", "int64"]),
        ("rank", ["(2, 3, 4)", "two axes", "batch of one"]),
        ("empty", ["0 tokens", "at least 1"]),
        ("empty row", ["sequence 7", "0 tokens", "at least 1"]),
        (
            "too long",
            [
                "99",
                "max_len 24",
                "sinusoidal",
                "--max-len",
                "overflow='truncate'",
                "--overflow truncate",
            ],
        ),
        ("no position", ["99", "max_len 24", "none positions", "--max-len"]),
        ("learned", ["99", "max_len 24", "learned table", "shorten"]),
        ("sum", ["99", "max_len 24", "learned table", "shorten"]),
        ("id", ["-5", "row 3", "column 8", "0..36", "tokenizer"]),
    ],
)
def test_a_message_names_value_limit_and_remedy(kind: str, parts: list[str]) -> None:
    for part in parts:
        assert part in str(BUILT[kind][0])


@pytest.mark.parametrize("kind", ["learned", "sum"])
def test_a_longer_export_is_not_offered_where_it_is_impossible(kind: str) -> None:
    assert "--max-len" not in str(BUILT[kind][0])


@pytest.mark.parametrize("kind", BUILT)
def test_an_error_survives_the_way_between_processes(kind: str) -> None:
    error, _ = BUILT[kind]
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)


def test_the_errors_import_nothing_of_ours_and_nothing_heavy() -> None:
    program = (
        "import sys, causal_encoder.errors\n"
        "print(sorted(n for n in sys.modules if n.startswith('causal_encoder')), "
        "[n for n in ('numpy', 'torch', 'onnxruntime', 'click') if n in sys.modules])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() == "['causal_encoder', 'causal_encoder.errors'] []"
