"""An all-reduce for inference engines, and the interface of their custom-all-reduce slot.

`AllReduce` sums activations out of place and decides by size how: uncompressed in one shot, uncompressed in two shots,
or in a codec. `CustomAllReduce` gives it the methods that vLLM and SGLang call on the object in ``ca_comm``.

**Workspace.** The constructor maps the memory that ranks use to exchange payloads: shared memory on the CPU, memory of
the peers' devices for fused CUDA kernels. Its size does not depend on ``max_bytes``: larger tensors pass through it
section by section. No tensor of the caller's is registered with the peers, so nothing has to be exchanged after a graph
has been captured.

**Pushes only.** The fused kernels of one and two shots, which are the ones used here, store payloads and signals into
the peers' memory and load from their own memory alone, as devices need that reach each other over PCIe without NVLink.
`make races` checks this for every access.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from dtcomm.codecs import Codec
from dtcomm.collectives.checks import require_no_overlap, require_tensor
from dtcomm.collectives.groups import DeviceGroup, GroupOrMesh, process_group_of
from dtcomm.tp.comm_config import NONE, default_algorithm, parse_codec

MAX_BYTES = 8 * 2**20
# Other libraries compress from 2 to 16 MiB on: encoding and decoding smaller sums takes as long as it saves on a link.
COMPRESS_FROM_ON_CUDA = 4 * 2**20
ALGORITHMS = ("auto", "one_shot", "two_shot")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class SumChoice:
    """How `AllReduce` sums a tensor of one size; ``reason`` says why its codec is not used, or is empty.

    ``algorithm`` is one of `dtcomm.all_reduce`: ``"direct"`` is one shot or two, as suits the size.
    """

    codec: Codec
    algorithm: str
    reason: str


class AllReduce:
    """Sum activations over the ranks of a tensor-parallel group, out of place.

    A call is ``y = all_reduce(x)`` or ``all_reduce(x, out)``. All ranks make the same calls in the same order, with
    tensors of the same size and dtype, and end with the same bits. On CUDA, calls are queued on the current stream and
    can be captured in graphs after one call of the same size and dtype.

    How a sum is taken depends on its size alone. One of more than ``max_bytes`` is a ValueError. One of at least
    ``compress_from`` is sent in ``codec``, two-shot, or one-shot on two ranks. A smaller one, or one in codec ``none``,
    is uncompressed: one-shot, or two-shot above the planner's limit, with the same result.

    Args:
        group: Process group, or a device mesh with one dimension. Default: all ranks.
        max_bytes: Size of the largest tensor, in bytes. Default: 8 MiB, as in vLLM.
        codec: Codec of large sums, a spec such as ``"int8"``, ``"fp8_e4m3"`` or ``"int4:block=128"``, or a
            `Codec`. Default: ``"none"``.
        algorithm: ``"one_shot"`` or ``"two_shot"`` for all sizes, or ``"auto"``, as above. Default: ``"auto"``.
        compress_from: Size in bytes from which on the codec is used. Default: None, which asks the planner on the CPU
            (`dtcomm tune` improves its answers). On CUDA it is what `dtcomm tune` has measured for this codec and
            number of ranks, else 4 MiB, where the kernels of inference engines and NCCL are as fast.
        device: Device of the tensors. Default: the CPU.

    Attributes:
        max_bytes: As passed.
        codec: The parsed codec.
        device: The device of the tensors.
        ranks: The ranks, connected for tensors of the device.
        rank: This rank in the group.
        world_size: Number of ranks.

    Raises:
        ValueError: An argument is not valid; the message names it.
        TypeError: ``codec`` is neither a spec nor a `Codec`.
        CollectiveTimeout: A rank does not make the object within the group's timeout.

    Example::

        all_reduce = dtcomm.tp.AllReduce(group, max_bytes=32 * 2**20, codec="int8")
        hidden = all_reduce(partial_hidden)
    """

    def __init__(
        self,
        group: GroupOrMesh = None,
        max_bytes: int = MAX_BYTES,
        codec: str | Codec = "none",
        *,
        algorithm: str = "auto",
        compress_from: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if not isinstance(max_bytes, int) or max_bytes < 1:
            raise ValueError(f"max_bytes: expected a positive number of bytes, got {max_bytes!r}")
        if algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm: {algorithm!r}; valid: {', '.join(ALGORITHMS)}")
        if compress_from is not None and (not isinstance(compress_from, int) or compress_from < 0):
            raise ValueError(f"compress_from: expected bytes or None, got {compress_from!r}")
        process_group = process_group_of(group, "tp", "mesh")
        self.max_bytes, self.codec, self.algorithm = max_bytes, parse_codec(codec), algorithm
        if not any(dtype in self.codec.dtypes for dtype in DTYPES):
            raise ValueError(f"codec: {self.codec} takes no fp32, fp16 or bf16 tensors")
        self.device = torch.device("cpu" if device is None else device)
        if str(self.device) == "cuda":  # without a number, which tensors have
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._compress_from = compress_from
        self._choices: dict[tuple[int, torch.dtype], SumChoice] = {}
        self.ranks = DeviceGroup(process_group, self.device)
        self.rank, self.world_size = self.ranks.rank, self.ranks.size

    def choose(self, numel: int, dtype: torch.dtype) -> SumChoice:
        """Return how a tensor is summed. All ranks get the same answer.

        Args:
            numel: Number of elements of the tensor.
            dtype: fp32, fp16 or bf16.
        """
        choice = self._choices.get((numel, dtype))
        if choice is None:
            choice = self._choices[numel, dtype] = self._choose(numel, dtype)
        return choice

    def __call__(self, inp: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Sum ``inp`` over the ranks.

        Args:
            inp: fp32, fp16 or bf16 tensor of any shape, on ``device``. It is not changed unless it is ``out``.
            out: Contiguous tensor like ``inp`` that receives the sum; may be ``inp`` itself. Default: a new tensor.

        Returns:
            The sum: ``out``, or a new tensor.

        Raises:
            TypeError: An argument has the wrong type; the message names it.
            ValueError: An argument has the wrong size, layout or device; the message names it.
            PeerLost, CollectiveTimeout: A rank died or did not come.
        """
        self._require_input(inp)
        if out is None:
            out = torch.empty_like(inp, memory_format=torch.contiguous_format)
        elif out is not inp:
            self._require_output(out, inp)
        elif not inp.is_contiguous():
            raise ValueError(f"out: expected a contiguous tensor, got strides {tuple(out.stride())}")
        if inp.numel() == 0:
            return out
        choice = self.choose(inp.numel(), inp.dtype)
        self.ranks.sum_into(out.detach(), inp.detach().contiguous(), choice.codec, choice.algorithm)
        return out

    def why_no_fused_kernel(self, numel: int, dtype: torch.dtype) -> str:
        """Return why a sum of this size is not taken by fused CUDA kernels; empty if it is."""
        choice = self.choose(numel, dtype)
        return self.ranks.why_no_fused_kernel(choice.codec, numel, dtype, choice.algorithm)

    def _choose(self, numel: int, dtype: torch.dtype) -> SumChoice:
        reason = self._why_uncompressed(numel, dtype)
        if self.algorithm != "auto":
            return SumChoice(codec=NONE if reason else self.codec, algorithm=self.algorithm, reason=reason)
        if reason or self.codec == NONE:
            return SumChoice(codec=NONE, algorithm="direct", reason=reason)
        algorithm = default_algorithm(self.world_size, self.codec, dtype)
        return SumChoice(codec=self.codec, algorithm=algorithm, reason="")

    def _why_uncompressed(self, numel: int, dtype: torch.dtype) -> str:
        if self.codec == NONE:
            return ""
        if dtype not in self.codec.dtypes:
            return f"{self.codec} does not take {str(dtype).removeprefix('torch.')}"
        size, threshold = numel * dtype.itemsize, self._compress_from
        if threshold is None and self.device.type == "cpu":
            return self.ranks.why_uncompressed(self.codec, numel, dtype)
        if threshold is None:
            measured = self.ranks.compress_from(self.codec)
            if measured == math.inf:
                return f"{self.codec} was not faster at any size that dtcomm tune has measured"
            threshold = COMPRESS_FROM_ON_CUDA if measured is None else round(measured)
        return "" if size >= threshold else f"{size} bytes, less than compress_from = {threshold}"

    def _require_input(self, inp: torch.Tensor) -> None:
        require_tensor(inp, "inp")
        if inp.dtype not in DTYPES:
            raise TypeError(f"inp: expected fp32, fp16 or bf16, got {inp.dtype}")
        if inp.device != self.device:
            raise ValueError(f"inp: expected a tensor on {self.device}, got one on {inp.device}")
        if inp.nbytes > self.max_bytes:
            raise ValueError(
                f"inp: has {inp.nbytes} bytes, more than max_bytes = {self.max_bytes}; "
                "make the object with a larger max_bytes, or call dtcomm.all_reduce"
            )

    def _require_output(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        require_tensor(out, "out")
        if out.shape != inp.shape or out.dtype != inp.dtype or out.device != inp.device:
            raise ValueError(
                f"out: expected {inp.dtype} {tuple(inp.shape)} on {inp.device}, "
                f"got {out.dtype} {tuple(out.shape)} on {out.device}"
            )
        if not out.is_contiguous():
            raise ValueError(f"out: expected a contiguous tensor, got strides {tuple(out.stride())}")
        if out.data_ptr() != inp.data_ptr():
            require_no_overlap(inp, out, None, "out", "inp")


class CustomAllReduce:
    """`AllReduce` with the methods that vLLM and SGLang call on their custom all-reduce (``ca_comm``).

    The engine asks `should_custom_ar` before each sum and uses its own communicator where the answer is False. Sums of
    CUDA tensors are accepted only where fused kernels serve them and, with a codec, from ``compress_from`` on: only
    these are faster than the engine's own.

    Args:
        group: Process group of the tensor-parallel ranks; it needs a backend for ``device``.
        device: Device of the activations. Default: the CPU.
        max_size: Size of the largest tensor that is accepted, in bytes. Default: 8 MiB.
        codec: See `AllReduce`. Default: ``"none"``.
        algorithm: See `AllReduce`. Default: ``"auto"``.
        compress_from: See `AllReduce`. Default: None.

    Attributes:
        disabled: Whether no sum is accepted.
        reason: Why ``disabled`` is True, or empty.
        max_size: As passed.
        rank: This rank in the group.
        world_size: Number of ranks.

    Raises:
        TypeError, ValueError, CollectiveTimeout: As `AllReduce`.

    Example::

        communicator = get_tp_group().device_communicator            # vLLM
        communicator.ca_comm = dtcomm.tp.CustomAllReduce(group, device, codec="int8")
    """

    def __init__(
        self,
        group: GroupOrMesh = None,
        device: torch.device | str | None = None,
        max_size: int = MAX_BYTES,
        *,
        codec: str | Codec = "none",
        algorithm: str = "auto",
        compress_from: int | None = None,
    ) -> None:
        self._all_reduce = AllReduce(
            group, max_size, codec, algorithm=algorithm, compress_from=compress_from, device=device
        )
        self.max_size = max_size
        self.rank, self.world_size = self._all_reduce.rank, self._all_reduce.world_size
        self._accepted: dict[tuple[int, torch.dtype], bool] = {}
        self.reason = self._why_disabled()
        self.disabled = bool(self.reason)

    def should_custom_ar(self, inp: torch.Tensor) -> bool:
        """Return whether `custom_all_reduce` takes this tensor. All ranks get the same answer."""
        if self.disabled or inp.dtype not in DTYPES or inp.device != self._all_reduce.device:
            return False
        if not inp.is_contiguous() or not 0 < inp.nbytes <= self.max_size:
            return False
        key = (inp.numel(), inp.dtype)
        accepted = self._accepted.get(key)
        if accepted is None:
            # What is too small for the codec is the engine's own kernel's.
            small = bool(self._all_reduce.choose(*key).reason)
            accepted = inp.is_cpu or (not small and not self._all_reduce.why_no_fused_kernel(*key))
            self._accepted[key] = accepted
        return accepted

    def custom_all_reduce(self, inp: torch.Tensor) -> torch.Tensor | None:
        """Return the sum in a new tensor, or None if `should_custom_ar` refuses it."""
        return self._all_reduce(inp) if self.should_custom_ar(inp) else None

    def all_reduce(
        self, inp: torch.Tensor, *, out: torch.Tensor | None = None, registered: bool = False
    ) -> torch.Tensor:
        """Return the sum.

        Args:
            inp: See `AllReduce`.
            out: See `AllReduce`. Default: a new tensor.
            registered: Accepted and ignored: no tensor needs to be registered.
        """
        return self._all_reduce(inp, out)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Surround the capture of graphs, as engines do. There is nothing to prepare or to exchange afterwards."""
        yield

    def register_graph_buffers(self) -> None:
        """Do nothing: captured graphs contain no addresses of the callers' tensors on other ranks."""

    def close(self) -> None:
        """Accept no more sums. The group's communicator stays until the group is destroyed."""
        self.reason, self.disabled = "closed", True

    def _why_disabled(self) -> str:
        if self.world_size == 1:
            return "one rank: nothing to sum"
        name, reason = self._all_reduce.ranks.runtime
        return reason if self._all_reduce.device.type == "cuda" and name != "peer" else ""
