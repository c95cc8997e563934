"""Makes ``init_process_group("dtcomm")`` known to torch, without importing torch.

Called by ``import dtcomm`` and, where dtcomm is installed, by torch itself (entry point ``torch.backends``). Either
may come first, and neither may make ``dtcomm --help`` wait for torch: the registration happens as soon as
``torch.distributed`` has been imported, and what it registers imports the backend when a group is made.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

NAME = "dtcomm"
DEVICES = ["cpu", "cuda"]
_REGISTRY = "torch.distributed.distributed_c10d"


def register() -> None:
    """Now, if torch.distributed is there, or else when it comes. Calling it again does nothing."""
    module = sys.modules.get(_REGISTRY)
    if module is not None and hasattr(module, "init_process_group"):
        _tell(module)
    elif not any(isinstance(finder, _WhenItComes) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenItComes())


def _tell(c10d: ModuleType) -> None:
    backends: Any = getattr(c10d, "Backend", None)  # None: a torch built without torch.distributed
    if backends is not None and NAME not in backends.backend_list:
        backends.register_backend(NAME, _create, extended_api=True, devices=DEVICES)


def _create(options: Any, backend_options: Any) -> Any:
    from dtcomm.backend.process_group import create

    return create(options, backend_options)


class _WhenItComes(importlib.abc.MetaPathFinder):
    """Finds nothing itself: when the module is asked for it steps aside and has the registration follow."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _tell(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
