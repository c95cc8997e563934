"""The symmetric two-shot all-reduce of tensor parallelism compared to its emulation in one process."""

from __future__ import annotations

import pytest
import torch

from dtcomm import tp
from dtcomm.codecs.spec import CODECS
from dtcomm.extensions.calibrate.emulate import emulate_all_reduce
from dtcomm.tp import functional
from dtcomm.tp.flash_all_reduce import flash_all_reduce
from tests.ranks.tp.test_flash_all_reduce import FEATURES, rank_input
from tests.support.rank_tests import on_ranks

SPECS = [
    *(name for name in CODECS if name not in ("none", "exact", "randk")),
    "int4:rotate=hadamard",
    "int2:spikes=1",
]


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks()
def test_sums_equal_those_of_the_emulation(rank: int, ranks: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [rank_input(source, dtype=dtype) for source in range(ranks)]
        for spec in SPECS:
            comm = tp.CommConfig.of(spec, algorithm="two_shot_symmetric")
            actual = flash_all_reduce(inputs[rank], comm).y
            assert torch.equal(actual, emulate_all_reduce(inputs, spec, "two_shot_symmetric")), (spec, dtype)
        assert flash_all_reduce(inputs[rank][:0], tp.CommConfig.of("int8")).y.shape == (0, FEATURES)
        # A lossless codec gives the plain sum with every algorithm.
        plain = functional.all_reduce(inputs[rank], tp.CommConfig.of("none", algorithm="two_shot_symmetric"))
        assert torch.equal(plain, emulate_all_reduce(inputs, "none", "one_shot"))
