"""`python -m lmscale`, the same as `lmscale`."""

import sys

from . import main

sys.exit(main())
