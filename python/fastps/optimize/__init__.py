"""Batch optimization of parameters that stay on the shards (Dean et al., NIPS 2012, section 4.2)."""

from __future__ import annotations

from fastps.optimize.vectors import BatchReport, Operation, PortionFailure, Vectors, drop

__all__ = ["BatchReport", "Operation", "PortionFailure", "Vectors", "drop"]
