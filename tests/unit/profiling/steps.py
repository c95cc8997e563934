"""Steps with round numbers: milliseconds in, nanoseconds out."""

from __future__ import annotations

from dtcomm.profiling import MessageRecord, StepRecord
from dtcomm.work import Span

MS = 1_000_000


def message(label: str, ready: float, started: float, finished: float, done: float) -> MessageRecord:
    """Encoding takes a tenth of its way."""
    ns = [round(each * MS) for each in (ready, ready + 0.1, started, finished, done)]
    encode = Span("encode", ns[2], ns[2] + (ns[3] - ns[2]) // 2, (ns[3] - ns[2]) // 10)
    return MessageRecord(label, "int8", 4000, 1000, ns[0], ns[1], ns[2], ns[3], ns[4], [encode])


def step(number: int, micro_batches: int = 1) -> StepRecord:
    """100 ms, and 40 more for each further micro-batch; the last backward ends at 60, the messages at 70 and 90."""
    extra = 40 * (micro_batches - 1)
    begin = 1000.0 + 200 * number
    at = begin + extra
    made = StepRecord(number, round(begin * MS), round((at + 100) * MS))
    for k in range(micro_batches):
        made.forward.append((round((begin + 40 * k) * MS), round((begin + 40 * k + 20) * MS)))
        made.backward.append((round((begin + 40 * k + 20) * MS), round((begin + 40 * k + 40) * MS)))
    made.backward[-1] = (made.backward[-1][0], round((at + 60) * MS))
    made.messages = [
        message("bucket 0", at + 30, at + 31, at + 69, at + 70),
        message("bucket 1", at + 50, at + 55, at + 90, at + 90),
    ]
    made.assign_waits(made.backward[-1][1])
    return made
