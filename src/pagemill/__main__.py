"""``python -m pagemill``: the same as the ``pagemill`` command."""

from __future__ import annotations

import sys

from pagemill.cli import main

if __name__ == "__main__":
    sys.exit(main())
