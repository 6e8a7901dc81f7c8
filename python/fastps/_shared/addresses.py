"""The addresses that are used where none are given."""

from __future__ import annotations

import os

__all__ = ["DEFAULT", "VARIABLE", "default_addresses"]

#: The environment variable with addresses; ``fastps run`` sets it.
VARIABLE = "FASTPS_ADDRESSES"
#: Where ``fastps serve`` listens by default.
DEFAULT = "127.0.0.1:7070"


def default_addresses() -> tuple[str, str]:
    """Addresses, and where they come from, for errors."""
    addresses = os.environ.get(VARIABLE, "").strip()
    if addresses:
        return addresses, f"the value of {VARIABLE}, since no address is given"
    return DEFAULT, f"the default address, since none is given and {VARIABLE} is not set"
