"""What a model says may reach the terminal as text only."""

import textwrap
import unicodedata

#: Unicode categories: control characters (C0, DEL, C1) and surrogates.
_UNSAFE = ("Cc", "Cs")
_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def safe_text(text: str) -> str:
    """Text without characters that steer a terminal.

    Escape and the C1 controls go (so no escape sequence survives), bidi controls and lone
    surrogates too; line feeds and tabs stay.
    """
    return "".join(
        character
        for character in text
        if character in "\n\t"
        or (unicodedata.category(character) not in _UNSAFE and character not in _BIDI)
    )


def wrapped(text: str, width: int) -> str:
    """Lines of a text broken between words, where they are longer than a terminal is wide.

    Args:
        text: lines; the spaces that a line begins with, and those after its first word, are kept.
        width: columns of the terminal.
    """
    lines = []
    for line in text.split("\n"):
        lines += textwrap.wrap(
            line,
            max(width, 8),
            subsequent_indent="  ",
            break_on_hyphens=False,
            break_long_words=False,  # such as paths
        )
        if not line.strip():
            lines.append("")
    return "\n".join(lines)
