"""The simulated sums of bench.partial_sums lose nothing with `none`, and more the more often a codec encodes."""

from __future__ import annotations

import pytest
import torch

from bench import partial_sums
from bench.training import recording
from bench.training.recommendation import RECOMMENDATION
from dtcomm.codecs import codec


def gradients(ranks: int) -> recording.Tensors:
    generator = torch.Generator().manual_seed(0)
    return [
        {name: torch.randn(numel, generator=generator) for name, numel in (("a", 3000), ("b", 1100))}
        for _ in range(ranks)
    ]


def terms(ranks: int) -> partial_sums.Terms:
    return partial_sums.Terms.of(gradients(ranks))


@pytest.mark.parametrize("algorithm", partial_sums.ALGORITHMS)
def test_uncompressed_sums_have_the_error_of_fp32(algorithm: str) -> None:
    squares = partial_sums.squares(codec("none"), algorithm, terms(8))
    assert set(squares) == {"a", "b"}
    assert partial_sums.vnmse(squares) < 1e-12


def test_rings_add_an_error_for_every_rank_and_two_shots_do_not() -> None:
    layout = codec("int4")

    def error(algorithm: str, ranks: int) -> float:
        return partial_sums.vnmse(partial_sums.squares(layout, algorithm, terms(ranks)))

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


def test_activations_of_fewer_ranks_are_sums_of_shares_and_add_up_to_the_layers_output() -> None:
    torch.manual_seed(0)
    block = torch.nn.Sequential()
    block.add_module("down", torch.nn.Linear(64, 32, bias=False))
    inputs = torch.randn(3, 5, 64)
    recorded = {"activations": {0: recording.row_parallel_terms(block, inputs, 16)}}
    for ranks in (1, 4, 16):
        terms = partial_sums.of_ranks(recorded, "activations", 0, ranks)
        assert len(terms) == ranks
        total = sum(own["down"] for own in terms)
        torch.testing.assert_close(total, block(inputs).flatten())
    (shares,) = (own["down"] for own in partial_sums.of_ranks(recorded, "activations", 0, 16)[:1])
    torch.testing.assert_close(shares, (inputs[..., :4] @ block.down.weight[:, :4].T).flatten())


def test_pieces_of_activations_are_those_of_some_rows() -> None:
    torch.manual_seed(0)
    block = torch.nn.Sequential()
    block.add_module("projection", torch.nn.Linear(64, 32, bias=False))
    inputs = torch.randn(3, 5, 64)
    terms = recording.row_parallel_terms(block, inputs, 4, piece=96)
    total = sum(own["projection"] for own in terms)
    torch.testing.assert_close(total, block(inputs).flatten(0, 1)[7:10].flatten())


def test_a_workload_is_trained_and_recorded_early_in_the_middle_and_at_its_end() -> None:
    recorded = recording.record_workload(RECOMMENDATION.shortened(20), ranks=3, piece=2048)
    assert list(recorded) == ["gradients"] and sorted(recorded["gradients"]) == [0, 9, 19]
    for of_ranks in recorded["gradients"].values():
        assert len(of_ranks) == 3
        names = set(of_ranks[0])
        assert len(names) > 1 and all(set(own) == names for own in of_ranks)
        assert max(x.numel() for x in of_ranks[0].values()) == 2048
        assert not any(torch.equal(of_ranks[0][name], of_ranks[1][name]) for name in names)
    early, late = (recorded["gradients"][step][0] for step in (0, 19))
    assert not any(torch.equal(early[name], late[name]) for name in early)
    result = partial_sums.measure(["int8", "intv"], [1, 2], recorded)
    assert result["steps"] == [0, 9, 19] and result["step"] == 9 and not result["hops"]
    written = partial_sums.page({"workload": "recommendation", **result})
    assert "| `intv` | 5.25" in written and "gradients, step 19" in written and "DynamiQ" not in written


def test_a_ring_whose_hops_have_one_codec_has_the_error_of_the_engines_ring() -> None:
    layout, eight = codec("int6"), terms(8)
    by_hop = partial_sums.vnmse(partial_sums.ring_by_hop([layout] * 8, eight))
    assert by_hop == pytest.approx(partial_sums.vnmse(partial_sums.squares(layout, "ring", eight)), rel=0.15)


def test_widths_by_hop_put_the_same_bytes_on_the_wire() -> None:
    rows = partial_sums.measure_hops(terms(9), 9)
    for last, mean in (("5", 5.25), ("6", 6.25)):
        bits = [row["bits"] for row in rows if row["name"].endswith(last)]
        assert bits == pytest.approx([mean] * len(bits), rel=0.02) and len(bits) > 1


def test_whole_matrices_are_those_of_a_workload(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        partial_sums.main(["--whole"])
    assert "--whole: only valid with --workload" in capsys.readouterr().err
    recorded = recording.record_workload(RECOMMENDATION.shortened(2), ranks=2, piece=None)
    sizes = {name: p.numel() for name, p in RECOMMENDATION.model().named_parameters() if p.ndim >= 2}
    (own, _) = recorded["gradients"][1]
    assert {name: x.numel() for name, x in own.items()} == {
        name: numel for name, numel in sizes.items() if numel >= recording.LEAST
    }
