"""torch has every private name that dtcomm uses, and only `dtcomm.torch_compat` uses them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.torch_version import TorchVersion

from dtcomm import torch_compat
from dtcomm.torch_compat import NAMES, PrivateName
from tests.support import structure


@pytest.fixture
def single_rank_group(tmp_path: Path) -> Iterator[None]:
    """A default group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def resolve(path: str) -> Any:
    module, _, attributes = path.partition(":")
    value: Any = importlib.import_module(module)
    for attribute in attributes.split("."):
        value = getattr(value, attribute)
    return value


@pytest.mark.parametrize("name", [name for name in NAMES if not name.instances], ids=lambda name: name.path)
def test_torch_has_the_name(name: PrivateName) -> None:
    if TorchVersion(torch.__version__) < name.checked.split(",")[0]:
        pytest.skip("this torch is older than the name")
    resolve(name.path)
    assert name.without and name.checked


def test_instances_have_their_names(single_rank_group: None) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    unit = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    examples = {
        "torch.nn.parallel:DistributedDataParallel": model,
        "torch.distributed.fsdp:FullyShardedDataParallel": unit,
        "torch.amp:GradScaler": torch.amp.GradScaler("cpu"),
    }
    made_later = ("_comm_hooks", "_comm_hook", "_comm_hook_state", "_divide_by_initial_world_size")
    for name in NAMES:
        owner, _, attribute = name.path.rpartition(".")
        if name.instances and attribute not in made_later:
            assert hasattr(examples[owner], attribute), name.path
    assert torch_compat.ddp_hook_states(model) == []
    assert torch_compat.join_config(model) is not None


def test_only_torch_compat_uses_private_names_of_torch() -> None:
    files = structure.python_files("dtcomm")
    stubs = sorted((structure.ROOT / "dtcomm").rglob("*.pyi"))
    places = structure.private_torch_names(files, stubs)
    assert [place for place in places if not place.startswith(structure.COMPAT)] == []


def test_a_planted_use_is_found() -> None:
    source = (
        "import torch\n\n\ndef f(x):\n    torch._C._thing(x) or x._odd_name or getattr(x, '_hidden', 0)\n"
        "    return vars(torch)['_there'] or torch.__dict__['_here']\n"
    )
    path = structure.ROOT / "dtcomm" / "planted.py"
    found = list(structure.private_torch_names([path], texts={path: source}))
    assert len(found) >= 5


@pytest.mark.parametrize(
    "name", ["AllGather", "ReduceScatter", "DDPMeshInfo", "PipelineStageBase", "clean_tensor_name"]
)
def test_names_that_are_imported_late(name: str) -> None:
    assert getattr(torch_compat, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = torch_compat.nothing


def test_the_default_group_is_torchs(single_rank_group: None) -> None:
    group = torch_compat.default_group()
    assert group is dist.group.WORLD and group in torch_compat.all_groups()
    assert torch_compat.group_or_raise(None) is group
