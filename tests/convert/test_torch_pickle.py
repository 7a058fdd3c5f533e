"""PyTorch checkpoints built by hand: tensors come out right, files that lie are refused."""

import collections
import io
import json
import pickle
import struct
import sys
import types
import zipfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_checkpoints import SIX, expect_refusal, name, plain, storage, table, tensor, write

from mlx_selective.convert.torch_pickle import PICKLE_LIMIT, read_torch_file
from mlx_selective.errors import UserError

CHECKPOINTS = Path(__file__).resolve().parents[2].parent / "shared" / "checkpoints"
FUZZ = settings(max_examples=300, deadline=None, database=None)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "pytorch_model.bin"


# What is read ------------------------------------------------------------------------------------

TYPES = {
    "Float": ("<f4", mx.float32), "Half": ("<f2", mx.float16), "Long": ("<i8", mx.int64),
    "Int": ("<i4", mx.int32), "Short": ("<i2", mx.int16), "Char": ("|i1", mx.int8),
    "Byte": ("|u1", mx.uint8), "Bool": ("|b1", mx.bool_), "Double": ("<f8", mx.float32),
}  # fmt: skip


@pytest.mark.parametrize("kind", TYPES)
def test_each_type(file, kind):
    code, expected = TYPES[kind]
    data = np.array([[0, 1, 2], [3, 100, 5]]).astype(code)
    write(file, table({"w": tensor(of=storage(f"torch.{kind}Storage"))}), {"0": data.tobytes()})
    read = read_torch_file(file)
    assert list(read) == ["w"] and read["w"].dtype == expected
    assert np.array_equal(np.array(read["w"]), data)


def test_bfloat16_keeps_its_bits(file):
    bits = np.array([0x3F80, 0xC000, 0x7F7F, 0x0001, 0x8000, 0x3FC0], "<u2")
    write(file, table({"w": tensor(of=storage("torch.BFloat16Storage"))}), {"0": bits.tobytes()})
    read = read_torch_file(file)["w"]
    assert read.dtype == mx.bfloat16 and read[0].tolist() == [
        1.0,
        -2.0,
        pytest.approx(3.39e38, 0.01),
    ]
    assert np.array_equal(np.array(read.view(mx.uint16)).ravel(), bits)


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_unsigned_types_in_untyped_storages(file, bits):
    data = np.arange(6, dtype=f"<u{bits // 8}") + (1 << bits - 1)
    untyped = storage("torch.storage.UntypedStorage", data.nbytes)
    body = tensor(of=untyped, rebuild="v3", tail=name(f"torch.uint{bits}"))
    write(file, table({"w": body}), {"0": data.tobytes()})
    assert np.array_equal(np.array(read_torch_file(file)["w"]), data.reshape(2, 3))


def test_odd_bytes_of_a_bool_are_true(file):
    body = tensor((), (), of=storage("torch.BoolStorage", 1))
    write(file, table({"w": body}), {"0": b"\x02"})
    read = read_torch_file(file)["w"]
    assert read.dtype == mx.bool_ and read.shape == () and read.view(mx.uint8).item() == 1


def test_shared_storages_views_and_parameters(file):
    parameter = name("torch._utils._rebuild_parameter") + b"(" + tensor() + b"\x88)tR"
    entries = {
        "tied": tensor(), "whole": tensor(), "transposed": tensor((3, 2), (1, 3)),
        "row": tensor((3,), (1,), 3), "column": tensor((2,), (3,), 1), "scalar": tensor((), (), 5),
        "empty": tensor((0, 4), (4, 1)), "parameter": parameter, "odd": tensor((1, 6), (10**17, 1)),
    }  # fmt: skip
    whole = SIX.reshape(2, 3)
    expected = {
        "tied": whole, "whole": whole, "transposed": whole.T, "row": whole[1],
        "column": whole[:, 1], "scalar": SIX[5], "empty": np.empty((0, 4)), "parameter": whole,
        "odd": SIX[None],
    }  # fmt: skip
    read = read_torch_file(write(file, table(entries)))
    assert list(read) == list(entries)
    for key, value in expected.items():
        assert read[key].shape == value.shape and np.array_equal(np.array(read[key]), value), key
    read["tied"][0, 0] = 99
    assert read["whole"][0, 0].item() == 1


@settings(max_examples=100, deadline=None, database=None)
@given(st.data())
def test_strided_views_as_numpy_has_them(tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
    strides = data.draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    offset = data.draw(st.integers(0, 20))
    values = np.arange(24, dtype="<i4")
    body = table(
        {"w": tensor(tuple(shape), tuple(strides), offset, of=storage("torch.IntStorage", 24))}
    )
    path = write(tmp_path_factory.getbasetemp() / "strided.bin", body, {"0": values.tobytes()})
    places = [offset + np.dot(i, strides) for i in np.ndindex(*shape)]
    if (max(places) if places else offset - 1) >= 24 or len(places) > 24:
        expect_refusal(path, "w: ")
    else:
        expected = values[np.array(places, int)].reshape(shape)
        assert np.array_equal(np.array(read_torch_file(path)["w"]), expected)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_a_real_pickler_writes(file, monkeypatch, protocol):
    """An OrderedDict with _metadata, as Module.state_dict() returns it, in every protocol."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    torch.FloatStorage = type("FloatStorage", (), {"__module__": "torch"})
    utils._rebuild_tensor_v2 = lambda *args: None
    utils._rebuild_tensor_v2.__module__ = "torch._utils"
    utils._rebuild_tensor_v2.__qualname__ = "_rebuild_tensor_v2"
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._utils", utils)

    class Tensor:
        def __reduce__(self):
            rest = (0, (2, 3), (3, 1), False, collections.OrderedDict())
            return utils._rebuild_tensor_v2, (torch.FloatStorage(), *rest)

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            if isinstance(obj, torch.FloatStorage):
                return "storage", torch.FloatStorage, "0", "cpu", 6

    state = collections.OrderedDict((f"layer.{i}", Tensor()) for i in range(300))
    state._metadata = collections.OrderedDict({"": {"version": 1}})
    out = io.BytesIO()
    Pickler(out, protocol).dump(
        {"model": state, "epoch": 3, "note": "x", "loss": 0.5, "none": None}
    )
    read = read_torch_file(write(file, out.getvalue(), whole=True))
    assert list(read) == list(state) and read["layer.7"].tolist() == SIX.reshape(2, 3).tolist()


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict"])
def test_a_wrapped_state_dict(file, key):
    inner = {key: table({"w": tensor()})}
    assert list(read_torch_file(write(file, table(inner | {"step": plain(1)})))) == ["w"]
    expect_refusal(
        write(file, table(inner | {"args": plain([1])})), "'args' beside the dict", "list"
    )
    expect_refusal(
        write(file, table(inner | {"other": tensor()})), "'other' beside the dict", "a tensor"
    )
    expect_refusal(write(file, table(inner | {7: plain(1)})), "'7' beside the dict")


# Tensors that do not fit, and files that are not what they say -----------------------------------

VIEWS = {
    "too long": ((2, 4), (4, 1), 0, "reaches outside"),
    "offset": ((6,), (1,), 1, "reaches outside"),
    "offset of nothing": ((0,), (1,), 7, "reaches outside"),
    "stride": ((2, 3), (4, 1), 0, "reaches outside"),
    "large stride": ((2,), (2**59,), 0, "reaches outside"),
    "product": ((2**31 - 1,) * 4, (1, 1, 1, 1), 0, "reaches outside"),
    "expanded": ((7,), (0,), 0, "an expanded view"),
    "much expanded": ((2**31 - 1,) * 30, (0,) * 30, 0, "an expanded view"),
    "negative size": ((-1, 6), (6, 1), 0, "not those of a tensor"),
    "negative stride": ((6,), (-1,), 5, "not those of a tensor"),
    "negative offset": ((6,), (1,), -1, "not those of a tensor"),
    "size beyond 31 bits": ((2**31, 0), (0, 1), 0, "not those of a tensor"),
    "stride beyond 60 bits": ((1,), (2**63,), 0, "not those of a tensor"),
    "huge numbers": ((2**2000,), (2**2000,), 2**2000, "not those of a tensor"),
    "ranks": ((2, 3), (1,), 0, "not those of a tensor"),
    "rank 33": ((1,) * 33, (1,) * 33, 0, "not those of a tensor"),
    "floats": ((6.0,), (1,), 0, "not those of a tensor"),
    "bools": ((True,), (1,), 0, "not those of a tensor"),
    "lists": ([6], [1], 0, "not those of a tensor"),
    "number": (6, 1, 0, "not those of a tensor"),
    "nothing, but large": ((0,) + (2**31 - 1,) * 3, (1,) * 4, 0, "damaged"),
}


@pytest.mark.parametrize("case", VIEWS)
def test_tensors_outside_their_storage(file, case):
    shape, strides, offset, words = VIEWS[case]
    expect_refusal(
        write(file, table({"good": tensor(), "w": tensor(shape, strides, offset)})), words
    )


def test_storages_and_records(file):
    good = table({"w": tensor()})
    expect_refusal(write(file, good, {}), "w: the zip has no record data/0")
    expect_refusal(write(file, good, {"0": bytes(23)}), "data/0 has 23 bytes, but its storage 24")
    expect_refusal(write(file, good, extra={"byteorder": b"big"}), "not little-endian")
    expect_refusal(write(file, good, extra={"data.pkl": None}), "holds no data.pkl")
    expect_refusal(write(file, good, extra={"constants.pkl": b""}), "TorchScript")
    expect_refusal(write(file, good, extra={"code/__torch__.py": b""}), "TorchScript")
    for record in ("data.pkl", "data/0", "unused"):
        expect_refusal(
            write(file, good, extra={"unused": bytes(999)}, compress=record), record, "compressed"
        )
    views = {str(i): tensor((1000,), (1,), i, of=storage(count=2000)) for i in range(1000)}
    expect_refusal(
        write(file, table(views), {"0": bytes(8000)}), "too many different tensors overlap"
    )
    large = struct.pack("<d", 1e300) * 6
    double = table({"w": tensor(of=storage("torch.DoubleStorage"))})
    expect_refusal(write(file, double, {"0": large}), "w: holds a float64 that is too large")
    assert list(read_torch_file(write(file, good, extra={"byteorder": None}))) == ["w"]
    assert list(read_torch_file(write(file, good, {"0": SIX.tobytes() + b"more"}))) == ["w"]


def test_a_large_pickle_is_not_run(file):
    expect_refusal(write(file, b"N" * (PICKLE_LIMIT + 1)), "more than 16777216")


def test_zip_records_that_lie(file):
    write(file, table({"w": tensor()}))
    data = file.read_bytes()
    with zipfile.ZipFile(file, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("archive/data/0", bytes(24))
    expect_refusal(file, "two records of the zip are called archive/data/0")
    file.write_bytes(data.replace(SIX.tobytes(), bytes(24)))
    expect_refusal(file, "archive/data/0 is damaged (Bad CRC-32")
    entry = data.rindex(b"PK\x01\x02")  # the directory's entry of data/0
    sized = bytearray(data)
    sized[entry + 20 : entry + 28] = struct.pack("<II", 2**30, 2**30)
    file.write_bytes(sized)
    expect_refusal(file, "claim more bytes than the file has")
    sized = bytearray(data)
    sized[entry + 8] |= 1
    file.write_bytes(sized)
    expect_refusal(file, "encrypted")


def test_files_that_are_not_zip_checkpoints(file, tmp_path):
    expect_refusal(file, "no such file")
    expect_refusal(tmp_path, "is not a file")
    data = write(file, table({"w": tensor()})).read_bytes()
    legacy = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2)
    cases = [
        (legacy, "before 1.6"), (pickle.dumps({}), "bare pickle"), (b"", "not a zip"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"), (b"{}", "not a zip"),
        (b"PK\x05\x06" + bytes(18), "no data.pkl"), (b"junk" + data, "not a zip"),
    ]  # fmt: skip
    for content, words in cases:
        file.write_bytes(content)
        expect_refusal(file, words)
    for length in range(2, len(data)):
        file.write_bytes(data[:length])
        expect_refusal(file, "cut short")


# Chance ------------------------------------------------------------------------------------------

GOOD = table(
    {
        "a": tensor(),
        "b": tensor((3, 2), (1, 3)),
        "c": tensor((2,), (1,), of=storage(key="1", count=2)),
    }
)


def spoil(draw, data):
    """Overwrite, insert and remove a few bytes."""
    data = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data) - 1))
        new = draw(st.binary(max_size=3))
        data[at : at + draw(st.integers(0, 3))] = new
    return bytes(data)


@FUZZ
@given(st.data())
def test_spoilt_files_are_refused_or_read_right(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "spoilt.bin"
    stores = {"0": SIX.tobytes(), "1": SIX[:2].tobytes()}
    right = {k: v.tolist() for k, v in read_torch_file(write(path, GOOD, stores)).items()}
    path.write_bytes(spoil(data.draw, path.read_bytes()))
    try:
        read = read_torch_file(path)
    except UserError as error:
        assert str(error).isprintable()
    else:
        assert {k: v.tolist() for k, v in read.items()} == right


@FUZZ
@given(st.data())
def test_spoilt_pickles_build_tensors_or_nothing(tmp_path_factory, data):
    """As above with the checksum made right again, so that the interpreter meets the bytes."""
    path = tmp_path_factory.getbasetemp() / "spoilt_pickle.bin"
    write(path, spoil(data.draw, GOOD), {"0": SIX.tobytes(), "1": SIX[:2].tobytes()})
    try:
        read = read_torch_file(path)
    except UserError as error:
        assert str(error).isprintable()
    else:
        assert all(type(k) is str and type(v) is mx.array for k, v in read.items())
        assert all(
            set(np.array(v).ravel()) <= set(SIX) for v in read.values() if v.dtype == mx.float32
        )


# Real files --------------------------------------------------------------------------------------


def llama_shapes(width, inner, heads, vocabulary):
    layer = {f"self_attn.{p}_proj.weight": (width, width) for p in "qkvo"}
    layer |= {f"mlp.{p}_proj.weight": (inner, width) for p in ("gate", "up")}
    layer |= {"mlp.down_proj.weight": (width, inner)}
    layer |= {f"{p}_layernorm.weight": (width,) for p in ("input", "post_attention")}
    outer = {"embed_tokens.weight": (vocabulary, width), "norm.weight": (width,)}
    return "model.layers", layer, {f"model.{k}": v for k, v in outer.items()}


def neox_shapes(width, inner, heads, vocabulary):
    layer = {f"{p}_layernorm.weight": (width,) for p in ("input", "post_attention")}
    layer |= {"attention.query_key_value.weight": (3 * width, width)}
    layer |= {"attention.dense.weight": (width, width)}
    layer |= {"mlp.dense_h_to_4h.weight": (inner, width)}
    layer |= {"mlp.dense_4h_to_h.weight": (width, inner)}
    layer |= {k.replace("weight", "bias"): v[:1] for k, v in layer.items()}
    for part in ("query", "value"):
        layer[f"attention.ssa_{part}.weight"] = (heads, width)
        layer[f"attention.ssa_{part}_alpha"] = (heads,)
    outer = {f"gpt_neox.final_layer_norm.{p}": (width,) for p in ("weight", "bias")}
    both = dict.fromkeys(["gpt_neox.embed_in.weight", "embed_out.weight"], (vocabulary, width))
    return "gpt_neox.layers", layer, outer | both


@pytest.mark.parametrize("shapes", [llama_shapes, neox_shapes])
def test_real_checkpoints(shapes):
    folder = "llama-selective" if shapes is llama_shapes else "neox-ssa"
    path = CHECKPOINTS / folder / "pytorch_model.bin"
    if not path.is_file():
        pytest.skip(f"needs ../shared/checkpoints/{folder}/pytorch_model.bin beside the repository")
    config = json.loads((path.parent / "config.json").read_text())
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    prefix, layer, expected = shapes(*(config[k] for k in sizes))
    for i in range(config["num_hidden_layers"]):
        expected |= {f"{prefix}.{i}.{k}": v for k, v in layer.items()}
    read = read_torch_file(path)
    assert {k: v.shape for k, v in read.items()} == expected
    assert all(v.dtype == mx.float16 and mx.isfinite(v).all().item() for v in read.values())
