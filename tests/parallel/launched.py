"""A part that torchrun starts: trains 5 steps. Part 1 is killed in its fourth if the file is not there."""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from models import batch, chain

import fastps
from fastps.torch.parallel import Replica

address, file = sys.argv[1], Path(sys.argv[2])
first = not file.exists()
if first:  # torchrun stops the other part once it sees that part 1 is gone; that part is to say so itself
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with fastps.connect(address) as ps, Replica(chain("mlp", [3]), timeout=60) as replica:
    optimizer = replica.optimizer(ps, fastps.SGD(lr=0.01))
    for step in range(5):
        x, y = batch(step)
        if first and step == 3 and replica.part == 1:
            while any(ps.versions(name)[name] < 1 + step for name in ps.names()):
                time.sleep(0.01)  # a push of either part has not arrived yet
            file.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        replica.step(input=x, target=y)
        optimizer.step()
    optimizer.close()
