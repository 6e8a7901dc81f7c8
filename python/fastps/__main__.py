"""`python -m fastps` is the command `fastps`."""

import sys

from fastps.cli import main

sys.exit(main())
