"""The cache of compiled kernels: damage is made good, and where it lies does not matter."""

import pytest

from metal_host.translation.toolchain import SIZES, cache_folder, cached


@pytest.fixture
def built(tmp_path, monkeypatch):
    """A folder of the cache, and how often it was built."""
    monkeypatch.setenv("METAL_HOST_CACHE", str(tmp_path))
    times = []

    def build(folder):
        times.append(folder)
        (folder / "kernel.so").write_bytes(b"a library")

    return lambda: (cached("key", build), len(times))


def test_a_whole_folder_is_used_again(built):
    assert built() == built()


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "kernel.so").write_bytes(b"a lib"),
        lambda folder: (folder / "kernel.so").unlink(),
        lambda folder: (folder / SIZES).write_text(""),
    ],
)
def test_a_damaged_folder_is_built_anew(built, damage):
    folder, _ = built()
    damage(folder)
    assert built() == (folder, 2)
    assert (folder / "kernel.so").read_bytes() == b"a library"


def test_a_failed_build_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("METAL_HOST_CACHE", str(tmp_path))
    with pytest.raises(ZeroDivisionError):
        cached("key", lambda folder: 1 / 0)
    assert list(tmp_path.iterdir()) == []


def test_a_relative_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("METAL_HOST_CACHE", "here")
    assert cache_folder() == tmp_path / "here"
