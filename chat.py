#!/usr/bin/env python3
"""Chat in the terminal: ``python chat.py``, the same as ``mlx-selective chat``."""

import sys

from mlx_selective.cli import main

sys.exit(main(["chat", *sys.argv[1:]]))
