"""`compress`: the stages of `torch.distributed.pipelining` send activations and gradients in codecs.

A schedule asks its stage for the operations of each message (``get_fwd_send_ops`` and so on) and runs them. A
compressed stage starts its messages with `dtcomm.send` and `dtcomm.recv` instead and returns no operations, so every
schedule works. It waits for a received tensor when the computation that needs it begins.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtcomm import env
from dtcomm.arguments import require_bool, require_int
from dtcomm.codecs import Codec
from dtcomm.compress.models import wrong_type
from dtcomm.compress.residuals import SampleReferences
from dtcomm.compress.spec import choose_feedback, require_accurate
from dtcomm.compress.traffic import Traffic
from dtcomm.pipeline.exchange import (
    NONE,
    Link,
    Receipt,
    Steps,
    as_sendable,
    message_codecs,
    post_receive,
    receive_tensor,
    shape_header,
)
from dtcomm.pipeline.state import PipelineState, Settings
from dtcomm.torch_compat import PipelineStageBase

_log = logging.getLogger("dtcomm")
ACTIVATIONS, GRADIENTS = "activations", "gradients"
RECEIVES_AHEAD = 1  # micro-batches


def compress(
    stages: PipelineStageBase | Sequence[PipelineStageBase],
    codec: str | Codec = "int8",
    *,
    backward_codec: str | Codec | None = None,
    feedback: bool | str = "auto",
    save_residuals: bool = True,
    seed: int = 0,
    differences: bool = False,
    dynamic_shapes: bool = False,
    allow_inaccurate: bool = False,
) -> PipelineState:
    """Compress what pipeline stages send to each other, in place. Call it on every rank, with the same options.

    With ``"none"`` the results are those of torch's stages, bit for bit. Tensors of integers or booleans are sent
    uncompressed.

    Args:
        stages: The stage of this rank, or the list of its stages: `torch.distributed.pipelining.PipelineStage` objects
            or those of ``build_stage``.
        codec: Codec of the activations, a spec or a `Codec`. ``"int4:block=64,rotate=hadamard"`` has the tiles and the
            rotation of TAH-Quant (He et al. 2025, arXiv:2506.01352). Default: ``"int8"``.
        backward_codec: Codec of their gradients. Default: that of the activations.
        feedback: Error feedback: keep what the encoding of a gradient lost and add it to the gradient of the same
            micro-batch in the next step. Pays where the gradients of successive steps are similar. ``"auto"``: True if
            their codec loses more than 20 % of Gaussian numbers in one encoding, else False. Default: ``"auto"``.
        save_residuals: Whether `PipelineState.state_dict` has what feedback keeps. Default: True.
        seed: Seed of stochastic rounding. Default: 0.
        differences: Send the difference to the activation of the same sample in the last epoch, as AQ-SGD does (Wang et
            al. 2022, arXiv:2206.01299), which allows 2 to 4 bits. Both ends keep an fp32 copy of the activations of
            every sample; say before each step with `PipelineState.set_samples` which samples it has. In evaluation
            activations are sent uncompressed. Default: False.
        dynamic_shapes: Shapes of activations may change from step to step and from micro-batch to micro-batch: each
            message is preceded by its shape. The number of micro-batches and of dimensions stays. Needs torch 2.13.
            Default: False.
        allow_inaccurate: Accept codecs that lose more than 20 % (relative error) of Gaussian numbers; with
            ``differences`` for activations and with ``feedback`` for gradients they are accepted anyway.
            Default: False.

    Returns:
        The state: ``report()``, ``bubble_fraction()``, ``state_dict()``, ...

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: A codec is wrong or too inaccurate, a stage is compressed already, or options exclude each other. In
            the first step: ``output_args`` of a stage do not require gradients.

    Example::

        stage = PipelineStage(layers, rank, ranks, torch.device("cpu"))
        state = dtcomm.pipeline.compress(stage, "int8")
        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss)
        schedule.step(batch)  # as before
        state.print_report()
    """
    listed = list(stages) if isinstance(stages, Sequence) else [stages]
    if not listed:
        raise ValueError("stages: expected at least one stage")
    for stage in listed:
        if not isinstance(stage, PipelineStageBase):
            raise wrong_type("stages", "stages of torch.distributed.pipelining", stage)
        if isinstance(vars(stage).get("get_fwd_send_ops"), _Replaced):
            raise ValueError(f"stages: stage {stage.stage_index} is compressed already")
    options = {
        "save_residuals": save_residuals,
        "differences": differences,
        "dynamic_shapes": dynamic_shapes,
        "allow_inaccurate": allow_inaccurate,
    }
    for name, value in options.items():
        require_bool(name, value)
    require_int("seed", seed)
    if differences and dynamic_shapes:
        raise ValueError(
            "differences: not valid with dynamic_shapes: a sample's activation must keep its shape"
        )
    forward, backward = message_codecs(codec, backward_codec)
    chosen, reason = choose_feedback(feedback, [backward])
    if not isinstance(chosen, bool):
        raise ValueError(f"feedback: {feedback!r}; valid for pipelines: True, False, 'auto'")
    if not allow_inaccurate:
        if not differences:
            require_accurate(forward, "codec", ACTIVATIONS, "differences=True")
        if not chosen:
            argument = "codec" if backward_codec is None else "backward_codec"
            require_accurate(backward, argument, GRADIENTS, "feedback=True")
    settings = Settings(
        forward=forward,
        backward=backward,
        feedback=chosen,
        reason=reason,
        save_residuals=save_residuals,
        seed=seed,
        differences=differences and not env.disabled(),
        dynamic_shapes=dynamic_shapes,
    )
    state = PipelineState(listed[0].group, torch.device(listed[0].device), settings)
    codecs = {"codec": codec, "backward_codec": backward_codec}
    state.arguments = {**codecs, "feedback": feedback, "seed": seed, **options}
    for stage in listed:
        state.add_stage(_StageMessages(stage, state))
    return state


class _Replaced:
    """A method of a stage that is replaced; in copies of the stage it is torch's own."""

    def __init__(self, call: Callable[..., Any], stage: PipelineStageBase, name: str) -> None:
        self._call, self._of_copies = call, (stage, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, self._of_copies


class _StageMessages:
    """The messages of one stage, in place of torch's.

    The methods that a schedule calls are replaced on the stage object. All of them are called as torch's are.
    """

    def __init__(self, stage: PipelineStageBase, state: PipelineState) -> None:
        self.traffic: dict[tuple[str, str, str], Traffic] = {}
        self.references: dict[int, SampleReferences] = {}
        self._stage, self._settings, self._state = stage, state.settings, state
        self._receipts: dict[tuple[str, int], list[Receipt]] = {}
        self._posted: set[tuple[str, int]] = set()  # receives of this step
        self._sent_shapes: dict[int, list[torch.Size]] = {}  # of the activations of each micro-batch
        self._computed = self._sent = 0
        self._examples_checked = False
        self._methods: dict[str, Callable[..., Any]] = {}
        for name in (
            "get_fwd_send_ops",
            "get_fwd_recv_ops",
            "get_bwd_send_ops",
            "get_bwd_recv_ops",
            "forward_one_chunk",
            "backward_one_chunk",
            "backward_weight_one_chunk",
            "clear_runtime_states",
        ):
            self._methods[name] = getattr(stage, name)
            setattr(stage, name, _Replaced(getattr(self, name), stage, name))

    @property
    def name(self) -> str:
        return f"stage {self._stage.stage_index}"

    @property
    def remaining(self) -> int:
        """Computations and messages until the end of the step; -1 before the stage knows its micro-batches."""
        stage, micro_batches = self._stage, len(self._stage.args_recv_info)
        if not micro_batches:
            return -1
        sends = (not stage.is_last and not self._is_local(1)) + (
            stage.has_backward and not stage.is_first and not self._is_local(-1)
        )
        return micro_batches * (1 + sends) - self._computed - self._sent

    def detach(self) -> None:
        """Give the stage torch's own methods back, and free the references of samples."""
        self.references.clear()
        while self._methods:
            delattr(self._stage, self._methods.popitem()[0])

    # --- what schedules call ------------------------------------------------------------------------------------------

    def clear_runtime_states(self) -> None:
        self._computed = self._sent = 0
        self._receipts.clear()
        self._sent_shapes.clear()
        self._posted.clear()
        self._state.begin_step()
        self._methods["clear_runtime_states"]()

    def get_fwd_send_ops(self, micro_batch: int) -> list[Any]:
        messages = self._messages_of("get_fwd_send_ops", micro_batch)
        self._sent_shapes[micro_batch] = [tensor.shape for tensor, _ in messages]
        for number, (tensor, link) in enumerate(messages):
            self._send_activation(tensor, link, number, micro_batch)
        if not self._stage.is_last:
            self._count_sent()
        return []

    def get_fwd_recv_ops(self, micro_batch: int) -> list[Any]:
        self._post(ACTIVATIONS, micro_batch)
        return []

    def get_bwd_send_ops(self, micro_batch: int) -> list[Any]:
        messages = self._messages_of("get_bwd_send_ops", micro_batch)
        if self._stage.is_first or not self._stage.has_backward:
            return []
        for number, (tensor, link) in enumerate(messages):
            codec, traffic = self._codec_of(tensor, GRADIENTS)
            residual = None
            if self._settings.feedback and not codec.lossless(tensor.dtype):
                name = f"{self.name}/{number}/{micro_batch}/{tuple(tensor.shape)}"
                residual = self._state.residuals.get(name, tensor).view(tensor.shape)
            self._state.exchange.send(
                as_sendable(tensor, codec), link, codec, traffic, tensor.nbytes, residual
            )
        self._count_sent()
        return []

    def get_bwd_recv_ops(self, micro_batch: int) -> list[Any]:
        self._post(GRADIENTS, micro_batch)
        return []

    def forward_one_chunk(self, micro_batch: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of a micro-batch when its input is there."""
        self._wait(ACTIVATIONS, micro_batch)
        begin = time.perf_counter()
        output = self._methods["forward_one_chunk"](micro_batch, *args, **kwargs)
        self._state.add_time(forward=time.perf_counter() - begin)
        if not self._stage.has_backward:
            self._count_computed()
        elif not self._examples_checked:
            self._check_examples(output)
        return output

    def backward_one_chunk(
        self, micro_batch: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the backward pass of a micro-batch, or that of its input, when its gradients are there."""
        self._wait(GRADIENTS, micro_batch)
        begin = time.perf_counter()
        self._methods["backward_one_chunk"](
            micro_batch, loss=loss, full_backward=full_backward, last_backward=last_backward
        )
        self._state.add_time(backward=time.perf_counter() - begin)
        if full_backward:
            self._count_computed()

    def backward_weight_one_chunk(self, micro_batch: int, *args: Any, **kwargs: Any) -> None:
        begin = time.perf_counter()
        self._methods["backward_weight_one_chunk"](micro_batch, *args, **kwargs)
        self._state.add_time(backward=time.perf_counter() - begin)
        self._count_computed()

    # --- messages -----------------------------------------------------------------------------------------------------

    def _post(self, what: str, micro_batch: int) -> None:
        """Post the receives of a micro-batch, and of the next one where it is known to be what the peer sends next.

        Without that a message would be decoded, and mostly read from the socket, only when the computation before it
        has ended.
        """
        last = micro_batch + self._receives_ahead
        for number in range(micro_batch, min(last + 1, len(self._stage.args_recv_info))):
            if (what, number) not in self._posted:
                self._posted.add((what, number))
                post = self._post_activations if what == ACTIVATIONS else self._post_gradients
                self._receipts[(what, number)] = post(number)

    @property
    def _receives_ahead(self) -> int:
        """Micro-batches whose messages may be received before the schedule asks for them.

        Where every rank has one stage, a stage receives activations from one rank and gradients from another, each in
        the order of the micro-batches. With several stages only the schedule knows what comes first. Shapes and
        references of samples may have to be known first.
        """
        ranks = list(self._stage.stage_index_to_group_rank.values())
        if len(set(ranks)) < len(ranks) or self._settings.dynamic_shapes or self._settings.differences:
            return 0
        return RECEIVES_AHEAD

    def _post_activations(self, micro_batch: int) -> list[Receipt]:
        messages = self._messages_of("get_fwd_recv_ops", micro_batch)  # torch 2.15 makes the buffers here
        infos = _with_buffers(self._stage.args_recv_info[micro_batch])
        return [
            self._state.exchange.receive(link, self._activation_steps(info, link, number, micro_batch))
            for number, (info, (_, link)) in enumerate(zip(infos, messages, strict=True))
        ]

    def _post_gradients(self, micro_batch: int) -> list[Receipt]:
        messages = self._messages_of("get_bwd_recv_ops", micro_batch)
        if messages and self._settings.dynamic_shapes:
            # Of all activations, which torch may have dropped; those without a gradient are not received.
            shapes = dict(zip(self._stage.grad_recv_info[micro_batch], self._sent_shapes.pop(micro_batch)))
            for number, info in enumerate(_with_buffers(list(shapes))):
                buffer, link = messages[number]
                if buffer.shape != shapes[info]:
                    info.buffer = buffer.new_empty(shapes[info])
                    messages[number] = info.buffer, link
        return [
            self._state.exchange.receive(
                link, receive_tensor(buffer, link, self._codec_for(buffer.dtype, GRADIENTS))
            )
            for buffer, link in messages
        ]

    def _messages_of(self, method: str, micro_batch: int) -> list[tuple[torch.Tensor, Link]]:
        """Return the tensors of torch's operations, contiguous if they are to be sent, and where they go."""
        sends = "send" in method
        return [
            (op.tensor.detach().contiguous() if sends else op.tensor.detach(), Link(op.peer, op.group))
            for op in self._methods[method](micro_batch)
        ]

    def _codec_for(self, dtype: torch.dtype, what: str) -> Codec:
        if what == ACTIVATIONS and self._settings.differences:  # differences themselves are encoded elsewhere
            return NONE
        codec = self._settings.forward if what == ACTIVATIONS else self._settings.backward
        return codec if dtype.is_floating_point and dtype in codec.dtypes else NONE

    def _codec_of(self, tensor: torch.Tensor, what: str) -> tuple[Codec, Traffic]:
        codec = self._codec_for(tensor.dtype, what)
        traffic = self._traffic_of(tensor, what, str(codec))
        wanted = self._settings.forward if what == ACTIVATIONS else self._settings.backward
        if str(codec) != str(wanted):
            evaluation = tensor.is_floating_point() and tensor.dtype in wanted.dtypes
            traffic.reason = "evaluation" if evaluation else f"{wanted} does not take {traffic.dtype}"
            traffic.fallback = tensor.is_floating_point() and not evaluation
        return codec, traffic

    def _traffic_of(self, tensor: torch.Tensor, what: str, codec: str) -> Traffic:
        dtype = str(tensor.dtype).removeprefix("torch.")
        traffic = self.traffic.setdefault((what, codec, dtype), Traffic(codec=codec, what=what, dtype=dtype))
        traffic.numel += tensor.numel()
        return traffic

    def _send_activation(self, tensor: torch.Tensor, link: Link, number: int, micro_batch: int) -> None:
        exchange = self._state.exchange
        if self._sends_differences(tensor):
            self._send_difference(tensor, link, number, micro_batch)
            return
        codec, traffic = self._codec_of(tensor, ACTIVATIONS)
        if self._settings.dynamic_shapes:
            header = shape_header(tensor)
            exchange.send(
                header.to(tensor.device),
                link,
                NONE,
                self._traffic_of(header, "shapes", "none"),
                header.nbytes,
            )
        exchange.send(as_sendable(tensor, codec), link, codec, traffic, tensor.nbytes)

    def _activation_steps(self, info: Any, link: Link, number: int, micro_batch: int) -> Steps:
        buffer: torch.Tensor = info.buffer
        if self._sends_differences(buffer):
            return self._difference_steps(buffer, link, number, micro_batch)
        codec = self._codec_for(buffer.dtype, ACTIVATIONS)
        if self._settings.dynamic_shapes:
            return _steps_with_shape(info, link, codec)
        return receive_tensor(buffer, link, codec)

    def _sends_differences(self, tensor: torch.Tensor) -> bool:
        return self._settings.differences and self._stage.has_backward and tensor.is_floating_point()

    def _send_difference(self, tensor: torch.Tensor, link: Link, number: int, micro_batch: int) -> None:
        """Send samples that the peer does not know as they are, and the differences of those that it knows."""
        samples, references = self._samples_of(micro_batch, len(tensor)), self._references_of(number)
        known = references.known(samples)
        for rows, is_known in ((tensor[~known], False), (tensor[known], True)):
            if not len(rows):
                continue
            selected = _select(samples, known, is_known)
            if is_known:
                seed = self._state.exchange.next_seed()
                message, codec = references.encode(selected, rows, seed), f"{references.codec}"
            else:
                references.store(selected, rows)
                message, codec = rows.contiguous(), "none"
            traffic = self._traffic_of(rows, ACTIVATIONS, codec)
            if not is_known:
                traffic.reason = "first time of these samples"
            self._state.exchange.send(message, link, NONE, traffic, rows.nbytes)

    def _difference_steps(self, buffer: torch.Tensor, link: Link, number: int, micro_batch: int) -> Steps:
        samples, references = self._samples_of(micro_batch, len(buffer)), self._references_of(number)
        known = references.known(samples)
        memory = buffer.detach()
        all_known, any_known = bool(known.all()), bool(known.any())
        if not all_known:
            new = _select(samples, known, False)
            rows = memory.new_empty((len(new), *memory.shape[1:]))
            yield post_receive(rows, link, NONE), not any_known
            references.store(new, rows)
            memory[~known] = rows
        if any_known:
            old = _select(samples, known, True)
            payload = torch.empty(references.payload_bytes(old), dtype=torch.uint8, device=memory.device)
            yield post_receive(payload, link, NONE), True
            memory[known] = references.decode(old, payload).view(-1, *memory.shape[1:]).to(memory.dtype)

    def _references_of(self, number: int) -> SampleReferences:
        return self.references.setdefault(number, SampleReferences(self._settings.forward))

    def _samples_of(self, micro_batch: int, rows: int) -> list[int]:
        """Return the samples of a micro-batch, which torch cuts as it does the batch."""
        if self._state.samples is None:
            raise ValueError("differences: call set_samples before each step, on every rank")
        parts = self._state.samples.tensor_split(len(self._stage.args_recv_info))
        samples: list[int] = parts[micro_batch].tolist()
        if len(samples) != rows:
            raise ValueError(
                f"samples: micro-batch {micro_batch} has {rows} rows and {len(samples)} samples; expected one for each "
                "row of the batch"
            )
        return samples

    # --- the course of a step -----------------------------------------------------------------------------------------

    def _is_local(self, offset: int) -> bool:
        """Return whether the neighbouring stage is on this rank too; then nothing is sent."""
        ranks = self._stage.stage_index_to_group_rank
        return ranks[self._stage.stage_index + offset] == ranks[self._stage.stage_index]

    def _check_examples(self, output: Any) -> None:
        """Raise ValueError if gradients of the output are needed but do not come, after which torch fails or waits."""
        self._examples_checked, stage = True, self._stage
        floats = [
            example for example in _examples(stage.args_recv_info[0]) if example.dtype.is_floating_point
        ]
        if not stage.is_first and floats and not any(example.requires_grad for example in floats):
            _log.warning(
                "dtcomm.pipeline: the examples in input_args of stage %d do not require gradients, so stage %d gets "
                "none; make them with requires_grad=True unless all stages before are frozen",
                stage.stage_index, stage.stage_index - 1,
            )  # fmt: skip
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        needed = any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in outputs)
        if not stage.is_last and needed and not _examples(stage.grad_recv_info[0]):
            raise ValueError(
                f"output_args: the examples of stage {stage.stage_index} do not require gradients, so none come from "
                f"stage {stage.stage_index + 1}; make them, and its input_args, with requires_grad=True"
            )

    def _wait(self, what: str, micro_batch: int) -> None:
        for receipt in self._receipts.pop((what, micro_batch), ()):
            receipt.wait()

    def _count_sent(self) -> None:
        self._sent += 1
        self._state.end_step_if_done()

    def _count_computed(self) -> None:
        self._computed += 1
        self._state.end_step_if_done()


def _steps_with_shape(info: Any, link: Link, codec: Codec) -> Steps:
    """Receive a shape, then a tensor of that shape, for which a buffer is made."""
    header = shape_header(info.buffer).to(info.buffer.device)
    yield post_receive(header, link, NONE), False
    dims, *sizes = header.tolist()
    if tuple(info.buffer.shape) != tuple(sizes[:dims]):
        info.buffer = info.buffer.new_empty(sizes[:dims])
    yield from receive_tensor(info.buffer, link, codec)


def _select(samples: Sequence[int], known: torch.Tensor, wanted: bool) -> list[int]:
    return [sample for sample, is_known in zip(samples, known.tolist(), strict=True) if is_known is wanted]


def _with_buffers(infos: Sequence[Any]) -> list[Any]:
    """Leave out inputs of the whole model, and gradients that are None: nothing is received for them."""
    return [info for info in infos if getattr(info, "buffer", None) is not None]


def _examples(infos: Sequence[Any]) -> list[Any]:
    """Return what torch knows of tensors that are to be received: its notes of them, or the buffers in torch 2.11."""
    sent = [info for info in infos if not getattr(info, "is_root_arg", False)]
    examples = [getattr(info, "tensor_meta", None) or getattr(info, "buffer", None) for info in sent]
    return [example for example in examples if example is not None]
