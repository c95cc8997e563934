"""Codecs that the Triton kernels support, and inputs that cover all cases at once."""

from __future__ import annotations

import dataclasses

import torch

from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.codecs.spec import CODECS
from dtcomm.kernels import triton
from tests.unit.codecs.cases import VALUES, covering
from tests.unit.kernels.inputs import KINDS, floats

FIRST_TIER = {"fp16", "bf16", "int8", "int4", "fp8_e4m3", "fp8_e3m4"}
PLAIN = [parse(name) for name in CODECS if triton.supports(parse(name))]


def mixed(n: int, seed: int) -> torch.Tensor:
    """`n` floats: stretches of every kind, of a length that is no block's."""
    stretches = [floats(kind, 150, seed=seed) for kind in KINDS]
    several = n // (150 * len(KINDS)) + 1
    return torch.cat(stretches * several)[torch.arange(n) + seed % 7].contiguous()


def option_sets(plain: Codec) -> list[Codec]:
    """The codec with sets of options in which every pair of supported values of two options occurs."""
    entry = CODECS[plain.name]
    columns = {
        option: [v for v in VALUES[option] if triton.supports(dataclasses.replace(plain, **{option: v}))]
        for option in entry.options()
    }
    rows = covering(list(columns.values()))
    return [dataclasses.replace(plain, **dict(zip(columns, row, strict=True))) for row in rows]


def codecs_with_option_sets() -> list[Codec]:
    """Each codec with its defaults and with its sets of options."""
    return list(dict.fromkeys(codec for plain in PLAIN for codec in [plain, *option_sets(plain)]))
