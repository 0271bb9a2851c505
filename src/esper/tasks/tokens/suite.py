"""The default suite: small token problems on which different seeds pay, in different slots."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from esper.errors import TaskError
from esper.tasks.data import PARTS, Data, Part, Scale, standardised, with_label_noise
from esper.tasks.instance import Instance
from esper.tasks.lookup import lookup
from esper.tasks.optimizer import OptimizerSettings
from esper.tasks.source import COMPUTED, Source
from esper.tasks.streams import stream
from esper.tasks.suite import Suite, log_uniform
from esper.tasks.tokens.catalogue import FULL, TRAINING, TRANSFER, Variant
from esper.tasks.tokens.examples import Examples, Sampler, random_directions
from esper.tasks.tokens.host import CLASSES, FEATURES, TOKENS, TokenHost

RENT = 0.08
LEARNING_RATES = (0.007, 0.015)
DRIFT_STEPS = range(9, 15)

_FAMILIES = {**TRAINING, **TRANSFER}
_DIRECTIONS_STREAM = len(PARTS)
_CACHED_PARTS = 128


class TokenSuite(Suite):
    """Eight tokens of five features, four classes, one host architecture for every family."""

    name = "tokens"
    classes = CLASSES
    input_shape = (TOKENS, FEATURES)
    sites = ("layer0", "layer1", "layer2")
    blueprints = ("mlp", "token_conv", "attention", "token_mix", "gate", "norm", "input_skip")
    steps = 30
    batches_per_step = 8
    batch_size = 32
    validation_size = 128
    test_size = 512
    optimizer = OptimizerSettings(name="adamw", betas=(0.9, 0.98), weight_decay=0.0)
    families = tuple(TRAINING)
    transfer_families = tuple(TRANSFER)

    def variants(self, family: str) -> tuple[str, ...]:
        """Names of the family's hidden variants; raises TaskError for an unknown family."""
        return tuple(lookup("token family", family, _FAMILIES))

    def draw(self, family: str, variant: str, seed: int, rng: np.random.Generator) -> Instance:
        """An instance of the variant with a random learning rate, train size and (family drift) drift step."""
        chosen = _variant(family, variant)
        return Instance(
            suite=self.name,
            family=family,
            variant=variant,
            seed=seed,
            widths=chosen.widths,
            learning_rate=log_uniform(*LEARNING_RATES, rng),
            train_size=int(rng.choice(chosen.train_sizes)),
            rent=RENT,
            label_noise=chosen.label_noise,
            drift_step=int(rng.choice(DRIFT_STEPS)) if chosen.after_drift else None,
            linear=chosen.linear,
        )

    def template(self) -> TokenHost:
        """The host at widths (10, 10, 10)."""
        return TokenHost(FULL, linear_host=False, generator=torch.Generator().manual_seed(0))

    def host(self, instance: Instance) -> TokenHost:
        """The instance's narrow host."""
        self.check(instance)
        generator = torch.Generator().manual_seed(instance.seed)
        return TokenHost(instance.widths, linear_host=instance.linear, generator=generator)

    def data(self, instance: Instance, part: Part, phase: int = 0) -> Data:
        """Inputs ``[N, TOKENS, FEATURES]``, standardised by the training part of the same phase, and labels."""
        self.check(instance)
        training = _training_part(instance, phase)
        if part == "train":
            examples = training
        else:
            count = self.validation_size if part == "validation" else self.test_size
            examples = _examples(instance, part, phase, count)
        return standardised(*examples, Scale.of(training.inputs))

    def source(self) -> Source:
        """Every instance computes its own."""
        return COMPUTED


def _variant(family: str, variant: str) -> Variant:
    return lookup(f"variant of token family '{family}'", variant, lookup("token family", family, _FAMILIES))


@lru_cache(maxsize=_CACHED_PARTS)
def _training_part(instance: Instance, phase: int) -> Examples:
    """Kept because every part is standardised by it; callers must not write to it."""
    return _examples(instance, "train", phase, instance.train_size)


def _examples(instance: Instance, part: Part, phase: int, count: int) -> Examples:
    sampler = _sampler(instance, phase)
    rng = stream(instance.seed, phase, PARTS.index(part))
    directions = random_directions(stream(instance.seed, phase, _DIRECTIONS_STREAM))
    inputs, labels = sampler(count, directions, rng)
    if part == "train" and instance.label_noise:
        labels = with_label_noise(labels, instance.label_noise, CLASSES, rng)
    return Examples(inputs, labels)


def _sampler(instance: Instance, phase: int) -> Sampler:
    variant = _variant(instance.family, instance.variant)
    if phase == 0:
        return variant.sampler
    if phase == 1 and variant.after_drift:
        return variant.after_drift
    raise TaskError(f"instance {instance.name} has no phase {phase}: only instances that drift have a phase 1")
