"""``fastps-lab sandblaster``: batch optimizers on real data, with replicas in separate processes.

The modules: `problems` (losses and gradients in NumPy), `replica` (a replica's process), `run` (the course
of a run), `command` (options and output), `plot`.
"""
