"""Batch optimization of parameters that stay on the shards (Dean et al., NIPS 2012, section 4.2)."""

from __future__ import annotations

from fastps.optimize.cg import CG
from fastps.optimize.gradient_descent import GradientDescent
from fastps.optimize.lbfgs import LBFGS
from fastps.optimize.line_search import Search, StrongWolfe, Trial
from fastps.optimize.minimize import minimize
from fastps.optimize.replica import Replica
from fastps.optimize.result import Iteration, OptimizeResult
from fastps.optimize.vectors import BatchReport, Operation, PortionFailure, Vectors, drop

__all__ = [
    "CG",
    "LBFGS",
    "BatchReport",
    "GradientDescent",
    "Iteration",
    "Operation",
    "OptimizeResult",
    "PortionFailure",
    "Replica",
    "Search",
    "StrongWolfe",
    "Trial",
    "Vectors",
    "drop",
    "minimize",
]
