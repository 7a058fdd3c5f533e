"""Zig's C++ compiler, and the cache of what it made."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

LANGUAGE = ["-std=c++20", "-nostdinc++", "-fno-exceptions", "-fno-rtti", "-fPIC"]
LANGUAGE += ["-fno-sanitize=undefined", "-Wno-unused-command-line-argument"]


class CompileError(Exception):
    """The compiler refused a kernel."""

    def __init__(self, output: str):
        lines = output.splitlines()
        super().__init__("the kernel does not compile:\n" + "\n".join(lines[:60]))
        self.errors = [line for line in lines if ": error: " in line]


def compile_cpp(folder: Path, *arguments: str) -> None:
    """Runs the compiler in `folder`."""
    command = [*_command(), "c++", *target(), *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if result.returncode:
        raise CompileError(result.stderr)


def linking() -> list[str]:
    """The process brings the C library: linking zig's would take most of a minute at first."""
    if sys.platform == "darwin":
        return ["-shared", "-Wl,-undefined,dynamic_lookup"]
    return ["-shared", "-nostdlib"]


@cache
def target() -> list[str]:
    """A fixed processor, so that a cache shared by machines serves them all."""
    machine = {"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())
    if sys.platform == "darwin":
        return ["-target", f"{machine}-macos"]
    processor = ["-mcpu=x86_64_v3"] if machine == "x86_64" else []
    return ["-target", f"{machine}-linux-gnu", *processor]


@cache
def version() -> str:
    return subprocess.run([*_command(), "version"], capture_output=True, text=True).stdout.strip()


def _command() -> list[str]:
    return [sys.executable, "-m", "ziglang"]


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]


def cached(key: str, build: Callable[[Path], None]) -> Path:
    """The folder `key` of the cache, filled by `build(folder)` once.

    It appears whole or not at all: two processes may build it at the same time.
    """
    root = cache_folder()
    folder = root / key
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=root, prefix="unfinished-"))
    try:
        build(unfinished)
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def cache_folder() -> Path:
    if folder := os.environ.get("METAL_HOST_CACHE"):
        return Path(folder)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "metal_host"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "metal_host"
