"""`MoE`, a layer of experts on the ranks of a group: router, dispatch, experts, combine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from dtcomm._autograd import autograd_apply
from dtcomm.arguments import require_int
from dtcomm.codecs import Codec
from dtcomm.collectives import broadcast
from dtcomm.kernels import counter_rng
from dtcomm.moe.dispatch import combine, dispatch
from dtcomm.moe.losses import count_choices, expert_capacity, load_balancing_loss, router_z_loss
from dtcomm.moe.padded import combine_padded, dispatch_padded
from dtcomm.moe.settings import make_codecs


@dataclass(frozen=True, kw_only=True)
class RouterStatistics:
    """What a router did in the last forward pass of `MoE`, with this rank's tokens: tensors on the device.

    Attributes:
        load_balancing_loss: The load-balancing loss; 1 if balanced.
        router_z_loss: The router z-loss.
        counts: int64 [num_experts], how many (token, choice) pairs chose each expert.
        dropped: int64, how many of them exceeded the capacity.
    """

    load_balancing_loss: torch.Tensor
    router_z_loss: torch.Tensor
    counts: torch.Tensor
    dropped: torch.Tensor

    def to_dict(self) -> dict[str, float]:
        """Return the losses, the share of dropped pairs and the largest load in multiples of the mean.

        The host waits for the device.
        """
        pairs = max(1, int(self.counts.sum()))
        return {
            "load_balancing_loss": float(self.load_balancing_loss),
            "router_z_loss": float(self.router_z_loss),
            "dropped": int(self.dropped) / pairs,
            "largest_load": int(self.counts.max()) * len(self.counts) / pairs,
        }


class MoE(nn.Module):
    """A mixture of experts whose experts are distributed over the ranks of a group.

    Every rank passes its own tokens. The router is the same on all ranks. Rank r of n holds the experts ``r *
    num_experts / n`` to ``(r + 1) * num_experts / n - 1``. Initial weights depend on rank 0's random state alone, and
    not on the number of ranks; names in state dicts contain the number of the expert among all of them.

    Gradients: the router's are those of this rank's tokens, to be averaged over the ranks as those of all other
    parameters, by DDP for example. Those of experts come from all ranks' tokens already and are divided by the number
    of ranks, so they must not be averaged: `expert_parameters` lists them. If several groups of ranks hold the same
    layer, average experts' gradients over those ranks of the groups that hold the same experts, and seed the groups
    alike.

    Args:
        features: Number of features of a token.
        num_experts: Number of experts on all ranks together, divisible by the number of ranks.
        expert: ``expert() -> nn.Module`` makes an expert, which maps [rows, features] to [rows, out_features] row by
            row. It is called once for each expert of this rank.
        top_k: Number of experts of a token. Default: 2.
        capacity_factor: Limits the rows from one rank to one expert, as `expert_capacity` says; what exceeds them is
            dropped: the expert adds nothing to the token. Default: None, no limit.
        padded: Whether rows travel in a fixed number, ``capacity_factor`` times what is sent if all experts are equal,
            so that nothing waits for the device. All ranks must then pass the same number of tokens. Default: False.
        drop_lowest: Whether the choices with the lowest weights are dropped (Riquelme et al. 2021, arXiv:2106.05974),
            for which a token's result depends on later tokens, too. Default: False, the last choices are.
        normalize_weights: Whether the weights of a token's experts are divided by their sum. Default: if ``top_k`` is
            more than 1, because a single weight would be constant.
        balance_weight: Factor of the load-balancing loss in ``auxiliary_loss``. Default: 0.01.
        z_weight: Factor of the router z-loss in ``auxiliary_loss``. Default: 0.001.
        balance_all_ranks: Whether the load-balancing loss counts all ranks' choices. Default: False.
        codec: Codec of the tokens, as of `dispatch`. Default: ``"fp8_e4m3"``.
        combine_codec: Codec of the experts' outputs. Default: ``"bf16"``; ``"none"`` if ``codec`` is.
        backward_codec: Codec of gradients. Default: ``"bf16"``; ``"none"`` if both other codecs are.
        hierarchical: Whether tokens travel first between hosts, as of `dispatch` or `dispatch_padded`. Default: if that
            sends less, which padded rows never do.
        group: Process group. Default: all ranks.
        allow_inaccurate: Whether codecs are allowed that lose more than a fifth of what they carry. Default: False.

    Attributes:
        auxiliary_loss: The weighted losses of the router in the last forward pass, to be added to the model's loss.
        statistics: `RouterStatistics` of the last forward pass; None before the first.

    Raises:
        TypeError, ValueError: An argument is not valid; the message names it.

    Example::

        layer = dtcomm.moe.MoE(512, 8, lambda: FeedForward(512), top_k=2)
        y = x + layer(norm(x))                                     # [..., 512]
        loss = functional.cross_entropy(head(y), targets) + layer.auxiliary_loss
    """

    def __init__(
        self,
        features: int,
        num_experts: int,
        expert: Callable[[], nn.Module],
        *,
        top_k: int = 2,
        capacity_factor: float | None = None,
        padded: bool = False,
        drop_lowest: bool = False,
        normalize_weights: bool | None = None,
        balance_weight: float = 0.01,
        z_weight: float = 0.001,
        balance_all_ranks: bool = False,
        codec: str | Codec = "fp8_e4m3",
        combine_codec: str | Codec | None = None,
        backward_codec: str | Codec | None = None,
        hierarchical: bool | None = None,
        group: dist.ProcessGroup | None = None,
        allow_inaccurate: bool = False,
    ) -> None:
        super().__init__()
        require_int("features", features, 1)
        require_int("num_experts", num_experts, 1)
        require_int("top_k", top_k, 1)
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        if num_experts % ranks:
            raise ValueError(f"num_experts: {num_experts} experts are not divisible by the {ranks} ranks")
        if top_k > num_experts:
            raise ValueError(f"top_k={top_k}: expected 1 to {num_experts}, the number of experts")
        if not callable(expert):
            raise TypeError(f"expert: expected a function that makes a module, got {type(expert).__name__}")
        if capacity_factor is not None:
            if not 0 < capacity_factor < math.inf:
                raise ValueError(f"capacity_factor: expected a positive number, got {capacity_factor!r}")
        elif padded or drop_lowest:
            argument = "padded" if padded else "drop_lowest"
            raise ValueError(f"{argument}: needs a capacity_factor, which says how many rows an expert takes")
        make_codecs(codec, combine_codec, backward_codec, allow_inaccurate)
        self.features, self.num_experts, self.top_k = features, num_experts, top_k
        self.capacity_factor, self.padded, self.drop_lowest = capacity_factor, padded, drop_lowest
        self.normalize_weights = top_k > 1 if normalize_weights is None else normalize_weights
        self.balance_weight, self.z_weight = balance_weight, z_weight
        self.balance_all_ranks = balance_all_ranks
        self.codecs: dict[str, Any] = {
            "codec": codec,
            "combine_codec": combine_codec,
            "backward_codec": backward_codec,
            "allow_inaccurate": allow_inaccurate,
        }
        self.hierarchical, self.group, self._ranks = hierarchical, group, ranks
        self.auxiliary_loss = torch.zeros((), device="cpu")
        self.statistics: RouterStatistics | None = None
        seed = torch.randint(2**62, (1,), device="cpu")
        broadcast(seed, dist.get_global_rank(group, 0) if group is not None else 0, group=group)
        local = num_experts // ranks
        with torch.random.fork_rng():
            torch.manual_seed(int(seed))
            self.router = nn.Linear(features, num_experts, bias=False)
            self.experts = nn.ModuleDict()
            for number in range(rank * local, (rank + 1) * local):
                torch.manual_seed(counter_rng.absorb(int(seed), number) >> 1)
                self.experts[str(number)] = expert()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts.

        Args:
            x: This rank's tokens, [..., features].

        Returns:
            [..., out_features].

        Raises:
            ValueError: The shape does not fit.
            CollectiveMismatch: Ranks pass different sizes or dtypes.
        """
        if not x.ndim or x.shape[-1] != self.features:
            raise ValueError(f"x: expected [..., {self.features}], got {tuple(x.shape)}")
        tokens = x.reshape(-1, self.features)
        weights, experts = self._route(tokens)
        capacity = None
        if self.capacity_factor is not None:
            capacity = expert_capacity(
                len(tokens), self.num_experts, choices=self.top_k, factor=self.capacity_factor
            )
        priorities = weights if self.drop_lowest else None
        # The gradient of an expert's parameters is the sum over all ranks' tokens; that of its rows is this rank's own.
        if self.padded:
            assert capacity is not None
            rows, padded_route = dispatch_padded(
                tokens,
                experts,
                self.num_experts,
                capacity,
                priorities=priorities,
                hierarchical=bool(self.hierarchical),
                group=self.group,
                **self.codecs,
            )
            rows = autograd_apply(_ScaleGradient, rows, float(self._ranks))
            outputs = torch.stack(
                [expert(part) for expert, part in zip(self.experts.values(), rows, strict=True)]
            )
            outputs = autograd_apply(_ScaleGradient, outputs, 1 / self._ranks)
            y, dropped = combine_padded(outputs, padded_route, weights), padded_route.dropped
        else:
            rows, route = dispatch(
                tokens,
                experts,
                self.num_experts,
                capacity=capacity,
                priorities=priorities,
                hierarchical=self.hierarchical,
                group=self.group,
                **self.codecs,
            )
            parts = route.split(autograd_apply(_ScaleGradient, rows, float(self._ranks)))
            outputs = torch.cat(
                [expert(part) for expert, part in zip(self.experts.values(), parts, strict=True)]
            )
            outputs = autograd_apply(_ScaleGradient, outputs, 1 / self._ranks)
            y, dropped = combine(outputs, route, weights), route.dropped
        assert self.statistics is not None
        self.statistics = RouterStatistics(**{**vars(self.statistics), "dropped": dropped})
        return y.view(*x.shape[:-1], y.shape[-1])

    def __getstate__(self) -> dict[str, Any]:
        # A tensor with a graph of gradients can be neither copied nor pickled.
        return {**self.__dict__, "auxiliary_loss": self.auxiliary_loss.detach()}

    def extra_repr(self) -> str:
        """Return the arguments that `print` shows."""
        return f"features={self.features}, num_experts={self.num_experts}, top_k={self.top_k}, ranks={self._ranks}"

    def _route(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and experts of each token, [tokens, top_k], and set losses and statistics."""
        with torch.autocast(tokens.device.type, enabled=False):
            logits = functional.linear(tokens.float(), self.router.weight.float())
            probabilities = torch.softmax(logits, 1)
            weights, experts = probabilities.topk(self.top_k, 1)
            if self.normalize_weights:
                weights = weights / weights.sum(1, keepdim=True)
            balance = z = logits.sum()  # without tokens: 0, and the router has a gradient
            if len(tokens):
                balance = load_balancing_loss(
                    probabilities, experts, group=self.group, all_ranks=self.balance_all_ranks
                )
                z = router_z_loss(logits)
        self.auxiliary_loss = self.balance_weight * balance + self.z_weight * z
        counts = count_choices(experts.reshape(-1), self.num_experts)
        self.statistics = RouterStatistics(
            load_balancing_loss=balance.detach(),
            router_z_loss=z.detach(),
            counts=counts,
            dropped=counts.new_zeros(()),
        )
        return weights, experts


def auxiliary_loss(model: nn.Module) -> torch.Tensor:
    """Return the sum of the auxiliary losses of all `MoE` layers of a model in their last forward pass.

    Args:
        model: The model.

    Returns:
        A scalar, fp32; 0 if the model has no such layer.

    Example::

        loss = functional.cross_entropy(model(inputs), targets) + dtcomm.moe.auxiliary_loss(model)
    """
    losses = [module.auxiliary_loss for module in model.modules() if isinstance(module, MoE)]
    return torch.stack(losses).sum() if losses else torch.zeros(())


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of experts, which differ between ranks and whose gradients must not be averaged.

    Args:
        model: A model with layers of `MoE`.

    Returns:
        The parameters by their names in the model.

    Example:
        Leave them out of torch's DDP::

            names = list(dtcomm.moe.expert_parameters(model))
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
            model = DistributedDataParallel(model)
    """
    owned = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, MoE)
        for parameter in module.experts.parameters()
    }
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in owned}


class _ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.factor, None
