"""The state of a model that `dtcomm.tp.compress` converted: its layers, their traffic and the report."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dtcomm.collectives.groups import expected_call
from dtcomm.compress.report import Payoff, Report, Reporting, describe_uncompressed
from dtcomm.compress.traffic import Traffic, group_traffic, message_rows
from dtcomm.tp.comm_config import NONE, CallKind, CommConfig
from dtcomm.tp.functional import compiled_traffic
from dtcomm.tp.layer_plan import PlanEntry
from dtcomm.tp.sharded_module import ShardedModule

_COMPILED = "(compiled code)"  # stands for the layers of compiled code in reports

_log = logging.getLogger("dtcomm")


@dataclass
class _Counted:
    """Calls of one layer that have the same codec, dtype and reason.

    Attributes:
        name: The layer.
        traffic: Their counters.
        compressed: Expected seconds of them.
        uncompressed: Expected seconds of the same calls with codec none.
        source: Where the seconds come from; empty if they are not known, as for tensors on a device.
    """

    name: str
    traffic: Traffic
    compressed: float = 0.0
    uncompressed: float = 0.0
    source: str = ""

    def add(self, kind: CallKind, calls: int, group: dist.ProcessGroup | None) -> None:
        """Add calls of a kind."""
        sent, plain = (
            expected_call(kind.collective, kind.numel, kind.dtype, codec, kind.algorithm, group)
            for codec in (kind.codec, NONE)
        )
        self.traffic.calls += calls
        self.traffic.numel += calls * kind.numel
        if sent is None or plain is None:
            return
        self.traffic.wire_bytes += round(calls * sent.wire_bytes)
        self.traffic.plain_bytes += round(calls * plain.wire_bytes)
        self.compressed += calls * sent.seconds
        self.uncompressed += calls * plain.seconds
        self.source = plain.source if kind.on_cpu else ""


class State(Reporting):
    """What `compress` did to a model, and what the model has communicated since; ``str()`` gives one line.

    Args:
        model: The converted model.
        comm: The settings that its layers have in common.
        plan: Module name → entry of the plan.
        layers: Module name → the tensor-parallel layer.
        excluded: Module name → the pattern that leaves it uncompressed.

    Attributes:
        codec: Codec of the activations of layers that have none of their own.
        backward_codec: Codec of gradients.
        layers: Module name → kind (`KINDS`).
        codecs: Module name → codec, for layers whose codec the plan specifies.
        excluded: Module name → the pattern of ``exclude=`` that leaves it uncompressed.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: CommConfig,
        plan: Mapping[str, PlanEntry],
        layers: Mapping[str, ShardedModule],
        excluded: Mapping[str, str],
    ) -> None:
        self.codec, self.backward_codec = str(comm.codec), str(comm.backward_codec)
        self.layers = {name: entry.kind for name, entry in plan.items()}
        self.codecs = {
            name: entry.codec
            for name, entry in plan.items()
            if entry.codec is not None and name not in excluded
        }
        self.excluded = dict(excluded)
        self._comm = comm
        self._modules = dict(layers)
        # Counters of compiled code are those of its group: what other models have counted is left out.
        self._compiled_before = Counter(compiled_traffic(comm.group_name).counts)
        self._logged = False
        self._handles = [
            model.register_forward_pre_hook(self._begin_forward),
            model.register_forward_hook(self._end_forward),
        ]

    def report(self) -> Report:
        """Return what the layers have sent on this rank, by codec and by layer, and whether that paid.

        Bytes and times are those of the algorithms, for the calls that were counted. Nothing is communicated. Compiled
        code is counted by process group, not by layer.

        Example::

            state = dtcomm.tp.compress(model, mesh, "int8")
            model(tokens)
            state.print_report()
        """
        counted = self._count()
        traffic = [(part.name, part.traffic) for part in counted]
        rows = group_traffic(traffic)
        report = Report(
            integration="TP",
            rank=self._comm.rank,
            world_size=self._comm.world_size,
            policy=str(self),
            feedback=False,
            steps=None,
            messages=sum(row.calls for row in rows),
            wire_bytes=sum(row.wire_bytes for row in rows),
            plain_bytes=sum(row.plain_bytes for row in rows),
            seconds=None,
            residual_bytes=0,
            rows=rows,
            by_message=message_rows(traffic),
            uncompressed=describe_uncompressed(rows, "layers"),
            notes=tuple(f"exclude: {name} ({pattern!r})" for name, pattern in self.excluded.items()),
            payoff=self._payoff(counted),
        )
        self._log_uncompressed(report)
        return report

    def _payoff(self, counted: Sequence[_Counted]) -> Payoff | None:
        compresses = {self.codec, self.backward_codec, *self.codecs.values()} != {"none"}
        if not counted or not compresses or not all(part.source for part in counted):
            return None
        calls = sum(part.traffic.calls for part in counted)
        return Payoff(
            compressed_ms=sum(part.compressed for part in counted) * 1e3,
            uncompressed_ms=sum(part.uncompressed for part in counted) * 1e3,
            source="predicted",
            basis=counted[0].source,
            scope=f"exposed communication in {calls} calls",
        )

    def _count(self) -> list[_Counted]:
        """Return what the layers have sent, by layer, codec, dtype and reason."""
        # Compiled code may belong to another model that is trained meanwhile, but its sums are of this group too.
        compiled = Counter(compiled_traffic(self._comm.group_name).counts) - self._compiled_before
        sources = [(name, module.comm.traffic.counts) for name, module in self._modules.items()]
        counted: dict[tuple[str, str, str, str, str], _Counted] = {}
        for name, counts in [*sources, (_COMPILED, compiled)]:
            for kind, calls in counts.items():
                what = "gradients" if kind.backward else "activations"
                if name == _COMPILED:
                    what = "activations, gradients"
                traffic = Traffic(
                    codec=str(kind.codec),
                    what=what,
                    dtype=str(kind.dtype).removeprefix("torch."),
                    reason=kind.reason,
                    fallback=bool(kind.reason),
                    seconds=None,
                )
                key = (name, what, traffic.codec, traffic.dtype, traffic.reason)
                counted.setdefault(key, _Counted(name, traffic)).add(kind, calls, self._comm.group)
        return list(counted.values())

    def _begin_forward(self, module: nn.Module, inputs: Any) -> None:
        """Log before the second pass what the first one sent uncompressed, gradients included."""
        if not torch.compiler.is_compiling() and any(
            layer.comm.traffic.counts for layer in self._modules.values()
        ):
            self.report()

    def _end_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and not torch.is_grad_enabled():  # no backward pass follows
            self.report()

    def _log_uncompressed(self, report: Report) -> None:
        if not report.messages:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if report.uncompressed and not self._logged:
            self._logged = True
            if report.rank == 0:
                _log.warning("dtcomm.tp: %s", report.uncompressed)

    def __str__(self) -> str:
        kinds = _count_values(self.layers)
        from_plan = f" ({_count_values(self.codecs)} by the plan)" if self.codecs else ""
        excluded = f", {len(self.excluded)} excluded" if self.excluded else ""
        return (
            f"{len(self.layers)} layers ({kinds}): forward {self.codec}{from_plan}, "
            f"backward {self.backward_codec}{excluded}"
        )


def _count_values(mapping: dict[str, str]) -> str:
    return ", ".join(f"{count} {value}" for value, count in Counter(mapping.values()).items())
