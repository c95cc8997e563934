"""`OptimizerBucket`: the parameters that `ShardedOptimizer` reduces and gathers together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dtcomm.collectives import all_reduce
from dtcomm.fsdp.flat_layout import concatenated_layout


class OptimizerBucket:
    """Parameters that are reduced and gathered together: one flat tensor, cut into one shard per rank.

    The constructor makes the parameters views of the flat tensor.

    Attributes:
        flat: The parameters that the model computes with, decoded and padded.
        layout: Where each parameter lies in it.
        master_shard: This rank's shard in fp32, which the optimizer updates.
        gradient: The flat gradient accumulated so far, or None.
        missing: Number of parameters whose gradient has not arrived in this backward pass.
        tensor_parallel_groups: The groups over which its parameters are cut; none if all ranks have them.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        ranks: int,
        rank: int,
        tensor_parallel_groups: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        self.name = name
        self.tensor_parallel_groups = tuple(tensor_parallel_groups)
        self.parameters = [parameter for _, parameter in parameters]
        self.layout = concatenated_layout([(name, parameter.shape) for name, parameter in parameters])
        self.ranks, self.rank = ranks, rank
        first = self.parameters[0]
        self.dtype = first.dtype
        with torch.no_grad():
            self.flat = first.new_zeros(self.layout.numel(ranks))
            for view, parameter in zip(self._views(self.flat), self.parameters, strict=True):
                view.copy_(parameter)
                parameter.data = view
        self.master_shard = torch.nn.Parameter(self.shard_of(self.flat).float().clone())
        self._versions = self._current_versions()
        self.gradient: torch.Tensor | None = None
        self.missing = len(self.parameters)

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        sizes = [parameter.numel() for parameter in self.parameters]
        slices = flat[: sum(sizes)].split_with_sizes(sizes)
        return [part.view(p.shape) for part, p in zip(slices, self.parameters, strict=True)]

    def shard_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a flat tensor."""
        return flat.view(self.ranks, -1)[self.rank]

    def _current_versions(self) -> list[int]:
        # Writing to the flat tensor does not change the versions of the parameters, writing to a parameter does.
        return [parameter._version for parameter in self.parameters]

    def update_master_if_overwritten(self) -> None:
        """Copy the parameters into the master shard if something else, such as a checkpoint, wrote them."""
        versions = self._current_versions()
        if versions != self._versions:
            self._versions = versions
            with torch.no_grad():
                self.master_shard.copy_(self.shard_of(self.flat))

    def parameter_means(self, shard: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """Return for each element of this rank's shard the mean of its parameter's elements over all ranks' shards.

        Where that is 0, the mean of the whole bucket takes its place.
        """
        whole = shard.new_zeros(self.ranks, shard.numel(), dtype=torch.float64)
        whole[self.rank] = shard
        views = self._views(whole.view(-1))
        sums = torch.stack([view.sum() for view in views])
        all_reduce(sums, group=group)
        sizes = sums.new_tensor([view.numel() for view in views])
        means = torch.where(sums > 0, sums / sizes, sums.sum() / sizes.sum())
        for view, mean in zip(views, means, strict=True):
            view.fill_(mean)
        return whole[self.rank].to(shard.dtype)

    def accumulate(self, index: int, keep: bool) -> None:
        """Add a parameter's gradient to the flat one; ``keep`` makes the parameter's ``grad`` a view of the sum."""
        parameter = self.parameters[index]
        gradient = parameter.grad
        assert gradient is not None  # autograd has just accumulated it
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.flat)
        view = self._views(self.gradient)[index]
        if gradient.data_ptr() != view.data_ptr():
            view.add_(gradient)
        parameter.grad = view if keep else None

    def add_reduced_shard(self, shard: torch.Tensor) -> None:
        """Add the reduced shard of a gradient to the gradient that the optimizer will see."""
        gradient = shard.float()
        master = self.master_shard
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
