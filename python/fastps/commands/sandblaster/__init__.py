"""``fastps sandblaster``: batch optimizers on real data, with replicas in processes of their own.

The pieces: :mod:`.problems` (losses and gradients in NumPy), :mod:`.replica` (a replica's process),
:mod:`.run` (the course of a run), :mod:`.command` (options and output), :mod:`.plot`.
"""
