"""The command line: ``mlx-selective convert | generate | chat | ...``."""

import argparse
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .errors import UserError
from .output import safe_text

#: Commands that are tools of mlx-lm, which read their flags themselves.
_STOCK = "stock_tools.command"
#: command -> (module with add_arguments and run, one line of help)
COMMANDS = {
    "convert": ("convert.command", "convert a PyTorch checkpoint from a folder or the Hub"),
    "generate": ("generation.command", "generate from one prompt"),
    "chat": ("chat.command", "chat in the terminal"),
    "budget": ("budget.command", "find how few keys each layer needs, and store it"),
    "doctor": ("doctor.command", "check this installation"),
    "finetune": (_STOCK, "fine-tune with what the methods need, with the flags of mlx_lm.lora"),
    "lora": (_STOCK, "fine-tune as any model (mlx_lm.lora)"),
    "fuse": (_STOCK, "put a fine-tuned adapter into its model (mlx_lm.fuse)"),
    "server": (_STOCK, "serve OpenAI's HTTP interface (mlx_lm.server)"),
    "benchmark": (_STOCK, "measure speed and memory (mlx_lm.benchmark)"),
    "cache_prompt": (_STOCK, "save a prompt's cache (mlx_lm.cache_prompt)"),
}


class OneLineParser(argparse.ArgumentParser):
    """Tells a wrong flag in one line, without the usage before it."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {safe_text(message)} (see {self.prog} --help)\n")


def start(command: str, arguments: list[str]) -> int | None:
    """Runs one command; the modules of the others are not imported."""
    module_name, summary = COMMANDS[command]
    module = importlib.import_module(f".{module_name}", __package__)
    if module_name == _STOCK:
        return module.run(command, arguments)
    parser = OneLineParser(
        prog=f"mlx-selective {command}", description=summary[0].upper() + summary[1:] + "."
    )
    module.add_arguments(parser)
    return module.run(parser.parse_args(arguments))


def usage() -> str:
    """What ``mlx-selective`` prints without a command."""
    lines = ["usage: mlx-selective COMMAND [--help] ...", "", "commands:"]
    lines += [f"  {name:<13} {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code (2: user's mistake, 130: Ctrl-C, 141: reader gone)."""
    _prepare_streams()
    try:
        with _orderly_end():
            try:
                return _run(list(sys.argv[1:] if arguments is None else arguments))
            finally:
                sys.stdout.flush()
    except OSError as error:
        # Nobody reads on (as in `| head`), or the disk is full: Python would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 141
        print(f"mlx-selective: error: the output cannot be written ({error}).", file=sys.stderr)
        return 2


def _prepare_streams() -> None:
    """A closed stream (as in `<&-`) becomes an empty one; what is no text is replaced."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
        if isinstance(getattr(sys, name), io.TextIOWrapper):
            getattr(sys, name).reconfigure(errors="replace")


@contextmanager
def _orderly_end() -> Iterator[None]:
    """SIGTERM and SIGHUP end the command as an exception does: what was begun is taken back."""

    def end(number, frame):
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {getattr(signal, name): signal.signal(getattr(signal, name), end) for name in names}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from . import __version__

        print(f"mlx-selective {__version__}")
        return 0
    command, *rest = arguments
    if command not in COMMANDS:
        print(
            f"mlx-selective: error: {command!r} is not a command; expected {', '.join(COMMANDS)}.",
            file=sys.stderr,
        )
        return 2
    try:
        _check_kernel_setting(rest)
        return start(command, rest) or 0
    except UserError as error:
        return _fail(command, str(error))
    except ModuleNotFoundError as error:  # run from a clone that was not installed
        return _fail(command, f"{error.name} is not installed; pip install . does it (README.md).")
    except BrokenPipeError:
        raise
    except OSError as error:
        return _fail(command, str(error))
    except KeyboardInterrupt:
        print(f"\nmlx-selective {command}: interrupted.", file=sys.stderr)
        return 130


def _check_kernel_setting(rest: list[str]) -> None:
    """A setting that cannot be followed is told at once, not when a kernel is first wanted."""
    if os.environ.get("MLX_SELECTIVE_KERNELS") and not {"-h", "--help"} & set(rest):
        from .kernels import find_backend

        find_backend()


def _fail(command: str, message: str) -> int:
    """One line on the error stream; what a file or a template says cannot steer the terminal."""
    message = safe_text(" ".join(message.split()))
    print(f"mlx-selective {command}: error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
