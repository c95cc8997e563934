"""ZeRO stages 1 and 2 for any optimiser of torch (Rajbhandari et al. 2020, arXiv:1910.02054), compressed.

    optimiser = dtcomm.fsdp.ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-3, gradients="int8")
    loss.backward()          # gradients are reduce-scattered while it runs
    optimiser.step()         # on this rank's shard, then parameters are gathered

The model stays as it is, whole on every rank: no wrapper, and no DDP around it. Optimiser state is cut over the ranks
(stage 1), and so are gradients, which go as soon as their bucket is reduced (stage 2). Parameters are stepped in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from dtcomm.codecs import Codec
from dtcomm.collectives import Work, all_gather, all_reduce, broadcast, reduce_scatter
from dtcomm.compress.guard import Event, Guard
from dtcomm.fsdp import spec
from dtcomm.fsdp.optimizer_bucket import Bucket
from dtcomm.fsdp.reduction import Reduction
from dtcomm.fsdp.report import Report
from dtcomm.fsdp.state import State, fitting

MIB = 2**20
_GUARD = Guard()
Named = Iterable[tuple[str, torch.nn.Parameter]]


class ShardedOptimizer(torch.optim.Optimizer):
    """Steps on one shard of every parameter a rank; `param_groups` and `state` are those of the shards.

    parameters: named parameters, or groups of them: dicts with "params" (named) and options. optimizer: a class of
    torch.optim that works element by element (SGD, Adam, AdamW, RMSprop). gradients, parameters_codec: recipes, as
    `dtcomm.fsdp.compress` takes them (``delta:`` costs no memory here: the model itself is the reference). stage: 1
    keeps whole gradients in ``parameter.grad``, 2 gives them up bucket by bucket. residual: the form of ``ef:``'s
    residuals, fp32, bf16 or int8. guard, sample_every: as `dtcomm.fsdp.compress` takes them, bucket by bucket; a step
    ends with `step`. The remaining options are the optimiser's.

    Gradients are averaged over the ranks. `clip_grad_norm_` clips by the norm of all shards. Raises ValueError or
    TypeError naming the argument.
    """

    def __init__(
        self,
        parameters: Named | Sequence[dict[str, Any]],
        optimizer: Callable[..., torch.optim.Optimizer],
        *,
        gradients: str | Codec = "none",
        parameters_codec: str | Codec = "none",
        stage: int = 2,
        bucket_bytes: int = 25 * MIB,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
        residual: str = "fp32",
        guard: Guard | None = _GUARD,
        sample_every: int = 50,
        **options: Any,
    ) -> None:
        if stage not in (1, 2):
            raise ValueError(f"stage: expected 1 or 2, got {stage!r}; 3 is FSDP (dtcomm.fsdp.compress)")
        if bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes: expected a positive number, got {bucket_bytes!r}")
        self.stage, self.group = stage, group
        self._codecs = State(
            spec.parse(gradients, spec.FEEDBACKS, "gradients"),
            spec.parse(parameters_codec, ("", "delta"), "parameters_codec"),
            seed,
            residual,
            guard,
            sample_every,
        )
        self._codecs.group = group
        self._codecs.begin()
        self._codecs.shards, self._codecs.shard = dist.get_world_size(group), dist.get_rank(group)
        self._buckets: list[Bucket] = []
        groups = []
        for number, given in enumerate(_groups(parameters)):
            buckets = self._make(given["params"], number, bucket_bytes)
            self._buckets += buckets
            groups.append({**given, "params": [bucket.exact for bucket in buckets]})
        self._inner = optimizer(groups, **options)
        super().__init__(self._inner.param_groups, self._inner.defaults)
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        self._sync, self._queued = True, False
        self._started: dict[int, tuple[Work, Reduction, torch.Tensor, int]] = {}
        for bucket in self._buckets:
            self._codecs.know(bucket.name, bucket.row)
            broadcast(bucket.flat, dist.get_global_rank(group, 0) if group else 0, group=group)
            bucket.exact.data.copy_(bucket.shard_of(bucket.flat))
            for place, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._arrival(bucket, place))  # type: ignore[no-untyped-call]

    def _make(
        self, parameters: Sequence[tuple[str, torch.nn.Parameter]], number: int, most: int
    ) -> list[Bucket]:
        """Buckets of one type each, from the last parameter to the first: the order in which gradients come."""
        made: list[Bucket] = []
        open_: dict[torch.dtype, list[tuple[str, torch.nn.Parameter]]] = {}

        def close(dtype: torch.dtype) -> None:
            name = f"group {number}, bucket {len(made)}"
            made.append(Bucket(name, open_.pop(dtype), self._codecs.shards, self._codecs.shard))

        for name, parameter in reversed(parameters):
            if not parameter.requires_grad:
                continue
            waiting = open_.setdefault(parameter.dtype, [])
            waiting.append((name, parameter))
            if sum(each.nbytes for _, each in waiting) >= most:
                close(parameter.dtype)
        for dtype in list(open_):
            close(dtype)
        return made

    # --- backward ---------------------------------------------------------------------------------------------

    def _arrival(self, bucket: Bucket, place: int) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            if not self._queued:
                self._queued = True
                torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)
            bucket.accumulate(place, keep=self.stage == 1)
            bucket.missing -= 1
            if self._sync and self.stage == 2:
                self._start_complete()

        return hook

    def _start_complete(self) -> None:
        """Start the buckets that are complete, in their order: it is the same on all ranks, whatever comes first."""
        for number, bucket in enumerate(self._buckets):
            if number in self._started:
                continue
            if bucket.missing > 0:
                return
            self._start(number)

    def _start(self, number: int) -> None:
        bucket = self._buckets[number]
        gradient = torch.zeros_like(bucket.flat) if bucket.gradient is None else bucket.gradient
        reduction = Reduction(self._codecs, bucket.name, gradient)
        shard = torch.empty_like(bucket.shard_of(gradient))
        work = reduce_scatter(shard, gradient, "avg", group=self.group, **reduction.options)
        assert work is not None  # it is with async_op
        plain = gradient.nbytes * (self._codecs.shards - 1) // self._codecs.shards
        self._started[number] = work, reduction, shard, plain
        if self.stage == 2:
            bucket.gradient = None

    def _after_backward(self) -> None:
        self._queued = False
        if self._sync:
            for number in range(len(self._buckets)):
                if number not in self._started:
                    self._start(number)
            for number, (work, reduction, shard, plain) in sorted(self._started.items()):
                bucket = self._buckets[number]
                work.wait()
                reduction.traffic.add(work, plain)
                reduction.done()
                bucket.exact.grad = None if self.stage == 1 else bucket.exact.grad
                bucket.own(shard)
            self._started.clear()
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward accumulates on each rank by itself; the next one outside reduces it all."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    # --- step -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their L2 norm over all parameters is at most ``max_norm``; the norm before."""
        shards = [bucket.exact.grad for bucket in self._buckets if bucket.exact.grad is not None]
        total = torch.stack([shard.double().square().sum() for shard in shards]).sum().reshape(1)
        all_reduce(total, group=self.group)
        norm = total.sqrt().float()[0]
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for shard in shards:
            shard.mul_(factor)
        return norm

    def step(self, closure: Any = None) -> Any:
        """Step on this rank's shards, then gather everybody's."""
        for bucket in self._buckets:
            bucket.notice()
        loss = self._inner.step(closure)
        with torch.no_grad():
            works = [self._gather(bucket) for bucket in self._buckets]
            for finish in works:
                finish()
        self._codecs.begin()  # the next one
        return loss

    def _gather(self, bucket: Bucket) -> Callable[[], None]:
        traffic = self._codecs.traffic(bucket.name, "parameters", self._codecs.parameters)
        recipe_now = self._codecs.watching.in_force(bucket.name, self._codecs.parameters)
        which = fitting(recipe_now, bucket.flat, traffic)
        options: dict[str, Any] = {"group": self.group, "seed": self._codecs.next_seed(), "async_op": True}
        differences = self._codecs.parameters.word == "delta" and not traffic.why
        if differences:
            # What the model computes with is what all ranks know of each other.
            own = (bucket.exact.detach() - bucket.shard_of(bucket.flat).float()).to(bucket.dtype)
            output = torch.empty_like(bucket.flat)
        else:
            own = bucket.exact.detach().to(bucket.dtype)
            output = bucket.flat
        work = all_gather(output, own, codec=which, **options)
        plain = own.nbytes * (self._codecs.shards - 1)

        def finish() -> None:
            work.wait()
            traffic.add(work, plain)
            if differences:
                bucket.flat.add_(output)

        return finish

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, of shards and of whole parameters; they are always set to None."""
        for bucket in self._buckets:
            bucket.exact.grad = None
            bucket.gradient = None
            for parameter in bucket.parameters:
                parameter.grad = None

    # --- state ------------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """What was sent, by bucket, and what the guard did."""
        return self._codecs.report()

    @property
    def events(self) -> tuple[Event, ...]:
        """What the guard saw and did, in order; the same on all ranks."""
        return self._codecs.events

    def observe(self, loss: float | torch.Tensor) -> None:
        """Tell the guard this step's loss, once a step and before its backward, on every rank."""
        self._codecs.observe(loss)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part: the optimiser's state of its shards, the exact shards, residuals and counters."""
        return {
            "optimizer": self._inner.state_dict(),
            "shards": [bucket.exact.detach().cpu().clone() for bucket in self._buckets],
            "compression": self._codecs.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from this rank's own `state_dict`, with the model's own state loaded before."""
        self._codecs.load_state_dict(state_dict["compression"])
        shards = state_dict["shards"]
        if [each.numel() for each in shards] != [bucket.exact.numel() for bucket in self._buckets]:
            raise ValueError("state_dict: its shards have other sizes: was it saved from another model?")
        self._inner.load_state_dict(state_dict["optimizer"])
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        for bucket, shard in zip(self._buckets, shards, strict=True):
            bucket.notice()
            bucket.exact.data.copy_(shard)

    def memory(self) -> dict[str, int]:
        """Bytes on this rank: whole parameters, exact shards, optimiser state, residuals, and whole gradients.

        With stage 2 the last is the largest bucket's, which backward fills and gives up in turn.
        """
        states = sum(
            value.nbytes
            for entry in self.state.values()
            for value in entry.values()
            if isinstance(value, torch.Tensor)
        )
        whole = [bucket.flat.nbytes for bucket in self._buckets]
        return {
            "parameters": sum(whole),
            "shards": sum(bucket.exact.nbytes for bucket in self._buckets),
            "optimizer": states,
            "residuals": self.report().residual_bytes,
            "gradients": sum(whole) if self.stage == 1 else max(whole, default=0),
        }


def _groups(parameters: Named | Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups with "params" as lists of (name, parameter). TypeError where there are no names."""
    given: list[Any] = list(parameters)
    if not given:
        raise ValueError("parameters: got none")
    groups = given if isinstance(given[0], dict) else [{"params": given}]
    for group in groups:
        named = list(group["params"])
        if any(not isinstance(each, tuple) for each in named):
            raise TypeError(
                "parameters: expected named ones (model.named_parameters()), which states are saved by"
            )
        group["params"] = named
    return groups
