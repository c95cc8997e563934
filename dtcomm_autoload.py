"""What torch calls while it is imported, in environments where dtcomm is installed (entry point ``torch.backends``).

A module outside the package, because an error here fails ``import torch`` in every program of the environment: an
installation of dtcomm that is broken or half removed must not do that.
"""

from __future__ import annotations

import sys
import warnings


def register() -> None:
    """Register the backend ``"dtcomm"``; a broken installation gives a warning. Never raises."""
    try:
        from dtcomm._torch_backend_entry import register as register_backend

        register_backend()
    except Exception as error:
        message = (
            f"dtcomm is installed but cannot be imported ({type(error).__name__}: {error}): torch continues without "
            'its backend "dtcomm". Remedy: pip uninstall dtcomm, or pip install . in a checkout of it'
        )
        try:
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        except RuntimeWarning:  # where warnings are errors
            print(f"warning: {message}", file=sys.stderr)
