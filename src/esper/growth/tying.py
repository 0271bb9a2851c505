"""Weights that several modules of a host share, such as an embedding and a head, when something is added to one place.

The place then has a weight that no other has, and what builds the model again must not tie it: Hugging Face's models
tie by their configuration, which `TiedWeights.untie` therefore changes.
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
"""Method of Hugging Face's models that ties weights again, as their configuration states."""


class _Place(NamedTuple):
    """Where a parameter is."""

    module: nn.Module
    name: str

    @property
    def parameter(self) -> nn.Parameter | None:
        """The parameter that is there now; None: none is."""
        return dict(self.module.named_parameters(recurse=False)).get(self.name)


class TiedWeights:
    """The parameters of ``host`` that have several places, as they are when this is made."""

    def __init__(self, host: nn.Module) -> None:
        self._host = host
        groups: dict[nn.Parameter, list[_Place]] = defaultdict(list)
        for _, module in list_named_modules(host, remove_duplicate=False):
            for name, parameter in module.named_parameters(recurse=False):
                groups[parameter].append(_Place(module, name))
        self._groups = {parameter: places for parameter, places in groups.items() if len(places) > 1}

    def untie(self) -> list[nn.Module]:
        """Let configurations state that places which have another parameter by now are not tied.

        Where that cannot be stated, a warning says what to look after: no configuration ties the places; its class ties
        them whatever it states; or more than one place is still tied by the same flag.

        Returns:
            Parts of the host that would lose what was added if they were built again.
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
                # Tie again, as classes may whatever their configuration states, and put back what was lost.
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
        """Parts of the host that hold all ``places`` and can tie them."""
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
