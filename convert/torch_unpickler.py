"""The interpreter of a checkpoint's ``data.pkl``: it can describe tensors and do nothing else.

A pickle is a program. This interpreter keeps only the opcodes that ``torch.save`` writes for
tensors, imports nothing, and every name that the pickle may use stands for a small function of
this file. What comes out are dicts, lists, tuples, numbers, text and ``View``; the file
``torch_pickle`` turns views into arrays.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

__all__ = ["DTYPES", "Refusal", "Storage", "View", "kind", "printable", "unpickle"]

_DEPTH_LIMIT = 100  # open marks; a state dict has fewer than ten
_TRUST = "only tensors are read (convert the file to safetensors where you trust it)"

# PyTorch's name of a type -> the NumPy type that its bytes are read as.
DTYPES = {
    name: np.dtype(code)
    for name, code in {
        "float32": "<f4", "float64": "<f8", "float16": "<f2", "bfloat16": "<u2",
        "int64": "<i8", "int32": "<i4", "int16": "<i2", "int8": "|i1", "uint8": "|u1",
        "bool": "|u1", "uint16": "<u2", "uint32": "<u4", "uint64": "<u8",
    }.items()
}  # fmt: skip
_STORAGES = {
    "torch.FloatStorage": "float32",
    "torch.DoubleStorage": "float64",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "int64",
    "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
    "torch.storage.UntypedStorage": None,
}


class Refusal(Exception):
    """Why a file is not read, in one line without the file's name."""


class Storage(NamedTuple):
    """A record ``data/<key>`` of the zip; dtype is None where each tensor names its own."""

    key: str
    dtype: str | None
    nbytes: int


class View(NamedTuple):
    """A tensor as the pickle describes it; offset, shape and strides are not checked yet."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Global(NamedTuple):
    """What a name in the pickle stands for: a function of this file, or only the name."""

    name: str
    build: Callable[..., Any] | None = None


def printable(text: object, limit: int = 120) -> str:
    """Text from a file made fit for one line of a terminal: no control characters, not long."""
    text = str(text)
    text = text if len(text) <= limit else text[:limit] + "..."
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def kind(value: object) -> str:
    """What a value is, in a few words for a message."""
    return "a tensor" if type(value) is View else f"of type {type(value).__name__.lstrip('_')}"


def unpickle(data: bytes) -> object:
    """Run the pickle of a checkpoint.

    Args:
        data: the bytes of data.pkl.

    Returns:
        What the pickle builds, made of dicts, lists, tuples, numbers, text and ``View`` only.

    Raises:
        Refusal: the pickle names, calls or uses anything else, or is damaged.
    """
    try:
        return _TensorUnpickler(data).load()
    except Refusal:
        raise
    except Exception as error:  # also RecursionError and MemoryError
        reason = f"{type(error).__name__}: {printable(error)}"
        raise Refusal(f"its data.pkl is damaged ({reason})") from error


def _tensor(storage, offset, size, stride, requires_grad=False, hooks=None, metadata=None) -> View:
    """Stands for torch._utils._rebuild_tensor_v2."""
    if type(storage) is not Storage or storage.dtype is None:
        raise Refusal("the pickle builds a tensor on something that is not a typed storage")
    return _view(storage, storage.dtype, offset, size, stride, metadata)


def _tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype, metadata=None) -> View:
    """Stands for torch._utils._rebuild_tensor_v3, which the wider unsigned types need."""
    name = dtype.name.removeprefix("torch.") if type(dtype) is _Global else None
    if type(storage) is not Storage or storage.dtype is not None or name not in DTYPES:
        raise Refusal("the pickle builds a tensor on something that is not an untyped storage")
    return _view(storage, name, offset, size, stride, metadata)


def _view(storage, dtype, offset, size, stride, metadata) -> View:
    if metadata:
        raise Refusal("the pickle holds a tensor with its conjugate or negative bit set")
    return View(storage, dtype, offset, size, stride)


def _parameter(data, requires_grad=False, hooks=None) -> View:
    """Stands for torch._utils._rebuild_parameter."""
    if type(data) is not View:
        raise Refusal("the pickle builds a parameter on something that is not a tensor")
    return data


def _ordered_dict() -> dict:
    """Stands for collections.OrderedDict: a plain dict keeps the order too."""
    return {}


def _size(items) -> tuple:
    """Stands for torch.Size."""
    if type(items) is not tuple:
        raise Refusal("the pickle builds a torch.Size on something that is not a tuple")
    return items


_ALLOWED = {
    "collections.OrderedDict": _ordered_dict,
    "torch.Size": _size,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    **dict.fromkeys(["torch.uint16", "torch.uint32", "torch.uint64", *_STORAGES]),
}
_GLOBALS = {tuple(n.rsplit(".", 1)): _Global(n, build) for n, build in _ALLOWED.items()}

# What torch.save writes for dicts of tensors under pickle protocols 2 to 5. INST is here only
# to name what it would call.
_OPCODES = """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT
    BINUNICODE SHORT_BINUNICODE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS
    EMPTY_DICT SETITEM SETITEMS BINPUT LONG_BINPUT BINGET LONG_BINGET MEMOIZE
    GLOBAL STACK_GLOBAL REDUCE BUILD BINPERSID INST
""".split()


class _Opcodes(dict):
    """The interpreter's table of opcodes; one that is not in it ends the reading."""

    def __missing__(self, code: int) -> None:
        known = pickletools.code2op.get(chr(code))
        name = f"the opcode {known.name}" if known else f"the unknown opcode {code}"
        raise Refusal(f"the pickle uses {name}; {_TRUST}")


# pickle's interpreter written in Python, because its table of opcodes can be cut down. The one
# in C would still follow EXT (objects that other code registered), NEWOBJ, OBJ and BUILD.
class _TensorUnpickler(pickle._Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._storages: dict[str, Storage] = {}

    def find_class(self, module: str, name: str) -> _Global:
        """Look a name up in our own table: nothing is imported, and dots are only characters."""
        found = _GLOBALS.get((module, name))
        if found is not None:
            return found
        full = printable(f"{module}.{name}")
        if module == "torch" and (name.endswith("Storage") or name.startswith("float8")):
            raise Refusal(f"the pickle holds numbers of the kind {full}, which are not read")
        raise Refusal(f"the pickle calls {full}; {_TRUST}")

    def persistent_load(self, pid: object) -> Storage:
        """The storage that ('storage', type, key, location, count) describes."""
        if type(pid) is not tuple or [type(x) for x in pid] != [str, _Global, str, str, int]:
            raise Refusal("the pickle refers to an outside object that is not a storage")
        tag, of, key, _, count = pid
        if tag != "storage" or of.name not in _STORAGES or not 0 <= count < 2**60:
            raise Refusal("the pickle refers to an outside object that is not a storage")
        dtype = _STORAGES[of.name]
        storage = Storage(key, dtype, count * (DTYPES[dtype].itemsize if dtype else 1))
        if self._storages.setdefault(key, storage) != storage:
            raise Refusal(f"the pickle describes the storage {printable(key)} in two ways")
        return storage

    def load_mark(self) -> None:
        if len(self.metastack) >= _DEPTH_LIMIT:
            raise Refusal(f"the pickle is nested more than {_DEPTH_LIMIT} deep")
        super().load_mark()

    def load_inst(self) -> None:
        module, name = (self.readline()[:-1].decode("utf-8") for _ in range(2))
        self.find_class(module, name)
        self.dispatch.__missing__(pickle.INST[0])

    def load_reduce(self) -> None:
        args = self.stack.pop()
        target = self.stack[-1]
        if type(target) is not _Global or target.build is None or type(args) is not tuple:
            raise Refusal(f"the pickle calls something {kind(target)}; {_TRUST}")
        self.stack[-1] = target.build(*args)

    def load_build(self) -> None:
        # The state of an OrderedDict is the _metadata of a state dict: not weights, so dropped.
        self.stack.pop()
        self._dict("sets the state of")

    def load_setitem(self) -> None:
        value = self.stack.pop()
        self._set_items([self.stack.pop(), value])

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def _dict(self, does: str) -> dict:
        target = self.stack[-1]
        if type(target) is not dict:
            raise Refusal(f"the pickle {does} something {kind(target)}; {_TRUST}")
        return target

    def _set_items(self, items: list) -> None:
        target = self._dict("sets items of")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # To hash a deep tuple overflows the C stack; large integers can be made to collide.
            if type(key) is not str and (type(key) is not int or abs(key) >= 2**31):
                raise Refusal(f"the pickle holds a dict key {kind(key)}, not a string")
            target[key] = value


def _table() -> _Opcodes:
    """The allowed opcodes, each with our method where there is one, else with pickle's."""
    codes = [getattr(pickle, name)[0] for name in _OPCODES]
    methods = [pickle._Unpickler.dispatch[code].__name__ for code in codes]
    return _Opcodes(zip(codes, [getattr(_TensorUnpickler, m) for m in methods], strict=True))


_TensorUnpickler.dispatch = _table()
