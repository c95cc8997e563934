"""Timelines as Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open, and their merge.

A rank is a process of the trace; its tracks are the steps, what it computes, its hook, what it waits for, and one a
bucket. Phases of neighbouring buckets overlap, so they are asynchronous events. Beside ``traceEvents`` a file keeps the
steps themselves under ``dtcomm``, for `dtcomm trace`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dtcomm.profiling.step_record import Message, Step

FORMAT = 1
TRACKS = {1: "steps", 2: "forward and backward", 3: "hook", 4: "waiting for communication"}
NUMBERS = ("communication", "exposed", "hidden", "hook")
FIRST_MESSAGE = 10  # the track of the first bucket

Event = dict[str, Any]


def write(path: str | os.PathLike[str], what: str, rank: int, host: str, steps: Sequence[Step]) -> str:
    """One rank's file, next to ``path``; whole or not at all."""
    target = Path(path)
    target = target.with_name(f"{target.stem}.rank{rank}{target.suffix or '.json'}")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"path: there is no folder {target.parent}")
    about = {
        "format": FORMAT,
        "what": what,
        "rank": rank,
        "host": host,
        "boot": _boot(),
        "wall_minus_monotonic_ns": time.time_ns() - time.monotonic_ns(),
        "steps": [step.to_dict() for step in steps],
    }
    _save(
        target, {"traceEvents": list(events(rank, host, steps)), "displayTimeUnit": "ms", "dtcomm": [about]}
    )
    return str(target)


def merge(paths: Sequence[str | os.PathLike[str]], path: str | os.PathLike[str]) -> None:
    """Traces of several ranks as one, on the clock of the first, which begins at 0.

    Ranks of one host share a clock; those of others are moved by what their clocks on the wall say. A trace that
    torch.profiler exported on the first one's host may be among them, and is moved onto the same clock.
    """
    ranks = read(paths)
    profiles = [found for each in paths if "dtcomm" not in (found := _load(each))]
    if not ranks:
        raise ValueError("paths: none of them is a trace of dtcomm's")
    every: list[Event] = []
    first = min((step.begin for _, steps in ranks for step in steps), default=0)
    for about, steps in ranks:
        every += events(about["rank"], about["host"], steps, -first)
    to_monotonic = ranks[0][0]["wall_minus_monotonic_ns"]
    for profile in profiles:
        every += _moved(profile, to_monotonic + first)
    kept = [{**about, "steps": [step.to_dict() for step in steps]} for about, steps in ranks]
    _save(Path(path), {"traceEvents": every, "displayTimeUnit": "ms", "dtcomm": kept})


def read(paths: Sequence[str | os.PathLike[str]]) -> list[tuple[dict[str, Any], list[Step]]]:
    """What is known of every rank, and its steps, all on the clock of the first; in order of ranks."""
    abouts = [about for path in paths for about in _load(path).get("dtcomm", [])]
    for about in abouts:
        if about["format"] != FORMAT:
            raise ValueError(f"trace of rank {about['rank']}: format {about['format']}, want {FORMAT}")
    found: list[tuple[dict[str, Any], list[Step]]] = []
    for about in sorted(abouts, key=lambda each: each["rank"]):
        first = found[0][0] if found else about
        same = (about["host"], about["boot"]) == (first["host"], first["boot"])
        shift = 0 if same else about["wall_minus_monotonic_ns"] - first["wall_minus_monotonic_ns"]
        steps = [_shifted(Step.from_dict(values), shift) for values in about["steps"]]
        # From here on it is on the first one's clock.
        clock = {name: first[name] for name in ("boot", "wall_minus_monotonic_ns")}
        found.append(({**about, "steps": None, **clock}, steps))
    return found


def events(rank: int, host: str, steps: Sequence[Step], shift: int = 0) -> Iterator[Event]:
    """One rank's; ``shift`` nanoseconds are added to all times."""
    labels = list(dict.fromkeys(message.label for step in steps for message in step.messages))
    tracks = TRACKS | {FIRST_MESSAGE + at: label for at, label in enumerate(labels)}
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank} ({host})"}}
    yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    for track, name in tracks.items():
        yield {"ph": "M", "pid": rank, "tid": track, "name": "thread_name", "args": {"name": name}}
        yield {
            "ph": "M",
            "pid": rank,
            "tid": track,
            "name": "thread_sort_index",
            "args": {"sort_index": track},
        }

    def slice_(track: int, name: str, begin: int, end: int, **about: Any) -> Iterator[Event]:
        if begin and end > begin:
            yield {
                "ph": "X",
                "cat": "dtcomm",
                "pid": rank,
                "tid": track,
                "name": name,
                "ts": (begin + shift) / 1e3,
                "dur": (end - begin) / 1e3,
                "args": about,
            }

    for step in steps:
        end = step.end or max((message.done for message in step.messages), default=0)
        numbers = {f"{name}_ms": round(getattr(step, name) * 1e-6, 4) for name in NUMBERS}
        yield from slice_(1, f"step {step.number}", step.begin, end, **numbers)
        for begin, stop in step.forward:
            yield from slice_(2, "forward", begin, stop)
        for begin, stop in step.backward:
            yield from slice_(2, "backward", begin, stop)
        for message in step.messages:
            track = FIRST_MESSAGE + labels.index(message.label)
            yield from slice_(3, message.label, message.ready, message.launched)
            yield from slice_(4, message.label, *message.waited)
            yield from slice_(track, "queued", message.ready, message.started)
            yield from slice_(track, "under way", message.started, message.finished, **_about(message))
            yield from slice_(track, "landing", message.finished, message.done)
            for at, span in enumerate(message.spans):
                common = {
                    "cat": span.phase,
                    "pid": rank,
                    "id": f"{rank}.{step.number}.{message.label}.{at}",
                    "name": f"{span.phase} {message.label}",
                }
                busy = {"busy_ms": round(span.busy_ns * 1e-6, 4)}
                yield {**common, "ph": "b", "ts": (span.begin_ns + shift) / 1e3, "args": busy}
                yield {**common, "ph": "e", "ts": (span.end_ns + shift) / 1e3, "args": {}}


def _about(message: Message) -> dict[str, Any]:
    busy = {f"{phase}_ms": round(value * 1e-6, 4) for phase, value in message.busy.items()}
    ratio = round(message.plain_bytes / message.wire_bytes, 3) if message.wire_bytes else None
    return {
        "codec": message.codec,
        "bytes": message.plain_bytes,
        "sent": message.wire_bytes,
        "ratio": ratio,
        **busy,
    }


def _shifted(step: Step, by: int) -> Step:
    if by == 0:
        return step

    def moved(moment: int) -> int:
        return moment + by if moment else 0

    step.begin, step.end = moved(step.begin), moved(step.end)
    step.forward = [(moved(begin), moved(end)) for begin, end in step.forward]
    step.backward = [(moved(begin), moved(end)) for begin, end in step.backward]
    for each in step.messages:
        for name in ("ready", "launched", "started", "finished", "done"):
            setattr(each, name, moved(getattr(each, name)))
        each.waited = each.waited._replace(begin=moved(each.waited.begin), end=moved(each.waited.end))
        each.spans = [
            span._replace(begin_ns=moved(span.begin_ns), end_ns=moved(span.end_ns)) for span in each.spans
        ]
    return step


def _moved(profile: dict[str, Any], minus_ns: int) -> Iterator[Event]:
    # Its times are microseconds of the wall clock, from a base that it names.
    base = profile.get("baseTimeNanoseconds", 0)
    for event in profile.get("traceEvents", []):
        yield {**event, "ts": event["ts"] + (base - minus_ns) / 1e3} if "ts" in event else event


def _load(path: str | os.PathLike[str]) -> dict[str, Any]:
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(found, dict) or "traceEvents" not in found:
        raise ValueError(f"{os.fspath(path)}: no trace: it has no traceEvents")
    return found


def _save(path: Path, found: dict[str, Any]) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(found) + "\n", encoding="utf-8")
    draft.replace(path)


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
