"""A process of a fleet that exchanges tensors with the others, without a server.

By torchft's DiLoCo, by an all-reduce at every step under torchrun's elastic agents, or by hivemind.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastps.commands.kit import watch_stdin
from fastps_lab.repro.fleet.arms import EVERY, LEASE
from fastps_lab.repro.fleet.worker import Job, wait
from fastps_lab.repro.local_steps import BATCH, WORKERS, AdamW, problem

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
        #: Whether this process is the one that says what the fleet has reached.
        self.speaks = job.machine == 0
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
        """Says what the fleet has reached, if this process is the one that does."""
        if self.speaks:
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


def elastic(peer: Peer) -> None:
    """A gradient of all at every step, under torchrun's agent, whose worker is a fork of this process.

    So a worker that is started again has imported what it needs, as those of the other arms have.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # A store of each round's own: in the agents' store workers read addresses of an earlier round, since they
    # look under the count of their own agent's restarts, which differs among agents.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    meeting = {
        "is_host": False,
        "last_call_timeout": 1,
        "keep_alive_interval": 1,
        "keep_alive_max_attempt": int(LEASE),
    }
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=WORKERS,
        nproc_per_node=1,
        run_id="fleet",
        rdzv_backend="c10d",
        rdzv_endpoint=peer.job.address,
        rdzv_configs=meeting,
        max_restarts=1_000_000,
        start_method="fork",
        local_addr="127.0.0.1",
        logs_specs=DefaultLogsSpecs(log_dir=str(Path(peer.job.clock).with_name("torchrun"))),
    )
    elastic_launch(config, every_step)(peer)


def every_step(peer: Peer) -> None:
    """Trains from the last snapshot on, until an exchange fails or the agent ends this process."""
    import torch.distributed as dist

    for number in (signal.SIGTERM, signal.SIGINT):  # the agent's are handled after an exchange, if at all
        signal.signal(number, signal.SIG_DFL)
    dist.init_process_group("gloo", timeout=PATIENT)
    snapshot, step = Path(peer.job.clock).with_name("snapshot"), 0
    if snapshot.exists():
        saved = torch.load(snapshot)
        peer.model.load_state_dict(saved["model"])
        peer.inner.load_state_dict(saved["inner"])
        step = saved["step"]
    peer.rng = np.random.default_rng([peer.job.seed, peer.job.machine, step])
    peer.speaks, world = dist.get_rank() == 0, dist.get_world_size()
    while True:
        peer.gradient()
        grads = [param.grad for param in peer.model.values()]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        at = 0
        for grad in grads:
            grad.copy_(flat[at : at + grad.numel()].view_as(grad) / world)
            at += grad.numel()
        peer.inner.step()
        step += 1
        if step % EVERY == 0:
            peer.say(step, world)
            if peer.speaks:
                state = {"model": peer.model.state_dict(), "inner": peer.inner.state_dict(), "step": step}
                torch.save(state, new := snapshot.with_suffix(".new"))
                new.rename(snapshot)


def hivemind(peer: Peer) -> None:
    """Local steps, after as many samples of all as those of a round averaged by hivemind."""
    import hivemind

    table = hivemind.DHT(start=True, initial_peers=[peer.job.address], host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    often = {"min_refresh_period": 0.2, "default_refresh_period": 0.5, "max_refresh_period": 1.0}
    optimizer = hivemind.Optimizer(
        dht=table,
        run_id="fleet",
        batch_size_per_step=BATCH,
        target_batch_size=WORKERS * EVERY * BATCH,
        params=list(peer.model.parameters()),
        optimizer=lambda params: torch.optim.AdamW(params, **INNER),
        use_local_updates=True,
        matchmaking_time=1.0,
        averager_opts={"request_timeout": 0.5},  # below the matchmaking time, as hivemind asks for
        averaging_timeout=2 * LEASE,
        load_state_timeout=PATIENT.total_seconds(),
        tracker_opts={**often, "metadata_expiration": LEASE},
    )
    version = 0
    while True:
        peer.gradient()
        optimizer.step()
        if optimizer.local_epoch != version:
            version = optimizer.local_epoch
            peer.say(version, optimizer.tracker.global_progress.num_peers)


#: Arms by name: the module that one imports before its machine is there, and its training.
KINDS: dict[str, tuple[str, Callable[[Peer], None]]] = {
    "torchft": ("torchft.local_sgd", torchft),
    "elastic": ("torch.distributed.launcher.api", elastic),
    "hivemind": ("hivemind", hivemind),
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
    watch_stdin(lambda _: None, lambda: os.killpg(0, signal.SIGKILL))
    main(sys.argv[1])
