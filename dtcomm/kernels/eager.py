"""The verbs outside `torch.compile`: check the arguments, choose the kernel, run it in one pass over memory.

`ops` documents the verbs and calls this module; so do the operators of `custom_ops` when a compiled graph runs.
`run_combine` and `run_decode` take checked calls. Behind them are two kinds of codecs that no kernel of `dispatch` runs
as a call: those of variable length, and those that run in Python, such as ``topk:scope=tensor`` in operators of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from dtcomm import _C, errors
from dtcomm.codecs import Codec, PythonCodec, TopK
from dtcomm.codecs import codec as parse
from dtcomm.codecs.base import ELEMENT_TYPES, FLOAT_TYPES
from dtcomm.codecs.sparse import POSITION_BYTES
from dtcomm.kernels import calls, counter_rng, cpu, dispatch, reference
from dtcomm.kernels.calls import CallGroup, Combine, GroupedCall, Runner, Tensors
from dtcomm.kernels.reference import lossless as reference_lossless
from dtcomm.kernels.reference.floats import bytes_of

# What depends only on a codec, a size and a type: parsing a spec takes longer than encoding a kilobyte.
_formats: dict[tuple[Codec | str, int, torch.dtype], tuple[Codec, int]] = {}
_MOST_FORMATS = 4096
_MOST_REPEATED_BYTES = 1 << 20  # of a tensor: above, checks take no time beside the kernel
# For codec topk: the type of values, the type of their codes, and the code of NaN.
_TOPK_TYPES = {
    "bf16": (torch.bfloat16, torch.int16, 0x7FC0),
    "fp16": (torch.float16, torch.int16, 0x7E00),
    "fp32": (torch.float32, torch.int32, 0x7FC00000),
}


def encode(
    codec: Codec | str,
    x: torch.Tensor,
    key: int,
    offset: int,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    decoded: torch.Tensor | None,
) -> torch.Tensor:
    """:func:`dtcomm.kernels.ops.encode`."""
    plain = residual is None and decoded is None
    if plain and out is not None and _C.encode_repeated(codec, x, key, offset, out):
        return out
    given = codec
    x = calls.tensor("x", x)
    numel, dtype = x.numel(), x.dtype
    codec, payload_bytes = _format(codec, "x", numel, dtype)
    if codec.variable_length:
        return _encode_lossless(codec, x, residual, out, decoded)
    payload = _payload_out(out, codec, numel, payload_bytes, x)
    call = Combine(
        codec=codec,
        numel=numel,
        dtype=dtype,
        local=x,
        residual=_residual(residual, numel, dtype, x),
        key=calls.uint64("key", key),
        offset=calls.uint64("offset", offset),
        payload_out=payload,
        out=None if decoded is None else calls.floats("decoded", decoded, numel, dtype, like=x),
    )
    _run(call, "x", x)
    if plain:
        _keep(given, codec, x, payload)
    return payload


def decode(
    codec: Codec | str,
    payload: torch.Tensor,
    numel: int,
    dtype: torch.dtype,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """:func:`dtcomm.kernels.ops.decode`."""
    if out is not None and _C.decode_repeated(codec, payload, numel, dtype, out):
        return out
    given = codec
    numel = calls.count("numel", numel)
    codec, payload_bytes = _format(codec, "dtype", numel, dtype)
    if codec.variable_length:
        return _decode_lossless(codec, payload, numel, dtype, out)
    payload = calls.payload("payload", payload, codec, numel, payload_bytes)
    calls.require_valid_payload(codec, [payload], numel)
    if out is None:
        out = payload.new_empty(numel, dtype=dtype)
    else:
        calls.floats("out", out, numel, dtype, like=payload)
    if numel == 0:
        return out
    run_decode(dispatch.kernel_for(codec, "payload", payload), codec, payload, numel, dtype, out)
    _keep(given, codec, out, payload)
    return out


def reduce(
    codec: Codec | str,
    payloads: Sequence[torch.Tensor],
    numel: int,
    local: torch.Tensor | None,
    position: int | None,
    divisor: int,
    out: torch.Tensor | None,
    op: str,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    """:func:`dtcomm.kernels.ops.reduce`."""
    call, name, first, _ = _reduction(codec, payloads, numel, local, position, divisor, op, dtype, out)
    if out is None:
        out = first.new_empty(numel, dtype=call.dtype)
    else:
        calls.floats("out", out, numel, call.dtype, *_accumulator_types(call.dtype), like=first)
    _run(call._replace(out=out), name, first)
    return out


def reduce_encode(
    codec: Codec | str,
    payloads: Sequence[torch.Tensor],
    numel: int,
    local: torch.Tensor | None,
    position: int | None,
    divisor: int,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    op: str,
    dtype: torch.dtype | None,
    key: int,
    offset: int,
    decoded: torch.Tensor | None,
) -> torch.Tensor:
    """:func:`dtcomm.kernels.ops.reduce_encode`."""
    call, name, first, payload_bytes = _reduction(
        codec, payloads, numel, local, position, divisor, op, dtype, decoded
    )
    dtype = call.dtype
    if decoded is not None:
        calls.floats("decoded", decoded, numel, dtype, *_accumulator_types(dtype), like=first)
    payload = _payload_out(out, call.codec, numel, payload_bytes, first)
    call = call._replace(
        residual=_residual(residual, numel, dtype, first),
        key=calls.uint64("key", key),
        offset=calls.uint64("offset", offset),
        payload_out=payload,
        out=decoded,
    )
    _run(call, name, first)
    return payload


def run_combine(kernel: str, call: Combine) -> None:
    """Run a checked call with the kernel of this name, which supports its codec and device."""
    if kernel == dispatch.REFERENCE:
        reference.combine(call)
    elif kernel == dispatch.PYTHON:
        _combine_in_torch(call)
    elif kernel == dispatch.CUDA:
        dispatch.cuda_kernels().combine(call)
    else:
        cpu.combine(kernel, call)


def run_decode(
    kernel: str, codec: Codec, payload: torch.Tensor, numel: int, dtype: torch.dtype, out: torch.Tensor
) -> None:
    """Decode a checked payload into `out` with the kernel of this name."""
    if kernel == dispatch.REFERENCE:
        reference.decode(codec, payload, numel, dtype, out)
    elif kernel == dispatch.PYTHON:
        with torch.inference_mode():
            out.view(-1).copy_(_decoded(cast(TopK | PythonCodec, codec), payload, numel))
    elif kernel == dispatch.CUDA:
        dispatch.cuda_kernels().decode(codec, payload, numel, dtype, out)
    else:
        cpu.decode(kernel, codec, payload, numel, dtype, out)


def prepare(kernel: str, group: CallGroup, device: torch.device) -> Runner:
    """Return what runs a group of calls with a kernel on a device, in as few native calls or launches as possible."""
    run: Runner | None = None
    if kernel == dispatch.CUDA:
        run = dispatch.cuda_kernels().prepare(group, device)
    elif kernel in dispatch.NATIVE and not group.codec.stores_positions:  # these are checked before each call
        run = cpu.prepare(kernel, group)

    def run_singly(tensors: Tensors, seed: int) -> None:
        for call in group.calls:
            run_single(kernel, group, call, tensors, seed)

    return run or run_singly


def run_single(kernel: str, group: CallGroup, call: GroupedCall, tensors: Tensors, seed: int) -> None:
    """Run one call of a group by itself."""
    codec, numel, dtype = group.codec, call.numel, group.dtype
    size = codec.wire_bytes(numel, dtype)
    local, out = (
        tensors.at(place, numel, given or dtype)
        for place, given in ((call.local, call.local_dtype), (call.out, call.out_dtype))
    )
    payloads = [tensors.at(place, size, torch.uint8) for place in call.payloads]
    payload_out = tensors.at(call.payload_out, size, torch.uint8)
    added, residual = (
        tensors.at(place, numel, torch.float32) for place in (call.residual_in, call.residual_out)
    )
    copied = not payloads and added is None and payload_out is None
    if out is not None and copied and local is not None and out.data_ptr() == local.data_ptr():
        out = None
    old = None
    if residual is None and added is not None:
        local = added if local is None else local.float() + added
    elif residual is not None and added is None:
        # It is in the sum already. Adding -0.0 changes no number; a block that is not finite keeps its residual, here
        # -0.0, which is then replaced by the old one.
        old = residual.clone()
        residual.fill_(-0.0)
    if payload_out is None and out is None and residual is None:
        return
    checked = cast(list[torch.Tensor], payloads)
    calls.require_valid_payload(codec, checked, numel)
    combine = Combine(
        codec=codec,
        numel=numel,
        dtype=dtype,
        payloads=tuple(checked),
        local=local,
        position=call.position,
        residual=residual,
        divisor=call.divisor,
        op=call.op,
        key=_C.mix_key(seed, group.rank, call.payload_id),
        offset=call.offset,
        payload_out=payload_out,
        out=out,
    )
    run_combine(kernel, combine)
    if old is not None and residual is not None:
        torch.where(residual.view(torch.int32) == -(2**31), old, residual, out=residual)


def _reduction(
    codec: Codec | str,
    payloads: Sequence[torch.Tensor],
    numel: int,
    local: torch.Tensor | None,
    position: int | None,
    divisor: int,
    op: str,
    dtype: torch.dtype | None,
    floats: torch.Tensor | None,
) -> tuple[Combine, str, torch.Tensor, int]:
    """The part of a call that both reductions share, the name of the argument whose device decides, the argument, and
    the bytes of a payload.

    `floats` is the output that states the type of the reduced tensor if neither `dtype` nor `local` does.
    """
    numel = calls.count("numel", numel)
    if dtype is None:
        known = [tensor.dtype for tensor in (local, floats) if isinstance(tensor, torch.Tensor)]
        dtype = known[0] if known else torch.float32
    codec, payload_bytes = _format(codec, "dtype", numel, dtype)
    if codec.variable_length:
        raise ValueError(
            f"codec: {str(codec)!r} has no sums: the length of its payloads depends on the data, and a sum is encoded "
            "piece by piece into memory of a fixed size; decode the payloads and add the tensors"
        )
    if not payloads and local is None:
        raise ValueError("payloads: expected at least one payload or a local tensor, got none")
    last = len(payloads)
    position = last if position is None else calls.count("position", position)
    if position > last:
        raise ValueError(f"position: expected 0 to {last}, got {position}")
    first: torch.Tensor | None = None
    checked = []
    for i, payload in enumerate(payloads):
        checked.append(calls.payload(f"payloads[{i}]", payload, codec, numel, payload_bytes, first))
        first = checked[0]
    if local is not None:
        calls.floats("local", local, numel, dtype, *_accumulator_types(dtype), like=first)
    call = Combine(
        codec=codec,
        numel=numel,
        dtype=dtype,
        payloads=tuple(checked),
        local=local,
        position=position,
        divisor=calls.divisor(divisor, dtype),
        op=calls.operation(codec, op),
    )
    if first is not None:
        return call, "payloads[0]", first, payload_bytes
    assert local is not None
    return call, "local", local, payload_bytes


def _format(codec: Codec | str, argument: str, numel: int, dtype: torch.dtype) -> tuple[Codec, int]:
    """The codec, and the bytes of a payload of `numel` elements of `dtype`, which `argument` states."""
    try:
        return _formats[codec, numel, dtype]
    except (KeyError, TypeError):  # TypeError: an argument of a wrong type, without a hash
        parsed = parse(codec)
    calls.element_type(argument, parsed, dtype)
    known = parsed, parsed.wire_bytes(numel, dtype)
    if not parsed.in_python:  # the functions of a codec written in Python decide anew
        if len(_formats) >= _MOST_FORMATS:
            _formats.clear()
        _formats[codec, numel, dtype] = known
    return known


def _keep(given: Codec | str, codec: Codec, tensor: torch.Tensor, payload: torch.Tensor) -> None:
    """Let the native module run later calls of this kind without the checks that have passed.

    Not for large tensors, which are written around the cache, and not where payloads have to be validated.
    """
    small = tensor.numel() * tensor.itemsize < _MOST_REPEATED_BYTES
    if tensor.is_cpu and small and not codec.in_python and not codec.stores_positions:
        _C.keep_format(given, codec.native_bytes, tensor, ELEMENT_TYPES[tensor.dtype], payload)


def _run(call: Combine, name: str, first: torch.Tensor) -> None:
    """Run `call` on the device of its argument `first`, which is called `name`."""
    if call.numel == 0:
        return
    calls.require_valid_payload(call.codec, call.payloads, call.numel)
    run_combine(dispatch.kernel_for(call.codec, name, first), call)


def _accumulator_types(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Types other than `dtype` in which a sum of `dtype` may be kept."""
    return (torch.float32,) if dtype in FLOAT_TYPES else ()


def _residual(
    residual: torch.Tensor | None, numel: int, dtype: torch.dtype, like: torch.Tensor
) -> torch.Tensor | None:
    if residual is None:
        return None
    if dtype not in FLOAT_TYPES:
        raise TypeError(f"residual: {dtype} is summed as itself and loses nothing; expected None")
    return calls.floats("residual", residual, numel, torch.float32, like=like)


def _payload_out(
    out: torch.Tensor | None, codec: Codec, numel: int, payload_bytes: int, like: torch.Tensor
) -> torch.Tensor:
    if out is None:
        return like.new_empty(payload_bytes, dtype=torch.uint8)
    return calls.payload("out", out, codec, numel, payload_bytes, like)


def _encode_lossless(
    codec: Codec,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    decoded: torch.Tensor | None,
) -> torch.Tensor:
    """The payload of a codec of variable length: a tensor of its own or the beginning of `out`."""
    if residual is not None:
        raise ValueError(f"residual: codec {str(codec)!r} loses nothing; expected None")
    numel, bound = x.numel(), codec.wire_bytes(x.numel(), x.dtype)
    if decoded is not None:
        calls.floats("decoded", decoded, numel, x.dtype, like=x)
    if out is not None:
        calls.payload("out", out, codec, numel, bound, like=x)
    kernel = dispatch.kernel_for(codec, "x", x)
    memory = x.new_empty(bound, dtype=torch.uint8) if out is None else out
    if kernel == dispatch.REFERENCE:
        payload = torch.from_numpy(reference_lossless.encode(bytes_of(x), x.itemsize))
        memory[: payload.numel()] = payload
        length = payload.numel()
    else:
        length = _C.encode_lossless(kernel, x.data_ptr(), numel, x.itemsize, memory.data_ptr())
    if decoded is not None and decoded is not x:
        decoded.view(-1).copy_(x.detach().view(-1))
    # A copy, because torch.save stores all of the memory that a view has a part of.
    return memory[:length].clone() if out is None else memory[:length]


def _decode_lossless(
    codec: Codec, payload: torch.Tensor, numel: int, dtype: torch.dtype, out: torch.Tensor | None
) -> torch.Tensor:
    """`payload` has the length that its encoding gave it."""
    payload = calls.tensor("payload", payload)
    bound = codec.wire_bytes(numel, dtype)
    if payload.dtype != torch.uint8:
        raise TypeError(f"payload: expected uint8, got {payload.dtype}")
    if payload.numel() > bound:
        raise ValueError(
            f"payload: {numel} elements of {dtype} in codec {str(codec)!r} are at most {bound} bytes, "
            f"got {payload.numel()}"
        )
    if out is None:
        out = payload.new_empty(numel, dtype=dtype)
    else:
        calls.floats("out", out, numel, dtype, like=payload)
    kernel = dispatch.kernel_for(codec, "payload", payload)
    error = ""
    if kernel == dispatch.REFERENCE:
        try:
            bytes_of(out)[:] = reference_lossless.decode(payload.numpy(), numel, dtype.itemsize)
        except ValueError as reason:
            error = str(reason)
    else:
        error = _C.decode_lossless(
            kernel, payload.data_ptr(), payload.numel(), numel, dtype.itemsize, out.data_ptr()
        )
    if error:
        raise errors.PayloadCorrupt(f"payload in codec {str(codec)!r} {error}")
    return out


def _combine_in_torch(call: Combine) -> None:
    """Run one call of a codec that is written in Python, on the current stream, with the arithmetic of `reference`."""
    codec, numel = cast(TopK | PythonCodec, call.codec), call.numel
    # Outputs may be inference tensors, which only inference mode writes.
    with torch.inference_mode():
        terms = [_decoded(codec, payload, numel) for payload in call.payloads]
        local = None if call.local is None else call.local.reshape(-1).float()
        residual = None if call.residual is None else call.residual.view(-1)
        if residual is not None:
            local = residual if local is None else local + residual
        if local is not None:
            terms.insert(call.position, local)
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        if call.divisor != 1:
            # A tensor, because CUDA multiplies by the reciprocal of a number.
            total = total / total.new_full((1,), float(call.divisor))
        if call.payload_out is None:
            if call.out is not None:
                call.out.view(-1).copy_(total)
            if residual is not None:
                residual.zero_()
            return
        size = codec.payload_bytes(numel)
        call.payload_out[:size].copy_(_encoded(codec, total, counter_rng.absorb(call.key, call.offset)))
        call.payload_out[size:].zero_()
        if residual is None and call.out is None:
            return
        decoded = _decoded(codec, call.payload_out, numel)
        if residual is not None:
            error = (total - decoded) * call.divisor
            residual.copy_(torch.where(error.isfinite(), error, residual))
        if call.out is not None:
            call.out.view(-1).copy_(decoded)


def _encoded(codec: TopK | PythonCodec, x: torch.Tensor, key: int) -> torch.Tensor:
    return _encode_topk(codec, x) if isinstance(codec, TopK) else codec.encode(x, key)


def _decoded(codec: TopK | PythonCodec, payload: torch.Tensor, numel: int) -> torch.Tensor:
    payload = payload[: codec.payload_bytes(numel)]
    return _decode_topk(codec, payload, numel) if isinstance(codec, TopK) else codec.decode(payload, numel)


def _encode_topk(codec: TopK, x: torch.Tensor) -> torch.Tensor:
    """The payload of an fp32 tensor [n], without padding."""
    magnitudes = x.view(torch.int32).bitwise_and(0x7FFFFFFF).long()
    # Numbers that all differ: the larger magnitude first, of equal ones the smaller index.
    ranking = (magnitudes << 32) - torch.arange(x.numel(), device=x.device)
    positions = ranking.topk(codec.kept_of_tensor(x.numel()), sorted=False).indices.sort().values
    values = x[positions]
    dtype, integers, nan = _TOPK_TYPES[codec.values]
    # Conversions give a NaN other bits in a vector.
    codes = torch.where(values.isnan(), nan, values.to(dtype).view(integers))
    return torch.cat([positions.int().view(torch.uint8), codes.view(torch.uint8)])


def _decode_topk(codec: TopK, payload: torch.Tensor, numel: int) -> torch.Tensor:
    """The fp32 tensor of a payload without padding; values at positions outside it are ignored."""
    split = POSITION_BYTES * codec.kept_of_tensor(numel)
    positions = payload[:split].view(torch.int32).long()
    values = payload[split:].clone().view(_TOPK_TYPES[codec.values][0]).float()
    outside = (positions < 0) | (positions >= numel)
    decoded = torch.zeros(numel + 1, device=payload.device)
    return decoded.scatter_(0, torch.where(outside, numel, positions), values)[:numel]
