"""Modules of a model that keep their own forward pass: mixtures of experts, and norms that all heads have in common.

`dtcomm.tp.compress` puts them in the place of modules of the kinds ``experts`` and ``replicated``. The dense module's
forward pass runs with the parameters of this rank in place of its own, so every way in which it may be computed works.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from dtcomm.tp import functional
from dtcomm.tp.comm_config import NONE, CommConfig
from dtcomm.tp.sharded_module import ShardedModule


class _WrappedModule(ShardedModule):
    """A module that runs the forward pass of another one with its own parameters."""

    def __init__(self, module: nn.Module, comm: CommConfig) -> None:
        super().__init__(comm)
        # In a tuple, so that it is no submodule: its parameters, which have no memory, are never used.
        no_memory: dict[int, Any] = {
            id(parameter): nn.Parameter(parameter.detach().to("meta")) for parameter in module.parameters()
        }
        self._dense = (copy.deepcopy(module, no_memory),)
        self.training = module.training

    def _run(self, parameters: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        """Return the output of the dense module's forward pass with these parameters."""
        (dense,) = self._dense
        dense.train(self.training)
        return functional_call(dense, parameters, args, kwargs)

    def extra_repr(self) -> str:
        return f"{type(self._dense[0]).__name__}, ranks={self.comm.world_size}, codec={self.comm.codec}"


class ReplicatedModule(_WrappedModule):
    """A module that every rank has whole and applies to its own features, such as a norm of each head.

    A rank's gradient of the parameters is that of its own features; the gradients are summed over the ranks,
    uncompressed.

    Args:
        module: The module; it has parameters and no submodules.
        comm: The settings of the communication.
        name: Name of the module, for error messages.

    Raises:
        ValueError: The module has no parameters of its own, or submodules or buffers.
    """

    def __init__(self, module: nn.Module, comm: CommConfig, name: str) -> None:
        if [*module.children(), *module.buffers()] or not [*module.parameters()]:
            raise ValueError(
                f"plan: {name} is a {type(module).__name__}; the kind replicated expects a module with parameters and "
                "without buffers and submodules, such as a norm"
            )
        super().__init__(module, comm)
        self.load_dense(dict(module.named_parameters()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output."""
        parameters = {
            name: functional.copy_to_ranks(parameter, self.comm)
            for name, parameter in self.named_parameters()
        }
        return self._run(parameters, *args, **kwargs)


class ParallelExperts(_WrappedModule):
    """Experts of transformers whose hidden features are cut over the ranks: every rank has a part of every expert.

    The routing is the same on all ranks. Each rank computes its features of each token's experts, and the weighted
    outputs are summed over the ranks in ``comm.codec``.

    Args:
        module: Experts with ``gate_up_proj`` [experts, 2 * hidden, width] and ``down_proj`` [experts, width, hidden],
            called with tokens [n, width], the experts of each token [n, k] and their weights [n, k].
        comm: The settings of the communication.
        name: Name of the module, for error messages.

    Raises:
        ValueError: The module is none of that kind, or its hidden features are not divisible by the number of ranks.
    """

    def __init__(self, module: nn.Module, comm: CommConfig, name: str) -> None:
        hidden = experts_features(module, name)
        if hidden % comm.world_size:
            raise ValueError(
                f"plan: {name}: the experts' {hidden} hidden features are not divisible by the {comm.world_size} ranks"
            )
        super().__init__(module, comm)
        parameters = dict(module.named_parameters())
        for parameter, dim, packed in (("gate_up_proj", 1, 2), ("down_proj", 2, 1)):
            shape = list(parameters[parameter].shape)
            shape[dim] //= comm.world_size
            self.register_shard(parameter, tuple(shape), dim, "meta", None, packed)
        self.load_dense(parameters)
        if isinstance(getattr(self._dense[0], "intermediate_dim", None), int):
            setattr(self._dense[0], "intermediate_dim", hidden // comm.world_size)  # noqa: B010
        # Weights are few, and what they lose changes what the router learns.
        self._weights_comm = CommConfig(
            codec=NONE, backward_codec=NONE, group=comm.group, group_name=comm.group_name
        )

    def forward(self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts, [n, width]."""
        tokens = functional.copy_to_ranks(tokens, self.comm)
        weights = functional.copy_to_ranks(weights, self._weights_comm)
        own = self._run(dict(self.named_parameters()), tokens, experts, weights)
        return functional.reduce_from_ranks(own, self.comm)


def experts_features(module: nn.Module, name: str) -> int:
    """Return the hidden features of each expert of a module that `ParallelExperts` can cut.

    Raises:
        ValueError: It cannot; the message contains ``name``.
    """
    parameters = {key: tuple(parameter.shape) for key, parameter in module.named_parameters()}
    up, down = parameters.get("gate_up_proj", ()), parameters.get("down_proj", ())
    if len(parameters) == 2 and len(up) == len(down) == 3 and up == (down[0], 2 * down[2], down[1]):
        return down[2]
    raise ValueError(
        f"plan: {name} is a {type(module).__name__}; the kind experts expects a module with the parameters "
        "gate_up_proj [experts, 2 * hidden, width] and down_proj [experts, width, hidden] and no others"
    )
