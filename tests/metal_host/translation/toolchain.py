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


#: in each folder of the cache: its files and their sizes
SIZES = "sizes.txt"


class CompileError(Exception):
    """The compiler refused a kernel."""

    def __init__(self, output: str):
        lines = output.splitlines()
        super().__init__("the kernel does not compile:\n" + "\n".join(lines[:60]))
        self.errors = [line for line in lines if ": error: " in line]


def compile_cpp(folder: Path, *arguments: str) -> None:
    """Runs the compiler in `folder`."""
    command = [*_command(), "c++", *target(), *arguments]
    # Without a cache of its own, zig waits for ever where there is no home.
    environment = {"ZIG_GLOBAL_CACHE_DIR": str(cache_folder() / "zig")} | os.environ
    result = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=environment, timeout=300
    )
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
    """Of the compiler, for the keys of the cache."""
    return subprocess.run([*_command(), "version"], capture_output=True, text=True).stdout.strip()


def _command() -> list[str]:
    return [sys.executable, "-m", "ziglang"]


def digest(*texts: str) -> str:
    """A key of the cache: a hash of all that goes into what it stands for."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]


def cached(key: str, build: Callable[[Path], None]) -> Path:
    """The folder `key` of the cache, filled by `build(folder)` once.

    It appears whole or not at all: two processes may build it at the same time.
    """
    root = cache_folder()
    folder = root / key
    if folder.is_dir():
        if (folder / SIZES).is_file() and _sizes(folder) == (folder / SIZES).read_text():
            return folder
        # a disk was full, say: loading a cut library would end the process
        shutil.rmtree(folder, ignore_errors=True)
    root.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=root, prefix="unfinished-"))
    try:
        build(unfinished)
        (unfinished / SIZES).write_text(_sizes(unfinished))
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _sizes(folder: Path) -> str:
    files = sorted(path for path in folder.iterdir() if path.name != SIZES and path.is_file())
    return "".join(f"{path.name} {path.stat().st_size}\n" for path in files)


def cache_folder() -> Path:
    """METAL_HOST_CACHE, else metal_host in the user's cache folder."""
    if folder := os.environ.get("METAL_HOST_CACHE"):
        return Path(folder).resolve()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "metal_host"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "metal_host"
