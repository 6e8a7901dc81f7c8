"""Prints what the extras and dependency groups named on the command line need, one requirement a line.

pip reads dependency groups only from version 25.1 on.
"""

import re
import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    tables = tomllib.load(file)
project, groups = tables["project"], tables["dependency-groups"]


def requirements(name: str) -> list[str]:
    lines = []
    for entry in groups[name] if name in groups else project["optional-dependencies"][name]:
        if isinstance(entry, dict):
            lines += requirements(entry["include-group"])
        elif own := re.fullmatch(rf"{project['name']}\[([\w, -]+)\]", entry):
            lines += [line for extra in own[1].split(",") for line in requirements(extra.strip())]
        else:
            lines.append(entry)
    return lines


wanted = project.get("dependencies", []) + [line for name in sys.argv[1:] for line in requirements(name)]
print("\n".join(dict.fromkeys(wanted)))
