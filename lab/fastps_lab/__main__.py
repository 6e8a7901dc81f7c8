"""`python -m fastps_lab` is the command `fastps-lab`."""

import sys

from fastps_lab.cli import main

sys.exit(main())
