"""Payloads keep their bytes from one version to the next, with every kernel."""

from __future__ import annotations

import pytest
import torch

from dtcomm.codecs import codec, names
from dtcomm.kernels import available, use
from dtcomm.kernels.ops import decode, encode
from tests.unit.kernels.golden import FOLDER, KEY, NUMEL, OFFSET, SPECS, golden_input


@pytest.mark.parametrize("kernel", available())
@pytest.mark.parametrize("name", SPECS)
def test_payloads_equal_the_golden_files(name: str, kernel: str) -> None:
    with use(kernel):
        payload = encode(SPECS[name], golden_input(), KEY, OFFSET)
        assert payload.numpy().tobytes() == (FOLDER / f"{name}.bin").read_bytes()
        decoded = decode(SPECS[name], payload, NUMEL)
    with use("reference"):
        assert torch.equal(decoded.view(torch.int32), decode(SPECS[name], payload, NUMEL).view(torch.int32))


def test_every_codec_has_a_golden_file() -> None:
    assert {path.stem for path in FOLDER.glob("*.bin")} == set(SPECS)
    assert {codec(spec).name for spec in SPECS.values()} == set(names())
