"""A serial model of every mode in NumPy, for the tests of `fastps.simulate`: an event queue, the rule of the
mode, and plain SGD, on one vector. It knows nothing of fastps but the modes' arguments.
"""

from __future__ import annotations

import heapq

import numpy as np

F = np.float32


class Model:
    """Runs `mode` with `workers` workers; `table[worker][step - 1]` are the durations.

    Attributes:
        w: The values.
        rows: (time, worker, version, staleness, scale) of each finished step; version 0 where it was refused.
    """

    def __init__(self, w, lr, workers, table, mode, gradient):
        self.w, self.lr, self.table, self.mode, self.gradient = w.copy(), F(lr), table, mode, gradient
        self.workers = range(workers)
        self.version, self.rows, self.queue, self.serial = 0, [], [], 0
        self.steps = [0] * workers
        self.own = [0] * workers  # pushes of each that were applied
        self.at = [w.copy() for _ in self.workers]  # the values that each computes at
        self.base = [(0, 0)] * workers  # version and own pushes that these contain
        self.waiting, self.clock, self.round = [], [0] * workers, []
        self.sum = [np.zeros_like(w) for _ in self.workers]
        self.first = list(self.base)  # the base of the first gradient in a sum
        self.coming = [[] for _ in self.workers]  # fetched values that are not installed yet, with their step
        self.kind = type(mode).__name__
        self.alone = mode.steps if self.kind == "WarmStart" else 0
        self.rule = mode.then if self.alone else mode

    def run(self, updates):
        for worker in [0] if self.alone else self.workers:
            self.begin(0.0, worker)
        while self.version < updates:
            time, _, worker = heapq.heappop(self.queue)
            self.arrive(time, worker, self.gradient(self.at[worker], worker, self.steps[worker]))
        return self.rows

    def begin(self, time, worker):
        self.steps[worker] += 1
        self.serial += 1
        late = time + self.table[worker][self.steps[worker] - 1]
        heapq.heappush(self.queue, (late, self.serial, worker))

    def fetch(self, worker):
        return self.w.copy(), (self.version, self.own[worker])

    def install(self, worker):
        self.at[worker], self.base[worker] = self.fetch(worker)

    def apply(self, worker, g, scale=1.0):
        self.w = self.w - self.lr * (g if scale == 1.0 else F(scale) * g)
        self.version += 1
        self.own[worker] += 1

    def arrive(self, time, worker, g):
        kind = "Async" if self.alone else type(self.rule).__name__
        getattr(self, kind.lower())(time, worker, g)
        if self.alone:
            self.alone -= 1
            if not self.alone:
                self.begin(time, worker)
                for other in self.workers[1:]:
                    self.install(other)
                    self.begin(time, other)
                return
        if kind in ("Async", "Local"):
            self.begin(time, worker)

    def corrected(self, worker, base=None):
        """Staleness and scale of a push; the scale is None if it is refused."""
        version, own = base or self.base[worker]
        late = self.version - version - (self.own[worker] - own)
        mode = self.rule if type(self.rule).__name__ == "Async" and not self.alone else None
        bound, adaptive = (mode.max_staleness, mode.delay_adaptive) if mode else (None, self.alone > 0)
        if bound is not None and mode.on_stale == "reject" and late > bound:
            return late, None
        clients = len({worker} | {k for k in self.workers if self.own[k]})
        limits = [*([clients] if adaptive else []), *([bound] if bound else [])]
        return late, min([1.0, *(limit / late for limit in limits if late)])

    def async_(self, time, worker, g):
        late, scale = self.corrected(worker)
        if scale is not None:
            self.apply(worker, g, scale)
        done = (self.version, late, scale) if scale is not None else (0, -1, np.nan)
        self.rows.append((time, worker, *done))
        if getattr(self.rule, "overlap", False) and not self.alone:
            self.later(worker, 1)
        else:
            self.install(worker)

    def later(self, worker, every):
        """Fetches now, and installs what was fetched `every` steps ago."""
        step = self.steps[worker]
        if step % every == 0:
            self.coming[worker].append((step + every, self.fetch(worker)))
        while self.coming[worker] and self.coming[worker][0][0] <= step:
            self.at[worker], self.base[worker] = self.coming[worker].pop(0)[1]

    def local(self, time, worker, g):
        mode, step = self.rule, self.steps[worker]
        self.at[worker] = self.at[worker] - F(mode.lr) * g
        if not self.sum[worker].any():
            self.first[worker] = self.base[worker]
        self.sum[worker] = self.sum[worker] + g
        done = (0, -1, np.nan)
        if step % mode.push_every == 0:
            late, _ = self.corrected(worker, self.first[worker])
            self.apply(worker, self.sum[worker])
            self.sum[worker] = np.zeros_like(g)
            done = (self.version, late, 1.0)
        self.rows.append((time, worker, *done))
        if mode.overlap:
            self.later(worker, mode.pull_every)
        elif step % mode.pull_every == 0:
            self.install(worker)

    def bounded(self, time, worker, g):
        late, _ = self.corrected(worker)
        self.apply(worker, g)
        self.clock[worker] += 1
        self.waiting.append((worker, self.version, late))
        for one in tuple(self.waiting):
            who, version, late = one
            if self.clock[who] <= min(self.clock) + self.rule.staleness:
                self.waiting.remove(one)
                self.rows.append((time, who, version, late, 1.0))
                self.install(who)
                self.begin(time, who)

    def sync(self, time, worker, g):
        if self.base[worker][0] < self.version:  # its version is made
            self.rows.append((time, worker, 0, -1, np.nan))
            self.install(worker)
            self.begin(time, worker)
            return
        self.round.append((worker, g))
        if len(self.round) < self.rule.workers:
            return
        parts = sorted(self.round, key=lambda part: part[0]) if self.rule.deterministic else self.round
        total = np.zeros_like(g)
        for _, part in parts:
            total = total + part
        mean = total if self.rule.reduce == "sum" else total * F(1 / self.rule.workers)
        self.apply(worker, mean)
        scale = 1.0 if self.rule.reduce == "sum" else 1 / self.rule.workers
        for who, _ in self.round:
            self.rows.append((time, who, self.version, 0, scale))
            self.install(who)
            self.begin(time, who)
        self.round = []


setattr(Model, "async", Model.async_)
