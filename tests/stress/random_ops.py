"""Random operations, the same on every rank without communication."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

import dtcomm
from dtcomm import algorithms
from dtcomm.codecs import codec as parse
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.codecs.spec import CODECS as NAMES
from dtcomm.schedule import Schedule

# Every codec, and options that change how bytes are computed.
OPTIONS = (
    "int8:block=32,round=stochastic",
    "int4:symmetric=false",
    "int4:rotate=hadamard",
    "int3:spikes=1",
    "int2:scale=fp32",
    "fp8_e4m3:round=stochastic",
    "topk:ratio=0.2,values=int4",
    "randk:ratio=0.1",
    "randk:ratio=0.1,positions=shared",
    "exact:bits=16",
)
CODECS = (*["none"] * 8, *(name for name in NAMES if name != "none"), *OPTIONS)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = tuple(ELEMENT_TYPES)
COLLECTIVES = (
    "all_reduce",
    "all_reduce",
    "all_reduce_coalesced",
    "run",  # an all-reduce with a custom schedule
    "reduce_scatter",
    "reduce_scatter_coalesced",
    "all_gather",
    "all_gather_coalesced",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "sendrecv",  # every member to the next
    "barrier",
)
REDUCING = ("all_reduce", "all_reduce_coalesced", "run", "reduce_scatter", "reduce")
ALIKE = (
    "all_reduce",
    "all_reduce_coalesced",
    "run",
    "all_gather",
    "broadcast",
)  # all ranks end with the same result
LARGEST = 200_000
LARGE = 0.15  # share of large operations
WHOLE = -1
MOST_GROUPS = 12
LARGE_CHECK = 8  # one of so many large results is checked, since that takes longer than the operation


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A random operation.

    ``group`` indexes the subgroups, WHOLE is all ranks; ``numel`` is that of one shard if there are shards.
    """

    index: int
    collective: str
    numel: int
    dtype: torch.dtype
    codec: str
    algorithm: str
    op: str
    group: int
    overlap: bool
    checksum: bool

    def input(self, rank: int, numel: int) -> torch.Tensor:
        """Return small integers, so that every order of summation and every codec's cast gives the same values."""
        generator = torch.Generator().manual_seed(self.index * 64 + rank)
        values = torch.randint(0, 8, (numel,), generator=generator).to(self.dtype)
        return self.memory(values) if self.shared else values

    @property
    def shared(self) -> bool:
        """Whether inputs are in memory that the other ranks can map."""
        return self.index % 5 == 0

    def memory(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` in memory that the other ranks can map."""
        return dtcomm.empty(values.numel(), dtype=values.dtype).copy_(values)

    @property
    def feedback(self) -> bool:
        """Whether the operation has error feedback."""
        lossy = "/" in self.codec or not parse(self.codec).lossless(self.dtype)
        ops = self.op in ("sum", "avg") and self.collective in (
            "all_reduce",
            "run",
            "reduce",
            "reduce_scatter",
        )
        return self.index % 3 == 0 and ops and lossy and self.dtype in FLOATS

    @property
    def audit(self) -> bool:
        """Whether the sum is checked with ``audit``."""
        return self.index % 2 == 0 and self.collective == "all_reduce" and self.codec.startswith("exact")

    @property
    def parts(self) -> list[int]:
        """Numbers of elements of the uneven tensors of a coalesced call, per shard."""
        return [self.numel // 7, self.numel // 2, self.numel - self.numel // 7 - self.numel // 2]

    @property
    def bucket_bytes(self) -> int:
        """The bucket size of a coalesced call: from one message per tensor to one message in all."""
        return (1, 4096, 25 * 2**20)[self.index % 3]

    def splits(self, src: int, shares: int) -> list[int] | None:
        """Return what the member at ``src`` sends to each member in an all_to_all; None: equal shards."""
        if self.index % 2:
            return None
        return [self.numel * ((src + 2 * dst + self.index) % 5) // 4 for dst in range(shares)]

    @property
    def exact(self) -> bool:
        """Whether the result must be the exact sum: there is no codec and no rounding of the average."""
        if self.codec != "none" or (self.op == "avg" and self.dtype not in FLOATS):
            return False
        return self.numel <= LARGEST // 10 or self.index % LARGE_CHECK == 0


def draw(
    chance: random.Random,
    index: int,
    groups: list[tuple[int, ...]],
    names: dict[str, list[str]],
    hosts: Sequence[int],
) -> Operation:
    """Return the next operation of a seeded sequence; ``hosts`` are by rank, ``names`` are the algorithms."""
    collective = chance.choice(COLLECTIVES)
    group = chance.randrange(-1, len(groups)) if groups else WHOLE
    members = range(len(hosts)) if group == WHOLE else groups[group]
    codec = chance.choice(CODECS)
    reduces = collective in REDUCING
    dtype = chance.choice([dtype for dtype in parse(codec).dtypes if dtype in DTYPES])
    if reduces and dtype is torch.bool:
        dtype = torch.uint8
    known = names.get("all_reduce" if collective == "run" else collective.removesuffix("_coalesced"), [])
    valid = ["auto", *known]
    if collective == "run":
        valid = [name for name in known if name != "hierarchical"]
    levels = "hierarchical" in valid and len({hosts[member] for member in members}) > 1
    single = "coalesced" not in collective and codec not in ("none", "randk:ratio=0.1,positions=shared")
    if levels and single and not codec.startswith("exact") and chance.random() < 0.3:
        codec, valid = f"none/{codec}", ["auto", "hierarchical"]
    some = [op for op in parse(codec.rpartition("/")[2]).operations if op in ("min", "max")]
    ops = ["sum", "sum", *(["avg"] if dtype.is_floating_point else []), *some]
    overlap = chance.random() < 0.5
    # With splits the call returns when all members have made it. Members that still wait in the comparison of an
    # earlier result with Gloo's would deadlock with one that has not reached that comparison.
    unequal = collective == "all_to_all" and index % 2 == 0
    most = 17.7 if chance.random() < LARGE else 12.0
    return Operation(
        index=index,
        collective=collective,
        numel=min(LARGEST, int(2 ** chance.uniform(0, most)) - 1),
        dtype=dtype,
        codec=codec,
        algorithm=chance.choice(valid),
        op=chance.choice(ops) if reduces else "sum",
        group=group,
        overlap=overlap and not unequal,
        checksum=chance.random() < 0.1,
    )


def sequence(seed: int | str, ranks: int, count: int, hosts: int = 1) -> list[Operation]:
    """Return ``count`` operations of ``ranks`` ranks on ``hosts`` hosts; the same on every rank."""
    chance, groups = random.Random(f"{seed}/{ranks}/{hosts}"), memberships(ranks)
    names = {name: list(algorithms.available(name)) for name in algorithms.collectives()}
    host_of_rank = [host_of(rank, ranks, hosts) for rank in range(ranks)]
    return [draw(chance, index, groups, names, host_of_rank) for index in range(count)]


def host_of(rank: int, ranks: int, hosts: int) -> int:
    """Return the host of a rank: 4 ranks on 3 hosts are 2 + 1 + 1."""
    return rank * hosts // ranks


def memberships(ranks: int) -> list[tuple[int, ...]]:
    """Return every proper subgroup of two or more ranks, or a sample of them if there are too many."""
    subgroups = [g for size in range(2, ranks) for g in itertools.combinations(range(ranks), size)]
    return subgroups if len(subgroups) <= MOST_GROUPS else random.Random(ranks).sample(subgroups, MOST_GROUPS)


@functools.lru_cache(maxsize=64)
def own_schedule(algorithm: str, ranks: int, shift: int) -> Schedule:
    """Return an all-reduce that no algorithm builds: that of ``algorithm`` with the ranks rotated by ``shift``."""
    schedule = algorithms.build(algorithm, "all_reduce", ranks)
    moved = tuple(
        replace(transfer, src=(transfer.src + shift) % ranks, dst=(transfer.dst + shift) % ranks)
        for transfer in schedule.transfers
    )
    return replace(schedule, transfers=moved)
