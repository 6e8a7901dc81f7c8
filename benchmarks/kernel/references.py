"""The references that kernels.py drives: the C library of `reference/` and the Rust `benches/kernels.rs`."""

from __future__ import annotations

import ctypes
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from harness import Runner, compile_c
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ("-fno-math-errno", "-ffp-contract=off", "-shared", "-fPIC", "-pthread")
SOURCES = ("optimizers.c", "bfloat16.c", "codecs.c", "vectors.c", "memory.c")

Floats = NDArray[np.float32]


class Memory:
    """Ordinary memory of a C program: touched, and without the huge pages that NumPy asks for."""

    def __init__(self, library: ctypes.CDLL, n: int) -> None:
        self._library = library
        self._address = library.take(ctypes.c_size_t(4 * n))
        if not self._address:
            raise MemoryError(n)
        self.array: Floats = np.ctypeslib.as_array((ctypes.c_float * n).from_address(self._address))

    def __del__(self) -> None:
        self._library.give_back(ctypes.c_void_p(self._address))


def address(memory: Memory | NDArray[Any]) -> int:
    """The address of its first element."""
    array = memory.array if isinstance(memory, Memory) else memory
    return int(array.ctypes.data)


class Reference:
    """The kernels in C. They are timed in C, so no call from Python is in their figures."""

    def __init__(self, folder: Path) -> None:
        self._library = ctypes.CDLL(str(compile_c(folder / "kernels.so", SOURCES, *FLAGS)))
        self._library.take.restype = ctypes.c_void_p

    def memory(self, n: int, values: Floats | float = 0.0) -> Memory:
        """Memory of `n` floats."""
        memory = Memory(self._library, n)
        memory.array[:] = values
        return memory

    def runner(
        self,
        kernel: str,
        *arrays: Memory | NDArray[Any],
        n: int,
        read: Memory | NDArray[Any],
        scalars: tuple[float, ...] = (),
        threads: int = 1,
    ) -> Runner:
        """One pass over `arrays` (written) and `read`; scalars are rounded to float32."""
        used = (*arrays, read)
        pointers = [ctypes.c_void_p(address(array)) for array in used]
        written = pointers[:-1] + [None] * (3 - len(arrays))
        values = (ctypes.c_float * max(1, len(scalars)))(*scalars)
        function = getattr(self._library, kernel)

        def run(repetitions: int) -> list[int]:
            assert used  # keeps the memory
            times = (ctypes.c_uint64 * repetitions)()
            n_, threads_, repetitions_ = map(ctypes.c_size_t, (n, threads, repetitions))
            self._library.repeat(function, n_, threads_, *written, pointers[-1], values, repetitions_, times)
            return list(times)

        return run

    def list_runner(
        self,
        kernel: str,
        written: list[list[Memory]],
        read: list[Floats],
        scalars: tuple[float, ...],
    ) -> Runner:
        """One pass over small tensors in turn, with the arrays of each that are written and read."""
        count, n = len(read), read[0].size
        column = ctypes.c_void_p * count
        columns = [column(*(address(arrays[k]) for arrays in written)) for k in range(len(written[0]))]
        columns += [column()] * (3 - len(columns))
        gradients = column(*map(address, read))
        values = (ctypes.c_float * max(1, len(scalars)))(*scalars)
        function = getattr(self._library, kernel)

        def run(repetitions: int) -> list[int]:
            assert written  # keeps the memory
            assert read
            times = (ctypes.c_uint64 * repetitions)()
            n_, count_, repetitions_ = map(ctypes.c_size_t, (n, count, repetitions))
            self._library.repeat_list(function, n_, count_, *columns, gradients, values, repetitions_, times)
            return list(times)

        return run


class RustBench:
    """A process that times fastps from Rust."""

    def __init__(self, program: Path) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([program], stdin=pipe, stdout=pipe, text=True)

    def runner(self, case: str, n: int) -> Runner:
        """Repetitions of one case of `benches/kernels.rs`."""

        def run(repetitions: int) -> list[int]:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            print(case, n, repetitions, file=self._process.stdin, flush=True)
            times = [int(word) for word in self._process.stdout.readline().split()]
            if len(times) != repetitions:
                raise RuntimeError(f"the Rust program ended in {case} {n}")
            return times

        return run

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def build_rust() -> Path:
    """Builds the Rust program with the optimizations of releases, and returns its path."""
    command = ["cargo", "bench", "--locked", "--package", "fastps-core", "--bench", "kernels", "--no-run"]
    command += ["--message-format", "json", "--quiet"]
    output = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True).stdout
    messages = [json.loads(line) for line in output.splitlines()]
    return next(
        Path(m["executable"])
        for m in messages
        if m.get("reason") == "compiler-artifact" and m["target"]["name"] == "kernels" and m["executable"]
    )
