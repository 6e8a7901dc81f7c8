"""``fastps demo``: Downpour SGD on real data, with real worker processes against real shard servers.

The pieces: :mod:`.config` (options), :mod:`.data`, :mod:`.model` (NumPy gradients), :mod:`.cluster` (what
the servers hold), :mod:`.worker` (one worker process), :mod:`.processes` (children), :mod:`.run` (the
course of a run), :mod:`.ledger` (reconciliation), :mod:`.view`, :mod:`.plot`, :mod:`.report`.
"""
