"""``python -m mlx_selective``."""

import sys

from .cli import main

sys.exit(main())
