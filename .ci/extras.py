"""Prints what the extras named on the command line need, one requirement a line."""

import re
import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]


def requirements(extra: str) -> list[str]:
    lines = []
    for line in project["optional-dependencies"][extra]:
        own = re.fullmatch(rf"{project['name']}\[([\w, -]+)\]", line)
        lines += [r for name in own[1].split(",") for r in requirements(name.strip())] if own else [line]
    return lines


wanted = project.get("dependencies", []) + [r for extra in sys.argv[1:] for r in requirements(extra)]
print("\n".join(dict.fromkeys(wanted)))
