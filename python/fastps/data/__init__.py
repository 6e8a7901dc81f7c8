"""Data sets, and samples distributed among workers. Torch is not needed."""

from fastps.data.cifar10 import cifar10
from fastps.data.images import Dataset, digits, mnist
from fastps.data.portions import Indices, Portions, Sampler

__all__ = ["Dataset", "Indices", "Portions", "Sampler", "cifar10", "digits", "mnist"]
