"""Compressed all-gather of parameters and reduce-scatter of gradients for FSDP.

    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    state = dtcomm.fsdp.compress(model, gradients="int8", parameters="fp8_e4m3")

Works on FSDP2 (`fully_shard`), every wrapped module by itself, and on FSDP1 for gradients, whose hook is the only one
that it has. The idea is ZeRO++'s (Wang et al. 2023, arXiv:2306.10209): both collectives move a quarter of the bytes.
Every rank, the owner included, computes with the decoded parameters, so all compute the same; the optimiser steps on
the owner's exact ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, Comm, ReduceScatter

from dtcomm.codecs import Codec, codec
from dtcomm.collectives import Work, all_gather, all_reduce, reduce_scatter
from dtcomm.compress.checkpoint import VERSION, share_of
from dtcomm.compress.feedback import Residuals
from dtcomm.compress.report import human

_OPS = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "avg"}


@dataclass
class Traffic:
    """What one module's collectives of a kind did on this rank: bytes sent, and what they were uncompressed."""

    codec: str
    calls: int = 0
    wire_bytes: int = 0
    plain_bytes: int = 0
    why: str = ""

    def add(self, work: Work, plain: int) -> None:
        """Count one call; ``plain`` bytes are what the tensor has that this rank sends."""
        self.calls += 1
        self.wire_bytes += work.wire_bytes
        self.plain_bytes += plain


@dataclass
class Report:
    """``str()`` gives a table, ``to_dict()`` plain values; bytes are this rank's."""

    modules: dict[str, dict[str, Traffic]] = field(default_factory=dict)
    residual_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Module name → "parameters" and "gradients" → counts."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{'module':<32} {'what':<10} {'codec':<24} {'calls':>6} {'sent':>10} {'instead of':>10}"]
        for name, kinds in self.modules.items():
            for kind, traffic in kinds.items():
                lines.append(
                    f"{name or '(root)':<32} {kind:<10} {traffic.codec:<24} {traffic.calls:>6} "
                    f"{human(traffic.wire_bytes):>10} {human(traffic.plain_bytes):>10} {traffic.why}".rstrip()
                )
        lines.append(f"{human(self.residual_bytes)} of residuals")
        return "\n".join(lines)


class State:
    """What the collectives of a model's modules remember and count; made by `compress`."""

    def __init__(self, gradients: Codec, parameters: Codec, feedback: bool, seed: int) -> None:
        self.gradients, self.parameters = gradients, parameters
        self.feedback = feedback
        self.seed = seed
        self.calls = 0
        self._residuals = Residuals()
        self._report = Report()

    def report(self) -> Report:
        """What was sent, by module, and for whatever was not compressed, why."""
        self._report.residual_bytes = self._residuals.nbytes()
        return self._report

    def traffic(self, module: str, kind: str, which: Codec) -> Traffic:
        """The counter of a module's "parameters" or "gradients"."""
        return self._report.modules.setdefault(module, {}).setdefault(kind, Traffic(str(which)))

    def next_seed(self) -> int:
        """Of stochastic rounding: the same on all ranks, which call the same collectives in the same order."""
        self.calls += 1
        return self.seed + self.calls

    def residual(self, module: str, like: torch.Tensor) -> torch.Tensor | None:
        """The error that this rank's gradients of a module have left so far; None without feedback."""
        return self._residuals.get(module, like) if self.feedback else None

    def rescale(self, factor: float) -> None:
        """Multiply the residuals by ``factor``: for a loss scale that changed by it between two steps."""
        self._residuals.scale(factor)

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals by module name, and the counters; every rank saves its own."""
        return {
            "version": VERSION,
            "calls": self.calls,
            "seed": self.seed,
            "rank": dist.get_rank(),
            "world_size": dist.get_world_size(),
            "residuals": self._residuals.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from `state_dict`; ValueError where it comes from another number of ranks.

        With another number of ranks a module's gradients are padded to other lengths, so residuals do not carry over.
        """
        first, residuals = share_of(state, dist.get_rank(), dist.get_world_size())
        self.calls, self.seed = first["calls"], first["seed"]
        self._residuals.load_state_dict(residuals)


class _Collective(Comm):
    """What FSDP2 asks of a collective besides moving bytes."""

    def __init__(self, state: State, module: str) -> None:
        self.state, self.module = state, module

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Collective, AllGather):
    """One module's all-gather."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        which = self.state.parameters
        traffic = self.state.traffic(self.module, "parameters", which)
        which = _fitting(which, input_tensor, traffic)
        # The input lies within the output, which is written while others still read what was encoded.
        own = input_tensor.clone()
        work = all_gather(
            output_tensor, own, codec=which, group=group, seed=self.state.next_seed(), async_op=True
        )
        assert work is not None  # it is with async_op
        return _finish(work, traffic, own.numel() * own.element_size() * (group.size() - 1), async_op)


class _Scatter(_Collective, ReduceScatter):
    """One module's reduce-scatter."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        which = self.state.gradients
        traffic = self.state.traffic(self.module, "gradients", which)
        which = _fitting(which, input_tensor, traffic)
        lossy = not which.lossless(input_tensor.dtype)
        work = reduce_scatter(
            output_tensor,
            input_tensor,
            op_name(op),
            codec=which,
            group=group,
            seed=self.state.next_seed(),
            residual=self.state.residual(self.module, input_tensor) if lossy else None,
            async_op=True,
        )
        assert work is not None  # it is with async_op
        sent = input_tensor.numel() * input_tensor.element_size() * (group.size() - 1) // group.size()
        return _finish(work, traffic, sent, async_op)


class _Later(dist.Work):
    """A started collective, as FSDP waits for it."""

    def __init__(self, work: Work, traffic: Traffic, plain: int) -> None:
        super().__init__()
        self._work, self._traffic, self._plain = work, traffic, plain

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        self._traffic.add(self._work, self._plain)
        return True


def _finish(work: Work, traffic: Traffic, plain: int, async_op: bool) -> dist.Work | None:
    later = _Later(work, traffic, plain)
    if async_op:
        return later
    later.wait()
    return None


def _fitting(which: Codec, tensor: torch.Tensor, traffic: Traffic) -> Codec:
    """`which`, or none where it does not take the tensor's type; the report says so."""
    if tensor.dtype in which.dtypes:
        return which
    traffic.codec, traffic.why = "none", f"{which} does not take {str(tensor.dtype).removeprefix('torch.')}"
    return codec("none")


def op_name(op: Any) -> str:
    """FSDP's reduction as ours. ValueError for a sum that is multiplied first, whose factor torch does not tell."""
    name = _OPS.get(op)
    if name is None:
        raise ValueError(
            f"fsdp: the reduce-scatter's op is {op}, whose factor cannot be read; "
            "call set_force_sum_reduction_for_comms(True) on the module, or leave its divide factor alone"
        )
    return name


def compress(
    model: torch.nn.Module,
    gradients: str | Codec = "int8",
    parameters: str | Codec = "none",
    *,
    feedback: bool = False,
    seed: int = 0,
) -> State:
    """Compress the collectives of every FSDP module in `model`.

    gradients, parameters: codecs (or their specs) of the reduce-scatter and the all-gather. feedback: keep what each
    rank's gradient encodings lose and add it to the next ones; that is a fp32 copy of every module's whole gradient
    on every rank, so it is off by default. Of HSDP the all-reduce between replicas stays torch's: there is no hook.

    TypeError where `model` has no FSDP module, or FSDP1 is asked to compress parameters, which it has no hook for.
    """
    state = State(codec(gradients), codec(parameters), feedback, seed)
    if isinstance(model, FullyShardedDataParallel):
        if str(state.parameters) != "none":
            raise TypeError(
                "parameters: FSDP1 has a hook for gradients only; valid: 'none', or FSDP2's fully_shard"
            )
        model.register_comm_hook(state, _fsdp1_hook)
        return state
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    if not found:
        raise TypeError(f"model: {type(model).__name__} has no module that fully_shard was applied to")
    for name, module in found:
        module.set_custom_all_gather(_Gather(state, name))
        module.set_custom_reduce_scatter(_Scatter(state, name))
    return state


def _fsdp1_hook(state: State, gradient: torch.Tensor, shard: torch.Tensor | None = None) -> None:
    """FSDP1 hands over its whole gradient, or a padded one and where this rank's part of the mean goes."""
    name = f"unit of {gradient.numel()} elements"
    traffic = state.traffic(name, "gradients", state.gradients)
    which = _fitting(state.gradients, gradient, traffic)
    options: dict[str, Any] = {"codec": which, "seed": state.next_seed(), "async_op": True}
    if shard is None:
        work = all_reduce(gradient, "avg", **options)
    else:
        work = reduce_scatter(shard, gradient, "avg", **options)
    assert work is not None  # it is with async_op
    work.wait()
    ranks = dist.get_world_size()
    traffic.add(work, gradient.numel() * gradient.element_size() * (ranks - 1) // ranks)
