"""The files of compression state in a checkpoint: what is written, what is read, and what is wrong with them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dtcomm.compress.checkpoint import seal
from dtcomm.frameworks import attached, save_with


class Compressor:
    """Saves its number of steps, and remembers what it loads."""

    def __init__(self, steps: int = 3) -> None:
        self.steps = steps
        self.loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return seal({"steps": self.steps, "residuals": {"weight": torch.ones(2)}})

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], **options: Any) -> None:
        if isinstance(state, Mapping) and state["steps"] == 13:
            raise ValueError("state: saved with codec='int4'")
        self.loaded = state


def test_a_rank_reads_what_it_wrote(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint" / "dtcomm")
    attached.save_files(Compressor(), folder)
    assert os.listdir(folder) == ["rank0-of-1.pt"]
    compressor = Compressor()
    assert attached.load_files(compressor, folder)
    assert compressor.loaded["steps"] == 3 and torch.equal(
        compressor.loaded["residuals"]["weight"], torch.ones(2)
    )


def test_saving_removes_the_files_of_other_numbers_of_ranks(tmp_path: Path) -> None:
    for name in ("rank0-of-2.pt", "rank1-of-2.pt", "rank0-of-1.pt", "notes.txt"):
        (tmp_path / name).touch()
    attached.save_files(Compressor(), str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "rank0-of-1.pt"]


def test_another_number_of_ranks_gets_all_states(tmp_path: Path) -> None:
    for rank in range(3):
        torch.save(seal({"steps": 3, "rank": rank}), tmp_path / f"rank{rank}-of-3.pt")
    compressor = Compressor()
    assert attached.load_files(compressor, str(tmp_path))
    assert [state["rank"] for state in compressor.loaded] == [0, 1, 2]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "rank0-of-1.pt is missing. What error feedback"),
        (("rank0-of-2.pt",), "rank1-of-2.pt is missing"),
        (("rank1-of-2.pt",), "rank0-of-2.pt is missing"),
        (("rank0-of-2.pt", "rank0-of-4.pt"), "rank0-of-1.pt is missing"),
        (("damaged",), "rank0-of-1.pt cannot be read"),
        (("rank0-of-2.pt", "rank1-of-2.pt", "other steps"), "are of different steps"),
    ],
)
def test_an_incomplete_state_is_not_loaded_and_warns_once(
    names: tuple[str, ...], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in names:
        if name == "damaged":
            (tmp_path / "rank0-of-1.pt").write_bytes(b"PK damaged")
        else:
            torch.save(seal({"steps": 3}), tmp_path / name)
    if "other steps" in names:
        torch.save(seal({"steps": 4}), tmp_path / "rank1-of-2.pt")
    compressor = Compressor()
    assert not attached.load_files(compressor, str(tmp_path))
    assert compressor.loaded is None
    assert [message in record.message for record in caplog.records] == [True]
    assert "bit for bit" in caplog.text


def test_the_folder_of_a_refused_state_is_named(tmp_path: Path) -> None:
    attached.save_files(Compressor(13), str(tmp_path))
    with pytest.raises(ValueError, match=f"{tmp_path}: state: saved with codec='int4'"):
        attached.load_files(Compressor(), str(tmp_path))


def test_folders_of_other_file_systems() -> None:
    folder = "memory://run/dtcomm/epoch=0.ckpt"
    attached.save_files(Compressor(), folder)
    assert attached.has_files(folder)
    assert attached.load_files(Compressor(), folder)
    attached.remove_files(folder)
    assert not attached.has_files(folder)


def test_another_object_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected an accelerate\.Accelerator, .* got int"):
        save_with(3, Compressor())
