"""A file of ``metal/`` taken apart for MLX, which writes the signature itself."""

import re
from dataclasses import dataclass
from pathlib import Path

from .. import metal
from .errors import KernelError
from .flattening import flatten, place
from .signature import Signature, added_by_mlx, parse_signature

#: where the package's kernels are
KERNEL_FOLDER = Path(metal.__file__).parent

_HIDDEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)
_KERNEL = re.compile(r"(?:template\s*<([^<>]*)>\s*)?\[\[\s*kernel\s*\]\]\s+void\s+(\w+)\s*\(")


@dataclass(frozen=True)
class KernelSource:
    """One kernel: ``name`` of its function, ``header`` before it, ``body``, and ``signature``."""

    name: str
    header: str
    body: str
    signature: Signature


def read_kernel(path: str, folder: Path = KERNEL_FOLDER) -> KernelSource:
    """Reads a kernel file, with what it includes.

    A file is complete Metal: helpers, then one ``[[kernel]]`` function and nothing behind it.
    MLX builds that function's signature from names, dtypes and the words of the body, so the
    file has to declare what MLX will write; this checks that it does.

    Args:
        path: of the file in the folder, such as ``ssa/temperature.metal``.
        folder: of all kernel sources.

    Raises:
        KernelError: naming the file and what is wrong in it.
    """
    text = flatten(folder / path, folder)
    # a directive's file name is a string too, and is hidden with the rest
    visible = _HIDDEN.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    try:
        return _take_apart(text, visible)
    except KernelError as error:
        raise KernelError(f"{path}: {error}") from None


def _take_apart(text: str, visible: str) -> KernelSource:
    found = list(_KERNEL.finditer(visible))
    if len(found) != 1:
        raise KernelError(f"holds {len(found)} functions '[[kernel]] void name(', not one.")
    (kernel,) = found
    close = _closing(visible, kernel.end() - 1, "()")
    start = close + 1 + len(visible[close + 1 :]) - len(visible[close + 1 :].lstrip())
    if visible[start : start + 1] != "{":
        raise KernelError(f"{kernel[2]} has no body.")
    end = _closing(visible, start, "{}")
    rest = re.sub(r"^#line.*$", "", visible[end + 1 :], flags=re.M).strip()
    if rest:
        raise KernelError(f"'{rest.splitlines()[0]}' after {kernel[2]}, which must come last.")
    signature = parse_signature(kernel[1], visible[kernel.end() : close])
    line, file = place(text, start)
    body = _shortened(f'#line {line} "{file}"\n{text[start + 1 : end].rstrip()}\n')
    body += _mention(signature, body)
    _check_names(signature, body)
    header = _shortened(text[: kernel.start()].rstrip() + "\n")
    return KernelSource(kernel[2], header, body, signature)


def _shortened(text: str) -> str:
    """Without comments and indentation: MLX copies the text in every call, 7 us of 40 KB."""
    text = _HIDDEN.sub(lambda match: match[0] if match[0][0] in "\"'" else _lines(match[0]), text)
    return re.sub(r"^[ \t]+|[ \t]+$", "", text, flags=re.M)


def _lines(text: str) -> str:
    return "\n" * text.count("\n")


def _closing(visible: str, start: int, pair: str) -> int:
    """Where the bracket at start closes."""
    depth = 0
    for match in re.finditer(f"[{re.escape(pair)}]", visible[start:]):
        depth += 1 if match[0] == pair[0] else -1
        if depth == 0:
            return start + match.start()
    raise KernelError(f"a '{pair[0]}' is never closed.")


def _mention(signature: Signature, body: str) -> str:
    """A comment with the names that are declared and not used, so that MLX adds them too."""
    unused = [name for name in signature.extras + signature.attributes if name not in body]
    return f"// {' '.join(unused)}\n" if unused else ""


def _check_names(signature: Signature, body: str) -> None:
    """Refuses words of the body for which MLX would add what the file does not declare."""
    about, attributes = added_by_mlx(body, signature.inputs)
    undeclared = (about | attributes) - set(signature.extras) - set(signature.attributes)
    if undeclared:
        names = ", ".join(sorted(undeclared))
        raise KernelError(f"the body says {names}: MLX adds a parameter that is not declared.")
