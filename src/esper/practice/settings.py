"""The configuration of `esper grow`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
from pydantic import Field, model_validator

from esper.config.settings import Settings
from esper.control.rules.simple import Never
from esper.grower.apart import Counterfactual
from esper.grower.choosing import rules_of
from esper.lifecycle.rules import Rules
from esper.numerics.devices import CPU, DeviceName
from esper.population.budget import Budget
from esper.rl.episode_config import EpisodeConfig
from esper.tasks.practice.registry import get_host, get_task, host_for

ALL_FROM_START = "all_from_start"
"""Instead of a controller: every slot is filled for good before the first step."""


class GrowSettings(Settings):
    """How one host is trained on one task, and grown; what is not said follows from task and host."""

    task: str = "digits"
    """The data: digits, mnist1d, fashion-mnist, cifar10 or charlm."""
    host: str
    """The network: mlp, conv, resnet, vit, conv1d or gpt, as suits the task."""
    controller: str = "look"
    """Who decides: look, heuristic, none, random, periodic, all_at_start, all_at_plateau, esper, the directory of a
    run of `esper train`, or all_from_start: every slot holds its dearest blueprint from the first step on, for good."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """All randomness of the run follows from it."""
    epochs: int = Field(ge=1)
    """Passes over the training data; each ends with a decision."""
    batch_size: int = Field(ge=1)
    """Examples in a minibatch."""
    learning_rate: float = Field(gt=0, allow_inf_nan=False)
    """Of AdamW, constant."""
    weight_decay: float = Field(ge=0, allow_inf_nan=False)
    """Of AdamW."""
    rent: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """What growth costs: the score is ``accuracy - rent * log1p(added parameters / host parameters)``."""
    slots: dict[str, tuple[str, ...] | Literal["auto"]]
    """Submodules of the host behind which it may grow, with the blueprints on offer there; auto: all that fit."""
    rules: Rules
    """What may happen to seeds; what is not said is as in the rules that the controller was trained with, or by
    default."""
    conduct: EpisodeConfig = EpisodeConfig()
    """When training that blows up is rolled back, what growth may cost, how often seeds are measured, and after how
    long a plateau training ends before its last epoch."""
    text: Path | None = None
    """The UTF-8 file that charlm learns; null: the text of Python's help."""
    evidence: Counterfactual = Counterfactual.DEPENDENCE
    """What seeds on trial are judged by: dependence (what the model loses when the seed is switched off) or refit (what
    it has over a fork that trains on without the seed, which costs about one more training pass for each)."""
    device: DeviceName
    """Where to compute, as torch names it; cuda if there is any."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        task = given.get("task", cls.model_fields["task"].default)
        host = given.get("host")
        if not isinstance(task, str) or not isinstance(host, str | None):
            return given
        name = host_for(task, host)
        kind = get_host(name)
        usual = {**vars(kind.recipe), "host": name, "slots": dict(kind.slots), "device": _device()}
        rules = _rules(given.get("controller", cls.model_fields["controller"].default), given.get("rules"))
        return {**usual, **cast("dict[str, Any]", given), "rules": rules}

    def usual(self) -> GrowSettings:
        """What follows from task, host and controller alone: the defaults of these settings."""
        chosen = {"task": self.task, "host": self.host, "controller": self.controller}
        return GrowSettings.model_validate(chosen)

    @model_validator(mode="after")
    def _slots_are_measured(self) -> Self:
        self.conduct.require_measurements(self.epochs)
        return self

    @model_validator(mode="after")
    def _budget_is_kept(self) -> Self:
        if self.controller == ALL_FROM_START and self.conduct.budget != Budget():
            raise ValueError(f"controller {ALL_FROM_START} fills every slot whatever it costs: leave the budget out")
        return self

    @model_validator(mode="after")
    def _evidence_is_used(self) -> Self:
        if self.evidence is Counterfactual.REFIT and self.controller in (Never.name, ALL_FROM_START):
            raise ValueError(f"controller {self.controller} puts no seed on trial: leave evidence out")
        return self

    @model_validator(mode="after")
    def _text_is_read(self) -> Self:
        if self.text is not None and not get_task(self.task).reads_text:
            raise ValueError(f"task {self.task} reads no text of yours: leave text out, or choose charlm")
        return self


def _rules(controller: Any, given: Any) -> Any:
    """The rules, where only some of them are given: the others are those that the controller knows."""
    if not isinstance(given, dict | None) or not isinstance(controller, str):
        return cast("Any", given)
    said = cast("dict[str, Any]", given or {})
    if said.keys() >= Rules.model_fields.keys():  # of a run that goes on, whose controller need not be there any more
        return said
    usual = Rules() if controller == ALL_FROM_START else rules_of(controller, (ALL_FROM_START,))
    return {**usual.model_dump(), **said}


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else CPU
