"""The cases of the fault campaign: what happens to which rank in which phase, and what the others must report."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LIMIT_SECONDS = 2.0  # in which the loss of a known process is reported
TIMEOUT_SECONDS = 2.0  # of the group
MARGIN_SECONDS = 1.0  # for a report at the timeout: the machine runs several cases at once
WORLD_SIZES = (2, 3, 4)
TRANSPORTS: dict[str, dict[str, str | None]] = {
    "memory": {"DTCOMM_TRANSPORT": "memory"},
    "sockets": {"DTCOMM_TRANSPORT": "sockets"},
    "ucx": {"DTCOMM_TRANSPORT": "ucx"},  # where dtcomm was built with UCX
    "gloo": {"DTCOMM_RUNTIME": "process_group", "DTCOMM_CHECK": "1"},
}

RENDEZVOUS = ("publish", "read", "connect", "agree")
OPERATIONS = ("before", "all_reduce", "all_to_all", "broadcast", "send_recv")
CLOSE = ("before_close", "in_close")
STARVED = ("no descriptors", "no memory")
MISMATCHES = ("skipped call", "other shape", "other dtype", "other op", "other codec", "other collective")
CHILDREN = ("child is killed", "child exits", "child releases")
STOPPING = ("kill", "stop", "stop and kill", "pause")
ACTIONS: dict[str, tuple[str, ...]] = {
    "publish": (*STOPPING, *STARVED, "raise"),
    "read": STOPPING,
    "connect": STOPPING,
    "agree": STOPPING,
    **dict.fromkeys(OPERATIONS, STOPPING),
    "before_close": ("kill", "stop", "pause"),
    "in_close": ("kill", "stop", "pause"),
    "fork": ("kill", "exit", *CHILDREN),
    "call": (*MISMATCHES, "absent"),
}
PHASES = {
    "publish": "rendezvous, before the rank publishes its address",
    "read": "rendezvous, after it has published and before it reads the others'",
    "connect": "rendezvous, while it maps memory or connects",
    "agree": "rendezvous, before the last agreement",
    "before": "before an all_reduce that the others are in",
    "all_reduce": "at any moment of repeated all_reduce",
    "all_to_all": "at any moment of repeated all_to_all",
    "broadcast": "at any moment of repeated broadcast from every rank in turn",
    "send_recv": "at any moment of repeated send and recv with every other rank",
    "before_close": "before the rank releases its communicators",
    "in_close": "while it releases them",
    "fork": "repeated all_reduce, after the rank has forked a child",
    "call": "the rank makes a wrong call, or none",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case of the campaign.

    Attributes:
        phase: A key of PHASES.
        action: What happens to the victim, one of ACTIONS[phase].
        transport: A key of TRANSPORTS.
        world_size: The number of ranks.
        repetition: The number of this case among those that differ in chance only.
        victim: The rank that it happens to.
        asynchronous: Whether operations are asynchronous, several at once; at close, whether the others wait in one.
        large: Whether tensors have 8 MB and not 64 KB; at close, whether the victim has closed its runtime already.
        known: Whether the ranks have shared a communicator before.
        shared: Whether tensors are in shared memory (``dtcomm.empty``).
        single_copy: Whether receivers copy out of the sender's memory.
        delay: Seconds until it happens, where that is a random moment.
        pause: Seconds until the victim continues or is killed.
        spare: Descriptors that a rank without descriptors can still open.
    """

    phase: str
    action: str
    transport: str
    world_size: int
    repetition: int
    victim: int
    asynchronous: bool
    large: bool
    known: bool
    shared: bool
    single_copy: bool
    delay: float
    pause: float
    spare: int

    @property
    def row(self) -> tuple[str, str, str, int]:
        """Return what the cases of one row of the table have in common."""
        return self.phase, self.action, self.transport, self.world_size

    @property
    def environment(self) -> dict[str, str | None]:
        """Return the variables of the ranks."""
        single = {"DTCOMM_SINGLE_COPY": "on"} if self.single_copy else {}
        return {"DTCOMM_TUNE": "off", **TRANSPORTS[self.transport], **single}

    @property
    def errors(self) -> tuple[str, ...]:
        """Return the errors of which every survivor must raise one; "" is none."""
        timeout, lost = "CollectiveTimeout", "PeerLost"
        if self.action in STARVED:
            # Threads of Gloo abort a process that has no descriptor for them.
            return ("", "DtcommError", lost, timeout) if self.transport == "gloo" else ("", "DtcommError")
        if self.action in CHILDREN:
            return ("",)
        if self.action in MISMATCHES:
            return ("CollectiveMismatch",)
        if self.phase in CLOSE:
            if not self.asynchronous:
                return ("",)
            # A rank that is stopped behind its close has closed.
            return (timeout, lost) if self.action == "stop" or self.transport == "gloo" else (lost,)
        if self.action == "pause":
            return ("",)
        if self.action in ("stop", "raise", "absent"):
            return (timeout,)
        if self.at_random_moment:  # perhaps behind all of it
            return "", lost, timeout
        if self.unheard_of:
            return (timeout,)
        return (lost, timeout) if self.transport == "gloo" else (lost,)

    @property
    def unheard_of(self) -> bool:
        """Return whether the others do not know the victim's process."""
        return self.phase == "publish" and not self.known

    @property
    def at_random_moment(self) -> bool:
        """Return whether the fault happens up to 5 ms after the beginning of its phase."""
        return self.phase == "connect" and self.large

    @property
    def limit(self) -> float:
        """Return the seconds in which survivors must report."""
        at_timeout = TIMEOUT_SECONDS + MARGIN_SECONDS
        if "CollectiveTimeout" in self.errors:
            return at_timeout
        return LIMIT_SECONDS + (self.pause if self.action == "pause" else 0.0)

    def command(self, seed: int) -> str:
        """Return the command that runs this case alone."""
        return (
            f"python -m tests.stress.campaign --seed {seed} --phase {self.phase} --action '{self.action}' "
            f"--transport {self.transport} --world-size {self.world_size} --repetition {self.repetition}"
        )


def make_case(
    phase: str, action: str, transport: str, world_size: int, repetition: int, seed: int = 0, **fixed: object
) -> Case:
    """Return a case; what ``fixed`` does not contain is drawn from the seed."""
    # Not hash(): it differs from process to process.
    text = f"{seed} {phase} {action} {transport} {world_size} {repetition}"
    chance = random.Random(zlib.crc32(text.encode()))
    drawn = {
        "victim": chance.randrange(world_size),
        "asynchronous": bool(repetition & 1),
        "large": bool(repetition & 2),
        "known": bool(repetition & 1),
        "shared": transport == "memory" and bool(repetition & 4),
        "single_copy": transport == "memory" and bool(repetition & 8),
        "delay": chance.uniform(0.0, 0.1),
        "pause": chance.uniform(0.05, 0.5),
        "spare": chance.randrange(12),
    }
    return Case(
        phase=phase,
        action=action,
        transport=transport,
        world_size=world_size,
        repetition=repetition,
        **{**drawn, **fixed},  # type: ignore[arg-type]
    )


def cases(
    phases: Sequence[str],
    actions: Sequence[str],
    transports: Sequence[str],
    world_sizes: Sequence[int],
    repetitions: Sequence[int],
    seed: int,
) -> Iterator[Case]:
    """Return the cases of all combinations that exist."""
    for phase in phases:
        for action in ACTIONS[phase]:
            if action not in actions:
                continue
            for transport in transports:
                for world_size in world_sizes:
                    for repetition in repetitions:
                        yield make_case(phase, action, transport, world_size, repetition, seed)
