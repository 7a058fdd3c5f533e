"""Makes PyTorch checkpoints by hand: an assembler of pickles, and the zip around them."""

import pickle
import zipfile

import numpy as np
import pytest

from mlx_selective.convert.torch_pickle import read_torch_file
from mlx_selective.errors import UserError


def plain(value):
    """The opcodes of a plain value, without protocol and STOP."""
    return pickle.dumps(value, 2)[2:-1]


def name(path):
    module, _, attribute = path.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def storage(kind="torch.FloatStorage", count=6, key="0", tag="storage"):
    return b"(" + plain(tag) + name(kind) + plain(key) + plain("cpu") + plain(count) + b"tQ"


def tensor(shape=(2, 3), strides=(3, 1), offset=0, *, of=None, rebuild="v2", tail=b""):
    call = name(f"torch._utils._rebuild_tensor_{rebuild}") + b"(" + (of or storage())
    rest = plain(offset) + plain(shape) + plain(strides) + b"\x89" + name("collections.OrderedDict")
    return call + rest + b")R" + tail + b"tR"


def table(entries):
    """A dict; its values are opcodes."""
    return b"}(" + b"".join(plain(key) + value for key, value in entries.items()) + b"u"


SIX = np.arange(6, dtype="<f4") + 1


def write(path, body, storages=None, *, root="archive", extra=None, compress=None, whole=False):
    """Write a checkpoint as torch.save lays it out; body is the pickle's opcodes."""
    storages = {"0": SIX.tobytes()} if storages is None else storages
    records = {"data.pkl": body if whole else b"\x80\x02" + body + b".", "byteorder": b"little"}
    records |= {f"data/{key}": value for key, value in storages.items()} | (extra or {})
    with zipfile.ZipFile(path, "w") as archive:
        for record, data in records.items():
            if data is not None:
                kind = zipfile.ZIP_DEFLATED if record == compress else zipfile.ZIP_STORED
                archive.writestr(f"{root}/{record}", data, kind)
    return path


def expect_refusal(path, *words):
    """Reading ends in one line that names the file and holds every word."""
    with pytest.raises(UserError) as caught:
        read_torch_file(path)
    message = str(caught.value)
    assert message.startswith(f"{path.name}: ") and message.isprintable() and len(message) < 400
    assert all(word in message for word in words), message
