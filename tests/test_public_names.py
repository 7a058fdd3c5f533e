"""Every public name says what it takes and gives."""

import importlib
import inspect
import pkgutil
import re
from types import UnionType
from typing import Any, Union, get_args, get_origin

import mlx.core as mx
import pytest

import mlx_selective
import mlx_selective.convert
import mlx_selective.metal

#: An editable install maps convert/ and metal/ from elsewhere: the package's own path lacks them.
PACKAGES = (mlx_selective, mlx_selective.convert, mlx_selective.metal)
MODULES = sorted(
    {package.__name__ for package in PACKAGES}
    | {
        module.name
        for package in PACKAGES
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if not module.name.endswith(("__main__", "mlx_selective_model"))
    }
)

#: One axis: a letter of the papers, a number, a word of this package, or a product or sum of such.
_NAME = r"(?:[BTNHDCLMRn]|Hkv|Dv|\d+(?: Hkv)?|live|reach|rows|width|TP|P|end - start|\.\.\.)"
_SUM = rf"(?:{_NAME}|\({_NAME}(?: [+*/] {_NAME})+\))"
_AXIS = rf"{_SUM}(?: \* {_SUM})*"
SHAPE = re.compile(
    rf"(?<!\w)\((?:|{_AXIS},|{_AXIS}(?:, {_AXIS})+)\)|\bbroadcastable to\b|\bof the \w+'s shape\b"
)
#: Arrays that only pass through, between two calls of a function that the caller gives.
PASSED_ON = {("mlx_selective.attention.blocks.scan_queries", "carry")}


def public_objects(module):
    """Functions and classes that a module defines under public names."""
    for name, value in vars(module).items():
        own = getattr(value, "__module__", None) == module.__name__
        if (
            not name.startswith("_")
            and own
            and (inspect.isfunction(value) or inspect.isclass(value))
        ):
            yield name, value


def public_methods(cls):
    """The name, function and docstring of a class's public methods and properties.

    A method that a base class has too may have its docstring there; that of ``__init__`` is the
    class's.
    """
    for name, value in vars(cls).items():
        if isinstance(value, (classmethod, staticmethod)):
            value = value.__func__
        function = getattr(value, "fget", None) or getattr(value, "func", None) or value
        # The default of a dataclass's field can be a function as well.
        if not inspect.isfunction(function) or name in getattr(cls, "__dataclass_fields__", ()):
            continue
        if name == "__init__":
            yield name, function, cls.__doc__
        elif not name.startswith("_"):
            bases = [vars(base)[name] for base in cls.__mro__ if name in vars(base)]
            yield name, function, next(filter(None, (base.__doc__ for base in bases)), None)


@pytest.mark.parametrize(
    "name", ["convert.pipeline", "convert.layouts.layout", "metal", "attention.ssa.layer"]
)
def test_no_part_of_the_package_is_passed_over(name):
    assert f"mlx_selective.{name}" in MODULES


@pytest.mark.parametrize("name", MODULES)
def test_modules_and_their_public_names_have_docstrings(name):
    module = importlib.import_module(name)
    assert module.__doc__, name
    missing = []
    for public, value in public_objects(module):
        # dataclass writes one itself, of the signature
        if not value.__doc__ or value.__doc__.startswith(f"{public}("):
            missing.append(public)
        if inspect.isclass(value):
            methods = public_methods(value)
            missing += [f"{public}.{method}" for method, _, told in methods if not told]
    assert not missing


@pytest.mark.parametrize("name", mlx_selective.__all__)
def test_what_the_package_exports_is_documented(name):
    value = getattr(mlx_selective, name)
    assert len(value.__doc__) > 40


# Shapes -------------------------------------------------------------------------------------------


def is_array(note: Any) -> bool:
    """Whether an annotation is that of an array, of some, or of one that may be missing.

    What may be a list or a text as well is a row of numbers, and has no shape to tell.
    """
    if get_origin(note) is tuple:
        return any(map(is_array, get_args(note)))
    if get_origin(note) in (Union, UnionType):
        others = [one for one in get_args(note) if one not in (int, float, type(None))]
        return bool(others) and all(map(is_array, others))
    return note is mx.array


def told_of_arguments(docstring: str) -> dict[str, str]:
    """What ``Args:`` says of each argument; names before one colon share it."""
    _, found, text = inspect.cleandoc(docstring).partition("Args:\n")
    entries = {}
    for line in text.splitlines() if found else ():
        if line and not line.startswith("    "):
            break
        if begins := re.match(r"    (\w+(?:, \w+)*): (.*)", line):
            names, said = begins[1].split(", "), begins[2]
            entries |= dict.fromkeys(names, said)
        elif line:
            entries |= {name: f"{entries[name]} {line.strip()}" for name in names}
    return entries


def untold(function, docstring: str) -> list[str]:
    """The arrays among the arguments and results whose shape a docstring does not tell."""
    notes = inspect.get_annotations(function, eval_str=True)
    arrays = [name for name, note in notes.items() if is_array(note)]
    docstring = inspect.cleandoc(docstring or "")
    arguments = told_of_arguments(docstring)
    _, has_results, results = docstring.partition("Returns:\n")
    missing = []
    for name in arrays:
        if name == "return":
            told = results.partition("\n\n")[0] if has_results else docstring
        else:
            told = arguments.get(name, "") if arguments else docstring
        same = re.match(r"as (\w+)", told)  # as another one
        if not (SHAPE.search(told) or (same and same[1] in arguments)):
            missing.append(name)
    return missing


@pytest.mark.parametrize("name", MODULES)
def test_functions_of_arrays_tell_shapes(name):
    """A parameter or result annotated as an array has its axes in the docstring."""
    module, missing = importlib.import_module(name), []
    for public, value in public_objects(module):
        told = [(public, value, value.__doc__)]
        if inspect.isclass(value):
            told = [(f"{public}.{method}", *rest) for method, *rest in public_methods(value)]
        for path, function, docstring in told:
            missing += [(f"{name}.{path}", array) for array in untold(function, docstring)]
    assert not set(missing) - PASSED_ON


def test_a_shape_that_is_missing_is_found():
    """The check above looks at every argument, and takes no other parenthesis for a shape."""

    def function(q: mx.array, k: mx.array | None, n: int, s: str | mx.array) -> mx.array:
        """Does this (and that).

        Args:
            q: (B, T), or ().
            k: the keys (of shape D).
            n: (N,).

        Returns:
            The result (in float32, always).
        """

    assert untold(function, function.__doc__) == ["k", "return"]
    assert untold(function, "Of q (B, H * Dv), k and all others.") == []
    assert untold(function, "Calls f(), with a shape (D).") != []
