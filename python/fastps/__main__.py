"""`python -m fastps` is the command `fastps`."""

import sys

from fastps.commands.cli import main

sys.exit(main())
