"""A store shared by processes: the same memory by fork, spawn and address; killed processes leave nothing."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import fastps

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="shared stores are for Linux"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
SGD = fastps.SGD(lr=1.0)
DEADLINE = 60


@pytest.fixture
def store():
    with fastps.Store(shared=True) as store:
        yield store


def run(code, *args):
    """Runs a Python program with this interpreter."""
    command = [sys.executable, "-c", "import sys, fastps, numpy as np\n" + code, *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


def test_an_unrelated_process_steps_the_same_memory(store):
    store.register("w", np.zeros(5, np.float32), SGD, apply="hogwild")
    view = store.view("w")
    program = """
store = fastps.Store.open(sys.argv[1])
store.push("w", np.arange(5, dtype=np.float32))
store.register("b", np.full(2, 7, np.float32), fastps.Adam(lr=0.5), apply="hogwild")
store.push("b", np.ones(2, np.float32))
print(store.versions()["w"], store.names(), store.address != sys.argv[1])
"""
    process = run(program, store.address)
    assert process.communicate(timeout=DEADLINE)[0].strip() == "2 ['b', 'w'] True"
    np.testing.assert_array_equal(view, -np.arange(5))
    # The other's tensor is found when it is asked for, and its state continues from where it was.
    np.testing.assert_allclose(store.pull("b"), 6.5, rtol=1e-6)
    assert store.state("b")["step"] == [1]
    assert store.push("b", np.ones(2, np.float32)).version == 3
    assert store.spec("b").optimizer == fastps.Adam(lr=0.5)


def push_many(store, name, pushes):
    for _ in range(pushes):
        store.push(name, np.full(3, -1, np.float32))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_by_multiprocessing(store, method):
    store.register("w", np.zeros(3, np.float32), SGD, apply="hogwild")
    context = multiprocessing.get_context(method)
    for _ in range(2):  # in sequence, so that nothing is overwritten
        process = context.Process(target=push_many, args=(store, "w", 50))
        process.start()
        process.join(DEADLINE)
        assert process.exitcode == 0
    np.testing.assert_array_equal(store.view("w"), 100)
    assert store.versions()["w"] == 101


def test_a_forked_child_registers_and_forks_again(store):
    store.register("w", np.zeros(3, np.float32), SGD, apply="hogwild")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            grandchild = os.fork()
            if grandchild == 0:
                store.register("deep", np.ones(1, np.float32), SGD, apply="hogwild")
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1])
            store.push("deep", np.ones(1, np.float32))
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert store.pull("deep") == 0


def test_the_same_bits_as_a_private_store(store):
    private = fastps.Store()
    generator = np.random.default_rng(3)
    shape = (3, 100_000)  # two slices
    optimizers = [SGD, fastps.SGD(lr=0.1, momentum=0.9), fastps.Adagrad(), fastps.Adam(), fastps.RMSprop()]
    for k, optimizer in enumerate(optimizers):
        values = generator.standard_normal(shape, np.float32)
        for each in (store, private):
            each.register(f"w{k}", values, optimizer, apply="hogwild")
    for codec in (None, fastps.Int8(), fastps.BFloat16()):
        grads = {f"w{k}": generator.standard_normal(shape, np.float32) for k in range(len(optimizers))}
        for each in (store, private):
            each.push(grads, codec=codec)
    for name in private.names():
        np.testing.assert_array_equal(store.pull(name), private.pull(name))
        np.testing.assert_array_equal(store.view(name), private.pull(name))
        ours, theirs = store.state(name), private.state(name)
        assert ours.keys() == theirs.keys()
        for slot in ours:
            np.testing.assert_array_equal(ours[slot], theirs[slot])


def test_a_view_is_the_memory_itself_and_outlives_the_store():
    torch = pytest.importorskip("torch")
    store = fastps.Store(shared=True)
    store.register("w", np.zeros((2, 3), np.float32), SGD, apply="hogwild")
    tensor = torch.from_numpy(store.view("w"))
    tensor[1, 2] = 4.0
    assert store.pull("w")[1, 2] == 4.0
    store.push("w", np.ones((2, 3), np.float32))
    assert tensor[1, 2] == 3.0
    store.close()
    del store
    tensor += 1
    assert tensor[1, 2] == 4.0


def test_empty_and_scalar_tensors(store):
    store.register("none", np.zeros((0, 3), np.float32), SGD, apply="hogwild")
    store.register("one", np.float32(2).reshape(()), SGD, apply="hogwild")
    assert store.view("none").shape == (0, 3)
    assert store.view("one").shape == ()
    assert store.view("one") == 2


def test_what_it_refuses(store):
    with pytest.raises(fastps.ConfigError, match=r'no exact tensor \(tensor "w"\)'):
        store.register("w", np.zeros(3, np.float32), SGD)
    assert store.names() == []
    store.register("w", np.zeros(3, np.float32), SGD, apply="hogwild")
    store.register("w", np.ones(3, np.float32), SGD, apply="hogwild")  # the same again keeps the values
    assert store.pull("w").sum() == 0
    with pytest.raises(fastps.ConfigError, match="another shape"):
        store.register("w", np.zeros(4, np.float32), SGD, apply="hogwild")
    with pytest.raises(fastps.ConfigError, match="keeps its tensors"):
        store.unregister("w")
    with pytest.raises(fastps.UnknownTensorError):
        store.view("v")
    private = fastps.Store()
    private.register("w", np.zeros(3, np.float32), SGD, apply="hogwild")
    with pytest.raises(fastps.ConfigError, match="only a shared store"):
        private.view("w")
    assert fastps.Store().address is None


def test_what_does_not_fit_is_published_to_nobody():
    with fastps.Store(shared=True, memory_limit=1 << 20) as small, fastps.Store.open(small.address) as other:
        with pytest.raises(fastps.CapacityError, match="large"):
            small.register("large", np.zeros(1 << 20, np.float32), optimizer=SGD, apply="hogwild")
        assert small.names() == other.names() == []
        small.register("fits", np.zeros(4, np.float32), optimizer=SGD, apply="hogwild")
        assert small.names() == other.names() == ["fits"]


def test_addresses_of_what_is_not_there(store):
    with pytest.raises(fastps.ConfigError, match="invalid address"):
        fastps.Store.open("nowhere")
    other = run("store = fastps.Store(shared=True); print(store.address, flush=True); input()")
    address = other.stdout.readline().strip()
    with fastps.Store.open(address):
        pass
    kind, pid, fd, number = address.split(":")
    with pytest.raises(fastps.UnavailableError, match="another store"):
        fastps.Store.open(f"{kind}:{pid}:{fd}:{int(number, 16) ^ 1:x}")
    with (
        open(os.devnull) as something,
        pytest.raises(fastps.UnavailableError, match="not the memory of a shared store"),
    ):
        fastps.Store.open(f"shm:{os.getpid()}:{something.fileno()}:1")
    other.communicate("\n", timeout=DEADLINE)
    with pytest.raises(fastps.UnavailableError, match="cannot be opened"):
        fastps.Store.open(address)


def test_a_scribbled_list_is_an_error_and_no_crash(store):
    """Another process of this user may write what it likes."""
    store.register("w", np.arange(5, dtype=np.float32), SGD, apply="hogwild")
    memory = int(store.address.split(":")[2])
    whole = os.pread(memory, 3 * 4096, 0)
    draw = np.random.default_rng(5)
    refused = 0
    places = [*range(24), *(4096 + draw.integers(0, 220, 200)).tolist()]
    for at in places:
        os.pwrite(memory, bytes([whole[at] ^ int(draw.integers(1, 256))]), at)
        try:
            with fastps.Store.open(store.address) as other:
                assert all(len(other.view(name)) <= 5 for name in other.names())
        except fastps.FastpsError:
            refused += 1
        os.pwrite(memory, whole[at : at + 1], at)
    assert refused > 100
    np.testing.assert_array_equal(fastps.Store.open(store.address).pull("w"), np.arange(5))


def test_racing_registrations_of_one_name_and_of_many():
    program = """
store = fastps.Store.open(sys.argv[1])
for k in range(50):
    store.register(f"shared{k}", np.full(3, int(sys.argv[2]), np.float32), fastps.SGD(), apply="hogwild")
    store.register(f"own{sys.argv[2]}-{k}", np.full(1000, k, np.float32), fastps.Adam(), apply="hogwild")
"""
    with fastps.Store(shared=True) as store:
        processes = [run(program, store.address, str(k)) for k in range(3)]
        for process in processes:
            process.communicate(timeout=DEADLINE)
        assert all(process.returncode == 0 for process in processes)
        assert len(store.names()) == 50 + 3 * 50
        for k in range(50):
            assert len(set(store.pull(f"shared{k}"))) == 1
            assert all((store.pull(f"own{p}-{k}") == k).all() for p in range(3))


def test_lost_updates_are_counted(store):
    store.register("w", np.zeros(200_000, np.float32), SGD, apply="hogwild")
    for _ in range(100):
        store.push("w", np.zeros(200_000, np.float32))
    counters = store.stats()["shards"][0]["counters"]
    assert counters["updates_probed"] == 64
    assert counters["updates_lost"] == 0


def memory_files():
    """Descriptors of this process that are a shared store's memory."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [link for link in links if "fastps-store" in link]


def test_killed_processes_leave_nothing_and_stop_nobody(store):
    kills = int(os.environ.get("FASTPS_KILLS", "6"))
    store.register("w", np.zeros(100_000, np.float32), SGD, apply="hogwild")
    store.register("count", np.zeros(1, np.float32), SGD, apply="hogwild")
    program = """
import itertools
store = fastps.Store.open(sys.argv[1])
print("ready", flush=True)
for k in itertools.count():
    store.push("w", np.ones(100_000, np.float32))
    store.register(f"{sys.argv[2]}-{k % 20}", np.ones(10_000, np.float32), fastps.Adam(), apply="hogwild")
"""
    before = len(memory_files())
    for kill in range(kills):
        process = run(program, store.address, str(kill))
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.001 * (kill * 7 % 40))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=DEADLINE)
        # Nothing that it held blocks another process.
        store.register(f"after{kill}", np.zeros(3, np.float32), SGD, apply="hogwild", timeout=10)
        version = store.push("count", np.full(1, -1, np.float32), timeout=10).version
        assert version == kill + 2
        assert np.isfinite(store.view("w")).all()
        for name in store.names():
            assert np.isfinite(store.pull(name)).all()
    assert store.pull("count") == kills
    assert len(memory_files()) == before
    assert not [name for name in os.listdir("/dev/shm") if "fastps" in name]


def test_the_memory_goes_with_its_last_process():
    owner = run("store = fastps.Store(shared=True); print(store.address, flush=True); input()")
    with fastps.Store.open(owner.stdout.readline().strip()) as survivor:
        survivor.register("w", np.ones(3, np.float32), SGD, apply="hogwild")
        owner.kill()
        owner.communicate(timeout=DEADLINE)
        survivor.push("w", np.ones(3, np.float32))
        other = run('print(fastps.Store.open(sys.argv[1]).pull("w").sum())', survivor.address)
        assert other.communicate(timeout=DEADLINE)[0].strip() == "0.0"
        again = pickle.loads(pickle.dumps(survivor))
        again.push("w", -np.ones(3, np.float32))
        assert survivor.pull("w").sum() == 3
    del survivor, again
    assert not memory_files()


def test_a_private_store_cannot_be_pickled():
    with pytest.raises(TypeError, match="shared=True"):
        pickle.dumps(fastps.Store())
