"""Read PyTorch checkpoints without PyTorch, and without running what is in them.

A ``.bin``, ``.pt`` or ``.pth`` file written by ``torch.save`` since 1.6 is a zip: ``data.pkl`` is
a pickle that says how tensors lie in storages, and ``data/<key>`` are the bytes of the storages.
The pickle is run by ``torch_unpickler``, which can only describe tensors; here its descriptions
are checked against the zip and become arrays.
"""

from __future__ import annotations

import io
import math
import zipfile
from pathlib import Path
from typing import BinaryIO

import mlx.core as mx
import numpy as np

from ..errors import UserError
from .torch_unpickler import DTYPES, Refusal, Storage, View, kind, printable, unpickle

__all__ = ["read_torch_file"]

PICKLE_LIMIT = 16 * 2**20  # bytes of data.pkl: about 130 a tensor, so over 100 000 tensors
_CHUNK = 16 * 2**20
_LEGACY_MAGIC = (0x1950A86A20F9469CFC6C).to_bytes(10, "little")
_WRAPPERS = ("model", "state_dict", "model_state_dict")
_PLAIN = (int, float, bool, str, type(None))
_AGAIN = "save it again with a newer PyTorch, or as safetensors"


def read_torch_file(path: Path) -> dict[str, mx.array]:
    """Read the tensors of a PyTorch zip checkpoint; nothing in the file is executed.

    float64 tensors become float32 (MLX has float64 on the CPU only); every other type is kept.
    A state dict under ``model``, ``state_dict`` or ``model_state_dict`` is unwrapped, and plain
    numbers and text beside it are skipped. Tensors that share a storage (tied weights) come out
    as equal arrays. Storages are read one at a time and their checksums compared, so memory
    peaks near the bytes of all tensors plus about twice those of the largest storage.

    Args:
        path: the file.

    Returns:
        The arrays by name, in the order of the file.

    Raises:
        UserError: the file is missing, damaged, not a zip checkpoint, or its pickle holds or
            calls anything but tensors. One line that names the file and the reason.
    """
    path = Path(path)
    name = printable(path.name)
    try:
        with _open(path) as file:
            return _read_file(file)
    except Refusal as refusal:
        raise UserError(f"{name}: {refusal}") from refusal
    except Exception as error:
        reason = f"{type(error).__name__}: {printable(error)}"
        raise UserError(f"{name}: the file is damaged ({reason})") from error


def _open(path: Path) -> BinaryIO:
    """Open the file after a look at its first bytes, which tell the usual mistakes apart."""
    if not path.is_file():  # also keeps a named pipe from blocking
        raise Refusal("is not a file" if path.exists() else "no such file")
    try:
        file = open(path, "rb")
    except OSError as error:
        raise Refusal(f"cannot be opened ({error.strerror})") from error
    head = file.read(32)
    if head.startswith(b"PK"):
        return file
    file.close()
    if head.startswith(b"version https://git-lfs"):
        raise Refusal("a Git LFS pointer, not the weights: fetch the file itself")
    if head[:1] == b"\x80" and _LEGACY_MAGIC in head:
        raise Refusal(f"written in the form of PyTorch before 1.6 (not a zip): {_AGAIN}")
    if head[:1] == b"\x80":
        raise Refusal("not a zip but a bare pickle: only zip checkpoints of torch.save are read")
    raise Refusal("not a zip: only zip checkpoints of torch.save (1.6 and later) are read")


def _read_file(file: BinaryIO) -> dict[str, mx.array]:
    size = file.seek(0, io.SEEK_END)
    try:
        archive = zipfile.ZipFile(file)
    except zipfile.BadZipFile as error:
        raise Refusal("the zip is cut short or damaged: no directory at its end") from error
    records = _records(archive, size)
    root = _root(records)
    order = records.get(f"{root}/byteorder")
    if order is not None:
        if order.file_size > 16 or bytes(_read_record(archive, order)) != b"little":
            raise Refusal(f"its numbers are not little-endian: {_AGAIN} on a usual machine")
    info = records[f"{root}/data.pkl"]
    if info.file_size > PICKLE_LIMIT:
        raise Refusal(f"its data.pkl has {info.file_size} bytes, more than {PICKLE_LIMIT}")
    state = _state_dict(unpickle(bytes(_read_record(archive, info))))
    return _load(archive, root, records, state)


def _records(archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
    """The records by name, or a refusal of any that could unpack to more than the file holds."""
    records: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        name = printable(info.filename)
        if info.filename in records:
            raise Refusal(f"two records of the zip are called {name}")
        if info.flag_bits & 1:
            raise Refusal(f"its record {name} is encrypted")
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise Refusal(f"its record {name} is compressed, which torch.save never does")
        records[info.filename] = info
    if sum(info.file_size for info in records.values()) > size:
        raise Refusal("its records claim more bytes than the file has (cut short, or overlapping)")
    return records


def _root(records: dict[str, zipfile.ZipInfo]) -> str:
    """The folder of the zip that everything lies in, e.g. ``archive``."""
    places = [name.split("/") for name in records]
    if any(p[1:] == ["constants.pkl"] or p[1:2] == ["code"] for p in places):
        raise Refusal("a TorchScript archive, which holds code: save its state_dict() instead")
    roots = [p[0] for p in places if p[1:] == ["data.pkl"]]
    if len(roots) != 1:
        many = "more than one" if roots else "no"
        raise Refusal(f"the zip holds {many} data.pkl, so torch.save did not write it")
    return roots[0]


def _read_record(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """The bytes of a record in one buffer; zipfile compares the checksum at the last byte."""
    raw = np.empty(info.file_size, np.uint8)
    done = 0
    try:
        with archive.open(info) as stream:
            while done < raw.size:
                count = stream.readinto(raw[done : done + _CHUNK].data)
                if not count:
                    raise EOFError("too few bytes")
                done += count
    except (zipfile.BadZipFile, EOFError) as error:
        reason = printable(error) or "too few bytes"
        raise Refusal(f"its record {printable(info.filename)} is damaged ({reason})") from error
    return raw


def _state_dict(value: object) -> dict[str, View]:
    """The dict of tensors, taken out of its wrapper where it has one."""
    if type(value) is not dict:
        raise Refusal(f"its top level is {kind(value)}, not a dict of tensors")
    inner = [key for key in _WRAPPERS if type(value.get(key)) is dict]
    if inner:
        for key, other in value.items():
            if key != inner[0] and (type(key) is not str or type(other) not in _PLAIN):
                found = f"'{printable(key)}' beside the dict '{inner[0]}' is {kind(other)}"
                raise Refusal(f"{found}; only plain numbers and text are skipped there")
        value = value[inner[0]]
    for key, tensor in value.items():
        if type(key) is not str or not key.isprintable():
            raise Refusal(f"the tensor name '{printable(key)}' is not a string of plain text")
        if type(tensor) is not View:
            raise Refusal(f"'{printable(key)}' is {kind(tensor)}, not a tensor")
    if not value:
        raise Refusal("it holds no tensors")
    return value


def _check_view(name: str, view: View) -> None:
    """Refuse a tensor that does not lie inside its storage."""
    shape, strides = view.shape, view.strides
    fits = (
        type(shape) is tuple
        and type(strides) is tuple
        and len(shape) == len(strides) <= 32
        and all(type(n) is int and 0 <= n < 2**31 for n in shape)
        and all(type(n) is int and 0 <= n < 2**60 for n in (view.offset, *strides))
    )
    if not fits:
        raise Refusal(f"{name}: its shape, strides or offset are not those of a tensor")
    limit = view.storage.nbytes // DTYPES[view.dtype].itemsize
    count = math.prod(shape)  # of Python's integers, which do not overflow
    end = view.offset
    if count:
        end += 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if end > limit:
        raise Refusal(f"{name}: reaches outside its storage (element {end} of {limit})")
    if count > limit:
        raise Refusal(f"{name}: an expanded view, with more elements than its storage has")


def _load(
    archive: zipfile.ZipFile,
    root: str,
    records: dict[str, zipfile.ZipInfo],
    state: dict[str, View],
) -> dict[str, mx.array]:
    """Read each storage once, make its tensors, and let it go before the next."""
    grouped: dict[Storage, dict[View, list[str]]] = {}
    for name, view in state.items():
        _check_view(printable(name), view)
        grouped.setdefault(view.storage, {}).setdefault(view, []).append(name)
    arrays: dict[str, mx.array] = {}
    for storage, views in grouped.items():
        first, key = (printable(t) for t in (next(iter(views.values()))[0], storage.key))
        info = records.get(f"{root}/data/{storage.key}")
        if info is None:
            raise Refusal(f"{first}: the zip has no record data/{key}")
        if info.file_size < storage.nbytes:
            sizes = f"{info.file_size} bytes, but its storage {storage.nbytes}"
            raise Refusal(f"{first}: the record data/{key} has {sizes}")
        # Views that overlap in many ways would let a small file fill the memory.
        wanted = sum(math.prod(view.shape) * DTYPES[view.dtype].itemsize for view in views)
        if wanted > 4 * storage.nbytes + 4096:
            raise Refusal(f"{first}: too many different tensors overlap in its storage data/{key}")
        raw = _read_record(archive, info)
        for view, names in views.items():
            array = _to_mlx(printable(names[0]), view, raw[: storage.nbytes])
            # A handle for each name: writing to one tied array must not change the other.
            arrays.update((name, array.view(array.dtype)) for name in names)
    mx.eval(arrays)
    return {name: arrays[name] for name in state}


def _to_mlx(name: str, view: View, raw: np.ndarray) -> mx.array:
    dtype = DTYPES[view.dtype]
    flat = raw[: raw.size - raw.size % dtype.itemsize].view(dtype)
    # The stride of a dimension of one element may be anything, and is never used.
    strides = [s * dtype.itemsize * (n > 1) for n, s in zip(view.shape, view.strides, strict=True)]
    if 0 in view.shape:
        values = np.empty(view.shape, dtype)
    else:
        values = np.lib.stride_tricks.as_strided(flat[view.offset :], view.shape, strides)
    if not values.flags.c_contiguous:
        values = values.copy()
    if view.dtype == "bool":
        return mx.array(values != 0)
    if view.dtype == "bfloat16":  # NumPy has no such type: its bits pass as uint16
        return mx.array(values).view(mx.bfloat16)
    if view.dtype == "float64":
        try:
            with np.errstate(over="raise"):
                values = values.astype(np.float32)
        except FloatingPointError as error:
            raise Refusal(f"{name}: holds a float64 that is too large for float32") from error
    return mx.array(values)
