"""A kernel file and what it includes, as one text: MLX compiles strings and finds no files."""

import re
from pathlib import Path

from .errors import KernelError

_INCLUDE = re.compile(r'\s*#\s*include\s*"([^"]*)"')
# what this module adds, and no comment that speaks of it
_MARKER = re.compile(r'^#line (\d+) "([^"]*)"$', re.M)
_DIRECTIVE = re.compile(r"\s*#\s*(if|ifdef|ifndef|elif|else|endif)\b")


def flatten(file: Path, root: Path) -> str:
    """The text of a file with every quoted include in its place, each file once.

    ``#line`` directives keep the files' own names and lines in what a compiler says.
    ``#include <...>`` stays as it is; ``#pragma once`` goes, since each file comes once.

    Args:
        file: the kernel file.
        root: the folder that holds all kernel sources.

    Raises:
        KernelError: if a file is missing, lies outside root, includes itself, has a character
            that is not ASCII, or is needed again where an ``#if`` may have left it out.
    """
    return _Flattening(root.resolve()).text_of(file.resolve(), ())


def place(text: str, position: int) -> tuple[int, str]:
    """Line and file that a position in a flattened text comes from."""
    before = text[:position]
    marker = list(_MARKER.finditer(before))[-1]
    return int(marker[1]) + before.count("\n", marker.start()) - 1, marker[2]


class _Flattening:
    """One flattening: the files that are open, and under which ``#if`` each one came."""

    def __init__(self, root: Path):
        self.root = root
        self.open: list[Path] = []
        self.done: dict[Path, tuple] = {}

    def text_of(self, file: Path, conditions: tuple) -> str:
        name = self._name(file)
        self._check_order(file, name)
        if file in self.done:
            if conditions[: len(self.done[file])] != self.done[file]:
                raise KernelError(
                    f"{name} is included under an #if and again outside of it; include it before."
                )
            return ""
        self.done[file] = conditions
        self.open.append(file)
        lines = [f'#line 1 "{name}"']
        skipped = False
        for number, line in enumerate(self._read(file, name).splitlines(), 1):
            conditions = _conditions_after(line, conditions, (name, number))
            include = _INCLUDE.match(line)
            if include:
                lines.append(self.text_of((file.parent / include[1]).resolve(), conditions))
                skipped = skipped or bool(conditions)
            else:
                # an empty line in its place, so that the numbers stay right
                lines.append("" if re.match(r"\s*#\s*pragma\s+once", line) else line)
            # a branch that a compiler skips takes its #line directives with it
            if include or (skipped and _DIRECTIVE.match(line)):
                lines.append(f'#line {number + 1} "{name}"')
        self.open.pop()
        return "\n".join(lines) + "\n"

    def _name(self, file: Path) -> str:
        if not file.is_relative_to(self.root):
            raise KernelError(f"{file} lies outside the folder of the kernels, {self.root}.")
        return file.relative_to(self.root).as_posix()

    def _check_order(self, file: Path, name: str) -> None:
        if file in self.open:
            circle = [self._name(one) for one in self.open[self.open.index(file) :]]
            raise KernelError(f"{' includes '.join([*circle, name])}: a circle.")

    def _read(self, file: Path, name: str) -> str:
        try:
            content = file.read_bytes()
        except OSError as error:
            asks = f" (included by {self._name(self.open[-2])})" if len(self.open) > 1 else ""
            raise KernelError(f"{name}{asks} cannot be read: {error.strerror}.") from None
        for number, line in enumerate(content.splitlines(), 1):
            if not line.isascii():
                raise KernelError(f"{name}, line {number}: MLX passes kernels on as ASCII only.")
        return content.decode("ascii")


def _conditions_after(line: str, conditions: tuple, here: tuple) -> tuple:
    """The branches of ``#if`` that are open after a line; each branch is named by its place."""
    directive = _DIRECTIVE.match(line)
    if not directive:
        return conditions
    if directive[1] in ("if", "ifdef", "ifndef"):
        return (*conditions, here)
    if not conditions:
        raise KernelError(f"{here[0]}, line {here[1]}: #{directive[1]} without #if.")
    return conditions[:-1] if directive[1] == "endif" else (*conditions[:-1], here)
