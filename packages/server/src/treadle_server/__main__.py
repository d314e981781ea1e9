"""``python -m treadle_server``."""

import sys

from treadle_server.cli import main

sys.exit(main())
