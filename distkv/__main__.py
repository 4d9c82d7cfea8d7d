"""``python -m distkv``."""

import sys

from distkv.cli import main

sys.exit(main())
