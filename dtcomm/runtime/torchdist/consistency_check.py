"""Comparison of what ranks are about to do, for DTCOMM_CHECK=1.

Ranks compare before each operation and all raise the same CollectiveMismatch if they differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from dtcomm.errors import CollectiveMismatch
from dtcomm.runtime.bootstrap.store_exchange import StoreExchange
from dtcomm.runtime.torchdist.transport import GlooTransport, P2PMessage

HEADER_BYTES = 512
HEADER_TAG = 0
_DIGEST_BYTES = 8
_TEXT_BYTES = HEADER_BYTES - _DIGEST_BYTES


def compare_by_messages(transport: GlooTransport, names: Sequence[str], text: str, value: object) -> None:
    """Compare through messages of the transport.

    Args:
        transport: The transport of this rank.
        names: How errors name each rank.
        text: What this rank does, for the error; truncated if it is long.
        value: What is compared, by its ``repr``.
    """
    digest = hashlib.blake2b(repr(value).encode(), digest_size=_DIGEST_BYTES).digest()
    header = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0") + digest
    own = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    headers = {peer: torch.empty_like(own) for peer in range(len(names)) if peer != transport.rank}
    receives = [P2PMessage(theirs, peer, HEADER_TAG) for peer, theirs in headers.items()]
    sends = [P2PMessage(own, peer, HEADER_TAG) for peer in headers]
    transport.wait(transport.send_recv(sends, receives, False, f"the check of {text}"))
    headers[transport.rank] = own
    contents = {rank: bytes(header.tolist()) for rank, header in sorted(headers.items())}
    if len(set(contents.values())) > 1:
        _raise_mismatch(
            {
                names[rank]: content[:_TEXT_BYTES].rstrip(bytes(1)).decode(errors="replace")
                for rank, content in contents.items()
            }
        )


def compare_through_store(exchange: StoreExchange, names: Sequence[str], text: str) -> None:
    """Compare ``text``, what this rank does, through the group's store."""
    texts = [info["operation"] for info in exchange.all_gather({"operation": text})]
    exchange.close()
    if len(set(texts)) > 1:
        _raise_mismatch(dict(zip(names, texts, strict=True)))


def _raise_mismatch(texts: Mapping[str, str]) -> None:
    listing = "; ".join(f"{name}: {text}" for name, text in texts.items())
    raise CollectiveMismatch(f"ranks disagree on what they do: {listing}")
