"""Untie weights shared by several modules of a host, such as an embedding and a head, when growth changes one of them.

The changed module then has its own weight, which must not be tied again when the model is rebuilt. Hugging Face models
tie weights as their configuration says, so `TiedWeights.untie` changes the configuration.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from typing import Any, NamedTuple

from torch import nn

from esper.growth.depth import CONFIGURATION
from esper.growth.taps import list_named_modules

_FLAG = "tie_word_embeddings"
"""Attribute of configurations: whether an embedding and a head share a weight."""
_TIE = "tie_weights"
"""Method of Hugging Face models that ties weights according to their configuration."""


class _Place(NamedTuple):
    """Where a parameter is."""

    module: nn.Module
    name: str

    @property
    def parameter(self) -> nn.Parameter | None:
        """The current parameter at this place; None if there is none."""
        return dict(self.module.named_parameters(recurse=False)).get(self.name)


class TiedWeights:
    """The parameters of ``host`` that have several places when this object is created."""

    def __init__(self, host: nn.Module) -> None:
        self._host = host
        groups: dict[nn.Parameter, list[_Place]] = defaultdict(list)
        for _, module in list_named_modules(host, remove_duplicate=False):
            for name, parameter in module.named_parameters(recurse=False):
                groups[parameter].append(_Place(module, name))
        self._groups = {parameter: places for parameter, places in groups.items() if len(places) > 1}

    def untie(self) -> list[nn.Module]:
        """Change configurations so that places which now have different parameters are not tied.

        There is a warning where this is not possible: no configuration ties the places, the class ties them regardless
        of the configuration, or the same flag still ties other places.

        Returns:
            Parts of the host that would lose growth if they were rebuilt.
        """
        losing: list[nn.Module] = []
        for before, places in self._groups.items():
            changed = [(place, place.parameter) for place in places if place.parameter is not before]
            if len({place.parameter for place in places}) == 1:  # still one
                continue
            tying = self._find_tying(places)
            stubborn = tying if len(places) - len(changed) > 1 else []
            if not stubborn:
                for configuration in [configuration for part in tying for configuration in _list_configurations(part)]:
                    if getattr(configuration, _FLAG, False):
                        setattr(configuration, _FLAG, False)
                # Tie again, as classes may do regardless of their configuration, and restore what was lost.
                for part in tying:
                    getattr(part, _TIE)()
                    lost = [(place, parameter) for place, parameter in changed if place.parameter is not parameter]
                    for place, parameter in lost:
                        place.module.register_parameter(place.name, parameter)
                    stubborn += [part] if lost else []
            losing += stubborn
            if stubborn or not tying:
                names = {module: name for name, module in list_named_modules(self._host)}
                together, apart = (
                    " and ".join(repr(f"{names[place.module]}.{place.name}".lstrip(".")) for place in chosen)
                    for chosen in (places, [place for place, _ in changed])
                )
                warnings.warn(
                    f"{together} were one weight, and are apart from now on, since something grew in {apart}: nothing "
                    "may tie them again, such as tie_weights(), or a class that ties and then loads this model's state "
                    "dict",
                    stacklevel=6,
                )
        return losing

    def _find_tying(self, places: list[_Place]) -> list[nn.Module]:
        """Parts of the host that contain all ``places`` and can tie them."""
        holders = {place.module for place in places}
        return [
            part
            for _, part in list_named_modules(self._host)
            if CONFIGURATION in vars(part)
            and callable(getattr(type(part), _TIE, None))
            and holders <= {inner for _, inner in list_named_modules(part)}
        ]


def _list_configurations(part: nn.Module) -> list[Any]:
    """The configurations that may have the flag of a part: its own, and that of the language model within it."""
    configuration: Any = vars(part)[CONFIGURATION]
    find_text = getattr(configuration, "get_text_config", None)
    return [configuration] if find_text is None else [configuration, find_text(decoder=True)]
