"""What a model returns, as tensors in tuples, lists and dictionaries of Python's own.

A class of another library in the output, such as Hugging Face's `ModelOutput`, would make the exported file need that
library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from esper.errors import ExportError
from esper.growth.export.reloading import tensors_in


def return_plain(model: nn.Module) -> None:
    """Let ``model`` return what `plain_output` makes of its output."""
    model.register_forward_hook(lambda _module, _arguments, returned: plain_output(returned))


def plain_output(returned: Any) -> Any:
    """Mappings and dataclasses as dictionaries, sequences as tuples or lists; what holds no tensor is left out.

    That is for instance the cache that a language model returns beside its logits, which is an object of its own.

    Raises:
        ExportError: no tensor is left.
    """
    plain = _plain(returned)
    if not tensors_in(plain):
        raise ExportError(
            f"the model returns a {type(returned).__name__} in which no tensor is found: wrap the model in a module "
            "that returns a tensor, or a tuple, list, mapping or dataclass of tensors"
        )
    return plain


def _plain(part: Any) -> Any:
    if isinstance(part, Tensor):
        return part
    if dataclasses.is_dataclass(part) and not isinstance(part, Mapping | type):
        part = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    if isinstance(part, Mapping):
        named = {name: _plain(one) for name, one in cast("Mapping[Any, Any]", part).items()}
        return {name: one for name, one in named.items() if one is not None} or None
    if isinstance(part, Sequence) and not isinstance(part, str | bytes):
        parts = [one for one in map(_plain, cast("Sequence[Any]", part)) if one is not None]
        return (tuple(parts) if isinstance(part, tuple) else parts) or None
    return None
