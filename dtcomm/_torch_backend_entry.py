"""Registers the backend ``"dtcomm"`` with torch.distributed, without importing torch.

``import dtcomm`` calls `register`, and so does torch itself if dtcomm is installed (``dtcomm_autoload``).
Either may come first, and ``dtcomm --help`` must not wait for torch. The registration therefore happens as soon as
``torch.distributed`` has been imported, and the backend is imported when the first group is created.
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
    """Register the backend now, or when torch.distributed is imported. Further calls do nothing."""
    module = sys.modules.get(_REGISTRY)
    if module is not None and hasattr(module, "init_process_group"):
        _register_with(module)
    elif not any(isinstance(finder, _RegisterOnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegisterOnImport())


def _register_with(c10d: ModuleType) -> None:
    backends: Any = getattr(c10d, "Backend", None)  # None: a torch built without torch.distributed
    if backends is not None and NAME not in backends.backend_list:
        backends.register_backend(NAME, _create, extended_api=True, devices=DEVICES)


def _create(options: Any, backend_options: Any) -> Any:
    from dtcomm.backend.process_group import create

    return create(options, backend_options)


class _RegisterOnImport(importlib.abc.MetaPathFinder):
    """Finds no module itself; makes the import of torch.distributed's registry register the backend afterwards."""

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
                _register_with(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
