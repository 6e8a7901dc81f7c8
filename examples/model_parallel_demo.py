"""Two replicas of two parts train one model on two shards; a part is killed half-way.

Needs the extras torch and demo.

    python examples/model_parallel_demo.py [--partition layers|rows] [--epochs N] [--output FILE]

Each replica is `torchrun --max-restarts 100 examples/model_parallel.py`: the one with the killed part starts
again. The images are MNIST in mnist/ of the folder FASTPS_DATA_DIR, or else the small digits that come with
fastps. Shows progress, and writes a picture of the loss.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import fastps

EXAMPLE = Path(__file__).with_name("model_parallel.py")
COLOURS = ("#2166ac", "#b2182b")


def start(number, servers, folder, arguments):
    """A replica of two parts."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "--max-restarts=100"]
    command += [str(EXAMPLE), servers, "--partition", arguments.partition, "--epochs", str(arguments.epochs)]
    command += ["--record", str(folder / f"replica{number}")]
    environment = {**os.environ, "REPLICA": str(number), "OMP_NUM_THREADS": "1"}
    with (folder / f"output{number}").open("w") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


def read(path):
    """The lines that a replica has written so far: starts of parts, steps, the end."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    starts = [line for line in found if "pid" in line]
    steps = [line for line in found if "loss" in line]
    return starts, steps, next((line for line in found if "accuracy" in line), None)


def watch(replicas, folder, half):
    """Shows progress, and kills part 1 of replica 0 half-way; returns when."""
    killed, shown = None, 0.0
    while any(codes := [replica.poll() for replica in replicas]) or None in codes:
        for number, code in enumerate(codes):
            if code:
                sys.exit(f"replica {number} has failed:\n{(folder / f'output{number}').read_text()[-3000:]}")
        logs = [read(folder / f"replica{number}") for number in range(2)]
        if killed is None and len(logs[0][1]) + len(logs[1][1]) >= half and logs[0][1]:
            victim = [line["pid"] for line in logs[0][0] if line["part"] == 1][-1]
            os.kill(victim, signal.SIGKILL)
            killed = time.time()
            print(f"killed part 1 of replica 0 (process {victim})", flush=True)
        if time.time() > shown + 2:
            shown = time.time()
            state = [
                f"replica {k}: {len(log[1])} steps, loss {log[1][-1]['loss']:.2g}"
                for k, log in enumerate(logs)
                if log[1]
            ]
            print("  ".join(state) or "starting", flush=True)
        time.sleep(0.1)
    return killed


def draw(logs, killed, title, path):
    """Loss against steps and time, with the kill and the new start."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    begun = min(log[1][0]["time"] for log in logs)
    steps = sorted((line["time"], line["loss"], number) for number, log in enumerate(logs) for line in log[1])
    again = next(line["time"] for line in logs[0][1] if line["time"] > killed + 1)
    for axes, label in zip(figure.subplots(1, 2), ("steps of both replicas", "time (s)"), strict=True):
        by_time = label == "time (s)"
        for number in range(2):
            own = [(k, at, loss) for k, (at, loss, who) in enumerate(steps) if who == number]
            width = max(1, len(own) // 100)
            points = [own[k : k + width] for k in range(0, len(own) - width + 1, width)]
            x = [p[-1][1] - begun if by_time else p[-1][0] for p in points]
            y = [sum(loss for *_, loss in p) / len(p) for p in points]
            axes.plot(x, y, ".", ms=4, color=COLOURS[number], label=f"replica {number}")
        for at, text in ((killed, "part 1 of replica 0 killed"), (again, "replica 0 trains again")):
            place = at - begun if by_time else sum(step[0] < at for step in steps)
            axes.axvline(place, color="#555555", ls="--", lw=1)
            axes.annotate(
                text,
                (place, 0.97),
                xycoords=("data", "axes fraction"),
                rotation=90,
                fontsize=8,
                ha="right",
                va="top",
            )
        axes.set(xlabel=label, ylabel="training loss", yscale="log")
        axes.grid(alpha=0.25)
        axes.legend(loc="lower left")
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--partition", choices=("layers", "rows"), default="layers")
    parser.add_argument("--epochs", type=int, help="default: 2 for MNIST, 120 for the digits")
    parser.add_argument("--output", type=Path, default=Path("demo-parallel.png"))
    arguments = parser.parse_args()
    if "FASTPS_RANK" in os.environ:
        sys.exit("this starts its own servers and replicas: use python FILE, without fastps run")
    mnist = bool(os.environ.get("FASTPS_DATA_DIR"))
    arguments.epochs = arguments.epochs or (2 if mnist else 120)
    portions = 938 if mnist else 23
    with tempfile.TemporaryDirectory() as name, fastps.serve(shards=2) as server:
        folder = Path(name)
        replicas = [start(number, server.addresses, folder, arguments) for number in range(2)]
        try:
            killed = watch(replicas, folder, arguments.epochs * portions // 2)
        finally:
            for replica in replicas:
                replica.terminate()
                replica.wait()
        logs = [read(folder / f"replica{number}") for number in range(2)]
        with fastps.connect(server.addresses) as ps:
            version = max(ps.versions(tensor)[tensor] for tensor in ps.names())
    for number, (starts, steps, end) in enumerate(logs):
        restarts = sum(line["part"] == 0 for line in starts) - 1
        print(f"replica {number}: {len(steps)} steps, {restarts} restarts, accuracy {end['accuracy']:.3f}")
    for edge, counters in logs[1][2]["stats"]["edges"].items():
        forward, backward = counters["value_bytes"], counters["gradient_bytes"]
        print(f"  {edge}: {forward / 1e6:.1f} MB forward, {backward / 1e6:.1f} MB backward in replica 1")
    print(f"steps on the servers: {version - 1}")
    if killed is None:
        sys.exit("the run was over before a part could be killed")
    title = f"2 replicas of 2 parts ({arguments.partition}), 2 shards, {'MNIST' if mnist else 'digits'}"
    draw(logs, killed, title, arguments.output)
    print(f"picture: {arguments.output}")


if __name__ == "__main__":
    main()
