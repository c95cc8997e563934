"""The layouts of a sequence: which queries see which keys, padding, and the order of tokens."""

from __future__ import annotations

import itertools

import pytest
import torch

from dtcomm.context_parallel import layout as layouts
from dtcomm.context_parallel import padded_length

CASES = list(itertools.product(layouts.LAYOUTS, (1, 2, 3, 5)))


def positions_of(layout: str, rank: int, ranks: int, tokens: int) -> list[int]:
    chunks = layouts.chunks_of(layout, rank, ranks)
    size = tokens // len(chunks)
    return [chunk * size + i for chunk in chunks for i in range(size)]


@pytest.mark.parametrize(("layout", "ranks"), CASES)
@pytest.mark.parametrize("padding", [0, 1, 5])
@pytest.mark.parametrize("is_causal", [False, True])
def test_visible_blocks_are_the_mask_of_the_whole_sequence(
    layout: str, ranks: int, padding: int, is_causal: bool
) -> None:
    tokens = 4
    length = max(1, tokens * ranks - padding)
    for rank in range(ranks):
        queries = positions_of(layout, rank, ranks, tokens)
        for source in range(ranks):
            keys = positions_of(layout, source, ranks, tokens)
            seen = torch.zeros(tokens, tokens, dtype=torch.bool)
            part = layouts.visible(layout, is_causal, rank, source, ranks, tokens, tokens, length)
            if part is not None:
                block = torch.ones_like(seen[part.queries, part.keys])
                seen[part.queries, part.keys] = block.tril() if part.causal else block
            for i, query in enumerate(queries):
                if query < length:  # what padded queries see does not matter
                    expected = [key < length and (key <= query or not is_causal) for key in keys]
                    assert seen[i].tolist() == expected, (rank, source, query)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_zigzag_gives_all_ranks_the_same_causal_work(ranks: int) -> None:
    tokens = 8
    pairs = []
    for rank in range(ranks):
        total = 0.0
        for source in range(ranks):
            part = layouts.visible("zigzag", True, rank, source, ranks, tokens, tokens)
            assert part is not None
            q, k = (piece.stop - piece.start for piece in (part.queries, part.keys))
            total += q * (q + 1) / 2 if part.causal else q * k
        pairs.append(total)
    assert len(set(pairs)) == 1
    assert sum(pairs) == tokens * ranks * (tokens * ranks + 1) / 2


@pytest.mark.parametrize(("layout", "ranks"), CASES)
def test_order_by_rank_is_the_inverse_of_order_by_position(layout: str, ranks: int) -> None:
    tokens = 6
    held = torch.tensor([positions_of(layout, rank, ranks, tokens) for rank in range(ranks)]).flatten()
    ordered = layouts.order_by_position(held, 0, layout, ranks)
    assert ordered.tolist() == list(range(tokens * ranks))
    assert torch.equal(layouts.order_by_rank(ordered, 0, layout, ranks), held)


def test_padded_lengths() -> None:
    assert [padded_length(length, 3) for length in (1, 6, 7)] == [6, 6, 12]
    assert [padded_length(length, 3, "contiguous") for length in (1, 3, 4)] == [3, 3, 6]
    assert padded_length(7, 1) == 7
    with pytest.raises(ValueError, match="length=0: expected 1 or more"):
        padded_length(0, 2)
    with pytest.raises(
        ValueError, match=r"layout: 'zig' is not one of zigzag, contiguous .did you mean 'zigzag'"
    ):
        padded_length(4, 2, "zig")
