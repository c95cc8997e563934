"""Versions in SGLang's layout, read by a stand-in for its ``local_checkpoint.pull`` (commit 01d5bfe5)."""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dtcomm.extensions.weights import Publisher, Subscriber
from dtcomm.extensions.weights.engines.sglang import SGLangFolder

safetensors = pytest.importorskip("safetensors.torch")


class _Compressor:
    """The call of zstandard that the writer makes, with zlib's bytes: the layout does not depend on the coding."""

    def __init__(self, level: int) -> None:
        self._level = level

    def compress(self, data: object) -> bytes:
        return zlib.compress(memoryview(data), self._level)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def zstandard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", SimpleNamespace(ZstdCompressor=_Compressor))


def pull(local: dict[str, Tensor], applied: int, source: Path, target: int) -> None:
    """Apply the changes up to a version to the bytes of a local checkpoint, with the checks that SGLang makes."""
    for version in range(applied + 1, target + 1):
        folder = source / f"weight_v{version:06d}"
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        metadata = index["metadata"]
        assert (int(metadata["base_version"]), int(metadata["version"])) == (version - 1, version)
        assert metadata["delta_encoding"] == "xor" and metadata["checksum_format"] == "adler32"
        assert metadata["compression_format"] == "zstd"
        for name in set(index["weight_map"].values()):
            with safetensors.safe_open(folder / name, "pt") as file:
                assert set(file.keys()) == {key for key, at in index["weight_map"].items() if at == name}
                for key in file.keys():  # noqa: SIM118
                    change = bytearray(zlib.decompress(bytes(file.get_tensor(key).tolist())))
                    held = local[key].view(-1).view(torch.uint8)
                    held ^= torch.frombuffer(change, dtype=torch.uint8)
                    assert f"{zlib.adler32(held.numpy()):08x}" == file.metadata()[key]


def test_engines_follow_from_their_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trained = {"a": torch.randn(9, 5).bfloat16(), "b": torch.randn(7), "c": torch.zeros(3, dtype=torch.int8)}
    (tmp_path / "base").mkdir()
    safetensors.save_file(trained, tmp_path / "base" / "model.safetensors")
    local = {name: tensor.clone() for name, tensor in trained.items()}
    publisher = Publisher(trained, tmp_path / "store")
    publisher.publish()
    state = {name: torch.zeros_like(tensor) for name, tensor in trained.items()}
    subscriber = Subscriber(state, tmp_path / "store")
    folder = SGLangFolder(tmp_path / "versions", tmp_path / "base")
    for applied, change in enumerate((1.0, 0.0, 2.0)):  # nothing changes in the second version
        trained["a"][2] += change
        trained["b"] *= 1 + change
        publisher.publish()
        subscriber.update()
        assert folder.publish(state) == applied + 1
        pull(local, applied, tmp_path / "versions", applied + 1)
        for name, tensor in trained.items():
            assert torch.equal(local[name], tensor), name
    late = safetensors.load_file(tmp_path / "base" / "model.safetensors")
    pull(late, 0, tmp_path / "versions", 3)
    assert all(torch.equal(late[name], tensor) for name, tensor in trained.items())
    assert [each.name for each in sorted((tmp_path / "versions").iterdir())] == [
        f"weight_v{version:06d}" for version in (1, 2, 3)
    ]
    index = json.loads(
        (tmp_path / "versions" / "weight_v000002" / "model.safetensors.index.json").read_text()
    )
    assert index["weight_map"] == {}


def test_other_tensors_and_old_versions_are_refused(tmp_path: Path) -> None:
    folder = SGLangFolder(tmp_path, {"a": torch.zeros(3)})
    for weights, message in (
        ({"b": torch.zeros(3)}, r"tensor 'b': torch.float32 \[3\]; the checkpoint has no such tensor"),
        ({"a": torch.zeros(3).half()}, r"tensor 'a': torch.float16 \[3\]; .* torch.float32 \[3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            folder.publish(weights)
    assert list(tmp_path.iterdir()) == []
    folder.publish({"a": torch.ones(3)})
    with pytest.raises(ValueError, match=r"holds weight_v000001 already"):
        SGLangFolder(tmp_path, {"a": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"no file \*.safetensors"):
        SGLangFolder(tmp_path / "new", tmp_path / "new")
