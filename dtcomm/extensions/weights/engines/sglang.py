"""SGLang: versions in folders, as its ``/pull_weights`` reads them (sglang#30366, merged into its branch sglang-miles).

Read: ``python/sglang/srt/weight_sync/local_checkpoint.py`` of commit 01d5bfe5. Release 0.5.23 does not have it. slime
and miles read the same layout. A version is a folder ``weight_v000001`` of safetensors with, for each tensor that
changed, zstd of old XOR new, and an index that names base, version and codings. Checksums are of the new bytes.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtcomm.extensions.weights.slices import bytes_of, on_cpu
from dtcomm.system import write_file

_FILE, _INDEX = "model-00001-of-00001.safetensors", "model.safetensors.index.json"


class SGLangFolder:
    """Writes versions for SGLang; it needs the packages safetensors and zstandard.

    Version 0 is the checkpoint that engines were started with, and each version holds the changes since the one before,
    so no version may be deleted. Over a slow link, let a `Subscriber` near the engines receive, and write there.

    Args:
        folder: Where versions go; engines reach it as ``source_dir``. It holds no versions yet.
        base: The checkpoint that engines were started with: its folder, or its tensors by name.

    Attributes:
        version: The version that was written last.

    Raises:
        ValueError: The folder holds versions, or the checkpoint has no safetensors.

    Example:
        Next to the engines, with ``state`` a dict of tensors on the CPU in the names and dtypes of the checkpoint::

            folder = SGLangFolder("/scratch/versions", "/models/base")
            subscriber = Subscriber(state, "tcp://trainer:29500")
            subscriber.update()
            pull = {"source_dir": "/scratch/versions", "local_checkpoint_dir": "/scratch/model"}
            requests.post(f"{url}/pull_weights", json={**pull, "target_version": folder.publish(state)})
            requests.post(f"{url}/update_weights_from_disk", json={"model_path": "/scratch/model"})
    """

    def __init__(self, folder: str | Path, base: str | Path | Mapping[str, Tensor]) -> None:
        self._zstd: Any = importlib.import_module("zstandard")
        self._folder, self.version = Path(folder), 0
        self._folder.mkdir(parents=True, exist_ok=True)
        if old := sorted(self._folder.glob("weight_v*")):
            raise ValueError(f"folder={str(folder)!r}: it holds {old[-1].name} already; give an empty one")
        if not isinstance(base, Mapping):
            from safetensors.torch import load_file

            files = sorted(Path(base).glob("*.safetensors"))
            base = {name: tensor for file in files for name, tensor in load_file(file).items()}
            if not base:
                raise ValueError("base: the folder has no file *.safetensors")
        self._old = {name: on_cpu(tensor).clone() for name, tensor in base.items()}

    def publish(self, weights: Mapping[str, Tensor]) -> int:
        """Write the next version.

        Args:
            weights: Whole tensors by name, in the checkpoint's names, shapes and dtypes; one that is left out stays.

        Returns:
            Its number, the ``target_version`` of ``/pull_weights``.

        Raises:
            ValueError: A name, shape or dtype is not that of the checkpoint; nothing was written.
        """
        from safetensors.torch import save

        for name, tensor in weights.items():
            held = self._old.get(name)
            if held is None or (held.shape, held.dtype) != (tensor.shape, tensor.dtype):
                expected = "no such tensor" if held is None else f"{held.dtype} {list(held.shape)}"
                raise ValueError(
                    f"tensor {name!r}: {tensor.dtype} {list(tensor.shape)}; the checkpoint has {expected}"
                )
        changes, sums = {}, {}
        news = {name: on_cpu(tensor) for name, tensor in weights.items() if tensor.numel()}
        for name, tensor in news.items():
            change = bytes_of(tensor) ^ bytes_of(self._old[name])
            if change.any():
                packed = self._zstd.ZstdCompressor(level=1).compress(change.numpy())
                changes[name] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
                sums[name] = f"{zlib.adler32(bytes_of(tensor).numpy().data):08x}"
        version = self.version + 1
        metadata = {"version": f"{version:06d}", "base_version": f"{self.version:06d}", "delta_encoding": "xor",
                    "compression_format": "zstd", "checksum_format": "adler32"}  # fmt: skip
        index = {"metadata": metadata, "weight_map": dict.fromkeys(changes, _FILE)}
        part = self._folder / f".weight_v{version:06d}"
        shutil.rmtree(part, ignore_errors=True)  # of a call that failed
        part.mkdir()
        if changes:
            write_file(part / _FILE, save(changes, sums))
        write_file(part / _INDEX, json.dumps(index).encode())
        os.replace(part, self._folder / f"weight_v{version:06d}")  # engines see the whole version or none
        for name in changes:
            self._old[name].copy_(news[name])
        self.version = version
        return version
