"""The structs of runtime/request.h."""

import ctypes

U8, U32, U64 = ctypes.c_uint8, ctypes.c_uint32, ctypes.c_uint64


class Buffer(ctypes.Structure):
    """A buffer of the launch, and the bytes counted there."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("size", U64),
        ("state", ctypes.c_void_p),
        ("space", U32),
        ("read_only", U32),
        ("start", U64),
        ("read", U64),
        ("written", U64),
    ]


class Party(ctypes.Structure):
    """A thread, and what it does where."""

    _fields_ = [("threadgroup", U32 * 3), ("thread", U32), ("site", U32), ("access", U32)]


class FaultRecord(ctypes.Structure):
    """The fault that ended a launch; kind 0: none did."""

    _fields_ = [
        ("kind", U32),
        ("space", U32),
        ("region", U32),
        ("size", U32),
        ("offset", ctypes.c_int64),
        ("party", Party),
        ("other", Party),
        ("has_other", U32),
        ("aligned", U32),
    ]


class Request(ctypes.Structure):
    """A launch: what it is given, then its results."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(Buffer)),
        ("array_table", ctypes.c_void_p),
        ("constants", ctypes.c_void_p),
        ("arrays", ctypes.POINTER(U32)),
        ("buffer_count", U32),
        ("array_count", U32),
        ("constant_count", U32),
        ("grid", U32 * 3),
        ("threadgroup", U32 * 3),
        ("seed", U64),
        ("multiply_accumulates", U64),
        ("special_functions", U64),
        ("barriers", U64),
        ("simd_operations", U64),
        ("threadgroup_read", U64),
        ("threadgroup_written", U64),
        ("fault", FaultRecord),
    ]
