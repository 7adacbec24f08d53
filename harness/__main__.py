"""`python -m harness`, the same as `lmscale`."""

import sys

from harness.cli.installed import main

if __name__ == "__main__":
    sys.exit(main())
