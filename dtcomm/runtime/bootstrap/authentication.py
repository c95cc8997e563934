"""Proofs that both ends of a connection know the same secret, DTCOMM_SECRET: HMAC-SHA256 of the standard library.

They keep strangers out; they do not encrypt. Without a secret the key is empty, and a proof is no more than a checksum.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct

from dtcomm import env

PROOF_BYTES = 32
NONCE_BYTES = 16
WRONG_SECRET = "it has another DTCOMM_SECRET"

_LENGTH = struct.Struct("<I")


def secret() -> bytes:
    """The shared secret; empty if DTCOMM_SECRET is not set."""
    return env.get("DTCOMM_SECRET").encode()


def nonce() -> bytes:
    """Random bytes, so that a proof of an earlier connection is of no use."""
    return os.urandom(NONCE_BYTES)


def prove(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC of the parts, each of which is preceded by its length.

    Example:
        >>> len(prove(b"secret", b"listener", b"0"))
        32
    """
    code = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        code.update(_LENGTH.pack(len(part)))
        code.update(part)
    return code.digest()


def is_proof(proof: bytes, key: bytes, *parts: bytes) -> bool:
    """Return whether ``proof`` is that of the parts; the time that it takes tells nothing about the key."""
    return hmac.compare_digest(proof, prove(key, *parts))
