"""Every example in a docstring runs."""

import doctest
import importlib

import numpy as np
import pytest

import fastps

MODULES = [
    "__init__",
    "checkpoint",
    "codecs",
    "engines",
    "jax",
    "modes.asynchronous",
    "modes.local",
    "optim",
    "optimize.cg",
    "optimize.gradient_descent",
    "optimize.lbfgs",
    "optimize.line_search",
    "optimize.minimize",
    "optimize.objective",
    "optimize.replica",
    "optimize.vectors",
    "rl",
    "rl.a3c",
    "rl.evolution",
    "rl.naive",
    "rl.playing.returns",
    "rl.workers",
    "server",
    "store",
    "torch",
    "torch.hierarchical.optimizer",
    "torch.objective",
    "torch.parallel.errors",
    "torch.parallel.graph",
    "torch.parallel.replica",
    "worker.run.parts",
    "worker.watched",
    "worker.worker",
    "_fastps",
    "connect",
    "parameter_server",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = fastps if name == "__init__" else importlib.import_module(f"fastps.{name}")
    result = doctest.testmod(module, extraglobs={"fastps": fastps, "np": np})
    assert result.failed == 0
