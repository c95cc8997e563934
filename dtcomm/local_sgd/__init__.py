"""Local SGD and DiLoCo: every rank trains on its own, and every so many steps the ranks average their progress.

- Local SGD: Stich 2019, "Local SGD Converges Fast and Communicates Little" (arXiv:1805.09767).
- Post-local SGD, with synchronous steps at first: Lin, Stich, Patel, Jaggi 2020 (arXiv:1808.07217).
- DiLoCo, with an outer optimizer: Douillard et al. 2023 (arXiv:2311.08105).
- Streaming DiLoCo, in fragments, overlapped and with few bits: Douillard et al. 2025 (arXiv:2501.18512).
- Error feedback of outer gradients of two bits: Thérien et al. 2025, MuLoCo (arXiv:2505.23725).
- Moments averaged on periods of their own: Iacob et al. 2025, DES-LOC (arXiv:2505.22549).

The ranks send the differences to the weights that all of them had after the last average. These are small and compress
well; what compression loses is fed back, as for gradients.

`attach` runs `LocalSGD` in the loop of Hugging Face's Trainer, which wraps the model in DDP over all ranks. A
communication hook keeps each rank's gradients, or averages them over its island alone, so that only `LocalSGD`
communicates between islands.
"""

# Annotations stay objects in this file: register_comm_hook compares the hook's with the types themselves.
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from dtcomm.compress import checkpoint
from dtcomm.compress.models import framework_of, wrong_type
from dtcomm.frameworks import Attached, Integration
from dtcomm.frameworks import attach as attach_to
from dtcomm.local_sgd.local_sgd import LocalSGD
from dtcomm.torch_compat import GradBucket

__all__ = ["LocalSGD", "TrainerState", "attach"]


class TrainerState:
    """What a rank adds to the Trainer's checkpoints: `LocalSGD`'s state, and this rank's weights and optimizer.

    The Trainer itself saves the weights and the optimizer of rank 0 alone, and between averages ranks differ.

    Args:
        local: The averages.
        model: The model, not wrapped.
        trainer: The ``transformers.Trainer``.

    Attributes:
        local: The averages, for ``local.report()``, for instance.
    """

    def __init__(self, local: LocalSGD, model: torch.nn.Module, trainer: Any) -> None:
        self.local = local
        self._model, self._trainer = model, trainer

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank."""
        own = {"model": self._model.state_dict(), "optimizer": self._trainer.optimizer.state_dict()}
        return checkpoint.seal({**self.local.state_dict(), **copy.deepcopy(own)})

    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, strict: bool = True
    ) -> None:
        """Continue from the state of this rank; from the list of all states with another number of ranks.

        A rank that the run before did not have starts with the weights and the optimizer of one that it had.

        Args:
            state: What `state_dict` returned on this rank, or the list of all ranks' states.
            strict: As for `LocalSGD.load_state_dict`.
        """
        rank = dist.get_rank(self.local.group)
        own = state if isinstance(state, Mapping) else state[rank % len(state)]
        checkpoint.require_intact(
            own,
            {"model": checkpoint.shaped_like(self._model.state_dict()), "optimizer": checkpoint.entries()},
        )
        with checkpoint.loaded_optimizer("optimizer", self._trainer.optimizer, own["optimizer"]):
            self.local.load_state_dict(state, strict=strict)
        self._model.load_state_dict(own["model"])


def attach(
    trainer: Any, make: Callable[[torch.nn.Module], LocalSGD], *, island: dist.ProcessGroup | None = None
) -> Attached[TrainerState]:
    """Train with `LocalSGD` in the loop of a Hugging Face Trainer, whose DDP then sends nothing between islands.

    `LocalSGD.step` is called after each step of the optimizer, and `LocalSGD.sync` at the end of training. Checkpoints
    of the Trainer contain the state of every rank, and a resumed run continues with it.

    Args:
        trainer: The ``transformers.Trainer``, before ``train()``.
        make: Makes the `LocalSGD` of the model, which is not wrapped in DDP when it is passed.
        island: The group of ranks that train one replica together by DDP; ``make`` then passes `LocalSGD` the group
            of ranks at equal positions of the islands. Default None: every rank is an island of its own.

    Returns:
        An object whose ``state`` is the `TrainerState`, once training has begun.

    Raises:
        TypeError: ``trainer`` is not a ``transformers.Trainer``.
        ValueError: The job has one process, or the Trainer's options ask for a communication hook.

    Example::

        attached = dtcomm.local_sgd.attach(trainer, lambda model: LocalSGD(model, every=30, codec="int4"))
        trainer.train()
        attached.state.local.print_report()
    """
    if framework_of(trainer) != "transformers":
        raise wrong_type("trainer", "a transformers.Trainer", trainer)

    def start(model: DistributedDataParallel) -> TrainerState:
        if island is None:
            model.register_comm_hook(None, keep_gradients)
        else:
            model.register_comm_hook(island, allreduce_hook)
        model.broadcast_buffers = False  # before each forward pass DDP would send rank 0's to all ranks
        return TrainerState(make(model.module), model.module, trainer)

    def unused() -> TrainerState:
        raise ValueError(
            "trainer: the job has one process, and local SGD needs several; launch it with torchrun"
        )

    return attach_to(
        trainer,
        Integration(
            name="dtcomm.local_sgd",
            wrapper="DDP",
            accepts=lambda model: isinstance(model, DistributedDataParallel),
            obstacle=lambda model: "the Trainer did not wrap the model in DDP, so nothing is averaged",
            compress=start,
            unused=unused,
            step_ended=lambda state: state.local.step(),
            training_ended=lambda state: state.local.sync(),
        ),
    )


def keep_gradients(state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A DDP communication hook that sends nothing: gradients stay those of the rank."""
    kept: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    kept.set_result(bucket.buffer())
    return kept
