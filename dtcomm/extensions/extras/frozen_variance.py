"""`FrozenVariance`: Adam whose second moment stays as it is after a warm-up, for coarse codecs.

A codec such as ``int2``, ``sign`` or
``topk`` makes gradients noisier, error feedback sends what an element missed as one large gradient, and Adam squares
both: its second moment grows, and its steps shrink. With a second moment from uncompressed steps, Adam is linear in the
gradients, so that errors which feedback sends later cancel, as they do under SGD.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dtcomm import torch_compat
from dtcomm.arguments import require_int
from dtcomm.fsdp import ShardedOptimizer
from dtcomm.fsdp.storage import OptimizerBucket

#: The least frozen variance of an element, as a share of the mean over its parameter.
FLOOR = 0.1


class FrozenVariance(torch.optim.Optimizer):
    """Adam or AdamW whose second moment is frozen, and floored, after ``warmup`` steps.

    In the first ``warmup`` steps it is the optimizer it wraps, bit for bit. Then it keeps the second moment, corrected
    for its bias, and only the first one follows the gradients: ``m = beta1 m + (1 - beta1) g`` and ``p -= lr m / ((1 -
    beta1^t) (sqrt(v) + eps))``. An element that had no gradients in the warm-up, such as the embedding of a token that
    did not occur, would move by huge steps later. So no element's variance is less than the share ``floor`` of the mean
    over its parameter. The method is that of 1-bit Adam (Tang et al. 2021, arXiv:2102.02888), which has no floor. Send
    the gradients of the warm-up uncompressed: ``warmup=`` of `dtcomm.ddp.compress` takes the same number.

    ``param_groups`` and ``state`` are those of the wrapped optimizer, so learning-rate schedulers, gradient scalers and
    checkpoints work as with it. A parameter is frozen when its own number of steps reaches the warm-up; a state that
    was saved after that stays frozen when it is loaded.

    Args:
        optimizer: A `torch.optim.Adam` or `torch.optim.AdamW`, without ``amsgrad`` and ``differentiable``. Call the
            wrapper's `step` instead of its own.
        warmup: Number of steps of a parameter after which its variance is frozen; at least 1. A tenth to a fifth of the
            run is usual, longer than the warm-up of the learning rate.
        floor: The least variance of an element after freezing, as a share of the mean over its parameter, from 0 to 1.
            Default: 0.1.

    Raises:
        TypeError: ``optimizer`` is not an Adam or AdamW, or has complex parameters.
        ValueError: ``warmup`` or ``floor`` is out of range, or the optimizer has ``amsgrad`` or ``differentiable``.

    Example::

        optimizer = extras.FrozenVariance(torch.optim.AdamW(model.parameters(), lr=1e-3), warmup=1000)
        state = dtcomm.ddp.compress(model, "int2", warmup=1000)
        loss.backward()
        optimizer.step()
    """

    def __init__(self, optimizer: torch.optim.Optimizer, warmup: int, *, floor: float = FLOOR) -> None:
        if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
            raise TypeError(
                f"optimizer: expected a torch.optim.Adam or AdamW, got {type(optimizer).__name__}"
            )
        require_int("warmup", warmup, 1)
        if not isinstance(floor, float | int) or not 0 <= floor <= 1:
            raise ValueError(f"floor: expected a number from 0 to 1, got {floor!r}")
        for group in optimizer.param_groups:
            for option in ("amsgrad", "differentiable"):
                if group.get(option):
                    raise ValueError(f"optimizer: {option}=True cannot be frozen; valid: {option}=False")
            if any(torch.is_complex(parameter) for parameter in group["params"]):
                raise TypeError("optimizer: has complex parameters; valid: real ones")
        self.warmup, self.floor = warmup, float(floor)
        self._inner = optimizer
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._share_inner_state()

    def _share_inner_state(self) -> None:
        self.param_groups, self.state = self._inner.param_groups, self._inner.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options, as torch's optimizers do; their warm-up begins when they are added."""
        if hasattr(self, "param_groups") and self.param_groups is self._inner.param_groups:
            self._inner.add_param_group(param_group)
        else:
            super().add_param_group(param_group)  # called by the constructor of torch.optim.Optimizer

    @property
    def warming_up(self) -> bool:
        """Whether a parameter has taken fewer steps than the warm-up."""
        return not self.state or any(
            not entry.get("frozen") and float(entry["step"]) < self.warmup for entry in self.state.values()
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, and freeze those whose warm-up ends with this step.

        Args:
            closure: As of torch's optimizers. Default: None.

        Returns:
            The closure's loss, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients: dict[torch.Tensor, torch.Tensor | None] = {}
        for group in self.param_groups:
            frozen = [p for p in group["params"] if p.grad is not None and self._is_frozen(p)]
            if frozen:
                self._frozen_step(group, frozen)
            for parameter in frozen:
                gradients[parameter], parameter.grad = parameter.grad, None
        try:
            self._inner.step()
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in self.state and not self._is_frozen(parameter):
                    self._freeze_if_due(parameter, group["betas"][1])
        return loss

    def _is_frozen(self, parameter: torch.Tensor) -> bool:
        return bool(self.state.get(parameter, {}).get("frozen", False))

    def _freeze_if_due(self, parameter: torch.Tensor, beta2: float) -> None:
        entry = self.state[parameter]
        step = float(entry["step"])
        if step < self.warmup:
            return
        variance = entry["exp_avg_sq"]
        floors = self._floors(parameter, variance)
        if floors is None:
            return
        # The bias is that of this step for good, so the state holds the corrected variance.
        variance.div_(1 - float(beta2) ** step)
        torch.maximum(variance, floors / (1 - float(beta2) ** step), out=variance)
        entry["frozen"] = True

    def _floors(self, parameter: torch.Tensor, variance: torch.Tensor) -> torch.Tensor | None:
        """Return the least variances, which broadcast; None if no gradient has arrived, so that there is no scale."""
        mean = variance.mean()
        if hasattr(mean, "full_tensor"):  # of a DTensor: over all shards
            mean = mean.full_tensor()
        return None if float(mean) == 0 else mean * self.floor

    def _frozen_step(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        """Update parameters with their frozen variances, in torch's order of operations."""
        beta1, rate, decay = float(group["betas"][0]), float(group["lr"]), float(group["weight_decay"])
        entries = [self.state[parameter] for parameter in parameters]
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        if group["maximize"]:
            gradients = list(torch_compat.foreach.neg(gradients))
        if decay and group.get("decoupled_weight_decay", isinstance(self._inner, torch.optim.AdamW)):
            torch_compat.foreach.mul_(parameters, 1 - rate * decay)
        elif decay:
            gradients = list(torch_compat.foreach.add(gradients, parameters, alpha=decay))
        torch_compat.foreach.add_([entry["step"] for entry in entries], 1)
        moments = [entry["exp_avg"] for entry in entries]
        torch_compat.foreach.lerp_(moments, gradients, 1 - beta1)
        denominators = torch_compat.foreach.sqrt([entry["exp_avg_sq"] for entry in entries])
        torch_compat.foreach.add_(denominators, float(group["eps"]))
        sizes = [-rate / (1 - beta1 ** float(entry["step"])) for entry in entries]
        torch_compat.foreach.addcdiv_(parameters, moments, denominators, sizes)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, in which frozen parameters are marked."""
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of the wrapped optimizer's."""
        self._inner.load_state_dict(state_dict)
        self._share_inner_state()


class _ShardedFrozenVariance(FrozenVariance):
    """`FrozenVariance` of shards of buckets: the floors are still shares of the means of whole parameters."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup: int,
        buckets: Sequence[OptimizerBucket],
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(optimizer, warmup)
        self._buckets = {id(bucket.master_shard): bucket for bucket in buckets}
        self._group = group

    def _floors(self, parameter: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        return self._buckets[id(parameter)].parameter_means(variance, self._group) * self.floor


def freeze_variance(optimizer: ShardedOptimizer, warmup: int) -> None:
    """Freeze the second moment of a `dtcomm.fsdp.ShardedOptimizer` of Adam or AdamW after a warm-up.

    Call it before the first step, and before a state is loaded. In the first ``warmup`` steps gradients are sent
    uncompressed.

    Args:
        optimizer: The optimizer.
        warmup: Number of steps after which the variance is frozen, as `FrozenVariance` takes it.

    Raises:
        TypeError: The optimizer of the shards is not an Adam or AdamW.
        ValueError: ``warmup`` is less than 1.

    Example::

        optimizer = dtcomm.fsdp.ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, gradients="int2")
        extras.freeze_variance(optimizer, warmup=100)
    """
    optimizer.wrap(lambda inner, buckets: _ShardedFrozenVariance(inner, warmup, buckets, optimizer.group))
