"""Which kernel runs: the best, the one that `use` names, or the one that DTCOMM_KERNEL names."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from dtcomm import _C
from dtcomm.kernels import available, current, native, ops, reference, use


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that ran, as the native core and the reference saw them."""
    names: list[str] = []
    combine, read = _C.combine, reference.combine

    def native_combine(kernel: str, *arguments: object) -> None:
        names.append(kernel)
        combine(kernel, *arguments)  # type: ignore[arg-type]

    def reference_combine(call: object) -> None:
        names.append("reference")
        read(call)  # type: ignore[arg-type]

    monkeypatch.setattr(_C, "combine", native_combine)
    monkeypatch.setattr(reference, "combine", reference_combine)
    return names


@pytest.mark.parametrize("name", available())
def test_use_forces(name: str, ran: list[str]) -> None:
    with use(name):
        assert current() == name
        ops.encode("int8", torch.ones(100))
    assert ran == [name]


def test_the_best_is_first(monkeypatch: pytest.MonkeyPatch, ran: list[str]) -> None:
    monkeypatch.delenv("DTCOMM_KERNEL", raising=False)
    ops.encode("int8", torch.ones(100))
    assert ran == [available()[0]] == [current()]
    assert available()[-2:] == ("generic", "reference")


def test_this_cpu_s_features_decide() -> None:
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        flags = next((line for line in lines if line.startswith("flags")), "").split()
    assert ("avx2" in available()) == ({"avx2", "f16c", "bmi1", "bmi2"} <= set(flags))
    wanted = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "f16c", "bmi1", "bmi2"}
    assert ("avx512" in available()) == (wanted <= set(flags))


@pytest.mark.parametrize("name", available())
def test_the_variable_forces(name: str) -> None:
    program = (
        "import torch; from dtcomm.kernels import current, ops, reference; from dtcomm import _C\n"
        "names, old, read = [], _C.combine, reference.combine\n"
        "_C.combine = lambda kernel, *rest: (names.append(kernel), old(kernel, *rest))\n"
        "reference.combine = lambda call: (names.append('reference'), read(call))\n"
        "ops.encode('int8', torch.ones(100)); print(current(), *names)"
    )
    environment = {**os.environ, "DTCOMM_KERNEL": name}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == [name, name]


def test_the_variable_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTCOMM_KERNEL", "sse9")
    with pytest.raises(ValueError, match=r"DTCOMM_KERNEL.*'sse9'.*generic, reference"):
        ops.encode("int8", torch.ones(1))


def test_unknown_kernels() -> None:
    with pytest.raises(ValueError, match=r"name.*'neon'.*generic, reference"), use("neon"):
        pass
    with pytest.raises(ValueError, match="neon"):
        _C.decode("neon", ops.parse("int8").native(), 0, 0, 0, 0, 0, False)


def test_use_nests_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTCOMM_KERNEL", "generic")
    with use("reference"):
        with pytest.raises(KeyError), use("generic"):
            raise KeyError
        assert current() == "reference"
    assert current() == "generic"


def test_use_holds_in_other_threads() -> None:
    seen: list[str] = []
    with use("generic"):
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
    assert seen == ["generic"]


def test_the_engine_gets_a_native_kernel() -> None:
    with use("reference"):
        assert native.current_name() == "generic"
    for name in available()[:-1]:
        with use(name):
            assert native.current_name() == name
