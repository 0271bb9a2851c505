"""Does the governor leave healthy trainings alone, and does it catch sick ones?

`python benchmarks/rollbacks.py FOLDER` trains each recipe for 200 decisions, adds a line for each to
FOLDER/rollbacks.jsonl, and prints the table. A second process on another core shares the work;
stopped, it goes on. A healthy recipe should have no rollback. A sick one is healthy until decision 50, and should be
rolled back, or refused by `esper.DivergedError`, soon after. Each computes in one thread.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from result_files import ResultFile
from sklearn.datasets import load_digits, make_friedman1
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from esper.control.rules import Uniform
from esper.engine.governor import Trouble
from esper.errors import DivergedError, EsperError
from esper.lifecycle.rules import Rules
from esper.rl.episodes import Episodes
from esper.tasks.registry import get_suite
from esper.train.workers import prepare_process

DECISIONS, SICK_FROM = 200, 50
BATCH, MINIBATCHES = 64, 10
"""Examples in a minibatch, and minibatches from one decision to the next."""

Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Result:
    """What the governor did in one training."""

    recipe: str
    sick: bool
    rollbacks: list[int]
    """Decisions with a rollback."""
    troubles: list[str]
    ended: int | None
    """The decision at which training was ended, if it was."""
    first_loss: float
    last_loss: float
    """Training losses of the first decision and of the last one before the sickness or the end."""


# Tasks: data for training and validation, and the loss of predictions.


def digits(seed: int) -> tuple[Data, Data]:
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(seed))
    inputs, labels = torch.tensor(data.data, dtype=torch.float32)[order] / 16, torch.tensor(data.target)[order]
    return (inputs[:1300], labels[:1300]), (inputs[1300:], labels[1300:])


def table(seed: int, scale: float = 1.0) -> tuple[Data, Data]:
    inputs, targets = make_friedman1(1600, noise=1.0, random_state=seed)
    x, y = torch.tensor(inputs, dtype=torch.float32), torch.tensor(targets, dtype=torch.float32)[:, None]
    y = (y - y.mean()) / y.std() * scale
    return (x[:1200], y[:1200]), (x[1200:], y[1200:])


def sequences(seed: int) -> tuple[Data, Data]:
    """Whether the first and the last half of 24 noisy steps have the same sign, as one of two classes."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (1600, 2), generator=generator) * 2 - 1
    x = signs.repeat_interleave(12, 1)[..., None] * 0.5 + torch.randn(1600, 24, 1, generator=generator)
    y = (signs[:, 0] == signs[:, 1]).long()
    return (x[:1200], y[:1200]), (x[1200:], y[1200:])


def text(seed: int) -> tuple[Data, Data]:
    """Windows of 16 characters of a text that comes with Python, and the characters that follow."""
    characters = Path(tyro.__file__).parent.joinpath("_cli.py").read_text()[:40_000]
    letters = {letter: place for place, letter in enumerate(sorted(set(characters)))}
    codes = torch.tensor([letters[letter] for letter in characters])
    windows = codes[: len(codes) // 17 * 17].view(-1, 17)
    windows = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))]
    part = len(windows) * 4 // 5
    return (windows[:part, :-1], windows[:part, 1:]), (windows[part:, :-1], windows[part:, 1:])


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def gaussian_nll(predicted: Tensor, targets: Tensor) -> Tensor:
    """Falls below zero, since the variance is learned; targets are 20 times smaller than the unit."""
    mean, log_variance = predicted.chunk(2, -1)
    return F.gaussian_nll_loss(mean, targets / 20, log_variance.clamp(-12, 6).exp())


def autoencoded(seed: int) -> tuple[Data, Data]:
    (x, _), (y, _) = digits(seed)
    return (x, x), (y, y)


# Hosts.


def mlp(inputs: int, outputs: int, width: int = 64, dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, outputs),
    )  # fmt: skip


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.norm2 = nn.Conv2d(16, 16, 3, padding=1, stride=2), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm1(self.first(inputs.view(-1, 1, 8, 8))).relu()
        return self.head(self.norm2(self.second(hidden)).relu().mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell, self.mix, self.head = kind(1, 24, batch_first=True), nn.Linear(24, 24), nn.Linear(24, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.mix(self.cell(inputs)[0][:, -1]).relu())


class Gpt(nn.Module):
    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, 32), nn.Embedding(16, 32)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(32, letters)

    def forward(self, indices: Tensor) -> Tensor:
        hidden = self.letters(indices) + self.places.weight[: indices.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(indices.shape[1])
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


@dataclass(frozen=True)
class Recipe:
    """A host, its data and how it is trained."""

    name: str
    host: Callable[[], nn.Module] = lambda: mlp(64, 10)
    slots: tuple[str, ...] = ("0", "3")
    data: Callable[[int], tuple[Data, Data]] = digits
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    rate: float = 1e-2
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    schedule: str = "constant"
    blueprint: str = "mlp"
    controller: str = "look"
    examples: int | None = None
    """How many there are to train on; None: all."""
    wrong_labels: float = 0.0
    """Share of labels of training that are drawn by chance."""
    drift: bool = False
    """Inputs shift by their own standard deviation over the training."""
    unit: float = 1.0
    """Factor of the loss."""
    mean_loss: bool = True
    """Report the mean of the minibatches' losses; otherwise the last one's."""
    sickness: Callable[[Training, int], None] | None = None
    """Is called before each epoch from `SICK_FROM` on with the training and how many epochs it is ill."""


@dataclass
class Training:
    """One training of a recipe; a sickness changes it."""

    recipe: Recipe
    model: esper.GrowingModel = field(init=False)
    inputs_factor: float = 1.0
    loss_factor: float = 1.0
    shift: float = 0.0

    def __post_init__(self) -> None:
        recipe = self.recipe
        torch.manual_seed(0)
        (x, y), self.validation = recipe.data(0)
        x, y = x[: recipe.examples], y[: recipe.examples].clone()
        wrong = torch.rand(len(y)) < recipe.wrong_labels
        y[wrong] = y[torch.randperm(len(y))][wrong]
        self.x, self.y = x, y
        self.classes = int(y.max()) + 1 if not y.is_floating_point() else None
        self.model = esper.attach(
            recipe.host(), {slot: [recipe.blueprint] for slot in recipe.slots}, example_input=x[:2]
        )
        self.optimizer = recipe.optimizer(self.model.parameter_groups(lr=recipe.rate))
        self.schedule: Any = None
        if recipe.schedule == "cosine":
            self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, DECISIONS)
        elif recipe.schedule == "onecycle":
            self.schedule = torch.optim.lr_scheduler.LambdaLR(
                self.optimizer, lambda step: min((step + 1) / 60, max(0.01, 1 - (step - 60) / (DECISIONS - 60)))
            )
        self.grower = esper.Grower(
            self.model,
            self.optimizer,
            controller=recipe.controller,
            evaluate=self.evaluate,
            horizon=DECISIONS,
            loss=lambda batch: recipe.loss(self.model(batch[0]), batch[1]) * recipe.unit,
        )

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> Any:
        model.eval()
        x, y = self.validation
        predicted = model(x + self.shift if x.is_floating_point() else x)
        loss = self.recipe.loss(predicted, y).item() * self.recipe.unit
        return loss if self.classes is None else (loss, (predicted.argmax(-1) == y).float().mean().item())

    def run(self) -> Result:
        losses: list[float] = []
        rollbacks: list[int] = []
        troubles: list[str] = []
        ended: int | None = None
        order = torch.Generator().manual_seed(1)
        for decision in range(DECISIONS):
            if self.recipe.sickness is not None and decision >= SICK_FROM:
                self.recipe.sickness(self, decision - SICK_FROM)
            if self.recipe.drift:
                self.shift = decision / DECISIONS * self.x.std().item()
            loss = self.train_epoch(order)
            try:
                done = self.grower.step(train_loss=loss)
            except DivergedError:
                ended = decision
                break
            if done.rollback is not None:
                rollbacks.append(decision)
                troubles.append(done.rollback.trouble.name.lower())
            elif self.recipe.sickness is None or decision < SICK_FROM:
                losses.append(loss)
            if self.recipe.sickness is not None and len(rollbacks) > 0:
                break
        return Result(
            self.recipe.name, self.recipe.sickness is not None, rollbacks, troubles, ended, losses[0], losses[-1]
        )

    def train_epoch(self, order: torch.Generator) -> float:
        self.model.train()
        losses: list[float] = []
        places = torch.randperm(len(self.x), generator=order).repeat(-(-BATCH * MINIBATCHES // len(self.x)))
        for chosen in places.split(min(BATCH, len(self.x)))[:MINIBATCHES]:
            x = self.x[chosen] * self.inputs_factor + self.shift if self.x.is_floating_point() else self.x[chosen]
            self.optimizer.zero_grad()
            loss = self.recipe.loss(self.model(x), self.y[chosen]) * self.recipe.unit
            (loss * self.loss_factor).backward()
            self.optimizer.step()
            losses.append(loss.item())
        if self.schedule is not None:
            self.schedule.step()
        return sum(losses) / len(losses) if self.recipe.mean_loss else losses[-1]


WIDTHS = {width: (lambda width=width: mlp(64, 10, width)) for width in (16, 32, 64, 128, 256)}
SGD: dict[str, Any] = {"optimizer": lambda groups: torch.optim.SGD(groups, momentum=0.9)}


def spoil(recipe: str, sickness: Callable[[Training, int], None], **changes: Any) -> Recipe:
    return Recipe(recipe, rate=3e-3, sickness=sickness, **changes)


def convolutions(name: str, **changes: Any) -> Recipe:
    return Recipe(name, Convolutions, ("norm1", "norm2"), blueprint="conv3x3", **changes)


def table_host(outputs: int = 1) -> Callable[[], nn.Module]:
    return lambda: mlp(10, outputs)


HEALTHY = [
    *(Recipe(f"digits, width {w}, AdamW {r}", host, rate=r) for w, host in WIDTHS.items() for r in (3e-3, 1e-2)),
    Recipe("digits, AdamW 3e-2", rate=3e-2),
    Recipe("digits, AdamW 1e-3", rate=1e-3),
    Recipe("digits, no controller", controller="none"),
    Recipe("digits, last minibatch's loss", mean_loss=False),
    Recipe("digits, width 32, last minibatch's loss", WIDTHS[32], mean_loss=False),
    Recipe("digits, width 128, last minibatch's loss", WIDTHS[128], mean_loss=False),
    Recipe("digits, SGD .1", rate=0.1, **SGD),
    Recipe("digits, SGD .15, the edge", rate=0.15, **SGD),
    Recipe("digits, RMSprop 3e-3", rate=3e-3, optimizer=torch.optim.RMSprop),
    Recipe("digits, Adagrad 3e-2", rate=3e-2, optimizer=torch.optim.Adagrad),
    Recipe("digits, cosine", schedule="cosine"),
    Recipe("digits, one-cycle", schedule="onecycle"),
    Recipe("digits, dropout", lambda: mlp(64, 10, dropout=0.3)),
    Recipe("digits, dropout, last minibatch", lambda: mlp(64, 10, dropout=0.3), mean_loss=False),
    Recipe("digits, 20% wrong labels", wrong_labels=0.2),
    Recipe("digits, 40% wrong labels", wrong_labels=0.4),
    Recipe("digits, 64 examples memorised", examples=64),
    Recipe("digits, 128 examples memorised", examples=128, controller="none"),
    Recipe("digits, 200 examples, 30% wrong labels", examples=200, wrong_labels=0.3),
    Recipe("digits, drift", drift=True),
    Recipe("digits, loss in units of 1e-3", unit=1e3),
    Recipe("digits, loss in units of 1e3", unit=1e-3),
    convolutions("convolutions, AdamW 1e-2"),
    convolutions("convolutions, SGD .1", rate=0.1, **SGD),
    convolutions("convolutions, last minibatch's loss", mean_loss=False),
    Recipe("table, AdamW 1e-2", table_host(), data=table, loss=F.mse_loss),
    Recipe("table, SGD .03", table_host(), data=table, loss=F.mse_loss, rate=0.03, **SGD),
    Recipe("table, targets of 1,000", table_host(), data=lambda s: table(s, 1e3), loss=F.mse_loss),
    Recipe("table, absolute error", table_host(), data=table, loss=F.l1_loss),
    Recipe("table, 64 examples memorised", table_host(), data=table, loss=F.mse_loss, examples=64),
    Recipe("table, drift", table_host(), data=table, loss=F.mse_loss, drift=True),
    Recipe("table, negative log-likelihood below 0", table_host(2), data=table, loss=gaussian_nll, rate=3e-4),
    Recipe("table, the same, AdamW 1e-3", table_host(2), data=table, loss=gaussian_nll, rate=1e-3),
    Recipe("autoencoder", lambda: mlp(64, 64), data=autoencoded, loss=F.binary_cross_entropy_with_logits, rate=3e-3),
    Recipe("recurrent, GRU", lambda: Recurrent(nn.GRU), ("mix",), sequences),
    Recipe("recurrent, tanh", lambda: Recurrent(nn.RNN), ("mix",), sequences, rate=3e-3),
    Recipe("characters, AdamW 3e-3", lambda: Gpt(100), ("blocks.0", "blocks.1"), text, rate=3e-3),
    Recipe("characters, AdamW 1e-2", lambda: Gpt(100), ("blocks.0", "blocks.1"), text),
    Recipe("characters, one-cycle", lambda: Gpt(100), ("blocks.0", "blocks.1"), text, schedule="onecycle"),
]


@torch.no_grad()
def scale_weights(training: Training, factor: float) -> None:
    for parameter in training.model.host.parameters():
        parameter.mul_(factor)


def scale_rate(training: Training, factor: float) -> None:
    for group in training.optimizer.param_groups:
        group["lr"] *= factor


@torch.no_grad()
def explode_seed(training: Training, _: int) -> None:
    for slot in training.model.slots.values():
        if slot.seed is not None:
            for parameter in slot.seed.parameters():
                parameter.mul_(30).add_(30)


def scale_inputs(training: Training, days: int) -> None:
    training.inputs_factor = 1e4 if days == 0 else 1.0


def flip_loss(training: Training, _: int) -> None:
    training.loss_factor = -1.0


def shuffle_labels(training: Training, days: int) -> None:
    if days == 0:
        training.y = training.y[torch.randperm(len(training.y), generator=torch.Generator().manual_seed(5))]


def once(change: Callable[[Training], None]) -> Callable[[Training, int], None]:
    return lambda training, days: change(training) if days == 0 else None


@torch.no_grad()
def shift_outputs(training: Training, days: int) -> None:
    """The training stands still, and a shift of outputs lets a squared error of .02 grow by 1.3 a decision."""
    scale_rate(training, 0.0)
    shifts = [math.sqrt(0.02 * (1.3**day - 1)) for day in (days, days + 1)]
    list(training.model.host.parameters())[-1].add_(shifts[1] - shifts[0])


def zero_weights(training: Training, _: int) -> None:
    scale_weights(training, 0.0)


SICK = [
    spoil("rate x100", once(lambda training: scale_rate(training, 100))),
    spoil("rate x1000", once(lambda training: scale_rate(training, 1000))),
    spoil("rate x1.5 a decision", lambda training, _: scale_rate(training, 1.5)),
    spoil("rate x100, SGD", once(lambda training: scale_rate(training, 100)), **SGD),
    spoil("weights not a number", once(lambda training: scale_weights(training, math.nan))),
    spoil("weights infinite", once(lambda training: scale_weights(training, math.inf))),
    spoil("weights x30, SGD", lambda training, _: scale_weights(training, 30), **SGD),
    spoil("weights 0 each decision", zero_weights),
    spoil("one decision of inputs x10,000, SGD", scale_inputs, **SGD),
    spoil("a seed explodes each decision", explode_seed),
    spoil("gradient ascent", flip_loss),
    spoil("labels shuffled for good", shuffle_labels),
    spoil("table, loss x1.3 a decision", shift_outputs, host=table_host(), data=table, loss=F.mse_loss),
    spoil(
        "recurrent net explodes",
        once(lambda training: scale_rate(training, 300)),
        host=lambda: Recurrent(nn.RNN),
        slots=("mix",),
        data=sequences,
    ),
    spoil("table, rate x100", once(lambda t: scale_rate(t, 100)), host=table_host(), data=table, loss=F.mse_loss),
    spoil(
        "table, rate x300, SGD",
        once(lambda t: scale_rate(t, 300)),
        host=table_host(),
        data=table,
        loss=F.mse_loss,
        **SGD,
    ),
    spoil(
        "convolutions, rate x300",
        once(lambda t: scale_rate(t, 300)),
        host=Convolutions,
        slots=("norm1", "norm2"),
        blueprint="conv3x3",
    ),
    spoil(
        "characters, rate x100",
        once(lambda t: scale_rate(t, 100)),
        host=lambda: Gpt(100),
        slots=("blocks.0", "blocks.1"),
        data=text,
    ),
]
POPULATIONS = ("tokens", "images", "language")
"""Suites of which 32 networks grow at random."""
RECIPES: dict[str, Callable[[], Result]] = {
    **{recipe.name: lambda recipe=recipe: Training(recipe).run() for recipe in HEALTHY},
    **{f"population of {suite}": lambda suite=suite: run_population(suite) for suite in POPULATIONS},
    **{recipe.name: lambda recipe=recipe: Training(recipe).run() for recipe in SICK},
}


def run_population(name: str) -> Result:
    """Episodes of 32 networks of a suite, one after another, under the `random` controller."""
    suite, draws, controller = get_suite(name), np.random.default_rng(0), Uniform()
    rollbacks: list[int] = []
    troubles: list[str] = []
    losses: list[float] = []
    for decision in range(DECISIONS):
        if decision % suite.steps == 0:
            episodes = Episodes(suite, suite.sample(32, "train", draws), Rules())
            state = controller.start(range(decision, decision + 32))
        actions, state = controller.act(episodes.observe(), episodes.legal_actions(), state)
        step = episodes.step(actions)
        losses.append(float(step.training.loss.mean()))
        for row in np.flatnonzero(step.intervention.rows):
            rollbacks.append(decision)
            troubles.append(Trouble(step.intervention.trouble[row]).name.lower())
    return Result(f"population of {name}", False, rollbacks, troubles, None, losses[0], losses[-1])


def describe(result: Result) -> str:
    """When training was rolled back or ended, and how many decisions after it became sick."""
    when = [f"{place} ({trouble})" for place, trouble in zip(result.rollbacks, result.troubles, strict=True)]
    if result.ended is not None:
        when.append(f"{result.ended} (ended)")
    late = f"; {min([*result.rollbacks, DECISIONS if result.ended is None else result.ended]) - SICK_FROM} late"
    return (", ".join(when) or "none") + (late if result.sick and when else "")


def write_table(results: list[Result]) -> str:
    """A row for each recipe, those that should have no rollback first."""
    lines = ["| training | rollbacks | loss, first to last |", "|---|---|---|"]
    known = {result.recipe: result for result in results}
    for name in (name for name in RECIPES if name in known):
        losses = f"{known[name].first_loss:.3g} to {known[name].last_loss:.3g}"
        lines.append(f"| {'sick: ' * known[name].sick}{name} | {describe(known[name])} | {losses} |")
    return "\n".join(lines) + "\n"


def main(folder: tyro.conf.Positional[Path], only: str = "") -> None:
    """Train every recipe whose name contains ``only``, and print the table."""
    prepare_process()
    warnings.simplefilter("ignore")
    file = ResultFile(folder / "rollbacks.jsonl", Result)
    names = [name for name in RECIPES if only in name]

    def run(name: str) -> None:
        result = RECIPES[name]()
        file.add(result)
        sys.stdout.write(f"{name}: {describe(result)}\n")

    file.run_missing(names, lambda name: any(one.recipe == name for one in file.results), run)
    sys.stdout.write(write_table(file.results))


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except EsperError as error:
        sys.exit(f"error: {error}")
