"""``fastps-lab torture``: servers and clients of every surface under faults, and a checker of their history.

The modules: `plan` (every action, from a seed and a step), `source`, `run` (executes them), `servers`,
`faults` (of servers and of connections), `client_lane` and `client` (a client, and its process), `witness`
and `auditor` (further clients), `tensors`, `history` (the record, JSON lines), `check` (the checker, pure
functions of a history), `report` and `command`.
"""
