"""The epilogue of a tensor-parallel sum: bias, residual stream and RMS norm, applied in the pass that decodes the sum.

`dtcomm.tp.row_linear` and `dtcomm.tp.flash_all_reduce` take an `Epilogue`; `dtcomm.kernels.epilogue` computes it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dtcomm.kernels.epilogue import EpilogueTask, epilogue_task


class Norm(NamedTuple):
    """An RMS norm: its weight ([features], or None for a norm without a weight) and its epsilon."""

    weight: torch.Tensor | None
    eps: float


class Epilogue(NamedTuple):
    """The operations after a sum, in this order; each may be None.

    Attributes:
        bias: [features], added to every row.
        residual: The residual stream, of the sum's shape, added to the sum.
        norm: RMS norm of the result, which is returned beside it.
    """

    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    norm: Norm | None = None

    def __bool__(self) -> bool:
        return any(operation is not None for operation in self)

    def rows(self, start: int, stop: int) -> Epilogue:
        """Return the epilogue of the rows (tokens) ``start`` to ``stop - 1``."""
        residual = self.residual
        if residual is None:
            return self
        flat = residual.detach().reshape(-1, residual.shape[-1]).contiguous()
        return self._replace(residual=flat[start:stop])

    def task(self, y: torch.Tensor, normed: torch.Tensor | None) -> EpilogueTask:
        """Return the kernel task that applies the epilogue to the sum in ``y``, in place, and writes ``normed``.

        A collective takes the task as its epilogue and runs it on every piece of the sum that it has decoded.
        """
        norm = self.norm
        bias, residual, weight = (
            None if tensor is None else tensor.detach().contiguous()
            for tensor in (self.bias, self.residual, None if norm is None else norm.weight)
        )
        eps = 0.0 if norm is None else norm.eps
        return epilogue_task(y, bias=bias, residual=residual, weight=weight, eps=eps, norm_out=normed)


class EpilogueResult(NamedTuple):
    """The sum with bias and residual, and its norm if the epilogue has one."""

    y: torch.Tensor
    normed: torch.Tensor | None
