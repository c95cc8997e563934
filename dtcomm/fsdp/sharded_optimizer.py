"""`ShardedOptimizer`: ZeRO stages 1 and 2 for any torch optimizer (Rajbhandari et al. 2020, arXiv:1910.02054),
compressed.

Example::

    optimizer = dtcomm.fsdp.ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-3, gradients="int8")
    loss.backward()          # gradients are reduce-scattered while it runs
    optimizer.step()         # updates this rank's shards, then gathers the parameters

The model is unchanged and whole on every rank: it needs no wrapper and no DDP. The optimizer's state is cut over the
ranks (stage 1), and so are gradients, which are freed when their bucket is reduced (stage 2). The optimizer updates an
fp32 master copy of this rank's shards, which no codec has touched.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dtcomm import torch_compat
from dtcomm.arguments import require_int, shares_options, suggest
from dtcomm.codecs import Codec
from dtcomm.collectives import Work, all_gather, all_reduce, broadcast, reduce_scatter
from dtcomm.collectives.groups import CONSTRUCTOR_LIMIT_S, Announcement, GroupOrMesh, process_group_of
from dtcomm.compress import checkpoint
from dtcomm.compress.guard import Event
from dtcomm.compress.policy import excluded_names
from dtcomm.compress.report import Report
from dtcomm.compress.reporting import Reporting
from dtcomm.compress.residuals import describe_size
from dtcomm.fsdp.collectives import GradientReduction
from dtcomm.fsdp.guard import parameters_name
from dtcomm.fsdp.options import STATE_DEFAULTS, StateOptions, parse_specs, require_accurate
from dtcomm.fsdp.state import LOG_NAMES, FSDPState, codec_spec_for
from dtcomm.fsdp.storage import OptimizerBucket
from dtcomm.tp.sharded_module import shard_groups

MIB = 2**20
NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]


class _BucketKey(NamedTuple):
    """What the parameters of a bucket have in common; tensor parallelism cuts them over the same groups."""

    dtype: torch.dtype
    excluded_by: str
    tensor_parallel_groups: tuple[str, ...]


class _PendingReduction(NamedTuple):
    work: Work
    reduction: GradientReduction
    shard: torch.Tensor
    plain_bytes: int


@shares_options(STATE_DEFAULTS, StateOptions)
class ShardedOptimizer(torch.optim.Optimizer, Reporting):
    """An optimizer that updates one shard of every parameter per rank and communicates compressed.

    Gradients are averaged over the ranks. ``param_groups`` and ``state`` are those of the shards; `clip_grad_norm_`
    clips by the norm over all shards.

    Beside tensor parallelism (`dtcomm.tp.compress` before this) ``group`` is that of the replicas, ``mesh["dp"]``.
    Parameters that all tensor-parallel ranks have are in buckets of their own, so that these copies stay equal.

    Args:
        params: Named parameters, as ``model.named_parameters()`` gives them, or groups of them: dicts with
            ``"params"`` (named parameters) and options of the optimizer.
        optimizer: An optimizer class of torch.optim that works element by element (SGD, Adam, AdamW, RMSprop).
        stage: ZeRO stage: 1 keeps whole gradients in ``parameter.grad``, 2 frees them bucket by bucket. Default: 2.
        bucket_bytes: Size of a bucket in bytes. Default: 25 MiB.
        group: Process group, or one axis of a device mesh. Default: all ranks.
        exclude: Shell patterns of parameters, or of modules with all that they contain, that are sent uncompressed, in
            buckets of their own. Default: nothing.
        **options: Options of compression, those below, and of the optimizer, such as ``lr``.

    Raises:
        TypeError: The parameters have no names or are DTensors, an argument has a wrong type, or an option is neither
            an argument of this class nor of the optimizer.
        ValueError: Another argument is wrong, or a codec is too inaccurate; the message names it.

    Example::

        optimizer = dtcomm.fsdp.ShardedOptimizer(
            model.named_parameters(), torch.optim.AdamW, lr=1e-3, gradients="int8", parameters="delta:int4"
        )
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    """

    integration = "ShardedOptimizer"

    def __init__(
        self,
        params: NamedParameters | Sequence[dict[str, Any]],
        optimizer: Callable[..., torch.optim.Optimizer],
        *,
        gradients: str | Codec | None = None,
        parameters: str | Codec | None = None,
        stage: int = 2,
        bucket_bytes: int = 25 * MIB,
        group: GroupOrMesh = None,
        **options: Any,
    ) -> None:
        if stage not in (1, 2):
            raise ValueError(f"stage: expected 1 or 2, got {stage!r}; stage 3 is FSDP (dtcomm.fsdp.compress)")
        require_int("bucket_bytes", bucket_bytes, 1)
        given: StateOptions = {**STATE_DEFAULTS}
        for name in given.keys() & options.keys():
            given[name] = options.pop(name)  # type: ignore[literal-required]
        _require_options(optimizer, options)
        self.stage, self.group = stage, (group := process_group_of(group, "dp"))
        groups = _named_groups(params)
        trainable = {
            name: parameter.numel()
            for members in groups
            for name, parameter in members["params"]
            if parameter.requires_grad
        }
        specs = parse_specs(gradients, parameters, given)
        memory = describe_size(sum(trainable.values()), given["residual"])
        require_accurate(specs, given, memory)
        self._excluded = excluded_names(given["exclude"], trainable)
        self._compression = compression = FSDPState(specs, given, self.integration)
        self._loss_watch = None if given["guard"] is None else compression.guard
        compression.group = group
        compression.begin_step()
        compression.num_shards, compression.shard_index = dist.get_world_size(group), dist.get_rank(group)
        compression.log_feedback(memory)
        self._buckets: list[OptimizerBucket] = []
        shard_groups = []
        for number, parameter_group in enumerate(groups):
            buckets = self._make_buckets(parameter_group["params"], number, bucket_bytes)
            self._buckets += buckets
            shard_groups.append({**parameter_group, "params": [bucket.master_shard for bucket in buckets]})
        self._inner = optimizer(shard_groups, **options)
        super().__init__(self._inner.param_groups, self._inner.defaults)
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        self._sync, self._callback_queued = True, False
        self._pending: dict[int, _PendingReduction] = {}  # by index of the bucket
        announced = {**compression.arguments, "stage": stage, "bucket_bytes": bucket_bytes}
        self.arguments = announced | options
        if compression.num_shards > 1:
            Announcement(group, LOG_NAMES[self.integration], announced).require_all(CONSTRUCTOR_LIMIT_S)
        for bucket in self._buckets:
            self._compression.register_layout(bucket.name, bucket.layout)
            broadcast(bucket.flat, dist.get_global_rank(group, 0) if group else 0, group=group)
            bucket.master_shard.data.copy_(bucket.shard_of(bucket.flat))
            for index, parameter in enumerate(bucket.parameters):
                hook = self._gradient_hook(bucket, index)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def wrap(
        self, wrap: Callable[[torch.optim.Optimizer, Sequence[OptimizerBucket]], torch.optim.Optimizer]
    ) -> None:
        """Replace the optimizer of the shards by one that wraps it; call it before the first step.

        While an attribute ``warming_up`` of the wrapper is true, gradients are sent uncompressed.

        Args:
            wrap: Returns the wrapper of the optimizer and of the buckets, whose shards are its parameters.
        """
        self._inner = wrap(self._inner, self._buckets)
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        self._update_warmup()

    def _make_buckets(
        self, parameters: Sequence[tuple[str, torch.nn.Parameter]], number: int, bucket_bytes: int
    ) -> list[OptimizerBucket]:
        """Make buckets from the last parameter to the first: gradients arrive in that order.

        The parameters of a bucket have one dtype, are excluded from compression by the same pattern or by none, and are
        cut over the same groups of tensor parallelism or over none. A block of a codec may hold elements of several
        parameters. Beside elements of a shard those of a norm would be rounded otherwise on each rank.
        """
        buckets: list[OptimizerBucket] = []
        unfinished: dict[_BucketKey, list[tuple[str, torch.nn.Parameter]]] = {}
        compression = self._compression
        all_groups = shard_groups(parameter for _, parameter in parameters)
        groups = {str(group.group_name): group for own in all_groups for group in own}
        compression.agree_over(groups.values())

        def finish(key: _BucketKey) -> None:
            name = f"group {number}, bucket {len(buckets)}"
            cut_over = [groups[group] for group in key.tensor_parallel_groups]
            members = unfinished.pop(key)
            buckets.append(
                OptimizerBucket(name, members, compression.num_shards, compression.shard_index, cut_over)
            )
            if key.excluded_by:
                compression.exclude(name, key.excluded_by)

        for (name, parameter), own in reversed(list(zip(parameters, all_groups, strict=True))):
            if not parameter.requires_grad:
                continue
            key = _BucketKey(
                parameter.dtype, self._excluded.get(name, ""), tuple(str(group.group_name) for group in own)
            )
            members = unfinished.setdefault(key, [])
            members.append((name, parameter))
            if sum(member.nbytes for _, member in members) >= bucket_bytes:
                finish(key)
        for key in list(unfinished):
            finish(key)
        return buckets

    # --- backward ---------------------------------------------------------------------------------------------

    def _gradient_hook(self, bucket: OptimizerBucket, index: int) -> Callable[[torch.Tensor], None]:
        """Return the hook that autograd calls when a parameter's gradient is complete."""

        def hook(_: torch.Tensor) -> None:
            if not self._callback_queued:
                self._callback_queued = True
                torch_compat.after_backward(self._after_backward)
            bucket.accumulate(index, keep=self.stage == 1)
            bucket.missing -= 1
            if self._sync and self.stage == 2:
                self._start_complete_buckets()

        return hook

    def _start_complete_buckets(self) -> None:
        """Start the complete buckets in their order, which is the same on all ranks whatever arrives first."""
        for number, bucket in enumerate(self._buckets):
            if number in self._pending:
                continue
            if bucket.missing > 0:
                return
            self._start_reduction(number)

    def _start_reduction(self, number: int) -> None:
        bucket = self._buckets[number]
        gradient = torch.zeros_like(bucket.flat) if bucket.gradient is None else bucket.gradient
        reduction = GradientReduction(self._compression, bucket.name, gradient)
        shard = torch.empty_like(bucket.shard_of(gradient))
        work = reduce_scatter(shard, gradient, "avg", group=self.group, **reduction.options)
        assert work is not None  # async_op is True
        ranks = self._compression.num_shards
        self._pending[number] = _PendingReduction(
            work, reduction, shard, gradient.nbytes * (ranks - 1) // ranks
        )
        if self.stage == 2:
            bucket.gradient = None

    def _after_backward(self) -> None:
        self._callback_queued = False
        if self._sync:
            for number in range(len(self._buckets)):
                if number not in self._pending:
                    self._start_reduction(number)
            for number, pending in sorted(self._pending.items()):
                bucket = self._buckets[number]
                pending.work.wait()
                pending.reduction.traffic.add(pending.work, pending.plain_bytes)
                pending.reduction.finish(pending.shard)
                if self.stage == 1:  # the flat gradient holds the sum of all passes
                    bucket.master_shard.grad = None
                bucket.add_reduced_shard(pending.shard)
            self._pending.clear()
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in backward passes inside the context; the next one outside reduces all."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    # --- step -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients so that their L2 norm over all parameters and ranks is at most ``max_norm``.

        Parameters that tensor parallelism cuts count with all of their parts, others once.

        Returns:
            The norm before, a scalar tensor.
        """
        squares: dict[tuple[dist.ProcessGroup, ...], torch.Tensor] = {}
        for bucket in self._buckets:
            # A bucket without a gradient counts too: all ranks must take part in the same sums.
            shard, groups = bucket.master_shard.grad, bucket.tensor_parallel_groups
            square = (bucket.master_shard.new_zeros(()) if shard is None else shard).double().square().sum()
            squares[groups] = squares[groups] + square if groups in squares else square
        for groups, square in squares.items():
            for group in (self.group, *groups):
                all_reduce(square, group=group)
        norm = torch.stack(list(squares.values())).sum().sqrt().float()
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for bucket in self._buckets:
            if bucket.master_shard.grad is not None:
                bucket.master_shard.grad.mul_(factor)
        return norm

    def step(self, closure: Any = None) -> Any:
        """Update this rank's shards, then gather the parameters from all ranks.

        Args:
            closure: As of torch's optimizers. Default: None.

        Returns:
            What the optimizer's step returns: the closure's loss, or None.
        """
        for bucket in self._buckets:
            bucket.update_master_if_overwritten()
        loss = self._inner.step(closure)
        self._update_warmup()
        with torch.no_grad():
            gathers = [self._start_gather(bucket) for bucket in self._buckets]
            for finish_gather in gathers:
                finish_gather()
        self._compression.begin_step()
        return loss

    def _update_warmup(self) -> None:
        """Leave gradients uncompressed while a wrapper of the optimizer says that it warms up."""
        self._compression.warming_up = bool(getattr(self._inner, "warming_up", False))

    def _start_gather(self, bucket: OptimizerBucket) -> Callable[[], None]:
        """Start the all-gather of a bucket's parameters; the returned function finishes it."""
        compression = self._compression
        requested = compression.spec(bucket.name, compression.parameters)
        traffic = compression.traffic(bucket.name, "parameters", requested)
        spec = compression.guard.current_spec(parameters_name(bucket.name), requested)
        shards = compression.num_shards
        codec_spec = codec_spec_for(spec, bucket.dtype, traffic, bucket.flat.numel() // shards, shards)
        compression.note_choice(bucket.name, traffic)
        values = bucket.master_shard.detach().to(bucket.dtype)
        sends_differences = requested.prefix == "delta" and not traffic.reason
        if sends_differences:
            # All ranks have the same parameters, those that the model computes with.
            difference = bucket.master_shard.detach() - bucket.shard_of(bucket.flat).float()
            shard = difference.to(bucket.dtype)
            output = torch.empty_like(bucket.flat)
        else:
            shard = values
            output = bucket.flat
        sample = None
        if not traffic.reason and not spec.lossless(bucket.dtype):
            sample = compression.guard.take_parameter_sample(bucket.name, spec, values, shard)
        work = all_gather(
            output, shard, codec=codec_spec, group=self.group, seed=compression.next_seed(), async_op=True
        )
        plain_bytes = shard.nbytes * (compression.num_shards - 1)

        def finish() -> None:
            work.wait()
            traffic.add(work, plain_bytes)
            if sample is not None:
                lost = shard.float() - bucket.shard_of(output).float()
                traffic.relative_error = compression.guard.record_parameter_error(sample, lost)
            if sends_differences:
                bucket.flat.add_(output)

        return finish

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, of shards and of whole parameters; they are set to None in any case."""
        for bucket in self._buckets:
            bucket.master_shard.grad = None
            bucket.gradient = None
            for parameter in bucket.parameters:
                parameter.grad = None

    # --- state ------------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """Return what was sent, by codec and by bucket, what that lost, and what the guard did."""
        return self._compression.report()

    @property
    def events(self) -> tuple[Event, ...]:
        """What the guard detected and did, in order; the same on all ranks."""
        return self._compression.events

    def detach(self) -> None:
        """Send gradients and parameters uncompressed from the next step on; call it on every rank.

        The shards and the hooks of the parameters stay, which the optimizer works with. Residuals are freed.
        """
        self._compression.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part: the optimizer's state, the master shards, and the compression's state."""
        return checkpoint.seal(
            {
                "integration": self.integration,
                "optimizer": copy.deepcopy(self._inner.state_dict()),
                "shards": [bucket.master_shard.detach().cpu().clone() for bucket in self._buckets],
                "compression": self._compression.state_dict(),
            }
        )

    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, strict: bool = True
    ) -> None:
        """Continue from this rank's own `state_dict`; load the model's state before.

        Args:
            state: What `state_dict` returned on this rank. Shards of another number of ranks cannot be loaded.
            strict: Refuse a state that was saved with other codecs or another kind of feedback; False: of the
                compression load its residuals alone.

        Raises:
            ValueError: The state is damaged or not valid, or the shards have other sizes. Nothing has changed.
        """
        sizes = [bucket.master_shard.numel() for bucket in self._buckets]

        def check_shards(name: str, shards: Any) -> None:
            checkpoint.each(checkpoint.TENSOR, checkpoint.LIST)(name, shards)
            if [shard.numel() for shard in shards] != sizes:
                raise ValueError(f"{name} have other sizes: was it saved from another model?")

        checks = {
            "optimizer": checkpoint.entries(),
            "shards": check_shards,
            "compression": checkpoint.entries(),
        }
        checkpoint.require_intact(state, checks, integration=self.integration)
        assert isinstance(state, Mapping)
        shards = state["shards"]
        with checkpoint.loaded_optimizer("optimizer", self._inner, state["optimizer"]):
            self._compression.load_state_dict(state["compression"], strict=strict)
        self._update_warmup()
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        for bucket, shard in zip(self._buckets, shards, strict=True):
            bucket.update_master_if_overwritten()
            bucket.master_shard.data.copy_(shard)

    def memory(self) -> dict[str, int]:
        """Return the memory on this rank in bytes.

        The keys are ``parameters`` (whole), ``shards`` (the master copy), ``optimizer`` (its state), ``residuals`` and
        ``gradients``: with stage 1 all whole gradients, with stage 2 those of the largest bucket.
        """
        optimizer_state = sum(
            value.nbytes
            for entry in self.state.values()
            for value in entry.values()
            if isinstance(value, torch.Tensor)
        )
        bucket_sizes = [bucket.flat.nbytes for bucket in self._buckets]
        return {
            "parameters": sum(bucket_sizes),
            "shards": sum(bucket.master_shard.nbytes for bucket in self._buckets),
            "optimizer": optimizer_state,
            "residuals": self.report().residual_bytes,
            "gradients": sum(bucket_sizes) if self.stage == 1 else max(bucket_sizes, default=0),
        }


def _require_options(optimizer: object, options: Mapping[str, Any]) -> None:
    """Check that the optimizer accepts its options; TypeError names the argument that was meant."""
    if not callable(optimizer):
        name = type(optimizer).__name__
        raise TypeError(
            f"optimizer: expected a class such as {name}, got an object of it; pass {name} and its options"
        )
    theirs = inspect.signature(optimizer).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in theirs.values()):
        return
    ours = inspect.signature(ShardedOptimizer.__init__).parameters
    names = [name for name in [*ours, *theirs] if name not in ("self", "params", "options")]
    for name in options:
        if name not in theirs:
            optimizer_name = getattr(optimizer, "__name__", type(optimizer).__name__)
            raise TypeError(
                f"{name}: neither an argument of ShardedOptimizer nor an option of {optimizer_name}"
                f"{suggest(name, names)}; valid: {', '.join(dict.fromkeys(names))}"
            )


def _named_groups(params: NamedParameters | Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return groups whose "params" are lists of (name, parameter); TypeError if there are no names."""
    entries: list[Any] = list(params)
    if not entries:
        raise ValueError("params: got none")
    groups = entries if isinstance(entries[0], dict) else [{"params": entries}]
    for group in groups:
        named = list(group["params"])
        if any(not isinstance(entry, tuple) for entry in named):
            raise TypeError(
                "params: expected named parameters (model.named_parameters()); states are saved by name"
            )
        for name, parameter in named:
            if isinstance(parameter, DTensor):
                raise TypeError(
                    f"params: {name} is a DTensor; valid: plain parameters, such as those of dtcomm.tp.compress. "
                    "For torch's tensor-parallel styles use FSDP2 (fully_shard and dtcomm.fsdp.compress)"
                )
        group["params"] = named
    return groups
