"""The verbs as torch operators: torch's own operator checks, compiled functions, and gradients."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dtcomm
from dtcomm.codecs import codec as parse
from dtcomm.kernels import custom_ops, ops
from dtcomm.kernels.ops import quantize
from tests.unit.kernels.inputs import floats

N = 1100
SPECS = ("int8", "int8:block=16,symmetric=false,round=stochastic", "fp16", "none")
KEY = 2**64 - 3  # a word that torch's schemas hold as a negative number


@pytest.fixture(autouse=True)
def reset_dynamo() -> Iterator[None]:
    """Forgets compiled functions and symbolic numbers of the test before."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def arguments(spec: str) -> dict[str, tuple[Any, ...]]:
    """Arguments of every operator, with all optional ones that the operator may write into."""
    x, y = floats("normal", N), floats("normal", N, seed=1)
    p, q = ops.encode(spec, x), ops.encode(spec, y)
    terms = (spec, [p, q], N, x, 1, 2, "sum", torch.float32)

    def residual() -> torch.Tensor:
        return floats("normal", N, seed=2)

    return {
        "encode": (spec, x, KEY - 2**64, 5),
        "encode_keep": (spec, x, 1, 0, residual(), torch.empty(N)),
        "encode_out": (spec, x, 1, 0, residual(), torch.empty_like(p), None),
        "decode": (spec, p, N, torch.float32),
        "decode_out": (spec, p, N, torch.float32, torch.empty(N)),
        "reduce": terms,
        "reduce_out": (*terms, torch.empty(N)),
        "reduce_encode": terms,
        "reduce_encode_keep": (*terms, 3, 4, residual(), torch.empty(N)),
        "reduce_encode_out": (*terms, 3, 4, residual(), torch.empty_like(p), torch.empty(N)),
        "quantize": (spec, x.reshape(11, 100).requires_grad_(), 6, 7),
    }


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["int8:block=16,symmetric=false,round=stochastic", "none"])
@pytest.mark.parametrize("name", arguments("int8"))
def test_operators_pass_torch_s_opcheck(name: str, spec: str) -> None:
    """Checks schemas, the shapes of fake tensors, and graphs with symbolic sizes."""
    torch.library.opcheck(getattr(torch.ops.dtcomm, name).default, arguments(spec)[name])


def test_opcheck_covers_every_operator() -> None:
    defined = {name for name, op in vars(custom_ops).items() if isinstance(op, torch.library.CustomOpDef)}
    assert defined == set(arguments("int8"))


def round_trip(spec: Any) -> Callable[[torch.Tensor, int], torch.Tensor]:
    def function(x: torch.Tensor, key: int) -> torch.Tensor:
        payload = dtcomm.encode(spec, x * 2, key=key)
        return dtcomm.decode(spec, payload, x.numel(), x.dtype) + 1

    return function


@pytest.mark.parametrize("spec", [*SPECS, dtcomm.codec("int8:block=64")], ids=str)
def test_compiled_round_trip_has_one_graph(spec: Any) -> None:
    """Also after sizes and keys have become symbolic."""
    function = round_trip(spec)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for n, key in ((100, 1), (3000, 2), (4001, KEY), (1024, 3), (1, 0)):
        x = floats("normal", n)
        assert torch.equal(compiled(x, key), function(x, key))


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    function = round_trip("int8")
    x = floats("normal", N)
    assert torch.equal(torch.compile(function, fullgraph=True)(x, 3), function(x, 3))


def every_verb(x: torch.Tensor, residual: torch.Tensor) -> list[torch.Tensor]:
    """Call every verb with every argument that it writes into."""
    decoded, again, sums, floats = (torch.empty_like(x) for _ in range(4))
    wire = x.new_empty(parse("int8").wire_bytes(N), dtype=torch.uint8)
    p = dtcomm.encode("int8", x, 1, 2, residual, decoded=decoded)
    q = dtcomm.encode("int8", x, 1, 2, residual, wire, decoded=again)
    dtcomm.decode("int8", q, N, out=floats)
    total = ops.reduce("int8", [p, q], N, x, 1, 3)
    ops.reduce("int8", [p], N, out=sums)
    r = ops.reduce_encode("int8", [p, q], N, x, divisor=3, residual=residual, decoded=again, key=4)
    s = ops.reduce_encode("int8", [p], N, x, residual=residual, out=wire)
    t = ops.reduce_encode("int8", [p, r], N)
    return [decoded, again, sums, floats, wire, p, q, total, r, s, t, residual]


def test_compiled_verbs_write_into_their_arguments() -> None:
    x, residual = floats("normal", N), floats("normal", N, seed=1)
    expected = every_verb(x, residual.clone())
    compiled = torch.compile(every_verb, fullgraph=True, backend="aot_eager")(x, residual)
    assert all(torch.equal(a, b) for a, b in zip(compiled, expected, strict=True))


@pytest.mark.slow
def test_the_first_compilation_registers_the_operators() -> None:
    """Importing dtcomm does not register them; tracing may import their module."""
    program = (
        "import sys, torch, dtcomm\n"
        "dtcomm.encode; print('dtcomm.kernels.custom_ops' in sys.modules)\n"
        "f = torch.compile(lambda x: dtcomm.encode('int8', x), fullgraph=True, backend='eager')\n"
        "print(f(torch.ones(3)).numel(), 'dtcomm.kernels.custom_ops' in sys.modules)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=True
    )
    assert run.stdout.split() == ["False", "48", "True"]


def test_verbs_can_be_exported() -> None:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return dtcomm.decode("int8", dtcomm.encode("int8", x), x.numel())

    x = floats("normal", N)
    program = torch.export.export(Module(), (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    for n in (N, 64, 5000):
        longer_input = floats("normal", n)
        assert torch.equal(program.module()(longer_input), Module()(longer_input))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_only_quantize_passes_gradients(backend: str) -> None:
    """The verbs detach their results; the gradient of quantize is the identity."""

    def quantized_sum(x: torch.Tensor) -> torch.Tensor:
        return (quantize("int8", x.reshape(-1), key=KEY) * weight).sum()

    def detached(x: torch.Tensor) -> torch.Tensor:
        return dtcomm.decode("int8", dtcomm.encode("int8", x), N) + ops.reduce("none", [], N, x)

    if backend != "eager":
        quantized_sum = torch.compile(quantized_sum, fullgraph=True, backend=backend)
        detached = torch.compile(detached, fullgraph=True, backend=backend)
    weight = floats("normal", N, seed=5)
    x = floats("normal", N).requires_grad_()
    total = quantized_sum(x)
    total.backward()
    assert torch.equal(x.grad, weight)
    expected = (ops.decode("int8", ops.encode("int8", x.detach(), KEY), N) * weight).sum()
    torch.testing.assert_close(total.detach(), expected)
    assert not detached(x).requires_grad


def test_quantize_keeps_shape_and_type() -> None:
    x = floats("normal", 60).to(torch.bfloat16).reshape(3, 4, 5)
    quantized = quantize("int8:block=16", x)
    assert quantized.shape == x.shape and quantized.dtype == x.dtype
    assert torch.equal(
        quantized.reshape(-1), ops.decode("int8:block=16", ops.encode("int8:block=16", x), 60, x.dtype)
    )


def test_wrong_arguments_are_named() -> None:
    x = floats("normal", N)
    with pytest.raises(ValueError, match=r"key: .*2\*\*64"):
        quantize("int8", x, key=2**64)
    with pytest.raises(TypeError, match=r"x: .*int64"):
        quantize("int8", x.long())
    with pytest.raises(ValueError, match=r"payload: .*bytes, got 3"):
        torch.ops.dtcomm.decode("int8", torch.zeros(3, dtype=torch.uint8), 4, torch.float32)
    with pytest.raises(Exception, match=r"int64"):
        torch.compile(lambda x: dtcomm.encode("int8", x), backend="eager", fullgraph=True)(x.long())
