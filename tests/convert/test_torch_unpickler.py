"""Pickles that would do something: each is refused by name, and nothing is executed."""

import builtins
import copyreg
import functools
import importlib
import operator
import os
import pickle
import subprocess

import pytest
from torch_checkpoints import expect_refusal, name, plain, storage, table, tensor, write

from mlx_selective.convert.torch_pickle import read_torch_file


@pytest.fixture
def file(tmp_path):
    return tmp_path / "pytorch_model.bin"


class Call:
    def __init__(self, *reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


def payloads(marker):
    touch = f"touch {marker}"
    return {
        "posix.system": Call(os.system, (touch,)),
        "eval": Call(builtins.eval, (f"open({str(marker)!r}, 'w').close()",)),
        "exec": Call(builtins.exec, (f"open({str(marker)!r}, 'w').close()",)),
        "subprocess.Popen": Call(subprocess.Popen, (["touch", str(marker)],)),
        "importlib.import_module": Call(importlib.import_module, ("antigravity",)),
        "functools.partial": functools.partial(os.system, touch),
        "operator.attrgetter": operator.attrgetter("system"),
        "getattr": Call(getattr, (Call(importlib.import_module, ("os",)), "system")),
    }


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("what", payloads(""))
def test_calls_are_refused_by_name_and_not_made(file, tmp_path, protocol, what):
    marker = tmp_path / "marker"
    for value in (payloads(marker)[what], {"w": payloads(marker)[what]}):
        expect_refusal(write(file, pickle.dumps(value, protocol), whole=True), "the pickle ")
        # Protocol 2 has Python 2's names, and 0 and 1 have opcodes that are refused before.
        if protocol >= 3:
            expect_refusal(file, f"{what}; only tensors are read")
    assert not marker.exists()


def test_the_payloads_work_where_they_are_run(tmp_path):
    marker = tmp_path / "marker"
    for what in ("posix.system", "eval", "exec"):
        pickle.loads(pickle.dumps(payloads(marker)[what]))
        assert marker.exists(), what
        marker.unlink()


DOTTED = [
    ("collections", "OrderedDict.fromkeys"),
    ("torch._utils", "_rebuild_tensor_v2.__globals__"),
    ("os", "path.os.system"),
    ("torch", "Size.__class__"),
    ("torch", "load"),
    ("torch.serialization", "load"),
    ("mlx_selective.convert.torch_unpickler", "pickle.loads"),
    ("", "OrderedDict"),
    ("collections", "Counter"),
    ("torch\x1b[2J", "x\n"),
]


@pytest.mark.parametrize("module, attribute", DOTTED)
def test_other_names_are_refused(file, module, attribute):
    body = b"\x80\x04" + plain(module) + plain(attribute) + b"\x93" + plain(("x",)) + b"R."
    shown = f"{module}.{attribute}".replace("\x1b", "\\x1b").replace("\n", "\\n")
    expect_refusal(write(file, body, whole=True), f"the pickle calls {shown}; only tensors")


ODD_OPCODES = {
    "INST": (b"(" + plain("touch x") + b"iposix\nsystem\n", "calls posix.system"),
    "INST allowed": (b"(icollections\nOrderedDict\n", "opcode INST"),
    "OBJ": (b"(" + name("posix.system") + plain("touch x") + b"o", "calls posix.system"),
    "OBJ allowed": (b"(" + name("collections.OrderedDict") + b"o", "opcode OBJ"),
    "NEWOBJ": (name("collections.OrderedDict") + b")\x81", "opcode NEWOBJ"),
    "NEWOBJ_EX": (name("collections.OrderedDict") + b")}\x92", "opcode NEWOBJ_EX"),
    "EXT1": (b"\x82\xf0" + plain(("touch x",)) + b"R", "opcode EXT1"),
    "EXT2": (b"\x83\xf0\x00", "opcode EXT2"),
    "EXT4": (b"\x84\xf0\x00\x00\x00", "opcode EXT4"),
    "PERSID": (b"P0\n", "opcode PERSID"),
    "DUP": (b"}2", "opcode DUP"),
    "unknown": (b"\xff", "unknown opcode 255"),
    "BUILD of a function": (name("torch.Size") + plain({"build": 1}) + b"b", "sets the state"),
    "BUILD of slots": (name("torch.Size") + b"N" + plain({"build": 1}) + b"\x86b", "sets the"),
    "BUILD of a tensor": (tensor() + plain({"shape": 1}) + b"b", "sets the state"),
    "BUILD of a storage": (storage() + plain({"key": 1}) + b"b", "sets the state"),
    "REDUCE of text": (plain("x") + b")R", "calls something of type str"),
    "REDUCE of a storage type": (name("torch.FloatStorage") + b")R", "calls something"),
    "REDUCE of a tensor": (tensor() + b")R", "calls something a tensor"),
    "REDUCE with text": (name("torch.Size") + plain("ab") + b"R", "calls something"),
    "filled OrderedDict": (name("collections.OrderedDict") + plain(([1],)) + b"R", "damaged"),
    "Size of a list": (name("torch.Size") + plain(([1],)) + b"R", "torch.Size"),
    "SETITEM of a list": (b"]" + plain(0) + plain(1) + b"s", "sets items of something of type"),
    "SETITEMS of a tensor": (tensor() + b"(" + plain("a") + plain(1) + b"u", "sets items"),
    "SETITEMS of one": (b"}(" + plain("a") + b"u", "damaged"),
    "APPEND to a dict": (b"}" + plain(1) + b"a", "damaged"),
    "list key": (b"}]" + plain(1) + b"s", "a dict key of type list"),
    "deep tuple key": (b"})" + b"\x85" * 200_000 + b"Ns", "a dict key of type tuple"),
    "float key": (b"}" + plain(0.5) + b"Ns", "a dict key of type float"),
    "large key": (b"}" + plain(2**61) + b"Ns", "a dict key of type int"),
    "number key": (b"}" + plain(1) + tensor() + b"s", "'1' is not a string"),
    "control key": (b"}" + plain("a\x1b[2J\n") + tensor() + b"s", "'a\\x1b[2J\\n' is not"),
    "surrogate key": (b"}X\x03\x00\x00\x00\xed\xa0\x80" + tensor() + b"s", "'\\ud800' is not"),
    "STACK_GLOBAL of numbers": (plain(1) + plain(2) + b"\x93", "damaged"),
    "persistent text": (plain("0") + b"Q", "not a storage"),
    "other tag": (storage(tag="module"), "not a storage"),
    "storage of no storage type": (storage("torch.Size"), "not a storage"),
    "negative count": (storage(count=-1), "not a storage"),
    "text count": (storage(count="6"), "not a storage"),
    "number key of a storage": (storage(key=0), "not a storage"),
    "one storage, two types": (table({"a": tensor(), "b": tensor(of=storage("torch.IntStorage"))}),
                               "the storage 0 in two ways"),
    "complex": (name("torch.ComplexFloatStorage"), "numbers of the kind torch.ComplexFloatStorage"),
    "float8": (name("torch.float8_e4m3fn"), "numbers of the kind torch.float8_e4m3fn"),
    "tensor of nothing": (tensor(of=b"N"), "not a typed storage"),
    "untyped v2": (tensor(of=storage("torch.storage.UntypedStorage")), "not a typed storage"),
    "typed v3": (tensor(rebuild="v3", tail=name("torch.uint16")), "not an untyped storage"),
    "conjugate": (tensor(tail=plain({"conj": True})), "conjugate"),
    "parameter of nothing": (name("torch._utils._rebuild_parameter") + b"(N\x89)tR", "parameter"),
    "few arguments": (name("torch._utils._rebuild_tensor_v2") + b")R", "damaged"),
    "deep marks": (b"(" * 10**5, "nested more than"),
    "deep tuples": (table({"w": b")" + b"\x85" * 200_000}), "'w' is of type tuple"),
    "deep lists": (table({"w": b"]" * 10**5 + b"a" * (10**5 - 1)}), "'w' is of type list"),
    "itself": (b"}q\xc8" + plain("w") + b"h\xc8s", "'w' is of type dict"),
    "no memo": (b"h\x63", "damaged"),
    "empty stack": (b"", "damaged"),
    "protocol 9": (b"\x80\x09N", "damaged"),
    "number": (plain(1), "top level is of type int"),
    "bare tensor": (tensor(), "top level is a tensor"),
    "nothing": (b"}", "no tensors"),
    "number inside": (table({"w": tensor(), "n": plain(1)}), "'n' is of type int, not a tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD_OPCODES)
def test_odd_pickles_are_refused(file, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(copyreg._extension_cache, 0xF0, os.system)  # what EXT would reach
    body, words = ODD_OPCODES[case]
    expect_refusal(write(file, body), words)
    assert os.listdir(tmp_path) == [file.name]


def test_the_state_of_an_ordered_dict_is_dropped(file):
    state = {"__class__": 1, "__setitem__": 2, "w": 3, "_metadata": {}}
    body = (
        name("collections.OrderedDict") + b")R" + plain("w") + tensor() + b"s" + plain(state) + b"b"
    )
    assert list(read_torch_file(write(file, body))) == ["w"]
