"""The rows of `bench.kernels` for the lossless codec, and the verdict on them."""

from __future__ import annotations

import pytest

from bench import kernels
from bench.common import kernel_targets
from dtcomm.codecs import codec
from dtcomm.kernels import dispatch


def test_lossless_has_rows_of_both_types_with_the_payloads_share(capsys: pytest.CaptureFixture[str]) -> None:
    size, kernel = 64 << 10, dispatch.native_kernel()
    entries = kernels.contestants(size, kernel, codec("lossless"), kernels.Buffers(size))
    for entry in entries:
        entry.run(1)
    times = {entry.name: [1e-3] * 3 for entry in entries}
    times["lossless decode, bfloat16"] = [2.1e-3] * 3
    rows = kernels.report(size, kernel, entries, times)
    shares = {row["verb"]: row["payload_fraction"] for row in rows if row["codec"]}
    assert set(shares) == {
        f"{verb}, {dtype}" for verb in ("encode", "decode") for dtype in ("bfloat16", "float32")
    }
    assert 0.68 < shares["decode, bfloat16"] < 0.73 and 0.83 < shares["decode, float32"] < 0.87
    (verdict,) = kernel_targets.verdicts(rows)
    assert verdict["verdict"] == "MISS" and verdict["figure"] == pytest.approx(1 / 2.1, abs=1e-3)
    assert "of weights" in capsys.readouterr().out
