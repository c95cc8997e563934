"""The checkpoint engine of verl and of NeMo-RL: the first rank of the trainer publishes, each rollout worker follows.

verl imports this module by ``custom_backend_module`` (0.9.1 was read); NeMo-RL makes the class by its name in
``refit_transport`` (NeMo-RL#2608 and what followed, to commit 2bce0689). Neither asks for its base class.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable
from typing import Any

import torch
from torch import Tensor

from dtcomm.extensions.weights.engines import Receiver, Sender


class CheckpointEngine:
    """Carries the trainer's weights to rollout workers as versions; only changes are sent.

    The trainer's first rank holds whole weights twice in host memory, each rollout worker once. Both keep them between
    updates: `finalize` frees nothing.

    Args:
        bucket_size: Bytes of the tensors that NeMo-RL loads at once.
        source: What rollout workers read, such as ``tcp://trainer:29500``, a relay, or the folder ``store``.
        store: Where the first rank puts versions, as of `Sender`.
        listen: ``host:port`` at which the first rank serves them.
        model: A name of the model.
        timeout_s: Seconds without any progress after which a rollout worker raises.
        device: Where rollout workers get tensors; None: on their GPU, or on the CPU where there is none.
        is_master: verl's; not used.
        release_after_refit: NeMo-RL's; not used.

    Example:
        In the configuration of verl::

            actor_rollout_ref.rollout.checkpoint_engine:
              backend: dtcomm
              custom_backend_module: dtcomm.extensions.weights.engines.checkpoint_engine
              engine_kwargs: {dtcomm: {source: tcp://trainer:29500, listen: 0.0.0.0:29500}}

        In that of NeMo-RL::

            policy.generation:
              refit_transport: dtcomm.extensions.weights.engines.checkpoint_engine:CheckpointEngine
              refit_cfg:
                dtcomm.extensions.weights.engines.checkpoint_engine:CheckpointEngine:
                  {source: tcp://trainer:29500, listen: 0.0.0.0:29500}
    """

    wire_format = "named_tensors"  # verl's name for pairs of name and whole tensor
    cleanup_after_load, shard_expert_weights = True, False  # read by NeMo-RL

    def __init__(
        self,
        bucket_size: int,
        source: str,
        *,
        store: str | None = None,
        listen: str | None = None,
        model: str = "",
        timeout_s: float = 600.0,
        device: str | None = None,
        is_master: bool = False,
        release_after_refit: bool = False,
    ) -> None:
        self._bucket_size, self._device = bucket_size, device
        self._sender, self._receiver = Sender(store, listen, model), Receiver(source, model, timeout_s)
        self._is_first, self._version = False, 0

    def prepare(self) -> dict[str, Any]:
        """Return the number of the next version; that of the first rank counts."""
        return {"version": self._sender.next_version()}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """verl: return the arguments of `init_process_group` for ranks of the trainer, and for rollout workers."""
        version = metadata[0]["version"]
        actors = {"rank": list(range(actor_wg_world_size)), "version": [version] * actor_wg_world_size}
        return actors, {"rank": [-1] * rollout_world_size, "version": [version] * rollout_world_size}

    def init_process_group(self, rank: int, version: int) -> None:
        """verl: take the rank in the trainer, -1 for a rollout worker, and the number of the next version."""
        self._is_first, self._version = rank == 0, version

    def init_policy_process_group(
        self, *, worker_rank: int, metadata: list[dict[str, Any]], **sizes: int
    ) -> None:
        """NeMo-RL: as `init_process_group`, on a rank of the trainer."""
        self.init_process_group(worker_rank, metadata[0]["version"])

    def init_rollout_process_group(self, *, metadata: list[dict[str, Any]], **ranks: int) -> None:
        """NeMo-RL: as `init_process_group`, on a rollout worker."""
        self.init_process_group(-1, metadata[0]["version"])

    def get_target_weight_layout(self) -> None:
        """NeMo-RL: return None, as tensors are sent whole."""

    def finalize(self) -> None:
        """Do nothing: both ends need the weights of the last version for the next one."""

    def close(self) -> None:
        """End connections, and stop serving."""
        self._sender.close()
        self._receiver.close()

    async def send_weights(
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publish whole tensors on the first rank; the others only iterate, as the trainer may gather."""
        version = self._next()
        if self._is_first:
            return self._sender.send(weights, version)
        for _ in weights:
            pass
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        """verl: yield names and tensors of the next version."""
        device = self._device or ("cuda" if torch.cuda.is_available() else "cpu")
        for name, tensor in (await asyncio.to_thread(self._receiver.receive, self._next())).items():
            yield name, tensor.to(device)

    async def receive_weight_batches(self) -> AsyncIterator[list[tuple[str, Tensor]]]:
        """NeMo-RL: yield names and tensors of the next version, in lists of about ``bucket_size`` bytes."""
        batch: list[tuple[str, Tensor]] = []
        async for name, tensor in self.receive_weights():
            if batch and sum(each.nbytes for _, each in batch) + tensor.nbytes > self._bucket_size:
                yield batch
                batch = []
            batch.append((name, tensor))
        if batch:
            yield batch

    def _next(self) -> int:
        # It counts also where a call fails: after an error, both ends still mean the same version.
        self._version += 1
        return self._version - 1


if (
    verl := sys.modules.get("verl.checkpoint_engine.base")
) is not None:  # verl imports this module to have it registered
    verl.CheckpointEngineRegistry.register("dtcomm")(CheckpointEngine)
