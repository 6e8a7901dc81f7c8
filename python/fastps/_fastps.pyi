# Types of the compiled half; `python -m mypy.stubtest fastps._fastps` compares them with it.

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Self, final, overload

from typing_extensions import disjoint_base

from fastps._shared.types import Array, File
from fastps.codecs import Codec
from fastps.errors import FastpsError
from fastps.modes import Mode
from fastps.modes._mode import Correction
from fastps.optim import EMA, Optimizer

__all__ = [
    "BoundList",
    "Client",
    "Encoded",
    "ErrorFeedback",
    "Exchange",
    "FactorTrainer",
    "InDoubt",
    "LinearTrainer",
    "Listener",
    "LocalSteps",
    "PullFlight",
    "PushFlight",
    "PushSettings",
    "Receipt",
    "Receipts",
    "Server",
    "SharedView",
    "Sparse",
    "VectorSpaces",
    "Versions",
    "__version__",
    "assign_all",
    "body_len",
    "check_average",
    "check_codec",
    "check_gradient",
    "check_optimizer",
    "command_cli",
    "connect",
    "decode",
    "described",
    "encode",
    "fetch_history",
    "forked",
    "instruction_set",
    "instruction_sets",
    "moment_of",
    "nearest",
    "printable",
    "recorded",
    "rewind_to",
    "serve_cli",
    "tearing",
    "without_secrets",
]
__version__: str

@final
class Receipt:
    __match_args__ = ("version", "staleness", "duplicate", "scale", "duplicates", "momentum")
    @property
    def version(self) -> int: ...
    @property
    def staleness(self) -> int | None: ...
    @property
    def duplicate(self) -> bool: ...
    @property
    def scale(self) -> float: ...
    @property
    def duplicates(self) -> int: ...
    @property
    def momentum(self) -> float | None: ...
    def __new__(
        cls,
        version: int,
        staleness: int | None,
        duplicate: bool,
        scale: float,
        duplicates: int = 0,
        momentum: float | None = None,
    ) -> Receipt: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[type[Receipt], tuple[int, int | None, bool, float, int, float | None]]: ...

@final
class Receipts:
    def names(self) -> tuple[str, ...]: ...
    def at(self, name: str) -> Receipt: ...
    def bytes(self) -> int: ...
    def staleness(self) -> int | None: ...
    def scale(self) -> float: ...
    def momentum(self) -> float | None: ...
    def __len__(self) -> int: ...

@final
class Sparse:
    @property
    def indices(self) -> Any: ...
    @property
    def values(self) -> Any: ...
    def __new__(cls, indices: Any, values: Any) -> Sparse: ...

@disjoint_base
class Encoded:
    @property
    def shape(self) -> list[int]: ...
    def __new__(cls, codec: Codec, body: Any, shape: Sequence[int]) -> Self: ...

@final
class Versions:
    def __getitem__(self, name: str, /) -> int: ...
    def slices(self, name: str) -> tuple[int, ...]: ...
    def updated(self, later: Versions) -> Versions: ...
    def __contains__(self, name: str, /) -> bool: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[str]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def names(self) -> list[str]: ...

@final
class InDoubt:
    @property
    def tensor(self) -> str: ...
    @property
    def shard(self) -> int: ...
    @property
    def elements(self) -> range: ...
    def result(self, timeout: float = 30.0) -> Literal["applied", "fenced", "unknown"]: ...

@final
class ErrorFeedback:
    def __new__(cls) -> ErrorFeedback: ...
    def state_dict(self) -> dict[str, Array]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

@final
class PushFlight:
    def __new__(cls) -> Self: ...
    @property
    def begun(self) -> bool: ...
    def done(self) -> bool: ...
    def wait(self, timeout: float | None) -> Receipts | None: ...
    def on_done(self, callback: Callable[[], object]) -> None: ...

@final
class Listener:
    def heard(self) -> bool: ...

@final
class PullFlight:
    def done(self) -> bool: ...
    def install(
        self, out: dict[str, Any] | None, timeout: float | None
    ) -> tuple[dict[str, Array], Versions] | None: ...

@final
class PushSettings:
    def __new__(
        cls,
        codec: Codec | None = None,
        lr: float | None = None,
        scale: float | None = None,
        based_on: Versions | None = None,
        timeout: float | None = None,
        correction: Correction | None = None,
        weight: float | None = None,
        note: str | None = None,
    ) -> PushSettings: ...

@final
class BoundList:
    @property
    def feedback(self) -> ErrorFeedback | None: ...
    def names(self) -> list[str]: ...

@final
class Exchange:
    @property
    def is_far(self) -> bool: ...

@final
class LocalSteps:
    def __new__(cls, params: dict[str, Any]) -> LocalSteps: ...
    def step(
        self, gradients: dict[str, Any], sums: dict[str, Any], lr: float, first: bool, check_finite: bool
    ) -> None: ...

@final
class SharedView:
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Client:
    @property
    def closed(self) -> bool: ...
    def lost(self) -> list[tuple[str, int, int | None, int, int]]: ...
    @property
    def known_tensors(self) -> int: ...
    @property
    def transport(self) -> list[tuple[str, str]]: ...
    @property
    def check_finite(self) -> bool: ...
    @property
    def timeout(self) -> float: ...
    @property
    def id(self) -> int: ...
    @staticmethod
    def store(
        threads: int | None,
        memory_limit: int | None,
        check_finite: bool,
        shared: bool = ...,
        address: str | None = ...,
    ) -> Client: ...
    @property
    def address(self) -> str | None: ...
    def view(self, name: str) -> SharedView: ...
    def another(self, name: str | None, timeout: float | None) -> Client: ...
    def register(
        self,
        values: dict[str, Any],
        rules: Optimizer | dict[str, Optimizer],
        apply: str,
        group: str,
        average: EMA | None,
        element: tuple[str | None, str | None, int | None],
        timeout: float | None,
    ) -> None: ...
    def unregister(self, name: str, timeout: float | None) -> None: ...
    @overload
    def push(self, what: str, grad: Any, settings: PushSettings) -> Receipt: ...
    @overload
    def push(self, what: dict[str, Any] | BoundList, grad: None, settings: PushSettings) -> Receipts: ...
    def push_async(
        self,
        what: dict[str, Any] | BoundList,
        settings: PushSettings,
        tracked: bool,
        every_slice: bool = False,
        flight: PushFlight | None = None,
    ) -> PushFlight: ...
    def push_pull(
        self, what: dict[str, Any] | BoundList, out: dict[str, Any] | None, settings: PushSettings
    ) -> tuple[dict[str, Array], Receipts, Versions]: ...
    def exchange_of(
        self, params: dict[str, Any], codec: Codec | None, feedback: ErrorFeedback | None
    ) -> Exchange | None: ...
    def exchange(
        self,
        list: Exchange,
        gradients: dict[str, Any],
        rates: dict[str, float] | None,
        settings: PushSettings,
        threads: int,
        groups: list[str],
        flight: PushFlight | None,
    ) -> tuple[Receipts | None, Versions | None, FastpsError | None, list[str]] | None: ...
    def pull(
        self, name: str, out: Any, view: str, timeout: float | None, codec: Codec | None = None
    ) -> tuple[Array, Versions]: ...
    def pull_list(
        self,
        names: Sequence[str],
        out: dict[str, Any] | None,
        view: str,
        timeout: float | None,
        codec: Codec | None = None,
    ) -> tuple[dict[str, Array], Versions]: ...
    def pull_rows(
        self, rows: dict[str, Any], out: dict[str, Any] | None, timeout: float | None
    ) -> tuple[dict[str, Array], Versions]: ...
    def pull_async(
        self, names: Sequence[str], into: dict[str, Any] | None, timeout: float | None
    ) -> PullFlight: ...
    def bind(
        self, list: dict[str, Any], codec: Codec | None, feedback: ErrorFeedback | None, timeout: float | None
    ) -> BoundList: ...
    def assign(self, name: str, values: Any, timeout: float | None) -> Receipt: ...
    def state(self, name: str, timeout: float | None) -> dict[str, Any]: ...
    def load_state(
        self, name: str, steps: Sequence[int], slots: dict[str, Any], timeout: float | None
    ) -> Receipt: ...
    def names(self, timeout: float | None) -> list[str]: ...
    def spec(
        self, name: str, timeout: float | None
    ) -> tuple[
        tuple[int, ...],
        str,
        str,
        str,
        Optimizer,
        EMA | None,
        Literal["stochastic", "nearest"] | None,
        int | None,
    ]: ...
    def versions(self, names: Sequence[str], timeout: float | None) -> Versions: ...
    def last_changes(self, names: Sequence[str], timeout: float | None) -> list[float | None]: ...
    def join(
        self,
        group: str,
        mode: Mode,
        seat: tuple[int | None, str],
        presence: tuple[bool, int, int] | None,
        timeout: float | None,
    ) -> tuple[int, list[str]]: ...
    def leave(self, group: str, warm: bool, timeout: float | None) -> None: ...
    def advance(self, group: str, warm: bool, steps: int, timeout: float | None) -> tuple[int, bool]: ...
    def listen(self, name: str, at: Versions) -> Listener: ...
    def end_graces(self, now: float) -> None: ...
    def portion(
        self,
        samples: tuple[str, int, int, int],
        worker: int,
        at: tuple[int, int, int | None],
        then: Literal["take", "rest", "leave"],
        wait: float,
        timeout: float | None,
    ) -> tuple[int, int, int, int | None, bool]: ...
    def stats(self, timeout: float | None) -> dict[str, Any]: ...
    def report(self, fields: dict[str, Any]) -> None: ...
    def mark(self, name: str, timeout: float | None) -> None: ...
    def close(self, timeout: float | None) -> None: ...

@final
class Server:
    def __new__(
        cls,
        shards: int,
        listen: Sequence[str],
        listen_unix: Sequence[File],
        cluster: Sequence[str],
        advertise: str | None,
        memory_limit: int | None,
        lease: float,
        refuse_workers: Sequence[str],
        local: bool,
        insecure: bool,
        tls_cert: File | None,
        tls_key: File | None,
        tls_ca: File | None,
        spin_us: int,
        data_dir: File | None,
        snapshot_every: float,
        snapshot_after: int,
        keep: int,
        keep_for: float,
        keep_history: int,
        copy_to: str | None,
        copy_history: bool,
        copy_log: float | None,
        copy_bytes_per_second: int | None,
        owner_lease: float | None,
        take_over: str | None,
        shard: int | None,
        accept_loss: bool,
        tokens: File | None,
        server_token: File | None,
        tls_crl: File | None,
        audit: File | None,
        certificate_role: str,
    ) -> Server: ...
    def addresses(self) -> list[str]: ...
    def stop(self, timeout: float) -> None: ...

def forked() -> None: ...
def connect(
    addresses: str,
    timeout: float = 30.0,
    check_finite: bool = True,
    transport: str | None = None,
    spin_us: int = 200,
    tls_ca: File | None = None,
    tls_cert: File | None = None,
    tls_key: File | None = None,
    tls_server_name: str | None = None,
    ack: str = "applied",
    namespace: str | None = None,
    wait: float | None = None,
    name: str | None = None,
    resolver: Callable[[], list[str]] | None = None,
    token_file: File | None = None,
) -> Client: ...
def serve_cli(command: Literal["serve", "fork"], args: Sequence[str]) -> int: ...
def command_cli(command: str, args: Sequence[str]) -> int: ...
def recorded(
    dir: File, norms: bool
) -> tuple[
    list[tuple[int, int, int, int, int]],
    list[str],
    dict[int, str],
    list[tuple[str, int, int]],
    list[str],
    bytes,
]: ...
def assign_all(client: Client, values: dict[str, Any], timeout: float | None) -> Receipts: ...
def fetch_history(
    url: str, folder: File, to: tuple[int, str | None, str | None, set[tuple[int, int]] | None] | None
) -> None: ...
def moment_of(
    dir: File, to: tuple[int, str | None, str | None, set[tuple[int, int]] | None]
) -> tuple[Client, list[str]]: ...
def rewind_to(
    dir: File,
    out: File,
    to: tuple[int, str | None, str | None, set[tuple[int, int]] | None],
    shards: int | None,
) -> list[str]: ...
def described(
    name: str,
) -> list[
    tuple[
        str,
        str,
        list[tuple[str, str]],
        list[tuple[list[str], str, list[str], str]],
        list[tuple[str, str]],
    ]
]: ...
def nearest(name: str, names: list[str]) -> str | None: ...
def printable(text: str) -> str: ...
def without_secrets(text: str) -> str: ...
def check_codec(codec: Codec) -> None: ...
def check_gradient(name: str, gradient: Any, shape: Sequence[int], finite: bool) -> None: ...
def check_average(average: EMA) -> None: ...
def check_optimizer(optimizer: Optimizer) -> None: ...
def encode(codec: Codec, array: Any, residual: Any, first_element: int, sequence: int) -> bytes: ...
def decode(codec: Codec, body: Any, n: int) -> Array: ...
def body_len(codec: Codec, n: int) -> int: ...
def instruction_set() -> str: ...
def instruction_sets() -> list[str]: ...
def tearing(isa: str, shared: bool, loads: int) -> list[tuple[int, int, int, int]]: ...

@final
class LinearTrainer:
    def __new__(
        cls,
        rows: Any,
        targets: Any,
        weights: Any,
        order: Any,
        coef: Any,
        intercept: float,
        t: int,
        average: tuple[Any, float] | None,
        threads: int,
        settings: dict[str, Any],
    ) -> LinearTrainer: ...
    def epoch(self, seed: int | None, eta: float | None, want_loss: bool) -> tuple[float, int]: ...
    def assign(self, coef: Any, intercept: float) -> None: ...
    def coef(self) -> Array: ...
    def norms(self) -> tuple[float, float]: ...
    def intercept(self) -> float: ...
    def average(self) -> tuple[Array, float] | None: ...
    def t(self) -> int: ...

@final
class FactorTrainer:
    def __new__(
        cls,
        users: Any,
        items: Any,
        values: Any,
        user_factors: Any,
        user_biases: Any,
        item_factors: Any,
        item_biases: Any,
        threads: int,
    ) -> FactorTrainer: ...
    def train(
        self,
        seed: int | None,
        lr: float,
        regularization: float,
        biases: bool,
        then: Callable[[float, int], tuple[int | None, float] | None],
    ) -> None: ...
    def parts(self) -> list[Array]: ...

@final
class VectorSpaces:
    def __new__(cls, client: Client) -> VectorSpaces: ...
    def open(
        self, name: str, tensors: list[str], vectors: list[str], keep_for: float, timeout: float | None
    ) -> tuple[int, bool, int, int]: ...
    def close(self, space: int, timeout: float | None) -> None: ...
    def list(
        self, timeout: float | None
    ) -> Sequence[tuple[str, int, Sequence[str], Sequence[str], str | None]]: ...
    def take(self, space: int, at_least: int, name: str, timeout: float | None) -> tuple[int, bytes]: ...
    def store(self, space: int, term: int, state: bytes, timeout: float | None) -> None: ...
    def leave(self, space: int, term: int, timeout: float | None) -> None: ...
    def run(
        self, space: int, term: int, number: int, ops: Sequence[Any], timeout: float | None
    ) -> Sequence[Sequence[float]]: ...
    def pull(
        self,
        space: int,
        names: Sequence[str],
        vector: int,
        batch: int | None,
        out: dict[str, Any] | None,
        timeout: float | None,
    ) -> dict[str, Any]: ...
    def push_portion(
        self, space: int, batch: int, portion: int, gradients: dict[str, Any], timeout: float | None
    ) -> tuple[str, str]: ...
    def batch(
        self,
        space: int,
        term: int,
        task: tuple[int, int, int, int, int, int, bool],
        wait: float,
        timeout: float | None,
    ) -> tuple[Any, ...]: ...
    def portion(
        self,
        space: str,
        replica: int,
        name: str,
        report: tuple[int, int, float, str | None, str] | None,
        then: str,
        wait: float,
        timeout: float | None,
    ) -> tuple[int, Sequence[str], tuple[int, int, int, int, int, int, bool], int, int | None] | None: ...
