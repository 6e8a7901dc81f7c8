"""The process of one row: `python -m device.child NAME SETTING OUT`, or `facts` as the name.

It writes one JSON object to OUT: the figures and their table, the reason of a skip, or the error.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

from device.row import Setting, Skipped


def measured(name: str, setting: Setting) -> dict[str, Any]:
    """Outcome of one row."""
    from device.rows import ROWS

    row = ROWS[name]
    try:
        figures = row.measure(setting)
        return {"verdict": "passed", "figures": figures, "table": row.show(figures)}
    except Skipped as reason:
        return {"verdict": "skipped", "reason": str(reason)}


def facts() -> dict[str, Any]:
    """The machine, and the names and time limits of all rows."""
    from device.facts import facts as of_machine
    from device.rows import CORES, GPU

    groups = {"gpu": GPU, "cores": CORES}
    limits = {name: {row.name: row.limit for row in rows} for name, rows in groups.items()}
    return {"verdict": "passed", "facts": of_machine(), "limits": limits}


def main(name: str, setting: str, out: str) -> None:
    """Measures and writes."""
    small, images = json.loads(setting)
    try:
        found = facts() if name == "facts" else measured(name, Setting(small, images and Path(images)))
    except BaseException as error:
        traceback.print_exc()
        last = str(error).strip().splitlines() or [""]
        found = {"verdict": "failed", "reason": f"{type(error).__name__}: {last[0]}"}
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
