"""What surrounds an operation: steps that a rank takes on its own, and numbers that ranks must agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dtcomm import _C
from dtcomm.kernels.local_steps import Step


class Around(NamedTuple):
    """``before`` runs at the operation's start, after all operations queued before it; ``after`` at its end.

    ``agreed`` is 0, or a number that ranks compare as they do the operation's shape.
    """

    before: Sequence[Step] = ()
    after: Sequence[Step] = ()
    agreed: int = 0

    def held(self) -> list[tuple[torch.Tensor | None, ...]]:
        """The tensors of each step."""
        return [step.held for step in (*self.before, *self.after)]

    def native(self) -> tuple[list[_C.NativeStep], list[_C.NativeStep], int]:
        """As the engine takes it."""
        before, after = (
            [step.native for step in steps if step.native] for steps in (self.before, self.after)
        )
        return before, after, self.agreed


NOTHING = Around()
