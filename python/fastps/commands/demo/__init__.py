"""``fastps demo``: Downpour SGD on real data, with real worker processes against real shard servers.

`config` has the options, `cluster` what the servers hold, `worker` one worker's process, `strip` when it
computes, `processes` the children, `run` the course of a run, `compare` runs of several modes, `ledger` the
reconciliation, and `output` what is shown. `spoil` and `lose` are demonstrations of their own.
"""
