"""Faults of shipped kernels are asserted where they were seen: a later version may mend them."""

import importlib.metadata

import pytest


def seen_in(package: str, version: str) -> pytest.MarkDecorator:
    """Skips a test of a shipped kernel's own fault in other versions of the package."""
    here = importlib.metadata.version(package)
    return pytest.mark.skipif(here != version, reason=f"seen in {package} {version}, not {here}")
