"""Random operations that every rank can work out for itself, and what a rank does with one."""

from __future__ import annotations

import itertools
import random
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import dtcomm
from dtcomm.codecs import codec as parse
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.codecs.spec import CODECS as NAMES
from dtcomm.collectives.launch import Several

# Every codec there is, and options that change how bytes are made.
OPTIONS = (
    "int8:block=32,round=stochastic",
    "int4:symmetric=false",
    "int4:rotate=hadamard",
    "int3:spikes=1",
    "int2:scale=fp32",
    "fp8_e4m3:round=stochastic",
    "topk:ratio=0.2,values=int4",
    "randk:ratio=0.1",
)
CODECS = (*["none"] * 8, *(name for name in NAMES if name != "none"), *OPTIONS)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = tuple(ELEMENT_TYPES)
COLLECTIVES = (
    "all_reduce",
    "all_reduce",
    "all_reduce_coalesced",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "sendrecv",  # every member to the next
    "barrier",
)
REDUCING = ("all_reduce", "all_reduce_coalesced", "reduce_scatter", "reduce")
ALIKE = ("all_reduce", "all_reduce_coalesced", "all_gather", "broadcast")  # all ranks end with the same
LARGEST = 200_000
WINDOW = 3  # asynchronous operations in flight
WHOLE = -1
MOST_GROUPS = 12
LARGE_CHECK = 8  # one of so many large results is worked out, which costs more than the operation


@dataclass(frozen=True, kw_only=True)
class Operation:
    """``group`` indexes the subgroups, WHOLE is everyone; ``numel`` is one share's where there are shares."""

    index: int
    collective: str
    numel: int
    dtype: torch.dtype
    codec: str
    algorithm: str
    op: str
    group: int
    overlap: bool

    def input(self, rank: int, numel: int) -> torch.Tensor:
        """Small integers, so that every order of summing, and every codec's cast, gives the same values."""
        generator = torch.Generator().manual_seed(self.index * 64 + rank)
        values = torch.randint(0, 8, (numel,), generator=generator).to(self.dtype)
        return self.memory(values) if self.shared else values

    @property
    def shared(self) -> bool:
        """Whether inputs lie in memory that the other ranks can map."""
        return self.index % 5 == 0

    def memory(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` in such memory."""
        return dtcomm.empty(values.numel(), dtype=values.dtype).copy_(values)

    @property
    def feedback(self) -> bool:
        """Whether what encodings lose is kept."""
        lossy = "/" in self.codec or not parse(self.codec).lossless(self.dtype)
        ops = self.op in ("sum", "avg") and self.collective in ("all_reduce", "reduce", "reduce_scatter")
        return self.index % 3 == 0 and ops and lossy and self.dtype in FLOATS

    def splits(self, src: int, shares: int) -> list[int] | None:
        """What the member at ``src`` sends to each in an all_to_all; None, for equal shards, every other time."""
        if self.index % 2:
            return None
        return [self.numel * ((src + 2 * dst + self.index) % 5) // 4 for dst in range(shares)]

    @property
    def exact(self) -> bool:
        """Whether the result must equal Gloo's: no codec between, and no rounding of the average."""
        if self.codec != "none" or (self.op == "avg" and self.dtype not in FLOATS):
            return False
        return self.numel <= LARGEST // 10 or self.index % LARGE_CHECK == 0


def draw(
    chance: random.Random,
    index: int,
    groups: list[tuple[int, ...]],
    algorithms: dict[str, list[str]],
    hosts: Sequence[int],
) -> Operation:
    """The next operation of a seeded sequence; ``hosts[rank]`` is the host of a rank."""
    collective = chance.choice(COLLECTIVES)
    group = chance.randrange(-1, len(groups)) if groups else WHOLE
    members = range(len(hosts)) if group == WHOLE else groups[group]
    codec = chance.choice(CODECS)
    reduces = collective in REDUCING
    dtype = chance.choice([dtype for dtype in parse(codec).dtypes if dtype in DTYPES])
    if reduces and dtype is torch.bool:
        dtype = torch.uint8
    names = ["auto", *algorithms.get(collective.removesuffix("_coalesced"), [])]
    levels = "hierarchical" in names and len({hosts[member] for member in members}) > 1
    if (
        levels
        and collective != "all_reduce_coalesced"
        and codec not in ("none", "exact")
        and chance.random() < 0.3
    ):
        codec, names = f"none/{codec}", ["auto", "hierarchical"]
    valid = [op for op in parse(codec.rpartition("/")[2]).operations if op in ("min", "max")]
    ops = ["sum", "sum", *(["avg"] if dtype.is_floating_point else []), *valid]
    overlap = chance.random() < 0.5
    # With splits the call returns when all members have made it: a member that still owes others the comparison of
    # an earlier result with Gloo's, which they wait in, would keep all of them waiting.
    unequal = collective == "all_to_all" and index % 2 == 0
    return Operation(
        index=index,
        collective=collective,
        numel=min(LARGEST, int(2 ** chance.uniform(0, 17.7)) - 1),
        dtype=dtype,
        codec=codec,
        algorithm=chance.choice(names),
        op=chance.choice(ops) if reduces else "sum",
        group=group,
        overlap=overlap and not unequal,
    )


def memberships(ranks: int) -> list[tuple[int, ...]]:
    """Every subgroup of two or more ranks that is not all of them, or some of them where there are too many."""
    found = [g for size in range(2, ranks) for g in itertools.combinations(range(ranks), size)]
    return found if len(found) <= MOST_GROUPS else random.Random(ranks).sample(found, MOST_GROUPS)


class Runner:
    """One rank's end of a sequence: starts operations, finishes them in order, keeps digests of results."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.members = [*memberships(ranks), tuple(range(ranks))]  # WHOLE indexes the last
        self.groups = [*(dist.new_group(list(m)) for m in self.members[:-1]), None]
        # Communicators meet at their first call: here, while all ranks go through the groups in one order.
        for members, group in zip(self.members, self.groups, strict=True):
            if rank in members:
                dtcomm.all_reduce(torch.zeros(1), group=group)
        self.digests: dict[int, int] = {}
        self.differs: list[str] = []
        self._flying: deque[tuple[Operation, Any, torch.Tensor]] = deque()

    def start(self, operation: Operation) -> None:
        """Begins ``operation`` if this rank is a member; at most WINDOW are in flight."""
        if self.rank not in self.members[operation.group]:
            return
        if not operation.overlap:
            self.drain()
        work, output = self._call(operation)
        self._flying.append((operation, work, output))
        if not operation.overlap or len(self._flying) > WINDOW:
            self._finish()

    def drain(self) -> None:
        """Finishes whatever is in flight."""
        while self._flying:
            self._finish()

    def _call(self, operation: Operation) -> tuple[Any, torch.Tensor]:
        members = self.members[operation.group]
        common: dict[str, Any] = {
            "codec": operation.codec,
            "algorithm": operation.algorithm,
            "group": self.groups[operation.group],
            "async_op": operation.overlap,
        }
        n, shares = operation.numel, len(members)
        if operation.collective == "barrier":
            return dtcomm.barrier(group=common["group"], async_op=operation.overlap), torch.empty(0)
        if operation.collective == "sendrecv":
            return self._pass_on(operation, members)
        if operation.feedback:
            whole = n * shares if operation.collective == "reduce_scatter" else n
            common["residual"] = torch.zeros(whole)
        if operation.collective == "all_reduce":
            output = operation.input(self.rank, n)
            return dtcomm.all_reduce(output, operation.op, **common), output
        if operation.collective == "all_reduce_coalesced":
            output = operation.input(self.rank, n)
            # Uneven tensors, the middle one with a codec of its own.
            tensors = list(output.split([n // 7, n // 2, n - n // 7 - n // 2]))
            common["codec"] = [operation.codec, "none", operation.codec]
            return dtcomm.all_reduce_coalesced(tensors, operation.op, **common), output
        if operation.collective == "reduce_scatter":
            output = torch.empty(n, dtype=operation.dtype)
            whole = operation.input(self.rank, n * shares)
            return dtcomm.reduce_scatter(output, whole, operation.op, **common), output
        if operation.collective == "all_gather":
            output = torch.empty(n * shares, dtype=operation.dtype)
            return dtcomm.all_gather(output, operation.input(self.rank, n), **common), output
        if operation.collective == "all_to_all":
            return self._exchange(operation, members, common)
        root = members[operation.index % shares]
        if operation.collective == "gather":
            output = torch.empty(n * shares if self.rank == root else 0, dtype=operation.dtype)
            taken = output if self.rank == root else None
            return dtcomm.gather(operation.input(self.rank, n), taken, root, **common), output
        if operation.collective == "scatter":
            output = torch.empty(n, dtype=operation.dtype)
            given = operation.input(root, n * shares) if self.rank == root else None
            return dtcomm.scatter(output, given, root, **common), output
        output = operation.input(self.rank, n)
        if operation.collective == "reduce":
            return dtcomm.reduce(output, root, operation.op, **common), output
        return dtcomm.broadcast(output, root, **common), output

    def _pass_on(self, operation: Operation, members: tuple[int, ...]) -> tuple[Any, torch.Tensor]:
        mine, n = members.index(self.rank), operation.numel
        common: dict[str, Any] = {"codec": operation.codec, "group": self.groups[operation.group]}
        given, output = operation.input(self.rank, n), torch.empty(n, dtype=operation.dtype)
        following, before = members[(mine + 1) % len(members)], members[mine - 1]
        works = [
            dtcomm.send(given, following, async_op=True, **common),
            dtcomm.recv(output, before, async_op=True, **common),
        ]
        return Several([work for work in works if work is not None], [output]), output

    def _exchange(
        self, operation: Operation, members: tuple[int, ...], common: dict[str, Any]
    ) -> tuple[Any, torch.Tensor]:
        n, shares = operation.numel, len(members)
        mine = members.index(self.rank)
        sent = operation.splits(mine, shares)
        if sent is None:
            output = torch.empty(n * shares, dtype=operation.dtype)
            return dtcomm.all_to_all(output, operation.input(self.rank, n * shares), **common), output
        taken = [(operation.splits(src, shares) or [])[mine] for src in range(shares)]
        output = torch.empty(sum(taken), dtype=operation.dtype)
        given = operation.input(self.rank, sum(sent))
        return dtcomm.all_to_all(output, given, taken, sent, **common), output

    def _finish(self) -> None:
        operation, work, output = self._flying.popleft()
        if work is not None:
            work.wait()
        # Where ranks end with different results there is nothing to be identical to.
        if operation.collective in ALIKE:
            self.digests[operation.index] = zlib.crc32(output.view(torch.uint8).numpy().tobytes())
        if operation.exact and not torch.equal(output, self.expected(operation)):
            self.differs.append(str(operation))

    def expected(self, operation: Operation) -> torch.Tensor:
        """Gloo's result for all_reduce over the whole group; elsewhere worked out from the inputs."""
        members = self.members[operation.group]
        simple = operation.op != "avg" and operation.dtype is not torch.int16
        if operation.collective == "all_reduce" and operation.group == WHOLE and simple:
            output = operation.input(self.rank, operation.numel)
            kinds = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
            dist.all_reduce(output, kinds[operation.op])
            return output
        n, shares = operation.numel, len(members)
        mine, root = members.index(self.rank), members[operation.index % shares]
        if operation.collective == "barrier":
            return torch.empty(0)
        if operation.collective == "sendrecv":
            return operation.input(members[mine - 1], n)
        if operation.collective == "broadcast":
            return operation.input(root, n)
        if operation.collective == "scatter":
            return operation.input(root, n * shares)[mine * n : (mine + 1) * n]
        if operation.collective == "gather" and self.rank != root:
            return torch.empty(0, dtype=operation.dtype)
        if operation.collective in ("all_gather", "gather"):
            return torch.cat([operation.input(member, n) for member in members])
        if operation.collective == "all_to_all":
            shards = []
            for src, member in enumerate(members):
                sent = operation.splits(src, shares) or [n] * shares
                shards.append(operation.input(member, sum(sent)).split(sent)[mine])
            return torch.cat(shards)
        if operation.collective == "reduce" and self.rank != root:
            return operation.input(self.rank, n)
        scattered = operation.collective == "reduce_scatter"
        inputs = torch.stack([operation.input(member, n * shares if scattered else n) for member in members])
        if operation.op in ("min", "max"):
            whole = inputs.amin(0) if operation.op == "min" else inputs.amax(0)
        else:
            wide = inputs.to(torch.float32 if operation.dtype in FLOATS else operation.dtype).sum(0)
            whole = (wide / shares if operation.op == "avg" else wide).to(operation.dtype)
        return whole[mine * n : (mine + 1) * n] if scattered else whole
