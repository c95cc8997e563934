"""docs/reference/wire-format.md suffices: a decoder that follows only its text gives the same floats."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from dtcomm.codecs import codec as parse
from dtcomm.codecs import names
from dtcomm.codecs.base import ELEMENTS
from dtcomm.kernels.ops import decode, encode
from tests.unit.codecs.cases import codecs_with_option_sets
from tests.unit.kernels import wire_decoder
from tests.unit.kernels.golden import FOLDER, NUMEL, SPECS
from tests.unit.kernels.inputs import floats

DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "wire-format.md"


@pytest.mark.parametrize("name", SPECS)
def test_the_decoder_decodes_golden_files(name: str) -> None:
    raw = (FOLDER / f"{name}.bin").read_bytes()
    decoded = wire_decoder.decode(parse(SPECS[name]).native(), raw, NUMEL)
    expected = decode(SPECS[name], torch.frombuffer(bytearray(raw), dtype=torch.uint8), NUMEL)
    assert decoded == expected.numpy().view(np.uint32).tolist()


@pytest.mark.parametrize("codec", codecs_with_option_sets(), ids=str)
def test_the_decoder_decodes_every_option(codec) -> None:  # type: ignore[no-untyped-def]
    for numel in (1, 37, 700):
        wire = encode(codec, floats("nonfinite", numel, seed=numel), key=5)
        ours = wire_decoder.decode(codec.native(), wire.numpy().tobytes(), numel)
        assert ours == decode(codec, wire, numel).numpy().view(np.uint32).tolist()


def test_the_decoder_imports_nothing_of_dtcomm() -> None:
    tree = ast.parse(Path(wire_decoder.__file__).read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported == {"__future__", "math", "struct", "dataclasses"}


def test_the_decoder_refuses_payloads_of_another_length() -> None:
    wire = encode("int8", torch.ones(100)).numpy().tobytes()
    with pytest.raises(ValueError, match="100 elements are 144 bytes, not 128"):
        wire_decoder.decode(parse("int8").native(), wire[:-16], 100)


def test_the_document_names_every_codec_and_option() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    headings = " ".join(line for line in text.splitlines() if line.startswith("#"))
    for name in names():
        assert f"`{name}`" in headings, f"no section is about {name}"
    for codec in codecs_with_option_sets():
        for option in codec.options():
            assert re.search(rf"`{option}=", text), f"the option {option} is not described"
    elements = text[text.index("The codec as sixteen bytes") :]
    for element, number in ELEMENTS.items():
        assert f"{number} {element}" in elements
