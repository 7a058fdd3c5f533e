"""The model that is shipped with the package, for a first chat without a download."""

from pathlib import Path

#: Folder of the built-in model; README.md in it tells where it comes from.
BUILTIN_MODEL = Path(__file__).parent
