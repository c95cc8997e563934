"""Which rows go where, and the order in which what comes back is summed."""

from __future__ import annotations

import torch

from dtcomm.moe.hops import make_hop, sum_slots, unique_destinations, with_zero_row


def test_destinations_are_counted_once_and_in_order() -> None:
    destinations = torch.tensor([[2, 0, 2], [3, 3, 3], [1, 3, 0], [1, 1, 1]])  # 3 is none
    assert unique_destinations(destinations, 3).tolist() == [[0, 2, 3], [3, 3, 3], [0, 1, 3], [1, 3, 3]]
    assert unique_destinations(torch.tensor([[0, 0], [1, 0]]), 1).tolist() == [[0], [0]]
    assert unique_destinations(torch.empty(0, 2, dtype=torch.int64), 3).shape == (0, 2)


def test_a_hop_sends_rows_in_the_order_of_the_ranks() -> None:
    # Destination 0 is rank 2, destination 1 rank 0: rank 0 receives rows 1 and 2, rank 2 rows 0 and 1.
    destinations = torch.tensor([[0, 2], [0, 1], [1, 2], [2, 2]])
    hop = make_hop("all ranks", destinations, [2, 0], [2, 0, 2], [0, 0, 0], 1, None)
    assert hop.send_index.tolist() == [1, 2, 0, 1]
    assert hop.slots.tolist() == [[2, 4], [3, 0], [1, 4], [4, 4]]
    rows = torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
    assert sum_slots(with_zero_row(rows), hop.slots).flatten().tolist() == [100, 1001, 10, 0]


def test_sums_are_in_fp32_in_the_order_of_the_columns_and_host_by_host() -> None:
    rows = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])
    assert sum_slots(rows, torch.tensor([[0, 1, 2, 3]])).item() == 1.0  # ((1e8 + 1) - 1e8) + 1
    begins = torch.tensor([[False, False, True, False]])
    assert sum_slots(rows, torch.tensor([[0, 1, 2, 3]]), begins).item() == 0.0  # (1e8 + 1) + (-1e8 + 1)
    assert sum_slots(rows, torch.tensor([[0, 2, 1, 3]]), begins).item() == 2.0
    small = torch.tensor([[256.0], [1.0], [1.0]]).bfloat16()
    assert sum_slots(small, torch.tensor([[0, 1, 2]])).item() == 258.0  # bf16 would round 257 to 256
