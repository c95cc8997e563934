"""Files are written whole, to new names and not through links; no other code opens files to write."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import dtcomm
from dtcomm.system import write_file

ROOT = Path(dtcomm.__file__).parent


def test_files_are_new_and_never_written_through_links(tmp_path: Path) -> None:
    theirs, target = tmp_path / "theirs", tmp_path / "ours.prom"
    theirs.write_text("untouched")
    for link in (target, tmp_path / f".ours.prom.{os.getpid()}", tmp_path / "ours.prom.new"):
        link.symlink_to(theirs)
    write_file(target, "content")
    assert theirs.read_text() == "untouched" and not target.is_symlink() and target.read_text() == "content"
    write_file(target, b"private", mode=0o600)
    assert target.read_bytes() == b"private" and target.stat().st_mode & 0o777 == 0o600
    write_file("/dev/null", "a device is written to")
    with pytest.raises(OSError):
        write_file(tmp_path, "a folder")
    assert len(list(tmp_path.iterdir())) == 4  # no draft is left


def test_no_other_code_writes_files() -> None:
    # What processes of `dtcomm.launch` write lies in a folder of their own, which no other user may enter.
    own_folder = {"system.py", "launch/worker.py", "launch/ranks.py"}
    writes = re.compile(r"""\.write_(text|bytes)\(|\.savefig\(|\bopen\([^)\n]*, "[wax]|os\.O_CREAT""")
    places = [path for path in ROOT.rglob("*.py") if writes.search(path.read_text(encoding="utf-8"))]
    remote = {"frameworks/attached.py"}  # files.open of fsspec: not on this machine
    assert {str(path.relative_to(ROOT)) for path in places} - own_folder - remote == set()
