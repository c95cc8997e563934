"""Where the state of a Lightning checkpoint is kept, and when it is saved, loaded and removed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtcomm.frameworks import save_with
from tests.unit.frameworks.test_attached import Compressor

FULL, WEIGHTS = {"optimizer_states": []}, {"state_dict": {}}


class Strategy:
    """What is used of a Lightning strategy; checkpoints are files, or folders if the name says so."""

    model = None
    is_global_zero = True

    def setup(self, trainer: Any) -> None: ...

    def broadcast(self, value: str) -> str:
        return value

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Path) -> None:
        if "folder" in filepath.name:
            filepath.mkdir()
        else:
            filepath.touch()

    def load_checkpoint(self, checkpoint_path: Path) -> dict[str, Any]:
        return {}

    def remove_checkpoint(self, filepath: Path) -> None:
        filepath.unlink()


@pytest.fixture
def compressor() -> Compressor:
    return Compressor()


@pytest.fixture
def trainer(compressor: Compressor) -> SimpleNamespace:
    fn = SimpleNamespace(value="fit")
    trainer = SimpleNamespace(strategy=Strategy(), world_size=1, state=SimpleNamespace(fn=fn))
    save_with(trainer, compressor)
    return trainer


def test_the_state_lies_beside_a_file_and_is_removed_with_it(
    trainer: SimpleNamespace, compressor: Compressor, tmp_path: Path
) -> None:
    for name in ("a.ckpt", "b.ckpt"):
        trainer.strategy.save_checkpoint(FULL, tmp_path / name)
        assert (tmp_path / "dtcomm" / name / "rank0-of-1.pt").exists()
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    trainer.strategy.load_checkpoint(tmp_path / "last.ckpt")
    assert compressor.loaded["steps"] == 3
    trainer.strategy.remove_checkpoint(tmp_path / "last.ckpt")
    assert (tmp_path / "dtcomm" / "a.ckpt").exists()
    trainer.strategy.remove_checkpoint(tmp_path / "a.ckpt")
    assert [path.name for path in (tmp_path / "dtcomm").iterdir()] == ["b.ckpt"]


def test_the_state_lies_inside_a_folder(trainer: SimpleNamespace, tmp_path: Path) -> None:
    trainer.strategy.save_checkpoint(FULL, tmp_path / "folder.ckpt")
    assert (tmp_path / "folder.ckpt" / "dtcomm" / "rank0-of-1.pt").exists()


def test_checkpoints_of_weights_alone_have_no_state(trainer: SimpleNamespace, tmp_path: Path) -> None:
    trainer.strategy.save_checkpoint(WEIGHTS, tmp_path / "weights.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["weights.ckpt"]


def test_validation_does_not_load_the_state(
    trainer: SimpleNamespace, compressor: Compressor, tmp_path: Path
) -> None:
    trainer.strategy.save_checkpoint(FULL, tmp_path / "a.ckpt")
    trainer.state.fn.value = "validate"
    trainer.strategy.load_checkpoint(tmp_path / "a.ckpt")
    assert compressor.loaded is None
