"""python -m bench: the programs of this folder, and what each measures."""

from __future__ import annotations

import importlib
import pkgutil

import bench

if __name__ == "__main__":
    for module in pkgutil.iter_modules(bench.__path__, "bench."):
        if not module.ispkg and not module.name.endswith("__main__"):
            first = (importlib.import_module(module.name).__doc__ or "").partition("\n")[0]
            print(f"python -m {module.name:26} {first}")
