"""``python -m warpspec``: see ``warpspec.cli``."""

import sys

from warpspec.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
