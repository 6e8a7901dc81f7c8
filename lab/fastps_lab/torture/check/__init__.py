"""The checker: pure functions of a history."""

from fastps_lab.torture.check.invariants import INVARIANTS, certain, check, kept, starts
from fastps_lab.torture.check.violation import Violation

__all__ = ["INVARIANTS", "Violation", "certain", "check", "kept", "starts"]
