"""A language model on 2 servers and 4 workers: one is killed, all stop and resume, then the model is served.

Needs the extras torch and checkpoint.

    python examples/language_model.py [--model lstm|transformer] [--quick] [--output DIR]   # all of it
    python examples/language_model.py --average 0.99         # and served by an average of its weights
    python examples/language_model.py --dtype bfloat16       # the servers keep the weights in bfloat16
    python examples/language_model.py plain --steps N                   # the same model in plain torch
    torchrun --nproc-per-node 2 examples/language_model.py plain --steps N                   # and with DDP

The text is WikiText-2 in wikitext-2/ of the folder FASTPS_DATA_DIR: nine tenths of valid.txt.gz train it.
With --quick it is made up. --device cuda --width 768 --layers 3 makes it 25 million parameters on a GPU.
"""

import argparse
import gzip
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import fastps.torch

BATCH, LENGTH = 16, 32


class LanguageModel(nn.Module):
    """Embedding, LSTM or causal transformer, and the embedding again as the output layer."""

    def __init__(self, kind: str, words: int, width: int, layers: int):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.bias = nn.Parameter(torch.zeros(words))
        self.places = nn.Parameter(torch.zeros(LENGTH, width)) if kind == "transformer" else None
        if kind == "lstm":
            self.body = nn.LSTM(width, width, layers, batch_first=True)
        else:
            layer = nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            self.body = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, words):
        value = self.embedding(words)
        if self.places is None:
            value, _ = self.body(value)
        else:
            count = words.shape[1]
            mask = nn.Transformer.generate_square_subsequent_mask(count, device=words.device)
            value = self.body(value + self.places[:count], mask=mask, is_causal=True)
        return value @ self.embedding.weight.T + self.bias


class Text:
    """Words as numbers: training, validation and test."""

    def __init__(self, quick: bool):
        if quick:  # each word has a few successors
            chance, following = random.Random(0), random.Random(1)
            after = [following.sample(range(60), 3) for _ in range(60)]
            words = [0]
            for _ in range(12_000):
                words.append(chance.choice(after[words[-1]]))
            parts = [
                [f"w{word}" for word in words[a:b]] for a, b in ((0, 9000), (9000, 10_500), (10_500, None))
            ]
        else:
            folder = Path(
                os.environ.get("FASTPS_DATA_DIR") or sys.exit("set FASTPS_DATA_DIR, or use --quick")
            )
            valid, test = (self._read(folder / f"wikitext-2/{name}.txt.gz") for name in ("valid", "test"))
            cut = 9 * len(valid) // 10
            parts = [valid[:cut], valid[cut:], test]
        self.words = sorted({*parts[0], "<unk>"})
        numbers = {word: k for k, word in enumerate(self.words)}
        self.unknown = numbers["<unk>"]
        self.train, self.valid, self.test = (
            torch.tensor([numbers.get(word, self.unknown) for word in part]) for part in parts
        )

    def _read(self, path: Path) -> list[str]:
        if not path.is_file():
            sys.exit(f"{path} is missing: FASTPS_DATA_DIR is the folder with wikitext-2/, or use --quick")
        with gzip.open(path, "rt") as stream:
            return [word for line in stream for word in [*line.split(), "<eos>"]]


def batch_of(words, generator):
    """Pieces of the text at random places, and the words that follow."""
    begins = torch.randint(len(words) - LENGTH - 1, (BATCH,), generator=generator)
    rows = words[begins[:, None] + torch.arange(LENGTH + 1)]
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def perplexity(model, words, device):
    """Perplexity over a whole text, in pieces."""
    pieces = words[: (len(words) - 1) // LENGTH * LENGTH + 1]
    x, y = pieces[:-1].view(-1, LENGTH), pieces[1:].view(-1, LENGTH)
    total = 0.0
    for k in range(0, len(x), BATCH):
        logits = model(x[k : k + BATCH].to(device)).flatten(0, 1)
        total += nn.functional.cross_entropy(
            logits, y[k : k + BATCH].to(device).flatten(), reduction="sum"
        ).item()
    return math.exp(total / y.numel())


def made(arguments):
    """The text, the model and the loss of a batch."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    text = Text(arguments.quick)
    torch.manual_seed(0)
    model = LanguageModel(arguments.model, len(text.words), arguments.width, arguments.layers)
    model.to(arguments.device)

    def loss_of(callable_model, generator):
        x, y = (part.to(arguments.device) for part in batch_of(text.train, generator))
        return nn.functional.cross_entropy(callable_model(x).flatten(0, 1), y.flatten())

    return text, model, loss_of


def work(arguments):
    """One worker: trains until all workers together have taken the steps."""
    _, model, loss_of = made(arguments)
    torch.manual_seed(time.time_ns() % 2**31)  # each worker draws other batches
    with fastps.connect() as ps:
        adam = fastps.Adam(lr=arguments.lr)
        optimizer = fastps.torch.ParameterServerOptimizer(
            model.named_parameters(),
            ps,
            adam,
            average=fastps.EMA(arguments.average) if arguments.average else None,
            dtype=arguments.dtype,
        )
        begin = max(ps.versions("bias")["bias"] - 1, 0)
        print(f"begins at step {begin}", flush=True)
        shown = begin
        while (step := ps.versions("bias")["bias"] - 1) < arguments.steps:
            optimizer.zero_grad()
            loss = loss_of(model, torch.default_generator)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step(loss=loss)
            if step - shown >= max(1, arguments.steps // 20):
                shown = step
                print(f"step {step}  loss {loss.item():.3f}", flush=True)
        optimizer.close()


def finish(arguments):
    """Exports the model or its average, and serves that: a process that only pulls continues a sentence."""
    text, model, _ = made(arguments)
    with fastps.connect(name="reader") as ps:
        step = ps.versions("bias")["bias"] - 1
        fastps.torch.load(model.eval(), ps, view="average" if arguments.average else "values")
    weights = {name: weight.cpu().clone() for name, weight in model.state_dict().items()}
    save_file(weights, arguments.output / "model.safetensors")
    found = {name: perplexity(model, getattr(text, name), arguments.device) for name in ("valid", "test")}
    words = text.test[:8].tolist()
    for _ in range(12):  # the most probable words
        logits = model(torch.tensor([words[-LENGTH:]], device=arguments.device))[0, -1]
        logits[text.unknown] = -math.inf
        words.append(int(logits.argmax()))
    sentence = " ".join(text.words[word] for word in words)
    print(json.dumps({"steps": step, "perplexity": found, "sentence": sentence}), flush=True)


def plain(arguments):
    """The same model in plain torch, and with DDP where torchrun starts several processes."""
    text, model, loss_of = made(arguments)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank() if ranks > 1 else 0
    trained = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    optimizer, generator = (
        torch.optim.Adam(model.parameters(), lr=arguments.lr),
        torch.Generator().manual_seed(1 + rank),
    )
    begin = time.monotonic()
    for _ in range(arguments.steps):
        optimizer.zero_grad()
        loss_of(trained, generator).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    seconds = time.monotonic() - begin
    if rank == 0:
        found = {
            name: perplexity(model.eval(), getattr(text, name), arguments.device)
            for name in ("valid", "test")
        }
        print(
            json.dumps(
                {"steps": arguments.steps, "seconds": seconds, "processes": ranks, "perplexity": found}
            )
        )
    if ranks > 1:
        torch.distributed.destroy_process_group()


# -- the whole run -------------------------------------------------------------------------------------------


#: Options that the processes of a run take over.
SHARED = ("model", "steps", "width", "layers", "lr", "device", "dtype", "output")


def command_of(arguments, role, *options):
    """`fastps run` with servers that keep their state, and a role of this script on it."""
    own = [str(Path(__file__).resolve()), role]
    own += [f"--{name}={getattr(arguments, name)}" for name in SHARED]
    own += ["--quick"] if arguments.quick else []
    own += [f"--average={arguments.average}"] if arguments.average else []
    run = [
        sys.executable,
        "-m",
        "fastps",
        "run",
        "--shards",
        "2",
        "--data-dir",
        str(arguments.output / "state"),
    ]
    return [*run, *options, *own]


def train(arguments, log):
    """Starts servers, and workers that restart."""
    options = ["-n", str(arguments.workers), "--restart", "3", "--json", str(log)]
    return subprocess.Popen(command_of(arguments, "work", *options))


def serve(arguments):
    """Starts the servers and one process that only pulls; returns its output."""
    command = command_of(arguments, "finish", "--servers-only", "--", sys.executable)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the model cannot be served:\n{done.stderr[-3000:]}")
    return done.stdout


def events(log):
    """Complete lines that `fastps run` has logged."""
    return [json.loads(line) for line in log.read_text().split("\n")[:-1]] if log.exists() else []


def wait_for_step(run, log, step):
    """Watches the servers until the workers have taken a step; returns the steps."""
    while not any(event["event"] == "start" for event in events(log)):
        if run.poll() is not None:
            sys.exit("fastps run ended before a worker began")
        time.sleep(0.1)
    servers = [event["address"] for event in events(log) if event["event"] == "server_start"]
    with fastps.connect(servers, timeout=60, name="watcher") as ps:
        ps.wait_for("bias", timeout=600)
        while (at := ps.versions("bias")["bias"] - 1) < step:
            if run.poll() is not None:
                sys.exit(f"the run ended at step {at}")
            time.sleep(0.05)
    return at


def whole(arguments):
    """Trains with a kill, a stop and a new start, exports, and serves."""
    if "FASTPS_RANK" in os.environ:
        sys.exit("this starts its own servers and workers: use python FILE, without fastps run")
    arguments.output.mkdir(parents=True, exist_ok=True)
    logs = [arguments.output / f"run{k}.jsonl" for k in range(2)]
    begin = time.monotonic()
    first = train(arguments, logs[0])
    try:
        wait_for_step(first, logs[0], arguments.steps // 4)
        victim = [event for event in events(logs[0]) if event["event"] == "start"][-1]
        os.kill(victim["pid"], signal.SIGKILL)
        print(f"killed the worker of rank {victim['rank']}", flush=True)
        stopped = wait_for_step(first, logs[0], arguments.steps // 2)
        first.send_signal(signal.SIGINT)
        print(f"stopped everything at step {stopped}", flush=True)
        first.wait()
        if train(arguments, logs[1]).wait():
            sys.exit("the second run has failed")
    finally:
        if first.poll() is None:
            first.terminate()
            first.wait()
    seconds = time.monotonic() - begin
    result = next(line for line in serve(arguments).splitlines() if '"perplexity"' in line)
    found = {**json.loads(result[result.index("{") :]), "stopped": stopped, "seconds": seconds}
    print(json.dumps(found, indent=1))
    (arguments.output / "result.json").write_text(json.dumps(found) + "\n")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    roles = {"whole": whole, "work": work, "finish": finish, "plain": plain}
    parser.add_argument("role", nargs="?", choices=roles, default="whole")
    parser.add_argument("--model", choices=("lstm", "transformer"), default="lstm")
    parser.add_argument("--quick", action="store_true", help="a small model on a text that is made up")
    parser.add_argument("--steps", type=int, help="of all workers together (4000)")
    parser.add_argument("--width", type=int, help="of the embedding and the layers (256)")
    parser.add_argument("--layers", type=int, help="(2)")
    parser.add_argument("--lr", type=float, help="learning rate of Adam (.001)")
    parser.add_argument("--average", type=float, help="decay of the average that is evaluated (none)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights on the servers"
    )
    parser.add_argument("--workers", type=int, help="(4)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=Path("language-model"))
    arguments = parser.parse_args()
    quick = {"steps": 240, "width": 32, "layers": 1, "lr": 0.01, "workers": 2}
    full = {"steps": 4000, "width": 256, "layers": 2, "lr": 0.001, "workers": 4}
    for name, value in (quick if arguments.quick else full).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    try:
        roles[arguments.role](arguments)
    except KeyboardInterrupt:  # Ctrl-C also reaches the workers
        sys.exit(130)


if __name__ == "__main__":
    main()
