"""The simulated sums of bench.partial_sums lose nothing with `none`, and more the more often a codec encodes."""

from __future__ import annotations

import pytest
import torch

from bench import partial_sums
from dtcomm.codecs import codec


def gradients(ranks: int) -> partial_sums.Gradients:
    generator = torch.Generator().manual_seed(0)
    return [
        {name: torch.randn(numel, generator=generator) for name, numel in (("a", 3000), ("b", 1100))}
        for _ in range(ranks)
    ]


@pytest.mark.parametrize("algorithm", partial_sums.ALGORITHMS)
def test_uncompressed_sums_have_the_error_of_fp32(algorithm: str) -> None:
    squares = partial_sums.squares(codec("none"), algorithm, gradients(8))
    assert set(squares) == {"a", "b"}
    assert partial_sums.vnmse(squares) < 1e-12


def test_rings_add_an_error_for_every_rank_and_two_shots_do_not() -> None:
    layout = codec("int4")

    def error(algorithm: str, ranks: int) -> float:
        return partial_sums.vnmse(partial_sums.squares(layout, algorithm, gradients(ranks)))

    once = error("two_shot", 1)
    assert error("two_shot", 16) < 3 * once
    assert error("ring", 16) > 2 * error("ring", 4) > 2 * once
    assert error("two_shot", 16) < error("tree", 16) < error("ring", 16)


def test_every_codec_but_those_without_a_loss_is_measured() -> None:
    specs = partial_sums.codecs()
    assert {"fp16", "int8", "int4:block=128", "fp8_e3m4", "nvfp4", "intv", "sign", "topk"} <= {
        spec.partition(":")[0] if spec.startswith("topk") else spec for spec in specs
    }
    assert not {"none", "exact", "lossless"} & set(specs)
