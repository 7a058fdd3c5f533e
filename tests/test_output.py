"""What reaches the terminal: text, and nothing that steers it."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_selective.output import safe_text, wrapped

# Written out by code point; the code under test goes by Unicode category.
CONTROLS = {*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")}
BIDI = {0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)}
UNSAFE = {chr(code) for code in CONTROLS | BIDI | set(range(0xD800, 0xE000))}

texts = st.text(st.one_of(st.characters(), st.sampled_from(sorted(UNSAFE)), st.just("\x1b")))


def test_every_code_point_is_kept_or_dropped_as_it_should_be():
    characters = "".join(map(chr, range(0x110000)))

    assert safe_text(characters) == "".join(c for c in characters if c not in UNSAFE)


def test_nothing_that_unicode_calls_an_explicit_bidi_control_survives():
    explicit = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    controls = [c for c in map(chr, range(0x110000)) if unicodedata.bidirectional(c) in explicit]

    assert len(controls) == 9
    assert safe_text("".join(controls)) == ""


@given(texts)
def test_only_unsafe_characters_go_and_the_order_stays(text):
    shown = safe_text(text)

    assert shown == "".join(c for c in text if c not in UNSAFE)
    assert safe_text(shown) == shown


@given(texts, texts)
def test_pieces_of_a_stream_are_as_safe_as_the_whole(first, second):
    assert safe_text(first) + safe_text(second) == safe_text(first + second)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "[31mred[0m"),
        ("\x1b]0;title\x07", "]0;title"),
        ("\x9b2Jgone", "2Jgone"),
        ("over\rwritten\b\b", "overwritten"),
        ("a\x00b\x7fc", "abc"),
        ("user\u202egnp.exe", "usergnp.exe"),
        ("half \ud83d of a pair", "half  of a pair"),
    ],
)
def test_known_tricks(text, shown):
    assert safe_text(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "one line\n\ttwo",
        "\U0001f469\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f \U0001f1eb\U0001f1f7",
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",  # Persian, with a non-joiner
        "e\u0301 \u05e9\u05dc\u05d5\u05dd \u4f60\u597d \u00a0 \u2028",
    ],
)
def test_text_of_any_language_is_kept(text):
    assert safe_text(text) == text


@pytest.mark.parametrize(
    "text, width, lines",
    [
        ("/undo          take it back", 80, ["/undo          take it back"]),
        ("/undo          take it back", 20, ["/undo          take", "  it back"]),
        ("one two\n\nthree", 40, ["one two", "", "three"]),
        ("a b", 1, ["a b"]),
        ("", 40, [""]),
        ("mlx-selective budget", 16, ["mlx-selective", "  budget"]),
    ],
)
def test_lines_are_broken_between_words(text, width, lines):
    assert wrapped(text, width).split("\n") == lines
