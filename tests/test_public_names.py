"""Every public name says what it takes and gives."""

import importlib
import inspect
import pkgutil

import mlx.core as mx
import pytest

import mlx_selective

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(mlx_selective.__path__, "mlx_selective.")
    if not module.name.endswith(("__main__", "mlx_selective_model"))
)


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


@pytest.mark.parametrize("name", MODULES)
def test_modules_and_their_public_names_have_docstrings(name):
    module = importlib.import_module(name)
    assert module.__doc__, name
    missing = [public for public, value in public_objects(module) if not value.__doc__]
    for public, value in public_objects(module):
        for method, function in vars(value).items() if inspect.isclass(value) else ():
            # A method of a base class may have said it already.
            told = inspect.getdoc(getattr(value, method)) if inspect.isfunction(function) else True
            if not method.startswith("_") and not told:
                missing.append(f"{public}.{method}")
    assert not missing


@pytest.mark.parametrize("name", mlx_selective.__all__)
def test_what_the_package_exports_is_documented(name):
    value = getattr(mlx_selective, name)
    assert len(value.__doc__) > 40


@pytest.mark.parametrize("name", MODULES)
def test_functions_of_arrays_tell_shapes(name):
    """A parameter or result annotated as an array has its axes in the docstring."""
    module = importlib.import_module(name)
    for public, function in public_objects(module):
        if not inspect.isfunction(function):
            continue
        annotations = inspect.get_annotations(function, eval_str=True).values()
        if any(note is mx.array for note in annotations):
            shapes = ("(B", "(T", "(H", "(N", "(Hkv", "shape", "(D", "()")
            assert any(shape in function.__doc__ for shape in shapes), f"{name}.{public}"
