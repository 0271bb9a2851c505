"""All kinds of models, and what is known not to work with them."""

from collections.abc import Generator
from contextlib import contextmanager

import pytest

from conformance import frozen, generative, pretrained, sequences, tricks, vision
from conformance.kind import Kind
from esper.errors import EsperError

KINDS: tuple[Kind, ...] = (
    *vision.KINDS,
    *sequences.KINDS,
    *generative.KINDS,
    *tricks.KINDS,
    *pretrained.KINDS,
    *frozen.KINDS,
)
REFUSED: tuple[tuple[Kind, str], ...] = (*generative.REFUSED, *tricks.REFUSED)
LEARNED = "learned"
"""A policy; the others are rules, by their names."""
CONTROLLERS = ("look", "heuristic", "periodic", "all_at_start", "all_at_plateau", "random", "none", LEARNED)

SENTENCES: dict[tuple[str, str], str] = {
    ("pt2", "gru_packed"): "torch.export cannot trace Gru",
    ("pt2", "vae"): "torch.export cannot trace Vae",
    ("pt2", "flow"): "torch.export cannot trace Flow",
    ("pt2", "experts"): "torch.export cannot trace Experts",
}
"""By check and kind: part of the sentence that refuses it. Whatever is not here must be right."""

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@contextmanager
def right_or_a_sentence(check: str, kind: Kind) -> Generator[None]:
    """The block must pass, unless `SENTENCES` has a sentence: then it must be refused with that one."""
    sentence = SENTENCES.get((check, kind.name))
    if sentence is None:
        yield
    else:
        with pytest.raises(EsperError, match=sentence):
            yield
