"""``fastps torture``: own servers and clients of every surface under faults, and a checker of what they saw.

The pieces: :mod:`.plan` (every action, from a seed and a step), :mod:`.source`, :mod:`.run` (executes them),
:mod:`.servers`, :mod:`.faults` (what is done to servers and to the way to them),
:mod:`.client_lane` and :mod:`.client` (a client, and its process), :mod:`.witness` and :mod:`.auditor` (those
beside them), :mod:`.tensors`, :mod:`.history` (the record, JSON lines),
:mod:`.check` (the checker, pure functions of a history), :mod:`.report` and :mod:`.command`.
"""
