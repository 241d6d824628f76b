"""Values that code given from Python uses, such as arrays, modules and closures' contents, as text in its source.

A value is pickled; functions and classes of the user's are names of the module that has the text, tensors their bytes.
"""

from __future__ import annotations

import base64
import io
import pickle
import sys
import zlib
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

LARGEST_TEXT = 1 << 26
"""Characters of a stored value: a model of 12 million parameters."""
PROTOCOL = 5
"""Of pickle, which every Python that hpcfed supports has."""


class NotStorable(Exception):
    """A value or a definition that no text can stand for; the message says which."""


def stored(value: Any, name_of: Callable[[Any], str | None]) -> str:
    """Return a value as text for `restored`.

    Args:
        name_of: the name that a function, a class or a module has where the text is read; None where pickle finds it.

    Raises:
        NotStorable: it cannot be pickled, or is too large.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, name_of).dump(value)
    except NotStorable:
        raise
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError, RuntimeError, ValueError) as error:
        raise NotStorable(f"{_kind(value)} ({error})") from error
    text = base64.b85encode(zlib.compress(buffer.getvalue())).decode()
    if len(text) > LARGEST_TEXT:
        raise NotStorable(f"{_kind(value)} of more than {LARGEST_TEXT:,} characters")
    return text


def restored(text: str, names: Mapping[str, Any]) -> Any:
    """Return the value of a text of `stored`, anew at each call; `names` are those of the module that has it."""
    return _Unpickler(io.BytesIO(zlib.decompress(base64.b85decode(text))), names).load()


def tensor(content: bytes, dtype: str, shape: tuple[int, ...], requires_grad: bool, is_parameter: bool) -> Any:
    """Return a tensor on the host from its bytes."""
    import torch

    found = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    found = found.view(getattr(torch, dtype)).reshape(shape)
    return torch.nn.Parameter(found, requires_grad) if is_parameter else found.requires_grad_(requires_grad)


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, name_of: Callable[[Any], str | None]):
        super().__init__(file, PROTOCOL)
        self._name_of = name_of

    def persistent_id(self, obj: Any) -> str | None:
        return self._name_of(obj) if isinstance(obj, FunctionType | type | ModuleType) else None

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(obj) not in (torch.Tensor, torch.nn.Parameter) or obj.layout is not torch.strided:
            return NotImplemented
        if obj.is_meta:
            return NotImplemented
        flat = obj.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        content = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        is_parameter = type(obj) is torch.nn.Parameter
        facts = str(obj.dtype).removeprefix("torch."), tuple(obj.shape), obj.requires_grad and obj.is_leaf, is_parameter
        return tensor, (content, *facts)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, names: Mapping[str, Any]):
        super().__init__(file)
        self._names = names

    def persistent_load(self, pid: Any) -> Any:
        return self._names[pid]
