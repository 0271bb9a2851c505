"""All kinds of models, and what is known not to work with them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import pytest

from conformance import generative, pretrained, sequences, tricks, vision
from conformance.kind import Kind
from esper.errors import EsperError

KINDS: tuple[Kind, ...] = (*vision.KINDS, *sequences.KINDS, *generative.KINDS, *tricks.KINDS, *pretrained.KINDS)
REFUSED: tuple[tuple[Kind, str], ...] = (*generative.REFUSED, *tricks.REFUSED)
CONTROLLERS = ("none", "random", "all_at_start", "periodic", "heuristic")

SENTENCES: dict[tuple[str, str], str] = {
    ("pt2", "gru_packed"): "torch.export cannot trace Gru",
    ("pt2", "vae"): "torch.export cannot trace Vae",
    ("pt2", "flow"): "torch.export cannot trace Flow",
    ("pt2", "experts"): "torch.export cannot trace Experts",
    # Until exports take what Hugging Face's models return.
    ("pt2", "hf_bert"): "does not run without Esper",
    ("pt2", "hf_gpt2"): "torch.export cannot trace GPT2LMHeadModel",
    ("pt2", "hf_vit"): "does not run without Esper",
    ("pt2", "hf_t5"): "torch.export cannot trace T5ForConditionalGeneration",
}
"""By check and kind: part of the sentence that refuses it. Whatever is not here must be right."""

NOT_YET: dict[str, str] = {
    "ema_before_growth": "copies that average a model are not yet told what grows in it",
    "masks": "blueprints that mix positions do not yet know of padding",
    "caches": "blueprints that mix positions do not yet know of caches",
    "unfinished_seeds": "finalize does not yet keep unfinished seeds",
}
"""Checks that wait for what they check, and why. Take a line out to have its check run."""

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def waits_for(feature: str) -> pytest.MarkDecorator:
    """Skips a check while its feature is `NOT_YET` there."""
    return pytest.mark.skipif(feature in NOT_YET, reason=NOT_YET.get(feature, ""))


@contextmanager
def right_or_a_sentence(check: str, kind: Kind) -> Generator[None]:
    """The block must pass, unless `SENTENCES` has a sentence: then it must be refused with that one."""
    sentence = SENTENCES.get((check, kind.name))
    if sentence is None:
        yield
    else:
        with pytest.raises(EsperError, match=sentence):
            yield
