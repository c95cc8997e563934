"""Training over a wide-area link between sites: data parallelism, compressed or not, and DiLoCo with H inner steps.

Each site has the same hosts and trains its share of the batch with the fastest layout of `search`. What the methods of
dtcomm send between sites is a sum of P values over k sites: 2 (k - 1) / k times the payload in each direction of a
site's link, and two steps of latency. Gradients are hidden behind the last backward. DiLoCo (arXiv:2311.08105) sends
every H steps and waits; Streaming DiLoCo (arXiv:2501.18512) sends the model in fragments, each within a number of steps
during which training goes on. `dtcomm.local_sgd` has all of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dtcomm import codecs
from dtcomm.extensions.jobs.hardware import Port, require_least
from dtcomm.extensions.jobs.step import JobStep
from dtcomm.extensions.jobs.training_model import BACKWARD_SHARE

FRAGMENTS = 4  # of Streaming DiLoCo
DELAY = 5  # steps that the sum of a fragment may take, the tau of Streaming DiLoCo


@dataclass(frozen=True, kw_only=True)
class WideArea:
    """The link between sites.

    Args:
        sites: How many sites there are.
        port: A site's link to all others.
        rtt_ms: The round trip between two sites in milliseconds.
        every: H, the inner steps between two outer steps of DiLoCo.

    Raises:
        ValueError: A number is not valid.
    """

    sites: int
    port: Port
    rtt_ms: float = 75.0
    every: int = 100

    def __post_init__(self) -> None:
        require_least(self, sites=2, every=1, rtt_ms=0)

    def seconds(self, payload: float) -> float:
        """Return the seconds of a sum of ``payload`` bytes over all sites."""
        return self.sent(payload) / self.port.bandwidth + self.rtt_ms * 1e-3

    def sent(self, payload: float) -> float:
        """Return the bytes that a site sends for it."""
        return 2 * (self.sites - 1) / self.sites * payload


@dataclass(frozen=True, kw_only=True)
class SiteMethod:
    """A method of training across sites.

    Args:
        method: Its name.
        codec: The codec of what it sends.
        seconds: The mean time of a step.
        exposed: What the link adds to it.
        bytes_per_step: What a site sends in a step, on average.
        peak_gbit: The rate of the link from which on nothing is exposed; None if the method always waits.
    """

    method: str
    codec: str
    seconds: float
    exposed: float
    bytes_per_step: float
    peak_gbit: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        times = {"step_ms": round(self.seconds * 1e3, 3), "exposed_ms": round(self.exposed * 1e3, 3)}
        peak = None if self.peak_gbit is None else round(self.peak_gbit, 4)
        sent = {"bytes_per_step": round(self.bytes_per_step), "peak_gbit": peak}
        return {"method": self.method, "codec": self.codec, **times, **sent}


def across_sites(step: JobStep, link: WideArea, specs: Sequence[str] = ("int8", "int4")) -> list[SiteMethod]:
    """Return the step of each method, fastest first.

    Args:
        step: The step inside a site, with the site's share of the batch.
        link: The link between sites.
        specs: Codecs to compare with none.

    Returns:
        One entry for each method and codec.

    Example:
        >>> from dtcomm.extensions.jobs.hardware import find_port, find_system
        >>> from dtcomm.extensions.jobs import Job, WideArea, across_sites, find_model, search
        >>> job = Job(model=find_model("llama3-8b"), system=find_system("h100"), batch=64, seq=8192)
        >>> link = WideArea(sites=2, port=find_port("1gbit"), rtt_ms=75, every=100)
        >>> across_sites(search(job).winner, link)[0].method
        'Streaming DiLoCo'
    """
    job = step.job
    parameters = round(job.model.parameters * job.trained)
    window = BACKWARD_SHARE * step.compute / step.layout.micro_batches(job)
    inside = step.seconds
    found: list[tuple[str, str, float, float, float | None]] = []
    for spec in ("none", *[spec for spec in specs if spec != "none"]):
        codec = codecs.codec(spec)
        gradients = parameters * job.dtype.itemsize if spec == "none" else codec.wire_bytes(parameters)
        differences = parameters * 4.0 if spec == "none" else float(codec.wire_bytes(parameters))
        sent, exposed = link.sent(gradients), max(0.0, link.seconds(gradients) - window)
        hidden = sent * 8e-9 / max(1e-9, window - link.rtt_ms * 1e-3)
        found.append(("DDP", spec, exposed, sent, hidden))
        sent = link.sent(differences) / link.every
        found.append(("DiLoCo", spec, link.seconds(differences) / link.every, sent, None))
        fragments = min(FRAGMENTS, link.every)
        delay = min(DELAY, max(1, link.every // fragments))
        late = max(0.0, link.seconds(differences / fragments) - delay * inside)
        time = max(1e-9, delay * inside - link.rtt_ms * 1e-3)
        hidden = link.sent(differences / fragments) * 8e-9 / time
        found.append(("Streaming DiLoCo", spec, fragments * late / link.every, sent, hidden))
    methods = [
        SiteMethod(
            method=method, codec=spec, seconds=inside + exposed, exposed=exposed, bytes_per_step=sent, peak_gbit=peak
        )
        for method, spec, exposed, sent, peak in found
    ]  # fmt: skip
    return sorted(methods, key=lambda entry: (round(entry.seconds, 6), entry.bytes_per_step))
