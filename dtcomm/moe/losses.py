"""Losses that keep a router balanced and its scores small, and the capacity of an expert."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from dtcomm._compilation import exclude_from_compilation
from dtcomm.arguments import require_int
from dtcomm.collectives import all_reduce


def load_balancing_loss(
    probabilities: torch.Tensor,
    experts: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    all_ranks: bool = False,
) -> torch.Tensor:
    """Return the load-balancing loss of a router: num_experts times the sum over experts of f * P.

    f is the share of the (token, choice) pairs that chose an expert, P the mean of its probability. The loss is 1 if
    both are uniform, and ``num_experts`` if all tokens choose one expert with certainty. Gradients flow through P. With
    one choice a token it is the loss of Switch Transformer (Fedus et al. 2021, arXiv:2101.03961, equation 4) without
    its factor alpha.

    Args:
        probabilities: The router's probabilities of all experts, [tokens, num_experts]. At least one token.
        experts: The chosen experts, integers, [tokens] or [tokens, choices].
        group: The process group of ``all_ranks``. Default: all ranks.
        all_ranks: Whether f counts the choices of the tokens of all ranks, which then all call this function; the mean
            of the ranks' losses is that of the whole batch. Experts that specialise in what one rank's tokens have in
            common are then not punished (Qiu et al. 2025, arXiv:2501.11873). Default: this rank's tokens alone.

    Returns:
        The loss, fp32, a scalar.

    Raises:
        ValueError: A shape does not fit; the message names the argument.

    Example:
        >>> import torch, dtcomm
        >>> probabilities = torch.full((4, 2), 0.5)
        >>> float(dtcomm.moe.load_balancing_loss(probabilities, torch.tensor([0, 1, 0, 1])))
        1.0
    """
    if probabilities.ndim != 2 or not len(probabilities):
        raise ValueError(f"probabilities: expected [tokens, num_experts], got {tuple(probabilities.shape)}")
    if experts.ndim not in (1, 2) or len(experts) != len(probabilities):
        raise ValueError(
            f"experts: expected [{len(probabilities)}] or [{len(probabilities)}, choices], got {tuple(experts.shape)}"
        )
    num_experts = probabilities.shape[1]
    counts = count_choices(experts.reshape(-1), num_experts)
    if all_ranks:
        _add_up(counts, group)
    shares = counts / counts.sum()
    return num_experts * (shares * probabilities.float().mean(0)).sum()


@exclude_from_compilation
def _add_up(counts: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    all_reduce(counts, group=group)


def router_z_loss(logits: torch.Tensor) -> torch.Tensor:
    """Return the mean over the tokens of the squared logarithm of the sum of the exponentials of the scores.

    It keeps scores small, and so the rounding errors of the softmax (ST-MoE, Zoph et al. 2022, arXiv:2202.08906,
    equation 5; there with a factor of 0.001).

    Args:
        logits: The router's scores before the softmax, [tokens, num_experts]. At least one token.

    Returns:
        The loss, fp32, a scalar.

    Raises:
        ValueError: The shape does not fit.

    Example:
        >>> import torch, dtcomm
        >>> round(float(dtcomm.moe.router_z_loss(torch.zeros(3, 4))), 4)  # log(4) ** 2
        1.9218
    """
    if logits.ndim != 2 or not len(logits):
        raise ValueError(f"logits: expected [tokens, num_experts], got {tuple(logits.shape)}")
    return torch.logsumexp(logits.float(), 1).square().mean()


def expert_capacity(tokens: int, num_experts: int, *, choices: int = 1, factor: float = 1.25) -> int:
    """Return how many rows one rank may send to one expert: ``factor`` times what it sends if all experts are equal.

    Args:
        tokens: Number of tokens of a rank.
        num_experts: Number of experts on all ranks together.
        choices: Number of experts of a token. Default: 1.
        factor: The capacity factor of Switch Transformer. Default: 1.25.

    Returns:
        ``ceil(factor * tokens * choices / num_experts)``, at least 1.

    Raises:
        TypeError, ValueError: An argument is not valid; the message names it.

    Example:
        >>> import dtcomm
        >>> dtcomm.moe.expert_capacity(1024, 64, choices=2)
        40
    """
    require_int("tokens", tokens, 0)
    require_int("num_experts", num_experts, 1)
    require_int("choices", choices, 1)
    if not 0 < factor < math.inf:
        raise ValueError(f"factor: expected a positive number, got {factor!r}")
    return max(1, math.ceil(factor * tokens * choices / num_experts))


def count_choices(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return how often each expert occurs, int64. `torch.bincount` would wait for a CUDA device."""
    counts = torch.zeros(num_experts, dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(0, experts.to(torch.int64), torch.ones_like(experts, dtype=torch.int64))
