"""Lists of codecs on command lines."""

from __future__ import annotations

import re
from collections.abc import Iterable


def split_codecs(texts: Iterable[str]) -> list[str]:
    """Return the codec specs of flags that may be repeated and hold several specs, separated by commas.

    A comma also separates the options of a codec: what looks like ``name=value`` belongs to the codec before it.

    Example:
        >>> split_codecs(["int8,int4:block=128,spikes=1", "none"])
        ['int8', 'int4:block=128,spikes=1', 'none']
    """
    specs: list[str] = []
    for text in texts:
        for number, part in enumerate(text.split(",")):
            if number and re.match(r"\w+=", part):
                specs[-1] += f",{part}"
            else:
                specs.append(part.strip())
    return specs
