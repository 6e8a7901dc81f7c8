"""The checker: pure functions of a history."""

from fastps.commands.torture.check.invariants import INVARIANTS, check, kept, starts
from fastps.commands.torture.check.violation import Violation

__all__ = ["INVARIANTS", "Violation", "check", "kept", "starts"]
