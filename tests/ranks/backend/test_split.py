"""``dist.split_group`` on the backend. torch requires an accelerator; here the CPU takes its place."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
import torch.distributed as dist

import dtcomm
from dtcomm.launch.ranks import run_ranks


def split(rank: int, world_size: int) -> None:
    parent = dist.group.WORLD
    assert parent is not None
    parent.bound_device_id = torch.device("cpu", 0)  # set by init_process_group(device_id=...)
    with contextlib.ExitStack() as stack:
        for name, answer in (("is_available", True), ("current_accelerator", torch.device("cpu"))):
            stack.enter_context(mock.patch.object(torch.accelerator, name, return_value=answer))
        # Options are passed because torch would otherwise copy Gloo's, which cannot be copied (NCCL's can).
        options = object()
        even = dist.split_group(None, [[0, 2], [1]], pg_options=options, group_desc="halves")
        again = dist.split_group(even, [[1, 0]], pg_options=options) if rank != 1 else None
        nobody = dist.split_group(None, [[0, 1]], pg_options=options)
    assert (nobody is None) == (rank == 2)
    assert even is not None and even.group_desc == "halves"
    assert dist.get_process_group_ranks(even) == ([1] if rank == 1 else [0, 2])
    for group, members in ((even, dist.get_process_group_ranks(even)), (again, [0, 2]), (nobody, [0, 1])):
        if group is None:
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
    for group in (again, nobody, even):
        if group is not None:
            dist.destroy_process_group(group)


def test_split_groups_work_as_new_ones_do() -> None:
    run_ranks(split, 3, backend="dtcomm")
