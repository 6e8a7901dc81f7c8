"""One table has every environment variable: it is what sources read and what the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastps._shared.variables import VARIABLES

ROOT = Path(__file__).resolve().parents[2]
NAMES = {str(variable) for group in VARIABLES.values() for variable in group}
PAGE = ROOT / "docs/reference/environment.md"
TABLE = ROOT / "python/fastps/_shared/variables.py"
FOLDERS = ("python", "lab", "rust", "tests", "benchmarks", "examples", "docs", ".ci", ".github")
TEXTS = {"", ".py", ".rs", ".toml", ".md", ".yml"}


def sources() -> list[Path]:
    """Files that may read or name a variable, except the table, its page, and wrong names in tests."""
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    beside = [*ROOT.glob("*.md"), ROOT / "Makefile"]
    apart = {TABLE, PAGE, Path(__file__).resolve()}
    return [
        path for path in [*inside, *beside] if path.suffix in TEXTS and path.is_file() and path not in apart
    ]


def rows() -> str:
    """The tables of the page."""
    lines: list[str] = []
    for title, group in VARIABLES.items():
        lines += [f"## {title}", "", "| variable | meaning |", "|---|---|"]
        lines += [*(f"| `{variable}` | {variable.meaning} |" for variable in group), ""]
    return "\n".join(lines)


def imported(code: str = "import fastps", **environment: str) -> str:
    """Standard error of a process that imports fastps."""
    return printed("-c", code, **environment)


def printed(*arguments: object, **environment: str) -> str:
    """Standard error of a Python program."""
    command = [sys.executable, *map(str, arguments)]
    own = {name: value for name, value in os.environ.items() if not name.startswith("FASTPS_")}
    ran = subprocess.run(command, env=own | environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stderr


def test_the_table_has_what_sources_read() -> None:
    found = {
        name
        for path in sources()
        for name in re.findall(r"\bFASTPS_[A-Z_]*[A-Z]\b", path.read_text(errors="replace"))
    }
    # Of the rest, `fastps run` sets three, and the table's module one.
    assert found <= NAMES
    assert NAMES - found <= {"FASTPS_ADDRESSES", "FASTPS_RANK", "FASTPS_WORKERS", "FASTPS_WARNED_OF"}


def test_servers_have_the_options_of_their_variables() -> None:
    options = (ROOT / "rust/cli/src/lib.rs").read_text()
    for variable in VARIABLES["Servers"]:
        if variable.meaning.startswith("`--"):
            option = re.match(r"`--([\w-]+)`", variable.meaning)[1]
            attribute = re.search(rf"#\[arg\(([^\]]*)\)\]\n    {option.replace('-', '_')}:", options)
            assert f'env = "{variable}"' in attribute[1], option


def test_the_page_shows_the_table() -> None:
    _, _, tables = PAGE.read_text().partition("\n## ")
    assert f"## {tables}".strip() == rows().strip()


@pytest.mark.parametrize(
    ("name", "hint"),
    [("FASTPS_LISTN", "; did you mean FASTPS_LISTEN?"), ("FASTPS_QQQ", "")],
)
def test_an_unknown_variable_is_warned_of_once(name: str, hint: str) -> None:
    warning = f"the environment variable {name} is unknown{hint}\n"
    assert imported("import fastps, fastps.data; fastps.Store().close()", **{name: "1"}) == warning


def test_known_variables_are_silent() -> None:
    known = dict.fromkeys(NAMES, "") | {"FASTPS_ISA": "scalar"}
    assert imported(**known, fastps_other="1", FASTPSX="1") == ""


SPAWNS = """
import multiprocessing, sys
import fastps

def work(queue):
    queue.put(fastps.worker_seed(0, fastps.Store()))

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue()
    for _ in range(2):
        process = context.Process(target=work, args=(queue,))
        process.start()
        queue.get(timeout=60)
        process.join()
        assert process.exitcode == 0
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_processes_of_a_process_do_not_repeat_its_warning(method: str, tmp_path: Path) -> None:
    script = tmp_path / "spawns.py"
    script.write_text(SPAWNS)
    assert printed(script, method, FASTPS_QQQ="1").count("FASTPS_QQQ is unknown") == 1


def test_commands_warn_too() -> None:
    code = "import sys; from fastps.commands.cli import main; sys.exit(main(['--version']))"
    assert "FASTPS_TRACEBAK is unknown; did you mean FASTPS_TRACEBACK?" in imported(code, FASTPS_TRACEBAK="1")
