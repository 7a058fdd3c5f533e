"""Where kernels run: the setting, the device, and the one line that a wrong setting gets."""

import mlx.core as mx
import pytest

from mlx_selective import UserError
from mlx_selective.cli import main
from mlx_selective.kernels import SETTING, find_backend, launched_by


class Machine:
    """What MLX says of a machine."""

    def __init__(self, monkeypatch):
        self.patch = monkeypatch
        self.patch.delenv(SETTING, raising=False)

    def has(self, device="gpu", metal=False, cuda=False, setting=None):
        self.patch.setattr(mx, "default_device", lambda: mx.Device(getattr(mx, device)))
        self.patch.setattr(mx.metal, "is_available", lambda: metal)
        self.patch.setattr(mx.cuda, "is_available", lambda: cuda)
        if setting is not None:
            self.patch.setenv(SETTING, setting)


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


@pytest.mark.parametrize(
    "has, name, reason",
    [
        ({"metal": True}, "metal", ""),
        ({"cuda": True}, "cuda", ""),
        ({}, None, "MLX has neither Metal nor CUDA here"),
        ({"device": "cpu", "metal": True}, None, "MLX computes on the CPU"),
        ({"metal": True, "setting": "auto"}, "metal", ""),
        ({"metal": True, "setting": ""}, "metal", ""),
        ({"metal": True, "setting": "metal"}, "metal", ""),
        ({"cuda": True, "setting": "cuda"}, "cuda", ""),
        ({"cuda": True, "setting": "off"}, None, "MLX_SELECTIVE_KERNELS is off"),
        ({"device": "cpu", "setting": "off"}, None, "MLX_SELECTIVE_KERNELS is off"),
    ],
)
def test_the_backend_follows_device_and_setting(machine, has, name, reason):
    machine.has(**has)
    assert find_backend() == (name, reason)


@pytest.mark.parametrize(
    "has, told",
    [
        ({"setting": "cuda", "metal": True}, "is cuda, but MLX has metal here."),
        ({"setting": "metal", "cuda": True}, "is metal, but MLX has cuda here."),
        ({"setting": "metal", "device": "cpu"}, "is metal, but MLX computes on the CPU."),
        ({"setting": "on"}, "must be one of auto, off, metal, cuda, got 'on'."),
        ({"setting": "Metal", "metal": True}, "must be one of auto, off, metal, cuda"),
    ],
)
def test_what_cannot_be_followed_is_the_users_mistake(machine, has, told, capsys):
    machine.has(**has)
    with pytest.raises(UserError, match=f"^{SETTING} ") as error:
        find_backend()
    assert told in str(error.value)
    for command in ("doctor", "generate"):
        assert main([command]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"mlx-selective {command}: error: {error.value}"


def test_another_launcher_counts_as_metal(machine):
    machine.has(device="cpu")
    with launched_by(print):
        assert find_backend().name == "metal"
        machine.has(device="cpu", setting="off")
        assert find_backend().name is None
        machine.has(device="cpu", setting="cuda")
        with pytest.raises(UserError, match="is cuda, but MLX has metal here"):
            find_backend()
