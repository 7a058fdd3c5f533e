#!/usr/bin/env python3
"""Chat in the terminal: ``python chat.py``, the same as ``mlx-selective chat``."""

import sys

try:
    from mlx_selective.cli import main
except ModuleNotFoundError as error:
    print(f"{error.name} is not installed; in a clone: pip install . (README.md)", file=sys.stderr)
    sys.exit(2)

sys.exit(main(["chat", *sys.argv[1:]]))
