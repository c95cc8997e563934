"""Options that several functions share: their signatures, texts, defaults and errors."""

from __future__ import annotations

import inspect
from typing import Any, TypedDict

import pytest
from typing_extensions import Unpack

from dtcomm.arguments import complete_options, shares_options


class Options(TypedDict, total=False):
    """What the functions below take.

    Attributes:
        model: The model, of
            two lines.
        seed: The seed.
    """

    seed: int


DEFAULTS: Options = {"seed": 0}


@shares_options(DEFAULTS, Options)
def compress(model: int, codec: str = "int8", **options: Unpack[Options]) -> Options:
    """Compress.

    Args:
        codec: The codec.

    Returns:
        The options.
    """
    return complete_options("compress", options, DEFAULTS)


@shares_options(DEFAULTS, Options)
class State:
    """Keep.

    Args:
        codec: Another text.
    """

    def __init__(self, codec: str, **options: Unpack[Options]) -> None:
        self.options = complete_options("State", options, DEFAULTS)


def test_the_signature_has_the_options_with_their_defaults() -> None:
    parameters = inspect.signature(compress).parameters
    assert list(parameters) == ["model", "codec", "seed"]
    assert parameters["seed"].default == 0 and parameters["seed"].kind is inspect.Parameter.KEYWORD_ONLY
    assert list(inspect.signature(State).parameters) == ["codec", "seed"]


def test_the_docstring_explains_each_argument_once() -> None:
    explained = "    model: The model, of\n        two lines.\n    codec: The codec.\n    seed: The seed.\n"
    assert inspect.getdoc(compress) == f"Compress.\n\nArgs:\n{explained}\nReturns:\n    The options."
    assert inspect.getdoc(State) == "Keep.\n\nArgs:\n    codec: Another text.\n    seed: The seed."


def test_options_are_completed_and_unknown_ones_refused() -> None:
    assert compress(1) == {"seed": 0} and State("int8", seed=3).options == {"seed": 3}
    wrong: dict[str, Any] = {"sead": 1}
    with pytest.raises(TypeError, match=r"'sead' \(did you mean 'seed'\?\); valid: codec, seed"):
        compress(1, **wrong)
    with pytest.raises(TypeError, match=r"'codek' \(did you mean 'codec'\?\)"):
        compress(1, **{"codek": "int8"})  # type: ignore[arg-type]
