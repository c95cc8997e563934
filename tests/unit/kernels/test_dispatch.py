"""Which kernel runs: the best one, the one that `use` names, or the one that DTCOMM_KERNEL names."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dtcomm import _C
from dtcomm.codecs import Codec, codec
from dtcomm.kernels import available, current, dispatch, ops, reference, use
from dtcomm.kernels.calls import Combine


@pytest.fixture
def kernels_run(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that ran, as the native core and the reference saw them."""
    names: list[str] = []
    combine, reference_original = _C.combine, reference.combine

    def native_combine(kernel: str, *arguments: object) -> None:
        names.append(kernel)
        combine(kernel, *arguments)  # type: ignore[arg-type]

    def reference_combine(call: object) -> None:
        names.append("reference")
        reference_original(call)  # type: ignore[arg-type]

    monkeypatch.setattr(_C, "combine", native_combine)
    monkeypatch.setattr(reference, "combine", reference_combine)
    return names


@pytest.mark.parametrize("name", available())
def test_use_forces_a_kernel(name: str, kernels_run: list[str]) -> None:
    with use(name):
        assert current() == name
        ops.encode("int8", torch.ones(100))
    assert kernels_run == [name]


def test_the_best_kernel_is_first(monkeypatch: pytest.MonkeyPatch, kernels_run: list[str]) -> None:
    monkeypatch.delenv("DTCOMM_KERNEL", raising=False)
    ops.encode("int8", torch.ones(100))
    assert kernels_run == [available()[0]] == [current()]
    assert available()[-2:] == ("generic", "reference")


def test_cpu_features_decide_which_kernels_are_available() -> None:
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        flags = next((line for line in lines if line.startswith("flags")), "").split()
    assert ("avx2" in available()) == ({"avx2", "f16c", "bmi1", "bmi2"} <= set(flags))
    avx512_features = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "f16c", "bmi1", "bmi2"}
    assert ("avx512" in available()) == (avx512_features <= set(flags))
    vbmi_features = avx512_features | {"avx512vbmi", "avx512_vbmi2"}
    assert ("avx512vbmi" in available()) == (vbmi_features <= set(flags))
    assert ("neon" in available()) == (platform.machine() == "aarch64")


@pytest.mark.parametrize("name", available())
def test_dtcomm_kernel_forces_a_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def record(kernel: str, combine: Callable[..., object], *call: object) -> None:
        names.append(kernel)
        combine(*call)

    combine, read = _C.combine, reference.combine
    monkeypatch.setattr(_C, "combine", lambda kernel, *rest: record(kernel, combine, kernel, *rest))
    monkeypatch.setattr(reference, "combine", lambda call: record("reference", read, call))
    monkeypatch.setenv("DTCOMM_KERNEL", name)
    ops.encode("int8", torch.ones(100))
    assert [current(), *names] == [name, name]


def test_an_invalid_dtcomm_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTCOMM_KERNEL", "sse9")
    with pytest.raises(ValueError, match=r"DTCOMM_KERNEL.*'sse9'.*generic, reference"):
        ops.encode("int8", torch.ones(1))


def test_use_refuses_unknown_kernels() -> None:
    before = current()
    with pytest.raises(ValueError, match=r"name.*'sse9'.*generic, reference"), use("sse9"):
        pytest.fail("the block ran without the kernel that it asks for")
    assert current() == before
    with pytest.raises(ValueError, match="sse9"):
        _C.decode("sse9", codec("int8").native(), 0, 0, 0, 0, 0, False)


def test_use_nests_and_restores_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTCOMM_KERNEL", "generic")
    with use("reference"):
        with pytest.raises(KeyError), use("generic"):
            raise KeyError
        assert current() == "reference"
    assert current() == "generic"


def test_use_holds_in_other_threads() -> None:
    kernels: list[str] = []
    with use("generic"):
        thread = threading.Thread(target=lambda: kernels.append(current()))
        thread.start()
        thread.join()
    assert kernels == ["generic"]


def test_the_engine_gets_a_native_kernel() -> None:
    with use("reference"):
        assert dispatch.native_kernel() == "generic"
    for name in available()[:-1]:
        with use(name):
            assert dispatch.native_kernel() == name


class RecordingBackend:
    """Stands for the module `cuda` and records the calls that it gets."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def combine(self, call: Combine) -> None:
        self.ran.append(f"{call.codec} on {call.payload_out.device}")

    def decode(self, codec: Codec, payload: torch.Tensor, numel: int, *_: object) -> None:
        self.ran.append(f"decodes {codec} on {payload.device}")


@pytest.fixture
def installs_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], list[str]]]:
    """In a mode of fake CUDA tensors, a function that says whether `_cuda` is built; it returns what ran there."""
    monkeypatch.delenv("DTCOMM_KERNEL", raising=False)
    backend = RecordingBackend()
    monkeypatch.setattr(dispatch, "cuda_kernels", lambda: backend)

    def install(built: bool) -> list[str]:
        monkeypatch.setattr(dispatch, "installed", lambda: built)
        return backend.ran

    with FakeTensorMode():
        yield install


def on_device() -> torch.Tensor:
    return torch.empty(100, device="cuda")


def test_device_tensors_run_in_cuda(installs_cuda: Callable[[bool], list[str]]) -> None:
    kernels_run = installs_cuda(True)
    payload = ops.encode("int8", on_device())
    assert payload.device == torch.device("cuda", 0)
    assert ops.decode("int8", payload, 100).device == payload.device
    assert kernels_run == ["int8 on cuda:0", "decodes int8 on cuda:0"]


def test_use_forces_a_device_kernel_or_raises(installs_cuda: Callable[[bool], list[str]]) -> None:
    """A forced kernel runs or raises, whichever other kernels could run."""
    kernels_run = installs_cuda(True)
    with use("cuda"):
        assert current() == "cuda" and dispatch.native_kernel() in available()
        ops.encode("int8", on_device())
        with pytest.raises(ValueError, match=r"payloads\[0\]: is on cpu, .*'cuda' cannot run"):
            ops.reduce("int8", [torch.empty(144, dtype=torch.uint8)], 100)
    with use("generic"), pytest.raises(ValueError, match=r"x: is on cuda:0, .*'generic' cannot run"):
        ops.encode("int8", on_device())
    assert kernels_run == ["int8 on cuda:0"]


def test_error_when_no_kernel_runs_the_codec(installs_cuda: Callable[[bool], list[str]]) -> None:
    """The error names what to build, or the codecs that have a kernel."""
    installs_cuda(False)
    with pytest.raises(RuntimeError, match=r"x: is on cuda:0, .*'int8' needs .*_cuda .*DTCOMM_CUDA=1"):
        ops.encode("int8", on_device())
    with pytest.raises(ValueError, match=r"name: .*'cuda'.*valid: .*reference; 'cuda' needs .*_cuda"):
        use("cuda").__enter__()
    for built in (False, True):
        installs_cuda(built)
        with pytest.raises(ValueError, match=r"x: is on cuda:0, .*'exact' has no kernel; valid: none, fp16"):
            ops.encode("exact", on_device())


def test_tensors_on_two_devices_are_refused(installs_cuda: Callable[[bool], list[str]]) -> None:
    """The error names the argument that is on another device than the others."""
    installs_cuda(True)
    x, cuda_tensor = torch.empty(100), on_device()
    wire = torch.empty(144, dtype=torch.uint8)
    for call, name in (
        (lambda: ops.encode("int8", cuda_tensor, residual=x), "residual"),
        (lambda: ops.encode("int8", x, residual=cuda_tensor), "residual"),
        (lambda: ops.encode("int8", cuda_tensor, out=wire), "out"),
        (lambda: ops.encode("int8", x, decoded=cuda_tensor), "decoded"),
        (lambda: ops.decode("int8", wire, 100, out=cuda_tensor), "out"),
        (lambda: ops.reduce("int8", [wire, torch.empty_like(wire, device="cuda")], 100), r"payloads\[1\]"),
        (lambda: ops.reduce("int8", [wire], 100, cuda_tensor), "local"),
        (lambda: ops.reduce("int8", [], 100, cuda_tensor, out=x), "out"),
        (lambda: ops.reduce_encode("int8", [wire], 100, decoded=cuda_tensor), "decoded"),
    ):
        with pytest.raises(
            ValueError, match=name + r": expected a tensor on (cpu|cuda:0) as the others, got"
        ):
            call()


def test_available_kernels_of_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"device: .*'tpu'; valid: cpu, cuda"):
        available("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for built in (True, False):
        monkeypatch.setattr(dispatch, "installed", lambda built=built: built)
        assert available("cuda") == ("cuda",) * built
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert available("cuda") == ()
