"""Ranks compare what each of them is about to do (DTCOMM_CHECK=1), by messages of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from dtcomm.errors import CollectiveMismatch
from dtcomm.runtime.torchdist.replay import Messages

HEADER_BYTES = 512
HEADER_TAG = 0
_DIGEST_BYTES = 8
_TEXT_BYTES = HEADER_BYTES - _DIGEST_BYTES


def compare(messages: Messages, rank: int, names: Sequence[str], text: str, exactly: object) -> None:
    """Tell all other ranks; CollectiveMismatch, on all of them, where somebody says something else.

    ``names[rank]`` is how errors call a rank; ``text`` is for people and cut where it is long, the representation of
    ``exactly`` decides.
    """
    digest = hashlib.blake2b(repr(exactly).encode(), digest_size=_DIGEST_BYTES).digest()
    said = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0") + digest
    own = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    headers = {peer: torch.empty_like(own) for peer in range(len(names)) if peer != rank}
    handles = [(messages.receive(header, peer, HEADER_TAG), peer) for peer, header in headers.items()]
    handles += [(messages.send(own, peer, HEADER_TAG), peer) for peer in headers]
    for handle, peer in handles:
        messages.wait(handle, peer, f"comparing {text}")
    headers[rank] = own
    # Every rank sees every header, so all that take part raise, and say the same.
    words = {each: bytes(header.tolist()) for each, header in sorted(headers.items())}
    if len(set(words.values())) > 1:
        listing = "; ".join(
            f"{names[each]}: {word[:_TEXT_BYTES].rstrip(bytes(1)).decode(errors='replace')}"
            for each, word in words.items()
        )
        raise CollectiveMismatch(f"ranks disagree on what they do: {listing}")
