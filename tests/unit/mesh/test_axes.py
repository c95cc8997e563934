"""Axes that fit neither the job nor the model are refused, and the error names them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from dtcomm.mesh import AXES, make_mesh


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_all_axes_exist() -> None:
    mesh = make_mesh(heads=3, layers=2, experts=5, batch=7, kv_heads=1)
    assert mesh.mesh_dim_names == tuple(AXES)
    assert all(mesh[axis].size() == 1 for axis in AXES)


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({"dp": 2, "tp": 3}, ValueError, r"mesh: dp=2 \* tp=3 needs 6 ranks, the job has 1"),
        ({"tp": 0}, ValueError, "tp=0: expected 1 or more"),
        ({"pp": 2.0}, TypeError, "pp: expected an integer, got 2.0"),
        ({"heads": 0}, ValueError, "heads=0: expected 1 or more"),
    ],
)
def test_what_does_not_fit_the_job_is_named(sizes: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make_mesh(**sizes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 4, "heads": 6}, "heads=6: not divisible by tp=4; valid tp: 1, 2, 3, 6"),
        ({"tp": 4, "heads": 8, "kv_heads": 2}, "kv_heads=2: not divisible by tp=4; valid tp: 1, 2"),
        ({"pp": 4, "layers": 3}, "pp=4: there are 3 layers; valid: 1 to 3 stages"),
        ({"ep": 4, "experts": 6}, "experts=6: not divisible by ep=4; valid ep: 1, 2, 3, 6"),
        ({"dp": 2, "ep": 2, "batch": 6}, r"batch=6: not divisible by dp \* fsdp \* ep=4; valid"),
    ],
)
def test_what_does_not_fit_the_model_is_named(
    sizes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)  # the checks need no ranks
    with pytest.raises(ValueError, match=message):
        make_mesh(**sizes)
