"""``dist.split_group`` on the backend. torch requires an accelerator; here the CPU takes its place."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
import torch.distributed as dist

import dtcomm
from tests.support.rank_tests import on_ranks


@on_ranks(3, backend="dtcomm")
def test_split_groups_run_collectives(rank: int, world_size: int) -> None:
    parent = dist.group.WORLD
    assert parent is not None
    parent.bound_device_id = torch.device("cpu", 0)  # set by init_process_group(device_id=...)
    with contextlib.ExitStack() as stack:
        for name, answer in (("is_available", True), ("current_accelerator", torch.device("cpu"))):
            stack.enter_context(mock.patch.object(torch.accelerator, name, return_value=answer))
        # Options are passed because torch would otherwise copy Gloo's, which cannot be copied (NCCL's can).
        options = object()
        halves = dist.split_group(None, [[0, 2], [1]], pg_options=options, group_desc="halves")
        reversed_pair = dist.split_group(halves, [[1, 0]], pg_options=options) if rank != 1 else None
        first_two = dist.split_group(None, [[0, 1]], pg_options=options)
    # Ranks outside of the new group get None, or from torch 2.15 on dist.GroupMember.NON_GROUP_MEMBER.
    assert isinstance(first_two, dist.ProcessGroup) == (rank != 2)
    assert halves is not None and halves.group_desc == "halves"
    assert dist.get_process_group_ranks(halves) == ([1] if rank == 1 else [0, 2])
    # Up to 2.14 torch sorts the ranks.
    pair = dist.get_process_group_ranks(reversed_pair) if isinstance(reversed_pair, dist.ProcessGroup) else []
    assert pair in ([], [0, 2], [2, 0]) and (not pair or reversed_pair.rank() == pair.index(rank))
    for group, members in (
        (halves, dist.get_process_group_ranks(halves)),
        (reversed_pair, pair),
        (first_two, [0, 1]),
    ):
        if not isinstance(group, dist.ProcessGroup):
            continue
        tensor = torch.full((1000,), float(rank + 1))
        dist.all_reduce(tensor, group=group)
        assert tensor.eq(sum(member + 1 for member in members)).all()
        ranks_of_group = [0] * len(members)
        dist.all_gather_object(ranks_of_group, rank, group=group)
        assert ranks_of_group == members
        if len(members) > 1:
            assert dtcomm.info(group)["runtime"] == "native"
    in_parent = torch.ones(10)
    dist.all_reduce(in_parent)  # the parent group still works
    assert in_parent.eq(world_size).all()
    for group in (reversed_pair, first_two, halves):
        if group is not None:
            dist.destroy_process_group(group)
