"""The error of a package that is not installed."""

from __future__ import annotations

__all__ = ["missing"]


def missing(what: str, error: ImportError, extra: str | None, *packages: str) -> ImportError:
    """The error of an optional part of fastps.

    Args:
        what: The part, such as ``fastps.hogwild``.
        error: Why it cannot be imported.
        extra: The extra of fastps that installs what it needs, or None.
        packages: Packages that it needs, by pip's names.

    Returns:
        The error that says so; `error` itself if a package is installed and lacks something else.
    """
    needed = {package.replace("scikit-learn", "sklearn") for package in packages}
    if error.name is None or error.name.partition(".")[0] not in needed:
        return error
    hint = "" if extra is None else f" (the extra fastps[{extra}])"
    return ModuleNotFoundError(
        f"{what} needs {' and '.join(packages)}: pip install {' '.join(packages)}{hint}", name=error.name
    )
