"""Includes of a kernel file: each file once, in its place, with its own line numbers."""

import re
import subprocess
import sys

import pytest

from mlx_selective.kernels import KernelError
from mlx_selective.kernels.flattening import flatten, place


def tree(folder, **files):
    """Files under a folder; ``a`` is the file a.h, ``sub_b`` is sub/b.h."""
    for name, text in files.items():
        path = folder / f"{name.replace('_', '/')}.h"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def flat(folder, name="a"):
    return flatten(folder / f"{name}.h", folder)


def words(text):
    """The text without directives of lines."""
    return re.sub(r"#line.*\n", "", text).split()


def test_each_file_comes_once_in_its_place(tmp_path):
    a = '#pragma once\nbefore\n#include "sub/b.h"\n# include "c.h"  // again\n#include <x>\nafter'
    tree(tmp_path, a=a, sub_b='#include "../c.h"\nb\n', c="#pragma once\nc\n")
    assert words(flat(tmp_path)) == "before c b #include <x> after".split()


def test_lines_keep_their_files_and_numbers(tmp_path):
    a = '#include "b.h"\nA2\n#include "c.h"\n#include "c.h"\nA5\n'
    text = flat(tree(tmp_path, a=a, b="B1\n\nB3\n", c='#pragma once\n#include "b.h"\nC3\n'))
    for word in ("B1", "B3", "A2", "C3", "A5"):
        assert place(text, text.index(word)) == (int(word[1]), f"{word[0].lower()}.h")


def test_a_compiler_sees_the_same_lines(tmp_path):
    """Also behind a branch that it skips, whose directives it does not see."""
    ziglang = pytest.importorskip("ziglang")
    a = '#if defined(NO)\n#include "b.h"\n#else\n#error A4\n#endif\n#error A6\n'
    text = flat(tree(tmp_path, a=a, b='#error B1\n#include "c.h"\n', c="\n\n\n"))
    (tmp_path / "flat.cpp").write_text(text)
    command = [sys.executable, "-m", ziglang.__name__, "c++", "-fsyntax-only", "flat.cpp"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stderr
    assert re.findall(r"(\w\.h):(\d+):\d+: error: (\w+)", told) == [
        ("a.h", "4", "A4"),
        ("a.h", "6", "A6"),
    ]


def test_a_circle_is_refused(tmp_path):
    tree(tmp_path, a='#include "b.h"\n', b='#include "c.h"\n', c='#include "b.h"\n')
    with pytest.raises(KernelError, match=r"^b.h includes c.h includes b.h: a circle"):
        flat(tmp_path)


@pytest.mark.parametrize("how", ["../outside.h", "link.h"])
def test_files_outside_the_folder_are_refused(tmp_path, how):
    (tmp_path / "outside.h").write_text("outside\n")
    inside = tree(tmp_path / "metal", a=f'#include "{how}"\n')
    (inside / "link.h").symlink_to(tmp_path / "outside.h")
    with pytest.raises(KernelError, match=r"outside.h lies outside the folder of the kernels"):
        flat(inside)


def test_a_missing_include_names_who_asked(tmp_path):
    tree(tmp_path, a='#include "b.h"\n', b='#include "gone.h"\n')
    with pytest.raises(KernelError, match=r"^gone.h \(included by b.h\) cannot be read"):
        flat(tmp_path)


IN_IF = '#if defined(__METAL_VERSION__)\n#include "b.h"\n'


@pytest.mark.parametrize(
    "rest",
    [
        '#else\n#include "b.h"\n#endif\n',
        '#endif\n#include "b.h"\n',
        '#endif\n#ifdef X\n#include "b.h"\n#endif\n',
        '#endif\n#include "c.h"\n',
    ],
)
def test_a_file_that_a_condition_may_have_left_out_is_not_there_again(tmp_path, rest):
    tree(tmp_path, a=IN_IF + rest, b="b\n", c='#include "b.h"\n')
    with pytest.raises(KernelError, match="^b.h is included under an #if and again outside"):
        flat(tmp_path)


@pytest.mark.parametrize(
    "text, expected",
    [
        (IN_IF + '#else\n#include "c.h"\n#endif\n', "b #else c"),
        (IN_IF + '#include "b.h"\n#if 1\n#include "b.h"\n#endif\n#endif\n', "b #if 1 #endif"),
        ('#include "b.h"\n' + IN_IF + "#endif\n", None),
    ],
)
def test_conditions_that_agree_are_fine(tmp_path, text, expected):
    got = words(flat(tree(tmp_path, a=text, b="b\n", c="c\n")))
    assert got.count("b") == 1
    if expected:
        assert got == ["#if", "defined(__METAL_VERSION__)", *expected.split(), "#endif"]


@pytest.mark.parametrize("directive", ["else", "elif 1", "endif"])
def test_a_branch_without_its_beginning_is_refused(tmp_path, directive):
    with pytest.raises(KernelError, match=r"^a.h, line 2: #\w+ without #if"):
        flat(tree(tmp_path, a=f"\n#{directive}\n"))
