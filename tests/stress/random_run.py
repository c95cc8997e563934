"""Run random operations on a rank: start them, finish them in order, keep digests, check results."""

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
    """One rank of a sequence: starts operations, finishes them in order, and keeps digests of results."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.members = [*memberships(ranks), tuple(range(ranks))]  # WHOLE indexes the last
        self.groups = [*(dist.new_group(list(m)) for m in self.members[:-1]), None]
        self.through_torch = dist.get_backend() == "dtcomm"
        # The first call creates a communicator; here all ranks go through the groups in the same order.
        for members, group in zip(self.members, self.groups, strict=True):
            if rank in members:
                dtcomm.all_reduce(torch.zeros(1), group=group)
        self.digests: dict[int, int] = {}
        self.differs: list[str] = []
        self._in_flight: deque[tuple[Operation, Any, torch.Tensor]] = deque()

    def start(self, operation: Operation) -> None:
        """Start ``operation`` if this rank is a member; at most WINDOW are in flight."""
        if self.rank not in self.members[operation.group]:
            return
        if not operation.overlap:
            self.drain()
        work, output = self._call(operation)
        self._in_flight.append((operation, work, output))
        if not operation.overlap or len(self._in_flight) > WINDOW:
            self._finish()

    def drain(self) -> None:
        """Finish all operations in flight."""
        while self._in_flight:
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
            return self._send_to_next(operation, members)
        if operation.feedback:
            full = n * shares if operation.collective == "reduce_scatter" else n
            common["residual"] = torch.zeros(full)
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
            full_tensors = list(output.split([part * shares for part in operation.parts]))
            inputs = list(operation.input(self.rank, n).split(operation.parts))
            self._mix(operation, common)
            return dtcomm.all_gather_coalesced(full_tensors, inputs, **common), output
        if operation.collective == "reduce_scatter_coalesced":
            output = torch.empty(n, dtype=operation.dtype)
            full_tensors = list(
                operation.input(self.rank, n * shares).split([part * shares for part in operation.parts])
            )
            shards = list(output.split(operation.parts))
            self._mix(operation, common)
            return dtcomm.reduce_scatter_coalesced(shards, full_tensors, operation.op, **common), output
        if operation.collective == "reduce_scatter":
            output = torch.empty(n, dtype=operation.dtype)
            full = operation.input(self.rank, n * shares)
            return dtcomm.reduce_scatter(output, full, operation.op, **common), output
        if operation.collective == "all_gather":
            output = torch.empty(n * shares, dtype=operation.dtype)
            return dtcomm.all_gather(output, operation.input(self.rank, n), **common), output
        if operation.collective == "all_to_all":
            return self._exchange(operation, members, common)
        root = members[operation.index % shares]
        if operation.collective == "gather":
            output = torch.empty(n * shares if self.rank == root else 0, dtype=operation.dtype)
            gathered = output if self.rank == root else None
            return dtcomm.gather(operation.input(self.rank, n), gathered, root, **common), output
        if operation.collective == "scatter":
            output = torch.empty(n, dtype=operation.dtype)
            inputs = operation.input(root, n * shares) if self.rank == root else None
            return dtcomm.scatter(output, inputs, root, **common), output
        output = operation.input(self.rank, n)
        if operation.collective == "reduce":
            return dtcomm.reduce(output, root, operation.op, **common), output
        return dtcomm.broadcast(output, root, **common), output

    def _mix(self, operation: Operation, common: dict[str, Any]) -> None:
        """Give the middle one of three tensors its own codec, and choose the number of messages."""
        common["codec"] = [operation.codec, "none", operation.codec]
        common["bucket_bytes"] = operation.bucket_bytes

    def _send_to_next(self, operation: Operation, members: tuple[int, ...]) -> tuple[Any, torch.Tensor]:
        position, n = members.index(self.rank), operation.numel
        common: dict[str, Any] = {
            "codec": operation.codec,
            "group": self.groups[operation.group],
            "checksum": operation.checksum,
        }
        sent, output = operation.input(self.rank, n), torch.empty(n, dtype=operation.dtype)
        following, before = members[(position + 1) % len(members)], members[position - 1]
        works = [
            dtcomm.send(sent, following, async_op=True, **common),
            dtcomm.recv(output, before, async_op=True, **common),
        ]
        return CompositeWork([work for work in works if work is not None], [output]), output

    def _exchange(
        self, operation: Operation, members: tuple[int, ...], common: dict[str, Any]
    ) -> tuple[Any, torch.Tensor]:
        n, shares = operation.numel, len(members)
        position = members.index(self.rank)
        sent = operation.splits(position, shares)
        if sent is None:
            output = torch.empty(n * shares, dtype=operation.dtype)
            return dtcomm.all_to_all(output, operation.input(self.rank, n * shares), **common), output
        received = [(operation.splits(src, shares) or [])[position] for src in range(shares)]
        output = torch.empty(sum(received), dtype=operation.dtype)
        input_tensor = operation.input(self.rank, sum(sent))
        return dtcomm.all_to_all(output, input_tensor, received, sent, **common), output

    def _finish(self) -> None:
        operation, work, output = self._in_flight.popleft()
        if work is not None:
            work.wait()
        # Only collectives that give all ranks the same result have a digest.
        if operation.collective in ALIKE:
            self.digests[operation.index] = zlib.crc32(output.view(torch.uint8).numpy().tobytes())
        if operation.exact and not torch.equal(output, self.expected(operation)):
            self.differs.append(str(operation))

    def expected(self, operation: Operation) -> torch.Tensor:
        """Return the exact result: Gloo's for some sums over the whole group, otherwise computed from the inputs."""
        members = self.members[operation.group]
        simple = operation.op != "avg" and operation.dtype is not torch.int16 and not self.through_torch
        chosen = operation.index % GLOO_CHECK == 0 and operation.group == WHOLE
        if operation.collective == "all_reduce" and simple and chosen:
            output = operation.input(self.rank, operation.numel)
            dist.all_reduce(output, random_torch.OPS[operation.op])
            return output
        n, shares = operation.numel, len(members)
        position, root = members.index(self.rank), members[operation.index % shares]
        if operation.collective == "barrier":
            return torch.empty(0)
        if operation.collective == "sendrecv":
            return operation.input(members[position - 1], n)
        if operation.collective == "broadcast":
            return operation.input(root, n)
        if operation.collective == "scatter":
            return operation.input(root, n * shares)[position * n : (position + 1) * n]
        if operation.collective == "gather" and self.rank != root:
            return torch.empty(0, dtype=operation.dtype)
        if operation.collective in ("all_gather", "gather"):
            return torch.cat([operation.input(member, n) for member in members])
        if operation.collective == "all_to_all":
            shards = []
            for src, member in enumerate(members):
                sent = operation.splits(src, shares) or [n] * shares
                shards.append(operation.input(member, sum(sent)).split(sent)[position])
            return torch.cat(shards)
        if operation.collective == "reduce" and self.rank != root:
            return operation.input(self.rank, n)
        if operation.collective == "all_gather_coalesced":
            inputs_by_rank = [operation.input(member, n).split(operation.parts) for member in members]
            return torch.cat([tensor[part] for part in range(3) for tensor in inputs_by_rank])
        scattered = operation.collective in ("reduce_scatter", "reduce_scatter_coalesced")
        inputs = torch.stack([operation.input(member, n * shares if scattered else n) for member in members])
        if operation.op in ("min", "max"):
            reduced = inputs.amin(0) if operation.op == "min" else inputs.amax(0)
        else:
            wide = inputs.to(torch.float32 if operation.dtype in FLOATS else operation.dtype).sum(0)
            reduced = (wide / shares if operation.op == "avg" else wide).to(operation.dtype)
        if operation.collective == "reduce_scatter_coalesced":
            full_tensors = reduced.split([part * shares for part in operation.parts])
            return torch.cat(
                [tensor.chunk(shares)[position] if tensor.numel() else tensor for tensor in full_tensors]
            )
        return reduced[position * n : (position + 1) * n] if scattered else reduced
