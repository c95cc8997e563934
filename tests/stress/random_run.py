"""What a rank does with random operations: starts them, finishes them in order, keeps digests, checks results."""

from __future__ import annotations

import zlib
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

import dtcomm
from dtcomm.work import CompositeWork
from tests.stress import random_torch
from tests.stress.random_ops import ALIKE, FLOATS, WHOLE, Operation, memberships, own_schedule

WINDOW = 3  # asynchronous operations in flight
GLOO_CHECK = 4  # one of so many exact sums is compared with Gloo's, the others with sums of the inputs


class Runner:
    """One rank's end of a sequence: starts operations, finishes them in order, keeps digests of results."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.members = [*memberships(ranks), tuple(range(ranks))]  # WHOLE indexes the last
        self.groups = [*(dist.new_group(list(m)) for m in self.members[:-1]), None]
        self.through_torch = dist.get_backend() == "dtcomm"
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
        if self.through_torch and random_torch.applies(operation):
            return random_torch.call(operation, self.rank, members, common["group"])
        n, shares = operation.numel, len(members)
        if operation.collective == "barrier":
            return dtcomm.barrier(group=common["group"], async_op=operation.overlap), torch.empty(0)
        common["checksum"] = operation.checksum
        if operation.collective == "sendrecv":
            return self._pass_on(operation, members)
        if operation.feedback:
            whole = n * shares if operation.collective == "reduce_scatter" else n
            common["residual"] = torch.zeros(whole)
        if operation.collective == "all_reduce":
            output = operation.input(self.rank, n)
            return dtcomm.all_reduce(output, operation.op, audit=operation.audit, **common), output
        if operation.collective == "run":
            del common["algorithm"]
            output = operation.input(self.rank, n)
            schedule = own_schedule(operation.algorithm, shares, operation.index % shares)
            return dtcomm.run(schedule, output, op=operation.op, **common), output
        if operation.collective == "all_reduce_coalesced":
            output = operation.input(self.rank, n)
            tensors = list(output.split(operation.parts))
            self._mix(operation, common)
            return dtcomm.all_reduce_coalesced(tensors, operation.op, **common), output
        if operation.collective == "all_gather_coalesced":
            output = torch.empty(n * shares, dtype=operation.dtype)
            wholes = list(output.split([part * shares for part in operation.parts]))
            given = list(operation.input(self.rank, n).split(operation.parts))
            self._mix(operation, common)
            return dtcomm.all_gather_coalesced(wholes, given, **common), output
        if operation.collective == "reduce_scatter_coalesced":
            output = torch.empty(n, dtype=operation.dtype)
            wholes = list(
                operation.input(self.rank, n * shares).split([part * shares for part in operation.parts])
            )
            mine = list(output.split(operation.parts))
            self._mix(operation, common)
            return dtcomm.reduce_scatter_coalesced(mine, wholes, operation.op, **common), output
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

    def _mix(self, operation: Operation, common: dict[str, Any]) -> None:
        """The middle one of three tensors has a codec of its own; there may be several messages."""
        common["codec"] = [operation.codec, "none", operation.codec]
        common["bucket_bytes"] = operation.bucket_bytes

    def _pass_on(self, operation: Operation, members: tuple[int, ...]) -> tuple[Any, torch.Tensor]:
        mine, n = members.index(self.rank), operation.numel
        common: dict[str, Any] = {
            "codec": operation.codec,
            "group": self.groups[operation.group],
            "checksum": operation.checksum,
        }
        given, output = operation.input(self.rank, n), torch.empty(n, dtype=operation.dtype)
        following, before = members[(mine + 1) % len(members)], members[mine - 1]
        works = [
            dtcomm.send(given, following, async_op=True, **common),
            dtcomm.recv(output, before, async_op=True, **common),
        ]
        return CompositeWork([work for work in works if work is not None], [output]), output

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
        """Gloo's result for some sums over the whole group; elsewhere worked out from the inputs."""
        members = self.members[operation.group]
        simple = operation.op != "avg" and operation.dtype is not torch.int16 and not self.through_torch
        chosen = operation.index % GLOO_CHECK == 0 and operation.group == WHOLE
        if operation.collective == "all_reduce" and simple and chosen:
            output = operation.input(self.rank, operation.numel)
            dist.all_reduce(output, random_torch.OPS[operation.op])
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
        if operation.collective == "all_gather_coalesced":
            given = [operation.input(member, n).split(operation.parts) for member in members]
            return torch.cat([each[part] for part in range(3) for each in given])
        scattered = operation.collective in ("reduce_scatter", "reduce_scatter_coalesced")
        inputs = torch.stack([operation.input(member, n * shares if scattered else n) for member in members])
        if operation.op in ("min", "max"):
            whole = inputs.amin(0) if operation.op == "min" else inputs.amax(0)
        else:
            wide = inputs.to(torch.float32 if operation.dtype in FLOATS else operation.dtype).sum(0)
            whole = (wide / shares if operation.op == "avg" else wide).to(operation.dtype)
        if operation.collective == "reduce_scatter_coalesced":
            wholes = whole.split([part * shares for part in operation.parts])
            return torch.cat([each.chunk(shares)[mine] if each.numel() else each for each in wholes])
        return whole[mine * n : (mine + 1) * n] if scattered else whole
