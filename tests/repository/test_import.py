"""Importing fastps is fast and silent, and imports only NumPy."""

import subprocess
import sys

import pytest

import fastps


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stderr == ""
    return done.stdout.strip()


def test_import_starts_no_thread():
    count = (
        "import os, numpy; threads = lambda: len(os.listdir('/proc/self/task')); before = threads(); "
        "import fastps; print(threads() - before)"
    )
    assert run(count) == "0"


def test_import_brings_little_of_the_standard_library():
    """It must not be felt; what takes long is imported where it is used."""
    code = (
        "import sys, numpy; before = set(sys.modules); import fastps; "
        "slow = ('asyncio', 'concurrent', 'email', 'http', 'logging', 'multiprocessing', 'socket', 'ssl', "
        "'subprocess', 'tempfile', 'unittest', 'zipfile'); "
        "print(sorted((set(sys.modules) - before) & set(slow)))"
    )
    assert run(code) == "[]"


def test_import_needs_numpy_alone():
    code = (
        "import sys, fastps; others = ('torch', 'jax', 'grpc', 'sklearn', 'scipy', 'google.protobuf', "
        "'rich', 'matplotlib'); "
        "print([m for m in others if m in sys.modules])"
    )
    assert run(code) == "[]"


def test_public_names_exist_and_are_documented():
    assert sorted(fastps.__all__) == sorted(set(fastps.__all__))
    for name in fastps.__all__:
        value = getattr(fastps, name)
        assert value.__doc__, name


@pytest.mark.parametrize("work", ["pass", "s.push_async({'w': np.ones(3, np.float32)})"])
def test_interpreter_exit_does_not_hang(work):
    code = (
        "import fastps, numpy as np; server = fastps.serve(); s = fastps.connect(server.addresses); "
        f"s.register('w', np.zeros(3, np.float32), fastps.SGD()); {work}; print('end')"
    )
    assert run(code) == "end"


@pytest.mark.timeout(320)
def test_parts_with_packages_of_their_own_are_imported_when_they_are_named():
    pytest.importorskip("sklearn")
    code = (
        "import sys, fastps; before = 'fastps.hogwild' in sys.modules; "
        "print(before, fastps.hogwild.__name__, fastps.torch.__name__)"
    )
    assert run(code) == "False fastps.hogwild fastps.torch"


def test_dir_shows_every_subpackage():
    code = "import sys, fastps; print(dir(fastps)); assert 'fastps.torch' not in sys.modules"
    shown = run(code)
    names = "checkpoint data engines hogwild jax mpi optimize rl simulate torch"
    for name in names.split():
        assert f"'{name}'" in shown


@pytest.mark.parametrize(
    ("module", "absent", "text"),
    [
        ("torch", "torch", "fastps.torch needs torch: pip install torch (the extra fastps[torch])"),
        ("jax", "jax", "fastps.jax needs jax: pip install jax (the extra fastps[jax])"),
        ("mpi", "mpi4py", "fastps.mpi needs mpi4py: pip install mpi4py (the extra fastps[mpi])"),
        (
            "hogwild",
            "sklearn",
            "fastps.hogwild needs scikit-learn: pip install scikit-learn (the extra fastps[sklearn])",
        ),
        (
            "rl",
            "gymnasium",
            "fastps.rl needs gymnasium and torch: pip install gymnasium torch (the extra fastps[rl])",
        ),
        (
            "rl",
            "torch",
            "fastps.rl needs gymnasium and torch: pip install gymnasium torch (the extra fastps[rl])",
        ),
    ],
)
@pytest.mark.parametrize("how", ["import fastps.{}", "import fastps; fastps.{}", "from fastps import {}"])
def test_a_missing_package_names_its_extra(module, absent, text, how):
    code = (
        f"import sys; sys.modules['{absent}'] = None\n"
        f"try:\n  {how.format(module)}\nexcept ImportError as error: print(error)"
    )
    assert run(code) == text


def test_import_of_the_torch_adapter_brings_no_checkpoints_of_torch():
    """They take more than a second."""
    pytest.importorskip("torch")
    code = "import sys, fastps.torch; print('torch.distributed.checkpoint' in sys.modules)"
    assert run(code) == "False"
