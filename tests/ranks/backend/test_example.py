"""The example with DDP, FSDP2, DTensor and checkpoints gives the same losses on the backend as on Gloo."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import init_device_mesh

from dtcomm.launch.ranks import run_ranks


def losses(rank: int, world_size: int) -> dict[str, float]:
    from examples.backend_everything import PARTS

    mesh = init_device_mesh("cpu", (world_size,))
    return {part.__name__: part(mesh, 4) for part in PARTS}


@pytest.mark.slow
def test_example_losses_equal_those_on_gloo() -> None:
    # Fresh processes: torch caches DTensor placements and meshes per process, and a reused process may have had another
    # rank.
    ours, theirs = (run_ranks(losses, 2, backend=backend, fresh=True) for backend in ("dtcomm", "gloo"))
    for dtcomm_losses, gloo_losses in zip(ours, theirs, strict=True):
        assert dtcomm_losses == pytest.approx(gloo_losses, rel=1e-5)
        assert len(dtcomm_losses) == 4
