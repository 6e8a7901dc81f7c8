"""Compresses wheels again, with zopfli: some percent smaller than zlib makes them, in a minute or two.

Usage: python .ci/repack.py WHEEL...
"""

import sys
import zipfile
from pathlib import Path

import zopfli

for wheel in map(Path, sys.argv[1:]):
    smaller = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as source, zopfli.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            target.writestr(entry, source.read(entry))
    smaller.replace(wheel)
