"""Mistakes of first-time users: every refusal names the place, what was expected, what came, and a way out.

The table has the texts in full. Each case provokes its error, with real servers where there are any.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import trustme

import fastps
from cases import case

ONES = np.ones(3, np.float32)
NAME = "layer.weight"


@dataclass
class World:
    """Objects that the cases use; `texts` holds what differs between two runs."""

    store: fastps.Store
    server: fastps.Server
    client: fastps.ParameterServer
    texts: dict[str, Any]


class _Web(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...


class _Ssh(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")


class _Tls(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, _TlsServer)
        with contextlib.suppress(OSError):  # the handshake fails
            self.server.context.wrap_socket(self.request, server_side=True).close()


class _TlsServer(socketserver.ThreadingTCPServer):
    context: ssl.SSLContext


def _port(stack: ExitStack, server: socketserver.TCPServer) -> int:
    """Serves until the end; the port."""
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    port: int = server.server_address[1]
    return port


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("tls")
    issuer = trustme.CA()
    own = issuer.issue_cert("127.0.0.1")
    own.private_key_pem.write_to_path(folder / "key.pem")
    own.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    (folder / "key.pem").chmod(0o600)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.configure_cert(context)
    with ExitStack() as stack:
        store = stack.enter_context(fastps.Store())
        store.register(NAME, ONES, fastps.SGD(lr=0.5))
        server = stack.enter_context(fastps.serve(shards=2))
        secured = stack.enter_context(fastps.serve(tls_cert=folder / "cert.pem", tls_key=folder / "key.pem"))
        client = stack.enter_context(fastps.connect(server, timeout=60.0))
        client.register(NAME, ONES, fastps.SGD(lr=0.5))
        taken = stack.enter_context(socket.socket())
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        tls = _TlsServer(("127.0.0.1", 0), _Tls)
        tls.context = context
        texts = {
            "address": server.addresses,
            "listed": ", ".join(server.address_list),
            "server": repr(server),
            "port": server.address_list[0].rpartition(":")[2],
            "secured": secured.addresses,
            "taken": taken.getsockname()[1],
            "web": _port(stack, http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Web)),
            "ssh": _port(stack, socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Ssh)),
            "tls": _port(stack, tls),
            "host": os.uname().nodename,
            "pid": os.getpid(),
        }
        yield World(store, server, client, texts)


def _torch(*arguments: Any, **settings: Any) -> Any:
    return fastps.torch.ParameterServerOptimizer(*arguments, **settings)


def _named() -> Any:
    import torch

    return torch.nn.Linear(3, 1).named_parameters()


def _model() -> Any:
    import torch

    return torch.nn.Linear(3, 1)


def _torch_adam() -> Any:
    import torch

    return torch.optim.Adam(_model().parameters())


def _registered_as(optimizer: fastps.Optimizer, size: int = 3) -> fastps.Store:
    import torch

    store, model = fastps.Store(), torch.nn.Linear(size, 1, bias=False)
    fastps.torch.ParameterServerOptimizer(model.named_parameters(), store, optimizer).close()
    return store


def _unbiased() -> Any:
    import torch

    return torch.nn.Linear(3, 1, bias=False).named_parameters()


def _closed(thing: Any) -> Any:
    thing.close()
    return thing


def _worker(world: World, **settings: Any) -> fastps.Worker:
    return fastps.Worker(world.store, {NAME: ONES}, fastps.Async(), **settings)


def _lonely(mode: fastps.Sync | fastps.DiLoCo) -> None:
    with fastps.serve() as server, fastps.connect(server, timeout=2.0) as ps:
        ps.register("w", ONES, fastps.SGD())
        ps.register("v", ONES, fastps.SGD())
        worker = fastps.Worker(ps, {"w": ONES, "v": ONES}, mode, name="me")
        while worker.stats()["steps"] < 5:
            worker.step(values=worker.params) if mode.takes_values else worker.step({"w": ONES, "v": ONES})


def _cart_pole() -> Any:
    import gymnasium

    return gymnasium.make("CartPole-v1")


def _with_lr(lr: Any) -> None:
    optimizer = _torch(_named(), fastps.Store(), fastps.SGD())
    optimizer.param_groups[0]["lr"] = lr
    optimizer.step()


EXPECTED_PS = "expected a fastps.Store or the result of fastps.connect, got "
ADDRESS = f"invalid ps: {EXPECTED_PS}the address 'host-a:7070'; write fastps.connect('host-a:7070')"
ORDER = (
    "expected (params, ps, optimizer), such as (model.named_parameters(), fastps.connect(...), "
    "fastps.Adam(lr=1e-3)), got "
)
UNKNOWN = (
    'no tensor of this name is registered (tensor "layer.weigth"): '
    'expected a registered name, such as "layer.weight", got "layer.weigth"'
)
HERE = UNKNOWN.replace(" (tensor", " at {listed} (tensor")
TLS_TEXT = "expected tls_ca, the file of the CA that signed the server's certificate, got no tls_ca"

Case = tuple[type[BaseException], str, Callable[[World], object]]


def _objective(params: Any, indices: Any) -> Any: ...


def _distributed(call: str) -> Callable[[Any], object]:
    return lambda ps: getattr(fastps.torch, call)(ps, _model(), _torch_adam(), "checkpoint")


TREE = {"w": ONES}

#: Places of a store or a client.
STORES: dict[str, Callable[[Any], object]] = {
    "worker_seed": lambda ps: fastps.worker_seed(0, ps),
    "evaluator": lambda ps: fastps.evaluator(ps, lambda params: {}),
    "checkpoint.save": lambda ps: fastps.checkpoint.save(ps, "model.safetensors"),
    "checkpoint.load": lambda ps: fastps.checkpoint.load(ps, "model.safetensors"),
    "data.Portions": lambda ps: fastps.data.Portions(ps, n=5),
    "jax.register": lambda ps: fastps.jax.register(ps, TREE, fastps.SGD()),
    "jax.push": lambda ps: fastps.jax.push(ps, TREE),
    "jax.pull": lambda ps: fastps.jax.pull(ps, TREE),
    "jax.Worker": lambda ps: fastps.jax.Worker(ps, TREE, fastps.Async()),
    "optimize.minimize": lambda ps: fastps.optimize.minimize(ps, ["w"], _objective, samples=2),
    "optimize.Vectors": lambda ps: fastps.optimize.Vectors(ps, ["w"], ["g"], space="s"),
    "optimize.Replica": lambda ps: fastps.optimize.Replica(ps, _objective),
    "optimize.drop": lambda ps: fastps.optimize.drop(ps, "s"),
    "rl.run_worker": lambda ps: fastps.rl.run_worker(ps, fastps.rl.A3C(), _cart_pole, seed=0, frames=1),
    "rl.evaluate": lambda ps: fastps.rl.evaluate(ps, fastps.rl.A3C(), _cart_pole, episodes=1),
    "torch.ParameterServerOptimizer": lambda ps: _torch(_named(), ps, fastps.Adam()),
    "torch.seed": lambda ps: fastps.torch.seed(0, ps),
    "torch.to_store": lambda ps: fastps.torch.to_store(ps, _model(), _torch_adam()),
    "torch.from_store": lambda ps: fastps.torch.from_store(ps, _model(), _torch_adam()),
    "torch.save_distributed": _distributed("save_distributed"),
    "torch.load_distributed": _distributed("load_distributed"),
    "torch.evaluator": lambda ps: fastps.torch.evaluator(_model(), ps, lambda model: {}),
}

#: Verbs with a name that is not there.
VERBS: dict[str, Callable[[Any], object]] = {
    "pull": lambda ps: ps.pull("layer.weigth"),
    "pull of several": lambda ps: ps.pull(["layer.weight", "layer.weigth"]),
    "pull of rows": lambda ps: ps.pull("layer.weigth", indices=[0]),
    "push": lambda ps: ps.push("layer.weigth", ONES),
    "push of several": lambda ps: ps.push({"layer.weigth": ONES}),
    "push_async": lambda ps: ps.push_async("layer.weigth", ONES),
    "push_pull": lambda ps: ps.push_pull("layer.weigth", ONES),
    "bind": lambda ps: ps.bind({"layer.weigth": ONES}),
    "assign": lambda ps: ps.assign("layer.weigth", ONES),
    "spec": lambda ps: ps.spec("layer.weigth"),
    "versions": lambda ps: ps.versions("layer.weigth"),
    "state": lambda ps: ps.state("layer.weigth"),
    "load_state": lambda ps: ps.load_state("layer.weigth", {"step": 1}),
    "Worker": lambda ps: fastps.Worker(ps, {"layer.weigth": ONES}, fastps.Async()),
}


def of_store(call: Callable[[Any], object]) -> Callable[[World], object]:
    return lambda world: call(world.store)


def of_client(call: Callable[[Any], object]) -> Callable[[World], object]:
    return lambda world: call(world.client)


CASES: dict[str, Case] = {
    # an address, a server or nothing where a store or a client belongs
    "ps: worker": (
        fastps.ConfigError,
        ADDRESS,
        lambda _: fastps.Worker("host-a:7070", {"w": ONES}, fastps.Async()),  # type: ignore[arg-type]
    ),
    "ps: worker, server": (
        fastps.ConfigError,
        f"invalid ps: {EXPECTED_PS}{{server}}; write fastps.connect('{{address}}')",
        lambda world: fastps.Worker(world.server, {"w": ONES}, fastps.Async()),  # type: ignore[arg-type]
    ),
    "ps: worker, class": (
        fastps.ConfigError,
        f"invalid ps: {EXPECTED_PS}the class Store; write fastps.Store()",
        lambda _: fastps.Worker(fastps.Store, {"w": ONES}, fastps.Async()),  # type: ignore[arg-type]
    ),
    "ps: worker, none": (
        fastps.ConfigError,
        f"invalid ps: {EXPECTED_PS}None",
        lambda _: fastps.Worker(None, {"w": ONES}, fastps.Async()),  # type: ignore[arg-type]
    ),
    **{
        f"ps: {place}": (fastps.ConfigError, ADDRESS, lambda _, call=call: call("host-a:7070"))
        for place, call in STORES.items()
    },
    # the arguments of ParameterServerOptimizer
    "torch: swapped": (
        fastps.ConfigError,
        f"ParameterServerOptimizer: another order of arguments: {ORDER}(Store, generator, Adam)",
        lambda world: _torch(world.store, _named(), fastps.Adam()),
    ),
    "torch: swapped at the end": (
        fastps.ConfigError,
        f"ParameterServerOptimizer: another order of arguments: {ORDER}(generator, Adam, Store)",
        lambda world: _torch(_named(), fastps.Adam(), world.store),
    ),
    "torch: no optimizer": (
        fastps.ConfigError,
        f"ParameterServerOptimizer: missing a required argument: 'optimizer': {ORDER}(generator, Store)",
        lambda world: _torch(_named(), world.store),
    ),
    "torch: no store": (
        fastps.ConfigError,
        f"ParameterServerOptimizer: missing a required argument: 'optimizer': {ORDER}(generator, Adam)",
        lambda _: _torch(_named(), fastps.Adam()),
    ),
    "torch: lr": (
        fastps.ConfigError,
        f"ParameterServerOptimizer: got an unexpected keyword argument 'lr': {ORDER}(generator, Store, Adam, "
        "float); lr is a setting of the optimizer",
        lambda world: _torch(_named(), world.store, fastps.Adam(), lr=0.1),
    ),
    "torch: keyword": (
        fastps.ConfigError,
        f"ParameterServerOptimizer: got an unexpected keyword argument 'codecs': {ORDER}(generator, Store, "
        "Adam, Int8); did you mean codec=?",
        lambda world: _torch(_named(), world.store, fastps.Adam(), codecs=fastps.Int8()),
    ),
    "torch: model": (
        fastps.ConfigError,
        "invalid params: expected model.named_parameters(), got Linear(in_features=3, out_features=1, "
        "bias=True)",
        lambda world: _torch(_model(), world.store, fastps.Adam()),
    ),
    "torch: parameters": (
        fastps.ConfigError,
        "invalid params: expected names with the parameters, as model.named_parameters() gives, got a "
        "torch.nn.parameter.Parameter; for groups without names (timm's): names = {{p: n for n, p in "
        "model.named_parameters()}}; groups = "
        '[{{**g, "params": [(names[p], p) for p in g["params"]]}} for g in groups]',
        lambda world: _torch(_model().parameters(), world.store, fastps.Adam()),
    ),
    "torch: its optimizer": (
        fastps.ConfigError,
        "invalid optimizer: expected one such as fastps.Adam(), got a torch.optim.adam.Adam",
        lambda world: _torch(_named(), world.store, _torch_adam()),
    ),
    "torch: class of it": (
        fastps.ConfigError,
        "invalid optimizer: expected one such as fastps.Adam(), got the class torch.optim.adam.Adam",
        lambda world: _torch(_named(), world.store, type(_torch_adam())),
    ),
    "torch: group": (
        fastps.ConfigError,
        'invalid key of a parameter group: expected one of "amsgrad", "betas", "decoupled_weight_decay", '
        '"eps", "lr", "maximize", "weight_decay", got \'wieght_decay\'; the nearest is "weight_decay"',
        lambda _: _torch([{"params": _named(), "wieght_decay": 0.1}], fastps.Store(), fastps.Adam()),
    ),
    # a lonely worker
    "sync: alone": (
        fastps.DeadlineError,
        "the wait for the other workers has timed out: expected gradients of 3 workers, got fewer; group "
        '"default" has 1 of 3 workers ("me"); 2 missing: start them, or use workers=1',
        lambda _: _lonely(fastps.Sync(workers=3)),
    ),
    "diloco: alone": (
        fastps.DeadlineError,
        "the wait for the other workers has timed out: expected gradients of 3 workers, got fewer; group "
        '"default" has 1 of 3 workers ("me"); 2 missing: start them, or use workers=1',
        lambda _: _lonely(fastps.DiLoCo(every=4, workers=3, quorum=2, fragments=2, overlap=1)),
    ),
    # what answers at an address
    "connect: web server": (
        fastps.ConfigError,
        "cannot connect to 127.0.0.1:{web}: no server of fastps listens there; check host and port: expected "
        "a server of fastps, got a web server that answers HTTP/1.0 501",
        lambda world: fastps.connect(world.texts["web"]),
    ),
    "connect: another program": (
        fastps.ConfigError,
        "cannot connect to 127.0.0.1:{ssh}: no server of fastps listens there; check host and port: expected "
        'a server of fastps, got another program that answers "SSH-2.0-OpenSSH_9.6"',
        lambda world: fastps.connect(world.texts["ssh"]),
    ),
    "connect: TLS without a CA": (
        fastps.PermissionDeniedError,
        f"cannot connect to {{secured}}: this port speaks TLS: {TLS_TEXT}",
        lambda world: fastps.connect(world.texts["secured"]),
    ),
    "connect: TLS of another program": (
        fastps.PermissionDeniedError,
        f"cannot connect to 127.0.0.1:{{tls}}: this port speaks TLS: {TLS_TEXT}",
        lambda world: fastps.connect(world.texts["tls"]),
    ),
    "connect: silence": (
        fastps.ConnectionLostError,
        "cannot connect to 127.0.0.1:{taken}: no answer within the timeout; is a server running there "
        "(fastps serve), and are host and port right?"
        " 127.0.0.1 is this machine only; a server elsewhere needs --listen HOST:PORT",
        lambda world: fastps.connect(world.texts["taken"], timeout=1.0),
    ),
    "connect: nobody": (
        fastps.ConnectionLostError,
        "cannot connect to 127.0.0.1:1: tcp connect error (Connection refused (os error 111)); is a server "
        "running there (fastps serve), and are host and port right?"
        " 127.0.0.1 is this machine only; a server elsewhere needs --listen HOST:PORT",
        lambda _: fastps.connect(1, timeout=0.5),
    ),
    # numbers in quotes
    "number: lr of an optimizer": (
        fastps.ConfigError,
        "invalid lr of Adam: expected a number without quotes, got the str '0.1'",
        lambda _: fastps.Adam(lr="0.1"),  # type: ignore[arg-type]
    ),
    "number: lr of a mode": (
        fastps.ConfigError,
        "invalid lr: expected a finite number >= 0 (as float32) without quotes, got the str '0.1'",
        lambda _: fastps.Local(lr="0.1"),  # type: ignore[arg-type]
    ),
    "number: lr of a push": (
        fastps.ConfigError,
        "invalid lr: expected a number without quotes, got the str '0.1'",
        lambda world: world.store.push(NAME, ONES, lr="0.1"),  # type: ignore[call-overload]
    ),
    "number: scale of a push": (
        fastps.ConfigError,
        "invalid scale: expected a number without quotes, got the str '2'",
        lambda world: world.client.push(NAME, ONES, scale="2"),  # type: ignore[call-overload]
    ),
    "number: lr of a step": (
        fastps.ConfigError,
        "invalid lr: expected a finite number >= 0 (as float32) without quotes, got the str '0.1'",
        lambda world: _worker(world).step({NAME: ONES}, lr="0.1"),  # type: ignore[arg-type]
    ),
    "number: lr of a group": (
        fastps.ConfigError,
        "invalid lr: expected a finite number >= 0 without quotes, got the str '0.1'",
        lambda _: _with_lr("0.1"),
    ),
    "number: timeout of a call": (
        fastps.ConfigError,
        "invalid timeout: expected a number without quotes, got the str '5'",
        lambda world: world.client.pull(NAME, timeout="5"),  # type: ignore[call-overload]
    ),
    "number: timeout of connect": (
        fastps.ConfigError,
        "invalid timeout: expected a number without quotes, got the str '5'",
        lambda world: fastps.connect(world.server, timeout="5"),  # type: ignore[arg-type]
    ),
    "number: lease": (
        fastps.ConfigError,
        "invalid lease: expected a number without quotes, got the str '10'",
        lambda _: fastps.serve(lease="10"),  # type: ignore[arg-type]
    ),
    "number: shards": (
        fastps.ConfigError,
        "invalid shards: expected an integer from 0 to 4294967295 without quotes, got the str '2'",
        lambda _: fastps.serve(shards="2"),  # type: ignore[arg-type]
    ),
    # another optimizer, another model
    "other: optimizer": (
        fastps.ConfigError,
        'these parameters are registered with another optimizer: "weight" (tensor "weight"): expected '
        "Adam(weight_decay=0.1), got SGD(momentum=0.9); train with that optimizer, Adam(weight_decay=0.1), "
        "or give the model other names (prefix=...), or unregister its tensors (ps.unregister)",
        lambda _: _torch(
            _unbiased(), _registered_as(fastps.Adam(lr=0.5, weight_decay=0.1)), fastps.SGD(momentum=0.9)
        ),
    ),
    "other: setting": (
        fastps.ConfigError,
        'these parameters are registered with another optimizer: "weight" (tensor "weight"): expected '
        "Adam(weight_decay=0.1), got Adam(weight_decay=0.0); train with that optimizer, "
        "Adam(weight_decay=0.1), or give the model other names (prefix=...), or unregister its tensors "
        "(ps.unregister)",
        lambda _: _torch(_unbiased(), _registered_as(fastps.Adam(weight_decay=0.1)), fastps.Adam()),
    ),
    "other: model": (
        fastps.ConfigError,
        'another model has these names: "weight" (tensor "weight"): expected shape (1, 5), got shape (1, 3); '
        "give this one other names (prefix=...), or unregister its tensors (ps.unregister)",
        lambda _: _torch(_unbiased(), _registered_as(fastps.Adam(), 5), fastps.Adam()),
    ),
    **{
        f"other: register in a {kind}": (
            fastps.ConfigError,
            "the tensor is registered with another optimizer; unregister() frees the name (tensor "
            f'"layer.weight"{shard}): expected SGD, got Adam',
            lambda world, call=call: call(world).register(NAME, ONES, fastps.Adam()),
        )
        for kind, shard, call in (
            ("store", "", lambda world: world.store),
            ("cluster", ", shard 0", lambda world: world.client),
        )
    },
    # names that are not there
    **{
        f"name: {verb} in a store": (fastps.UnknownTensorError, UNKNOWN, of_store(call))
        for verb, call in VERBS.items()
    },
    **{
        f"name: {verb} at servers": (fastps.UnknownTensorError, HERE, of_client(call))
        for verb, call in VERBS.items()
    },
    "name: unregister in a store": (
        fastps.UnknownTensorError,
        UNKNOWN,
        lambda world: world.store.unregister("layer.weigth"),
    ),
    "name: nothing like it": (
        fastps.UnknownTensorError,
        'no tensor of this name is registered (tensor "embedding"): expected a registered name '
        '(names() lists them), got "embedding"',
        lambda world: world.store.pull("embedding"),
    ),
    "name: nothing at all": (
        fastps.UnknownTensorError,
        'no tensor of this name is registered (tensor "w"): expected a registered name (register() makes '
        'one), got "w"',
        lambda _: fastps.Store().pull("w"),
    ),
    "name: gradient": (
        fastps.ConfigError,
        'the worker has no such tensor (tensor "layer.weigth"): expected names from "layer.weight", got '
        '"layer.weigth"; did you mean "layer.weight"?',
        lambda world: _worker(world).step({"layer.weigth": ONES}),
    ),
    "name: rate": (
        fastps.ConfigError,
        'the worker has no such tensor, but lr names it (tensor "layer.weigth"): expected names from '
        '"layer.weight", got "layer.weigth"; did you mean "layer.weight"?',
        lambda world: _worker(world).step({NAME: ONES}, lr={"layer.weigth": 0.1}),
    ),
    "name: attribute": (
        AttributeError,
        "module 'fastps' has no attribute 'Adamw'; did you mean fastps.AdamW?",
        lambda _: fastps.Adamw,
    ),
    "name: subpackage": (
        AttributeError,
        "module 'fastps' has no attribute 'optimise'; did you mean fastps.optimize?",
        lambda _: fastps.optimise,
    ),
    "name: optimizer": (
        fastps.ConfigError,
        'invalid optimizer: expected an object such as fastps.RMSprop(), got the str "rmsprob"',
        lambda world: world.store.register("q", ONES, "rmsprob"),  # type: ignore[arg-type]
    ),
    "name: optimizer's class": (
        fastps.ConfigError,
        "invalid optimizer: expected an object such as fastps.AdamW(), got the class fastps.optim.AdamW",
        lambda world: world.client.register("q", ONES, fastps.AdamW),  # type: ignore[arg-type]
    ),
    "name: codec": (
        fastps.ConfigError,
        'invalid codec: expected an object such as fastps.OneBit(), got the str "onebits"',
        lambda world: world.store.push(NAME, ONES, codec="onebits"),  # type: ignore[call-overload]
    ),
    "name: codec of a worker": (
        fastps.ConfigError,
        "invalid codec: expected a codec, such as fastps.BFloat16(), got 'bfloat16'",
        lambda world: _worker(world, codec="bfloat16"),
    ),
    "name: mode": (
        fastps.ConfigError,
        "invalid mode: expected a mode, such as fastps.Bounded(), got the class fastps.modes.bounded.Bounded",
        lambda world: fastps.Worker(world.store, {NAME: ONES}, fastps.Bounded),  # type: ignore[arg-type]
    ),
    # closed objects
    "closed: store": (
        fastps.ConfigError,
        "this store is closed; make another one: expected an open store, got a closed one",
        lambda _: _closed(fastps.Store()).names(),
    ),
    "closed: client": (
        fastps.ConfigError,
        "this client of {listed} is closed; connect again: expected an open client, got a closed one",
        lambda world: _closed(fastps.connect(world.server)).pull(NAME),
    ),
    **{
        f"closed: worker, {verb}": (
            fastps.ConfigError,
            'this worker ("me") is closed: expected an open worker, got a closed one; make another one',
            lambda world, call=call: call(_closed(_worker(world, name="me"))),
        )
        for verb, call in {
            "step": lambda worker: worker.step({NAME: ONES}),
            "begin": lambda worker: worker.begin({NAME: ONES}),
            "ready": lambda worker: worker.ready(),
            "flush": lambda worker: worker.flush(),
            "pull_model": lambda worker: worker.pull_model(),
            "push_model": lambda worker: worker.push_model(),
            "add": lambda worker: worker.add_params({"other": ONES}),
        }.items()
    },
    **{
        f"closed: optimizer, {verb}": (
            fastps.ConfigError,
            "this ParameterServerOptimizer is closed: expected an open optimizer, got a closed one; make "
            "another one",
            lambda _, call=call: call(_closed(_torch(_named(), fastps.Store(), fastps.SGD()))),
        )
        for verb, call in {
            "step": lambda optimizer: optimizer.step(),
            "flush": lambda optimizer: optimizer.flush(),
            "pull_model": lambda optimizer: optimizer.pull_model(),
            "push_model": lambda optimizer: optimizer.push_model(),
        }.items()
    },
    # ports that are taken
    "port: of this process": (
        fastps.ConfigError,
        "cannot listen on port {port}: expected a free port, or 0 for any, got {port}; {server} of this "
        "process uses it: stop() that, or use fastps.connect({port})",
        lambda world: fastps.serve(listen=f"127.0.0.1:{world.texts['port']}"),
    ),
    "port: of another program": (
        fastps.ConfigError,
        "cannot listen on 127.0.0.1:{taken}: the port is in use: expected a free port, or 0 for any, got "
        "{taken}",
        lambda world: fastps.serve(listen=f"127.0.0.1:{world.texts['taken']}"),
    ),
}


def test_a_refusal_shows_a_way_out(world: World) -> None:
    for name, (kind, text, call) in CASES.items():
        with case(name):
            with pytest.raises(kind) as caught:
                call(world)
            assert type(caught.value) is kind
            assert str(caught.value) == text.format(**world.texts)
