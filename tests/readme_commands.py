"""Prints a command block of the README, so that CI runs what the README says.

usage: python tests/readme_commands.py chat|test|lint
"""

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def block(name: str) -> str:
    """The fenced block that follows the marker <!-- command: name -->."""
    pattern = rf"<!-- command: {re.escape(name)} -->\n```bash\n(.*?)```"
    found = re.findall(pattern, README.read_text(encoding="utf-8"), re.S)
    if len(found) != 1:
        raise SystemExit(f"README.md: {len(found)} blocks are marked 'command: {name}', not one.")
    return found[0]


if __name__ == "__main__":
    print(block(sys.argv[1]), end="")
