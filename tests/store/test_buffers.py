"""Arrays of every library are passed without a copy."""

import array
import ctypes
import gc
import struct
import sys
import weakref

import numpy as np
import pytest

import fastps


@pytest.fixture
def w(store):
    store.register("w", np.zeros(4, np.float32), optimizer=fastps.SGD(lr=1.0))
    return store


ONES = {
    "ndarray": lambda: np.ones(4, np.float32),
    "read-only": lambda: np.frombuffer(np.ones(4, np.float32).tobytes(), np.float32),
    "array.array": lambda: array.array("f", [1, 1, 1, 1]),
    "memoryview": lambda: memoryview(np.ones(4, np.float32)),
    "view": lambda: np.ones(9, np.float32)[3:7],
    "strided-but-contiguous": lambda: np.ones((4, 1), np.float32).T[0],
}


@pytest.mark.parametrize("kind", ONES)
def test_buffer_protocol(w, kind):
    w.push("w", ONES[kind]())
    np.testing.assert_array_equal(w.pull("w"), np.full(4, -1, np.float32))


def test_numpy_scalar_and_zero_dimensional(store):
    store.register("s", np.float32(1), optimizer=fastps.SGD(lr=1.0))
    store.push("s", np.float32(1))
    store.push("s", np.array(1, np.float32))
    assert store.pull("s") == -1
    out = np.zeros((), np.float32)
    assert store.pull("s", out=out) is out
    assert out == -1


def test_read_only_cannot_be_a_target(w):
    out = np.zeros(4, np.float32)
    out.flags.writeable = False
    with pytest.raises(fastps.ConfigError, match="read-only"):
        w.pull("w", out=out)


def test_unaligned_memory_is_refused(w):
    raw = (
        np.zeros(17, np.uint8)[1:].view(np.float32) if False else np.ndarray(4, np.float32, bytearray(17), 1)
    )
    if raw.ctypes.data % 4 == 0:
        pytest.skip("the memory happens to be aligned")
    with pytest.raises(fastps.ShapeError, match="aligned"):
        w.push("w", raw)


def test_targets_are_written_in_place_and_nothing_beside(w):
    memory = np.full(8, 7, np.float32)
    w.pull("w", out=memory[2:6])
    np.testing.assert_array_equal(memory, np.array([7, 7, 0, 0, 0, 0, 7, 7], np.float32))


def test_memory_is_let_go(w):
    for call in (
        lambda a: w.push("w", a),
        lambda a: w.push({"w": a}),
        lambda a: w.push_async("w", a).result(),
        lambda a: w.push_pull("w", a, out=np.zeros(4, np.float32)),
        lambda a: w.bind({"w": a}) and None,
        lambda a: w.pull("w", out=a),
    ):
        gradient = np.ones(4, np.float32)
        gone = weakref.ref(gradient)
        before = sys.getrefcount(gradient)
        call(gradient)
        w.names()
        assert sys.getrefcount(gradient) == before
        del gradient
        gc.collect()
        assert gone() is None


class Subclass(np.ndarray):
    """Not looked into, but asked for its buffer, as it may answer for itself."""


# A short list is pushed with the GIL held, without locking its arrays; a long one is not.
@pytest.mark.parametrize("size", [5, 100_000])
def test_lists_of_mixed_arrays(store, size):
    torch = pytest.importorskip("torch")
    kinds = {
        "ndarray": np.copy,
        "view": lambda a: np.concatenate([a, a])[len(a) :],
        "subclass": lambda a: a.copy().view(Subclass),
        "memoryview": lambda a: memoryview(a.copy()),
        "torch": lambda a: torch.from_numpy(a.copy()),
        "torch-view": lambda a: torch.from_numpy(np.concatenate([a, a]))[len(a) :],
    }
    for chosen in (["ndarray", "view"], ["torch", "torch-view"], ["ndarray", "torch"], list(kinds)):
        gradients = {
            f"{kind} {len(chosen)}": np.full(size, k + 1, np.float32) for k, kind in enumerate(chosen)
        }
        for name, gradient in gradients.items():
            store.register(name, np.zeros_like(gradient), optimizer=fastps.SGD(lr=1.0))
        arrays = {name: kinds[name.split()[0]](gradient) for name, gradient in gradients.items()}
        before = [sys.getrefcount(array) for array in arrays.values()]
        receipts = store.push(arrays)
        assert list(receipts) == list(gradients)
        assert [sys.getrefcount(array) for array in arrays.values()] == before
        for name, gradient in gradients.items():
            np.testing.assert_array_equal(store.pull(name), -gradient)
            store.unregister(name)


@pytest.mark.parametrize(
    "bad", [np.ones(4, ">f4"), np.ones((4, 2), np.float32)[:, 0], np.ones(4), np.ones((2, 2), np.float32).T]
)
def test_one_bad_array_of_a_list_changes_nothing(w, bad):
    w.register("v", np.zeros(4, np.float32), optimizer=fastps.SGD())
    with pytest.raises((fastps.DTypeError, fastps.ShapeError)) as caught:
        w.push({"w": np.ones(4, np.float32), "v": bad})
    assert caught.value.tensor == "v"
    assert w.versions()["w"] == 1


def test_a_buffer_in_use_stays_locked(w):
    memory = bytearray(16)
    bound = w.bind({"w": memoryview(memory).cast("f")})
    with pytest.raises(BufferError):
        memory.clear()
    del bound
    gc.collect()
    w.names()
    memory.clear()


class Capsule:
    """A library that speaks only DLPack, through a NumPy array."""

    def __init__(self, array, versioned=True):
        self.array, self.versioned = array, versioned

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **options):
        if options and not self.versioned:
            raise TypeError("no max_version here")
        return self.array.__dlpack__(**options)


@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack(w, versioned):
    w.push("w", Capsule(np.ones(4, np.float32), versioned))
    out = np.zeros(4, np.float32)
    w.pull("w", out=Capsule(out, versioned))
    np.testing.assert_array_equal(out, np.full(4, -1, np.float32))
    with pytest.raises(fastps.DTypeError):
        w.push("w", Capsule(np.ones(4), versioned))
    with pytest.raises(fastps.ShapeError, match="contiguous"):
        w.push("w", Capsule(np.ones((4, 2), np.float32)[:, 0], versioned))


class Raw:
    """A DLPack capsule with any fields. The struct lives as long as this object."""

    def __init__(self, ndim=1, offset=0, shape=(4,)):
        self._values = np.ones(16, np.float32)
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        data, sizes = self._values.ctypes.data, ctypes.addressof(self._shape)
        self._struct = bytearray(64)
        # DLManagedTensor: data, device, ndim, dtype, shape, strides, byte_offset; no context, no deleter
        struct.pack_into(
            "=Qiii BBH QQQ QQ", self._struct, 0, data, 1, 0, ndim, 2, 32, 1, sizes, 0, offset, 0, 0
        )

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **options):
        if options:
            raise TypeError("no max_version here")
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(ctypes.c_char.from_buffer(self._struct)), b"dltensor", None)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"ndim": 1 << 20}, "0 to 64 dimensions"),
        ({"ndim": 65}, "0 to 64 dimensions"),
        ({"ndim": -1}, "0 to 64 dimensions"),
        ({"offset": 1 << 63}, "within a process's memory"),
        ({"offset": (1 << 64) - 4}, "within a process's memory"),
        ({"shape": (1 << 62,)}, "within a process's memory"),
        ({"shape": (-4,)}, "within a process's memory"),
    ],
    ids=str,
)
def test_impossible_dlpack_capsules_are_refused(w, fields, text):
    w.push("w", Raw())
    before = w.pull("w")
    for call in (
        lambda: w.push("w", Raw(**fields)),
        lambda: w.pull("w", out=Raw(**fields)),
        lambda: w.bind({"w": Raw(**fields)}),
    ):
        with pytest.raises(fastps.ShapeError, match=text) as caught:
            call()
        assert len(str(caught.value)) < 500
    np.testing.assert_array_equal(w.pull("w"), before)


def test_dlpack_on_a_device_is_refused(w):
    class Device(Capsule):
        device = "cuda:0"

        def __dlpack_device__(self):
            return (2, 0)

    with pytest.raises(fastps.DTypeError) as caught:
        w.push("w", Device(np.ones(4, np.float32)))
    assert caught.value.got == "cuda:0"
    assert "cpu" in str(caught.value)


def test_torch(w):
    torch = pytest.importorskip("torch")
    w.push("w", torch.ones(4))
    out = torch.zeros(4)
    w.pull("w", out=out)
    assert out.tolist() == [-1.0] * 4
    w.push("w", torch.ones(8)[2:6])
    bound = w.bind({"w": out})
    w.push(bound)
    assert w.pull("w").tolist() == [-1.0] * 4
    parameter = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(fastps.DTypeError, match="detach"):
        w.push("w", parameter)
    w.push("w", parameter.detach())
    for bad, error in (
        (torch.ones(4, dtype=torch.float64), fastps.DTypeError),
        (torch.ones(4, 2)[:, 0], fastps.ShapeError),
    ):
        with pytest.raises(error) as caught:
            w.push("w", bad)
        assert caught.value.tensor == "w"
    w.register("t", torch.ones(2, 3), optimizer=fastps.SGD())
    assert w.pull("t").shape == (2, 3)
    assert torch.from_numpy(w.pull("t")).sum() == 6


def test_negated_views_of_torch_have_their_values(ps):
    """Autograd makes such gradients: their memory has the values negated, and DLPack does not say so."""
    torch = pytest.importorskip("torch")
    negated = torch._neg_view(-torch.ones(4))

    def worker(mode, **options):
        with fastps.Worker(ps, {"w": np.zeros(4, np.float32)}, mode, **options) as worker:
            worker.step({"w": negated})
            worker.step({"w": negated})

    for k, (use, expected) in enumerate(
        (
            (lambda: ps.push("w", negated), -1),
            (lambda: ps.push({"w": negated}), -1),
            (lambda: ps.push_async("w", negated).result(), -1),
            (lambda: ps.push_pull("w", negated, out=np.zeros(4, np.float32)), -1),
            (lambda: ps.push("w", fastps.Sparse([0, 1, 2, 3], negated)), -1),
            (lambda: ps.push("w", negated, codec=fastps.BFloat16()), -1),
            (lambda: ps.assign("w", negated), 1),
            (lambda: ps.unregister("w") or ps.register("w", negated, fastps.SGD()), 1),
            (lambda: worker(fastps.Async()), -2),
            (lambda: worker(fastps.Async(), accumulate=2), -1),
            (lambda: worker(fastps.Local(push_every=2, lr=1.0)), -2),
            (lambda: worker(fastps.Sync(workers=1)), -2),
            (lambda: worker(fastps.Async(), codec=fastps.Int8()), -2),
        )
    ):
        ps.register("w", np.zeros(4, np.float32), fastps.SGD(lr=1.0))
        use()
        np.testing.assert_allclose(ps.pull("w"), np.full(4, expected), rtol=0.01, err_msg=str(k))
        ps.unregister("w")
    ps.register("w", np.zeros(4, np.float32), fastps.SGD(lr=1.0))
    for refused in (
        lambda: ps.pull("w", out=negated),
        lambda: ps.push_pull("w", np.ones(4, np.float32), out=negated),
        lambda: ps.bind({"w": negated}),
        lambda: fastps.Worker(ps, {"w": negated}, fastps.Async(), copy=False),
    ):
        with pytest.raises(fastps.ConfigError, match="resolve_neg"):
            refused()
    assert negated.tolist() == [1.0] * 4
    with pytest.raises(fastps.ShapeError, match="no memory"):
        ps.push("w", torch._efficientzerotensor(4))
