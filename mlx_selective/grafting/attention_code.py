"""mlx-lm's own attention code of a layer, run with a LayerCall in it."""

import inspect
import types
from typing import Any

import mlx.nn as nn

from ..errors import UserError

INTERCEPTED = "scaled_dot_product_attention"
#: what mlx-lm's attention modules call the part that turns queries and keys by their position
_ROPE_NAMES = ("rope", "rotary_emb")
_MASK_NAMES = ("mask", "attention_mask")
#: parameters beside input, mask and cache that have nothing to do with keys kept elsewhere
_HARMLESS = ("attn_scale",)


def names_in_code(module: nn.Module) -> tuple[str, ...]:
    """The names that a module's own ``__call__`` uses."""
    code = getattr(type(module).__call__, "__code__", None) if callable(module) else None
    return code.co_names if code else ()


def calls_attention(module: nn.Module) -> bool:
    """Whether a module's own code ends in mlx-lm's attention function."""
    return INTERCEPTED in names_in_code(module)


def with_globals(function: types.FunctionType, **names: Any) -> types.FunctionType:
    """The same code, finding other things under some global names."""
    code, scope = function.__code__, {**function.__globals__, **names}
    copy = types.FunctionType(
        code, scope, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class AttentionCode:
    """The ``__call__`` of an mlx-lm attention class, with three things exchanged.

    The names that the code finds in its module are those of this moment.

    Args:
        base: the class; ``calls_attention`` holds for its instances.

    Attributes:
        input: what the code calls the layer's input (B, T, C).
        scales_by_position: whether it takes a scale of the queries that depends on their position.

    Raises:
        UserError: if it takes keys from elsewhere, or no mask or cache.
    """

    def __init__(self, base: type):
        original = base.__call__
        self._run = with_globals(original, **{INTERCEPTED: _hand_over})
        self._signature = inspect.signature(original)
        self._self, self.input, *others = self._signature.parameters
        self._mask = next((name for name in _MASK_NAMES if name in others), None)
        if self._mask is None or "cache" not in others:
            raise UserError(f"{base.__name__} cannot be grafted: it takes no mask or no cache.")
        self.scales_by_position = any(name in others for name in _HARMLESS)
        foreign = [n for n in others if n not in (self._mask, "cache", *_HARMLESS)]
        if foreign:
            raise UserError(
                f"{base.__name__} cannot be grafted: it takes {', '.join(foreign)} beside input, "
                "mask and cache, as layers do that share keys and values."
            )

    def bind(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, the module itself among them."""
        return self._signature.bind(module, *args, **kwargs).arguments

    def extra_arguments(self) -> dict[str, Any]:
        """Neutral values of the parameters that have none, beside the input."""
        empty = inspect.Parameter.empty
        names = [n for n, p in self._signature.parameters.items() if p.default is empty][2:]
        return {name: 1 if name in _HARMLESS else None for name in names}

    def run(self, call: Any, arguments: dict[str, Any]) -> Any:
        """Runs the code; the mask and the cache that the model passed are left aside.

        Args:
            call: what takes the place of cache, RoPE and attention function.
            arguments: as :meth:`bind` gives them.
        """
        lent = _Lent(arguments[self._self], call)
        return self._run(**arguments | {self._self: lent, self._mask: None, "cache": call})


class _Lent:
    """An attention module as its own code sees it in one call: all of it, but for its RoPE."""

    def __init__(self, module, call):
        self._module, self._call = module, call

    def __getattr__(self, name):
        part = getattr(self._module, name)
        # None in layers that have no positions
        return _LentRope(part, self._call) if name in _ROPE_NAMES and part is not None else part

    def __contains__(self, name):
        return name in self._module

    def __getitem__(self, name):
        return self._module[name]


class _LentRope:
    """The RoPE of such a module: whatever it is asked to turn, the LayerCall turns."""

    def __init__(self, rope, call):
        self._rope, self._call = rope, call

    def __call__(self, x, *args, **kwargs):
        return self._call.rotate(self._rope, x, *args, **kwargs)

    def __getattr__(self, name):
        return getattr(self._rope, name)


def _hand_over(queries, keys, values, cache, scale, mask, sinks=None):
    """Stands in a grafted layer where mlx-lm's attention function was."""
    if sinks is not None:
        raise UserError("attention sinks would be lost")
    if mask is not None:
        raise UserError("a mask or bias of its own (latent or sparse attention) would be lost")
    return cache.attend(queries, keys, values, scale)
