"""What runs here is compiled by the clang of the ziglang package: without it there is nothing."""

import importlib.util
import os

if importlib.util.find_spec("ziglang") is None:
    # Locally it may be left out; where nobody looks at what is skipped, that would prove nothing.
    if os.environ.get("CI"):
        raise RuntimeError("the tests of metal_host need the package ziglang")
    collect_ignore = ["proof"]
