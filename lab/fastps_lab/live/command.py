"""The ``live`` subcommand: its options, its folder, and the browser."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
import webbrowser
from collections.abc import Iterator
from pathlib import Path

from fastps.commands.kit import EXIT_OK, signals_raise
from fastps_lab.live.errors import LiveError
from fastps_lab.live.settings import MOST_WORKERS, Settings

__all__ = ["add_arguments", "execute"]

EPILOG = """\
exit codes: 0 done; 1 failed, the last line says why; 2 wrong usage; 130 stopped by Ctrl-C (128 + signal
number). Its processes and temporary folders end with it. The page is served on this machine only."""


def _port(text: str) -> int:
    return _between(text, 0, 65_535)


def _workers(text: str) -> int:
    return _between(text, 1, MOST_WORKERS)


def _between(text: str, least: int, most: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
    return number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``fastps-lab live``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("--port", type=_port, default=0, help="port of the page (0: any free port)")
    parser.add_argument(
        "--no-browser", action="store_true", help="print the link instead of opening a browser"
    )
    parser.add_argument(
        "--workers", type=_workers, default=8, help=f"number of worker processes, at most {MOST_WORKERS} (8)"
    )
    parser.add_argument(
        "--export", metavar="FILE", help="write the page as one HTML file that needs no server, and exit"
    )


def execute(args: argparse.Namespace) -> int:
    """Runs ``fastps-lab live``; the exit code."""
    if args.export is not None:
        return _export(Path(args.export))
    with signals_raise(), _folder() as folder:
        return _serve(args, folder)


def _export(file: Path) -> int:
    from fastps_lab.live.export import one_file

    try:
        file.write_text(one_file())
    except OSError as error:
        raise LiveError(f"--export {file}: {error.strerror}; choose a file that can be written") from error
    return EXIT_OK


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder for logs and data directories."""
    folder = Path(tempfile.mkdtemp(prefix="fastps-live-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _serve(args: argparse.Namespace, folder: Path) -> int:
    from fastps_lab.live.session import Session
    from fastps_lab.live.web import Site

    # The port comes first: if it is in use, nothing has been started.
    with (
        contextlib.closing(Site(args.port)) as site,
        contextlib.closing(Session(folder, Settings(workers=args.workers))) as session,
    ):
        site.open(session)
        print(f"{site.link}\nOpen this link; Ctrl-C stops everything.", flush=True)
        if not args.no_browser and not _open(site.link):
            print("fastps: no browser was found: open the link above yourself", file=sys.stderr)
        session.run()
    return EXIT_OK


def _open(link: str) -> bool:
    """Opens the link in a browser with windows; whether there is one."""
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return False
    # One that runs in the terminal would take it over.
    in_terminal = type(browser) is webbrowser.GenericBrowser
    return not in_terminal and browser.open(link)
