"""A process of a fleet that exchanges tensors with the others, without a server: torchft's DiLoCo."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from fastps.commands.kit import watch_stdin
from fastps_lab.repro.fleet.arms import EVERY
from fastps_lab.repro.fleet.worker import Job, wait
from fastps_lab.repro.local_steps import AdamW, problem

__all__ = ["main"]

#: The paper's outer optimizer, and the inner one of all arms.
OUTER: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
INNER: dict[str, Any] = {"lr": 3e-3, "weight_decay": AdamW.decay}
#: Seconds after which an exchange among processes has failed.
PATIENT = timedelta(seconds=20)


class Peer:
    """The model of a process, and its local steps at the pace of its machine."""

    def __init__(self, job: Job) -> None:
        self.job, self.task = job, problem("text", job.quick)
        self.pace: Callable[[float], float]
        self.rng = np.random.default_rng([job.seed, job.machine])
        self.model = torch.nn.ParameterDict(
            {name: torch.nn.Parameter(torch.from_numpy(w)) for name, w in self.task.start(0).items()}
        )
        self.values = {name: param.detach().numpy() for name, param in self.model.items()}
        #: Made here, since torch imports half of itself for it.
        self.inner = torch.optim.AdamW(self.model.parameters(), **INNER)

    def gradient(self) -> None:
        """Computes a gradient, which takes as long as the trace says."""
        began = time.monotonic()
        grads = self.task.gradient(self.values, self.job.machine, self.rng)
        for name, param in self.model.items():
            param.grad = torch.from_numpy(grads[name].astype(np.float32))
        time.sleep(max(0.0, self.pace(began) - (time.monotonic() - began)))

    def say(self, version: int, present: int | None = None) -> None:
        """Says what the fleet has reached, if this machine is the one that does."""
        if self.job.machine == 0:
            said = {"version": version, "loss": self.task.loss(self.values), "present": present}
            print(json.dumps(said), flush=True)


# -- the arms ------------------------------------------------------------------------------------------------


def torchft(peer: Peer) -> None:
    """Rounds of local steps, joined by torchft."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    inner = peer.inner
    outer = torch.optim.SGD(peer.model.parameters(), **OUTER)

    def state() -> dict[str, Any]:
        return {"model": peer.model.state_dict(), "inner": inner.state_dict()}

    def load(state: dict[str, Any]) -> None:
        peer.model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENT),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=state,
        replica_id=f"machine-{peer.job.machine}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=peer.job.address,
        port=0,
        hostname="127.0.0.1",
        use_async_quorum=False,
        timeout=PATIENT,
        connect_timeout=PATIENT,
    )
    with DiLoCo(manager, [peer.model], inner, outer, sync_every=EVERY):
        version = 0
        while True:
            peer.gradient()
            inner.step()
            if manager.current_step() != version:
                version = manager.current_step()
                peer.say(version, manager.num_participants())


#: Arms by name: the module that one imports before its machine is there, and its training.
KINDS: dict[str, tuple[str, Callable[[Peer], None]]] = {
    "torchft": ("torchft.local_sgd", torchft),
}


def main(text: str) -> None:
    """Trains as a job in JSON says, from the first moment of its paces on."""
    job = Job(**json.loads(text))
    torch.set_num_threads(1)
    module, train = KINDS[job.mode[0]]
    importlib.import_module(module)
    peer = Peer(job)
    peer.pace = wait(job)
    train(peer)


if __name__ == "__main__":
    watch_stdin(lambda _: None, lambda: os._exit(1))
    main(sys.argv[1])
