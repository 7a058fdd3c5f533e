"""mlx-lm's tools and this package's commands as processes, and what they print."""

import importlib.metadata
import sys

from mlx_selective.output import safe_text

MESSAGE = "hello there, how are you?"
#: Keys that a layer of the selective model keeps.
BUDGET = 8
#: mlx-lm 0.31 runs a folder's code unasked in these tools, which have no flag for it.
_UNASKED = ("lora", "fuse", "benchmark", "convert")
_OLD = importlib.metadata.version("mlx-lm").startswith("0.31.")


def tool_command(side: str, tool: str) -> list[str]:
    """What starts a tool; mlx-lm's needs the flag that lets it run the folder's code."""
    if side == "ours":
        return [sys.executable, "-m", "mlx_selective", tool]
    trust = [] if _OLD and tool in _UNASKED else ["--trust-remote-code"]
    return [sys.executable, "-m", "mlx_lm", tool, *trust]


def text_of(printed: str) -> str:
    """The text among what generate prints."""
    return safe_text(printed.split("==========\n")[1]).removesuffix("\n")
