"""Fixed scenarios whose every figure `same_bits.py` compares between two versions of Esper.

A scenario is a function of a size and a folder that returns a tree of names and JSON values: decisions, events,
scalars, and tensors by their SHA-256. Both versions run this very file, so it uses only what outlives a restructuring:
the public names of `esper`, ``esper.rl`` with Gymnasium, the command line, and files on disk. What has another address
in another version stands in `ADDRESSES`.

    python tools/bit_scenarios.py FOLDER SOURCE [NAME...]   # as `same_bits.py` runs it: FOLDER/NAME.json for each

Times, versions, paths and hashes of files are left out (`VOLATILE`).
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import io
import json
import math
import multiprocessing
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from enum import Enum
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import gymnasium
import numpy as np
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import esper
import esper.rl
from esper.grower.scores import Score

Tree = dict[str, Any]
Scenario = Callable[[bool, Path], Tree]

ADDRESSES = {
    "Metric": ("esper.grower:Metric",),
    "Constrained": ("esper.grower:Constrained",),
    "Refit": ("esper.grower:Refit",),
    "GrowthConfig": ("esper:GrowthConfig", "esper:EpisodeConfig"),
    "Rules": ("esper:Rules", "esper.lifecycle.rules:Rules"),
}
"""Where a class may be, the newest address first."""
VOLATILE = frozenset(
    {"seconds", "time", "platform", "version", "file", "sha256", "run", "environment_steps_per_second"}
)
"""Names whose values no two runs of the same code share, or that say nothing of what was computed."""
WORDS = frozenset({"basis", "claim", "place", "title"})
"""Names of sentences for people."""
SMALL = 4
"""Elements of an array up to which it is written out."""

SCENARIOS: dict[str, Scenario] = {}
THOROUGH = {"train_resumed", "evaluate_suites"}
"""Scenarios that are left out where it has to be quick."""


def scenario(function: Scenario) -> Scenario:
    """Decorator: a scenario by its function's name."""
    SCENARIOS[function.__name__] = function
    return function


def find_class(name: str) -> Any:
    """The class of that name, wherever this version has it; None if it has none."""
    for address in ADDRESSES[name]:
        try:
            return resolve_name(address)
        except (AttributeError, ImportError):
            continue
    return None


GROWTH = "growth" if "GrowthConfig" in esper.__all__ else "conduct"
"""The name of the settings of growth."""


# What is compared


def describe(value: Any) -> Any:
    """``value`` as JSON to the last bit; large arrays by type, shape, mean and SHA-256."""
    match value:
        case Enum():
            return value.name.lower()
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            return describe_array(value.detach().cpu().numpy())
        case np.ndarray():
            return describe_array(value)
        case np.generic():
            return value.item()
        case Mapping():
            return {str(name): describe(part) for name, part in value.items() if name not in VOLATILE | WORDS}
        case _ if dataclasses.is_dataclass(value):
            return describe({part.name: getattr(value, part.name) for part in dataclasses.fields(value)})
        case _ if hasattr(value, "_asdict"):
            return describe(value._asdict())
        case Sequence():
            return [describe(part) for part in value]
        case _:
            raise TypeError(f"a scenario returned {value!r}, which has no exact form as JSON")


def describe_array(array: np.ndarray[Any, Any]) -> Any:
    """Small arrays as they are, others so that it shows how far two of them differ."""
    if array.dtype == object:
        return describe(array.tolist())
    kind = f"{array.dtype}{list(array.shape)}"
    if array.size <= SMALL:
        return f"{kind} {array.tolist()}"
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    with np.errstate(all="ignore"):
        return f"{kind} mean {array.mean(dtype=np.float64):.9g} sha {digest[:16]}"


def describe_tensors(module: nn.Module) -> Tree:
    """Every tensor of a module's state dict."""
    return {name: describe(value) for name, value in sorted(module.state_dict().items())}


def describe_optimizer(optimizer: torch.optim.Optimizer) -> Tree:
    """Every tensor that an optimizer remembers, by the place of its parameter."""
    state = optimizer.state_dict()["state"]
    return {str(place): describe(state[place]) for place in sorted(state)}


def read_run(folder: Path) -> Tree:
    """Events, scalars and checkpoints of a run's folder.

    Events are sorted by iteration, environment, step and type, those that share all four by their content: shards and
    processes may write in any order.
    """
    with closing(sqlite3.connect(f"file:{folder / 'run.db'}?mode=ro", uri=True)) as database:
        events = database.execute("SELECT type, iteration, payload FROM events").fetchall()
        scalars = database.execute("SELECT iteration, name, value FROM scalars ORDER BY 1, 2").fetchall()
        levels = database.execute("SELECT value FROM metadata WHERE key = 'baseline_levels'").fetchone()
    tree: Tree = {"events": {}, "scalars": {}, "checkpoints": {}}
    for kind, iteration, payload in events:
        fields = describe(json.loads(payload))
        node = tree["events"]
        place = {"iteration": iteration, "environment": fields.get("environment"), "step": fields.get("step")}
        for name in (*(f"{name} {number}" for name, number in place.items() if number is not None), kind):
            parent, last, node = node, name, node.setdefault(name, {})
        parent[last] = sorted([*(node or []), fields], key=to_json)
    for iteration, name, value in scalars:
        if name not in VOLATILE:
            tree["scalars"].setdefault(f"iteration {iteration}", {})[name] = value
    for path in sorted(folder.glob("checkpoints/*.safetensors")):
        state = json.loads(path.with_suffix(".json").read_text())["state"]
        tree["checkpoints"][path.stem] = {**describe(load_file(path)), "state": describe(state)}
    if levels is not None:
        tree["baseline levels"] = json.loads(levels[0])
    return tree


def to_json(tree: Any) -> str:
    """One text for one tree."""
    return json.dumps(tree, sort_keys=True, separators=(",", ":"))


# Hosts and data, of plain torch


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers that depend on nothing but the arguments."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def label(inputs: Tensor, classes: int) -> Tensor:
    """Classes by a fixed random network with one hidden layer, so that there is something to grow for."""
    flat = inputs.flatten(1)
    hidden = torch.tanh(flat @ draw(flat.shape[1], 12, seed=101) * 2 / math.sqrt(flat.shape[1]))
    return (hidden @ draw(12, classes, seed=102)).argmax(1)


class Residual(nn.Module):
    """A block of a ResNet with batch normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.last_norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.last_norm(self.second(F.relu(self.norm(self.first(x))))))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-2, -3)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=self.causal)
        x = x + self.project(mixed.transpose(-2, -3).flatten(-2))
        return x + self.mlp(self.mlp_norm(x))


class ViT(nn.Module):
    """A transformer on patches of an image."""

    def __init__(self, width: int = 16, classes: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(2, width, 4, stride=4)
        self.places = nn.Parameter(0.02 * draw(4, width, seed=5))
        self.blocks = nn.Sequential(*(Block(width, 2, causal=False) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.blocks(tokens)).mean(1))


class GPT(nn.Module):
    """A tiny language model with a stack of blocks."""

    def __init__(self, vocabulary: int = 12, width: int = 16, length: int = 12, depth: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 2, causal=True) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[-1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclasses.dataclass(frozen=True)
class Problem:
    """A host, where it may grow, and what it learns."""

    make: Callable[[], nn.Module]
    slots: Mapping[str, Sequence[str] | str]
    inputs: Tensor
    labels: Tensor
    task: str = "classification"
    classes: int = 4

    def compute_loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy of a minibatch."""
        outputs = model(batch[0])
        return F.cross_entropy(outputs.flatten(0, -2), batch[1].flatten())

    def compute_losses(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropies of the examples of a minibatch."""
        outputs = model(batch[0]).movedim(-1, 1)
        losses = F.cross_entropy(outputs, batch[1], reduction="none")
        return losses if losses.ndim == 1 else losses.flatten(1).mean(-1)

    def batches(self, part: slice, size: int = 32) -> list[tuple[Tensor, Tensor]]:
        """Minibatches of a part of the data."""
        return list(zip(self.inputs[part].split(size), self.labels[part].split(size), strict=True))


TRAINING, VALIDATION = slice(0, 128), slice(128, 256)


def make_mlp() -> nn.Module:
    """Two hidden layers."""
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 4))


def make_conv1d() -> nn.Module:
    """Two convolutions over a signal."""
    convolutions = (nn.Conv1d(2, 8, 5, padding=2), nn.ReLU(), nn.Conv1d(8, 8, 5, stride=2, padding=2), nn.ReLU())
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(16, 4))


def make_resnet() -> nn.Module:
    """Two residual blocks."""
    first = (nn.Conv2d(2, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(*first, Residual(8), Residual(8), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4))


def draw_sequences(count: int, length: int, vocabulary: int) -> Tensor:
    """Sequences in which the next token mostly follows from the two before."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(vocabulary, (count, length), generator=generator)
    noise = torch.rand((count, length), generator=generator) < 0.2
    for place in range(2, length):
        follows = (3 * tokens[:, place - 1] + 5 * tokens[:, place - 2] + 1) % vocabulary
        tokens[:, place] = torch.where(noise[:, place], tokens[:, place], follows)
    return tokens


CAUSAL = ["attention", "lowrank", "lowrank_8", "mlp", "mlp_wide", "norm"]
MIXING = sorted([*CAUSAL, "gate", "token_conv", "token_mix"])
"""What fits tokens, those that mix positions included. An activation behind a `Conv1d` counts as tokens, too."""


def list_problems() -> dict[str, Problem]:
    """All hosts by name."""
    points, signals, images = draw(256, 6, seed=1), draw(256, 2, 16, seed=2), draw(256, 2, 8, 8, seed=3)
    text = draw_sequences(256, 13, 12)
    deeper = ["block_copy", "block_zero", "mlp"]
    return {
        "mlp": Problem(make_mlp, {"1": "auto", "3": "auto"}, points, label(points, 4)),
        "conv1d": Problem(make_conv1d, {"1": MIXING, "3": MIXING}, signals, label(signals, 4)),
        "resnet": Problem(make_resnet, {"3": "auto", "4": "auto"}, images, label(images, 4)),
        "vit": Problem(ViT, {r"re:blocks\.\d": MIXING}, images, label(images, 4)),
        "gpt": Problem(
            GPT, {"blocks.0": deeper, "blocks.1": CAUSAL}, text[:, :-1], text[:, 1:], "language_modelling", 12
        ),
    }


PROBLEMS = list_problems()


# Growth in a training loop of its owner's


def make_grower(
    model: esper.GrowingModel, optimizer: torch.optim.Optimizer, controller: str, evaluate: Any, **options: Any
) -> esper.Grower:
    """A grower whose criterion is given by evaluators, or by keyword arguments, as this version has it."""
    wrap = {name: find_class(name) for name in ("Metric", "Constrained", "Refit")}
    if wrap["Metric"] is not None:
        if "metric" in options:
            evaluate = wrap["Metric"](evaluate, options.pop("metric"), options.pop("higher_is_better"))
        if "objective" in options:
            evaluate = wrap["Constrained"](evaluate, options.pop("objective"), options.pop("constraints"))
        if options.pop("counterfactual", None) == "refit":
            evaluate = wrap["Refit"](evaluate)
    return esper.Grower(model, optimizer, controller=controller, evaluate=evaluate, **options)


def train_isolated(grower: esper.Grower, loss: Tensor, *batch: Tensor) -> None:
    """Let isolated modules and forks learn from a minibatch, by the method's name in this version."""
    named = dir(type(grower))
    getattr(grower, "isolated_backward" if "isolated_backward" in named else "learn_apart")(loss, *batch)


class Loop:
    """A training loop: two minibatches and a decision, as often as wanted."""

    def __init__(
        self, problem: Problem, controller: str, *, model: esper.GrowingModel | None = None, **options: Any
    ) -> None:
        torch.manual_seed(11)
        self.problem = problem
        self.model = attach(problem) if model is None else model
        self.optimizer = torch.optim.AdamW(self.model.parameter_groups(lr=1e-2))
        evaluate = options.pop("evaluate", None) or esper.Validation(problem.task, problem.batches(VALIDATION, 128))
        options["loss"] = lambda *batch: problem.compute_loss(self.model, batch)
        self.grower = make_grower(self.model, self.optimizer, controller, evaluate, **options)

    def step(self, spoil: Callable[[nn.Module], None] | None = None) -> Tree:
        """Train on two minibatches, decide, and describe the decision; ``spoil`` may harm the model in between."""
        self.model.train()
        total = 0.0
        for batch in self.problem.batches(TRAINING, 64):
            loss = self.problem.compute_loss(self.model, batch)
            self.grower.isolated_backward(loss, *batch)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += loss.item() / 2
        if spoil is not None:
            spoil(self.model)
        decision = self.grower.step(train_loss=total)
        return {**describe(decision), "broken": bool(decision.broken)}

    def run(self, decisions: int) -> Tree:
        """So many decisions and all that they led to."""
        return {f"decision {number}": self.step() for number in range(1, decisions + 1)}

    def conclude(self) -> Tree:
        """What the growth came to: the ending, the growing and the finalized model, the optimizer, and the costs."""
        ending = describe(self.grower.finish())
        self.grower.close()
        plain = self.model.finalize("raise").eval()
        with torch.no_grad():
            outputs = plain(self.problem.inputs[VALIDATION])
        return {
            "ending": ending,
            "model": describe_tensors(self.model),
            "optimizer": describe_optimizer(self.optimizer),
            "finalized": describe_tensors(plain),
            "outputs": describe(outputs),
            "flops": self.grower.spending.flops,
            "generator": describe(torch.get_rng_state()),
        }


def attach(problem: Problem, *, freeze: bool = False) -> esper.GrowingModel:
    """The problem's host, ready to grow."""
    torch.manual_seed(3)
    return esper.attach(problem.make(), problem.slots, problem.inputs[:2], freeze_host=freeze)


LEARNED = "learned"
"""The policy of a run; the other controllers are rules."""
CONTROLLERS = ("look", "heuristic", LEARNED, "random")
HORIZON = 24
"""Decisions that are planned; fewer are taken where it has to be quick."""


def find_controller(name: str, folder: Path) -> str:
    """A rule by its name; `LEARNED` is the run of a policy that trained for one iteration, made where there is none."""
    if name != LEARNED:
        return name
    run = folder / LEARNED
    if not run.exists():
        run_training(run, "seed=3", "shards=1", "iterations=1", *SMALLER)
    return str(run)


def grow(name: str, quick: bool, folder: Path) -> Tree:
    """A host under each controller, with the run that tells of it."""
    tree: Tree = {}
    decisions = 12 if quick else HORIZON
    for controller in CONTROLLERS:
        run = folder / f"grower_{name}_{controller}"
        decides = find_controller(controller, folder)
        loop = Loop(PROBLEMS[name], decides, horizon=HORIZON, run=run, rent=0.01, seed=5)
        tree[controller] = {**loop.run(decisions), **loop.conclude(), **read_run(run)}
    return tree


for _name in PROBLEMS:
    SCENARIOS[f"grower_{_name}"] = partial(grow, _name)


EVERY_CHOICE = {
    "operations": ("wait", "germinate", "advance", "set_alpha", "fossilize", "prune"),
    "blends": ("add", "gate", "multiply"),
    "tempos": (3, 5, 8),
    "alpha_targets": (0.5, 0.7, 1.0),
    "alpha_speeds": (0, 3, 5, 8),
    "alpha_curves": ("linear", "cosine", "sigmoid"),
}


@scenario
def grower_options(quick: bool, folder: Path) -> Tree:
    """What else growers can do: isolation, forks, constraints, caps, budgets, other metrics, rollbacks."""
    mlp, conv = PROBLEMS["mlp"], PROBLEMS["conv1d"]
    rules = find_class("Rules")
    measure = esper.Validation("classification", mlp.batches(VALIDATION, 128))
    conflicting = esper.Validation("classification", [(mlp.inputs[:64], mlp.labels[:64].flip(0))])

    def measure_two_sets(model: nn.Module) -> dict[str, Score]:
        return {"target": Score(*measure(model)), "source": Score(*conflicting(model))}

    def measure_margin(model: nn.Module) -> dict[str, float]:
        loss, accuracy = measure(model)
        return {"loss": loss, "margin": 2 * accuracy - loss}

    def poison(model: nn.Module) -> None:
        with torch.no_grad():
            next(model.parameters()).fill_(math.nan)

    def inflate(model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4)

    capped = {
        "budget": {"parameters": 300},
        "counterfactual_every": 2,
        "plateau": 2,
    }
    promise = {"every": 3, "first": 1, "examples": 64}
    decisions = 12 if quick else HORIZON
    variants: dict[str, tuple[Problem, str, Tree]] = {
        "every choice": (mlp, "random", {"rules": rules(**EVERY_CHOICE), "train_size": 128}),
        "refit": (mlp, "look", {"counterfactual": "refit"}),
        "constraints": (
            mlp,
            "heuristic",
            {"evaluate": measure_two_sets, "objective": "target", "constraints": {"source": 0.05}},
        ),
        "capped": (conv, "heuristic", {GROWTH: find_class("GrowthConfig")(**capped), "rent": 0.05, "rent_on": "flops"}),
        "promised": (conv, "look", {GROWTH: find_class("GrowthConfig")(promise=promise)}),
        "metric": (mlp, "look", {"evaluate": measure_margin, "metric": "margin", "higher_is_better": True}),
        "loss alone": (mlp, "look", {"evaluate": lambda model: measure(model)[0]}),
        "flops": (mlp, "heuristic", {"training_flops": 1.5e6}),
        "frozen": (mlp, "look", {"model": attach(mlp, freeze=True)}),
        "periodic": (conv, "periodic", {}),
        "all_at_start": (conv, "all_at_start", {}),
        "all_at_plateau": (mlp, "all_at_plateau", {}),
        "none": (mlp, "none", {}),
    }
    tree: Tree = {}
    for name, (problem, controller, options) in variants.items():
        loop = Loop(problem, controller, **{"horizon": HORIZON, "seed": 2, **options})
        tree[name] = {**loop.run(decisions), **loop.conclude()}
    # What is not finite is trouble at once; a loss that is too high is, once it has been so three times in a row.
    for name, harms in (("not finite", {5: poison, 9: poison}), ("exploded", dict.fromkeys((6, 7, 8), inflate))):
        run = folder / f"grower_options_{name}"
        loop = Loop(mlp, "heuristic", run=run, horizon=HORIZON)
        steps = {f"decision {number}": loop.step(harms.get(number)) for number in range(1, decisions + 1)}
        tree[name] = {**steps, **loop.conclude(), **read_run(run)}
    return tree


@scenario
def resume(quick: bool, folder: Path) -> Tree:
    """Growers saved at every decision and resumed in new objects do what the uninterrupted one does."""
    tree: Tree = {}
    decisions = 9 if quick else 14
    variants: list[tuple[str, str, Tree]] = [
        ("conv1d", LEARNED, {}),
        ("mlp", "heuristic", {GROWTH: find_class("GrowthConfig")(counterfactual_every=2)}),
        ("mlp", "random", {}),
        ("resnet", "look", {}),
        ("mlp", "look", {"counterfactual": "refit"}),
    ]
    for name, controller, options in variants[:2] if quick else variants:
        variant = " ".join((name, controller, *options))
        problem, options = PROBLEMS[name], {"horizon": HORIZON, "seed": 4, **options}
        controller = find_controller(controller, folder)
        loop = Loop(problem, controller, **options)
        saved: list[bytes] = []
        expected: Tree = {}
        for number in range(1, decisions + 1):
            expected[f"decision {number}"] = loop.step()
            state = {
                "optimizer": loop.optimizer.state_dict(),
                "grower": loop.grower.state_dict(),
                "generator": torch.get_rng_state(),
            }
            file = io.BytesIO()
            torch.save(state, file)
            saved.append(file.getvalue())
            esper.save(loop.model, folder / f"resume_{number}")
        expected.update(loop.conclude())
        expected.pop("flops")  # a resumed grower may measure once more what had been proved equal
        tree[variant] = {"uninterrupted": expected}
        for number, content in enumerate(saved, start=1):
            state = torch.load(io.BytesIO(content), weights_only=True)
            model = esper.load(folder / f"resume_{number}", problem.make(), problem.inputs[:2])
            again = Loop(problem, controller, model=model, **options)
            again.optimizer.load_state_dict(state["optimizer"])
            again.grower.load_state_dict(state["grower"])
            torch.set_rng_state(state["generator"])
            continued: Tree = {f"decision {later}": again.step() for later in range(number + 1, decisions + 1)}
            continued.update(again.conclude())
            differing = [part for part, value in continued.items() if part != "flops" and value != expected[part]]
            tree[variant][f"resumed after {number}"] = {"differs in": differing, **continued}
    return tree


def train_by_hand(problem: Problem, model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int) -> list[float]:
    """Plain training; returns the losses."""
    model.train()
    losses: list[float] = []
    for batch in problem.batches(TRAINING, 64) * epochs:
        optimizer.zero_grad()
        loss = problem.compute_loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@scenario
def deepen(quick: bool, folder: Path) -> Tree:
    """Copies of blocks of a tiny GPT, planted by hand and finalized to a deeper model."""
    problem, tree = PROBLEMS["gpt"], {}
    for blueprint, weight in (("block_copy", 1.0), ("block_copy", 0.5), ("block_zero", 1.0)):
        model = attach(problem)
        optimizer = torch.optim.SGD(model.parameter_groups(lr=0.05), momentum=0.9)
        model.link(optimizer)
        losses = train_by_hand(problem, model, optimizer, 2)
        model.slots["blocks.0"].germinate(blueprint, torch.Generator().manual_seed(1), alpha=weight)
        losses += train_by_hand(problem, model, optimizer, 2)
        model.slots["blocks.0"].fossilize()
        losses += train_by_hand(problem, model, optimizer, 2)
        plain = model.finalize().eval()
        with torch.no_grad():
            outputs = plain(problem.inputs[VALIDATION])
        tree[f"{blueprint} at {weight}"] = {
            "losses": losses,
            "model": describe_tensors(model),
            "optimizer": describe_optimizer(optimizer),
            "finalized": describe_tensors(plain),
            "outputs": describe(outputs),
        }
    return tree


@scenario
def look(quick: bool, folder: Path) -> Tree:
    """What every host is found to need."""
    tree: Tree = {}
    for name, problem in PROBLEMS.items():
        model = attach(problem)
        train_by_hand(problem, model, torch.optim.SGD(model.parameter_groups(lr=0.05)), 2)
        tree[name] = describe(model.look(problem.compute_losses, problem.batches(TRAINING), examples=128, seed=1))
    return tree


@scenario
def blueprints(quick: bool, folder: Path) -> Tree:
    """Every blueprint on offer in every slot: as it is born, and after a few steps of training at half weight."""
    tree: Tree = {}
    for name, problem in PROBLEMS.items():
        offers = [(place, blueprint) for place, slot in attach(problem).slots.items() for blueprint in slot.blueprints]
        for slot, blueprint in offers:
            model = attach(problem)
            optimizer = torch.optim.AdamW(model.parameter_groups(lr=1e-2))
            model.link(optimizer)
            seed = model.slots[slot].germinate(blueprint, torch.Generator().manual_seed(9), alpha=0.5)
            born = describe_tensors(seed)
            losses = train_by_hand(problem, model, optimizer, 1 if quick else 3)
            tree[f"{name} {slot} {blueprint}"] = {"born": born, "losses": losses, "trained": describe_tensors(model)}
    return tree


@scenario
def export(quick: bool, folder: Path) -> Tree:
    """Growing models saved and loaded, and finalized."""
    tree: Tree = {}
    for name in ("conv1d", "resnet", "gpt"):
        problem = PROBLEMS[name]
        loop = Loop(problem, "all_at_start", horizon=HORIZON, seed=1)
        loop.run(4)
        esper.save(loop.model, folder / f"saved_{name}")
        loaded = esper.load(folder / f"saved_{name}", problem.make(), problem.inputs[:2])
        plain = {way: loop.model.finalize(way).eval() for way in ("keep", "drop")}
        with torch.no_grad():
            tree[name] = {
                "loaded": describe_tensors(loaded),
                **{
                    way: {**describe_tensors(one), "outputs": describe(one(problem.inputs[:8]))}
                    for way, one in plain.items()
                },
            }
    return tree


# The command line, and the environment


def run_command(*words: str | Path) -> Tree:
    """What an `esper` command with ``--json`` prints last."""
    done = subprocess.run(
        [sys.executable, "-m", "esper", *map(str, words), "--json"], stdout=subprocess.PIPE, text=True, check=True
    )
    return describe(json.loads(done.stdout.splitlines()[-1]))


def run_training(path: Path, *overrides: str) -> Tree:
    """A run of ``esper train``, and all that is in its folder."""
    words = [word for override in overrides for word in ("--set", override)]
    printed = run_command("train", "--run-dir", path, *words)
    settings = yaml.safe_load((path / "config.yaml").read_text())
    return {"printed": printed, "settings": select_numbers(settings), **read_run(path)}


def select_numbers(settings: Any) -> Any:
    """The numbers among resolved settings: rules are not so close to their limits that each of them would show."""
    if isinstance(settings, list):
        return [select_numbers(part) for part in settings]
    if not isinstance(settings, dict):
        return settings if isinstance(settings, int | float) else None
    numbers = {name: select_numbers(part) for name, part in settings.items()}
    return {name: part for name, part in numbers.items() if part not in (None, {}, [])}


SMALLER = (
    "environments=8",
    "probe_instances=2",
    "policy.hidden=32",
    "policy.width=16",
    "ppo.group=4",
    "ppo.epochs=4",
    "ppo.max_gradient_norm=0.05",  # low enough to be reached
)


@scenario
def train(quick: bool, folder: Path) -> Tree:
    """Three iterations on the default suite, with what is promised and with twins that only wait."""
    overrides = ["seed=3", "shards=2", "ppo.no_growth_baseline=true", "checkpoint_every=1", "probe_every=2"]
    if quick:
        return run_training(folder / "train", *overrides, "iterations=1", *SMALLER)
    return run_training(folder / "train", *overrides, "iterations=3", "environments=16", "probe_instances=8")


@scenario
def train_choices(quick: bool, folder: Path) -> Tree:
    """Every choice and another reward, isolated seeds, no advice, a mix of suites, other execution and other losses."""
    rules = ", ".join(f"{name}: [{', '.join(map(str, values))}]" for name, values in EVERY_CHOICE.items())
    overrides = [
        "seed=5",
        "strategy=looped",
        f"rules={{isolation: shadow, min_training_steps: 1, {rules}}}",
        "reward=shaped",
        "policy.advice=null",
        "policy.probability_floor.op=0.02",
        f"{GROWTH}.counterfactual_every=2",
        f"{GROWTH}.budget.parameters=2000",
        f"{GROWTH}.promise={{every: 5, first: 1, examples: 64}}",
        "ppo.surrogate=joint",
        "ppo.chunk=10",
        "ppo.epochs=3",
        "checkpoint_every=1",
        "probe_instances=1",
    ]
    small = ("iterations=1", "shards=1", "environments=6", "ppo.group=1")
    large = ("iterations=2", "shards=2", "environments=24", "ppo.group=2", "suite=mnist1d_conv", "mix=[generated]")
    more = small if quick else large
    return run_training(folder / "train_choices", *overrides, *more)


@scenario
def train_resumed(quick: bool, folder: Path) -> Tree:
    """A run that goes on after its first checkpoint, as if the others had never been made."""
    path, short = folder / "train_resumed", ("suite=generated:4", "seed=3", "shards=2", "checkpoint_every=1")
    whole = run_training(path, *short, "iterations=3", *SMALLER)
    for file in path.glob("checkpoints/iteration-0000000[23].*"):
        file.unlink()
    printed = run_command("train", "--resume", path)
    again = read_run(path)
    return {
        "whole": whole,
        "printed": printed,
        "resumed": again,
        "differs": [part for part in ("checkpoints", "scalars") if again[part] != whole[part]],
    }


@scenario
def evaluate(quick: bool, folder: Path) -> Tree:
    """A run's policy and all baselines on held-out instances and on other families."""
    run = folder / "train"
    if not run.exists():
        train(quick, folder)
    held_out, transfer = (2, 0) if quick else (32, 8)
    return {
        "printed": run_command("evaluate", run, "--instances", str(held_out), "--transfer", str(transfer)),
        **{path.stem: describe(json.loads(path.read_text())) for path in sorted(run.glob("*.json"))},
    }


@scenario
def evaluate_suites(quick: bool, folder: Path) -> Tree:
    """A policy beside all baselines on suites of other hosts than those that it learned on."""
    suites = ("generated:8",) if quick else ("digits", "mnist1d", "mnist1d_conv", "generated:5", "generated:8")
    options = ("--controller", find_controller(LEARNED, folder), "--seed", "3", "--instances", "2" if quick else "4")
    return {suite: run_command("evaluate", "--suite", suite, *options) for suite in suites}


@scenario
def environment(quick: bool, folder: Path) -> Tree:
    """Episodes of ``esper/Growth-v0`` by random actions: networks side by side, and one alone."""
    settings: Tree = {
        "suite": "tokens",
        "rules": EVERY_CHOICE,
        "reward": ["outcome", "shaped"],
        GROWTH: {"promise": {"every": 8, "first": 2, "examples": 64}},
    }
    tree = {
        "vector": play(gymnasium.make_vec(esper.rl.ENVIRONMENT, num_envs=4, **settings), episodes=2),
        "alone": play(gymnasium.make(esper.rl.ENVIRONMENT, **settings), episodes=2),
    }
    # Other hosts and ways to run networks: SGD and AdamW with gradients that are clipped, and such that are not.
    for number in (22, 33) if quick else (22, 33, 41, 4, 8, 16):
        for strategy in ("stacked", "looped"):
            suite = f"generated:{number}"
            envs = gymnasium.make_vec(esper.rl.ENVIRONMENT, num_envs=2, suite=suite, strategy=strategy)
            tree[f"{suite} {strategy}"] = play(envs, episodes=1, most=8 if quick else 20)
    return tree


def play(envs: Any, episodes: int, most: int | None = None) -> Tree:
    """Episodes of so many decisions at most, in which each head chooses at random among what its mask allows."""
    rng = np.random.default_rng(0)
    ends = np.cumsum(getattr(envs, "single_action_space", envs.action_space).nvec)[:-1]
    tree: Tree = {}
    for episode in range(episodes):
        observation, info = envs.reset(seed=episode)
        steps = [{"observation": describe(observation), "info": describe(info)}]
        over = False
        while not over and len(steps) != most:
            chances = [rng.random(part.shape) * part for part in np.split(observation["action_mask"], ends, axis=-1)]
            actions = np.stack([chance.argmax(-1) for chance in chances], axis=-1)
            observation, reward, terminated, truncated, info = envs.step(actions)
            over = bool(np.all(terminated))
            parts = {
                "actions": actions,
                "observation": observation,
                "reward": reward,
                "terminated": terminated,
                "truncated": truncated,
                "info": info,
            }
            steps.append(describe(parts))
        tree[f"episode {episode}"] = {"steps": steps, "score": describe(envs.unwrapped.final_score()) if over else None}
    return tree


# Running


def run_scenario(name: str, quick: bool, folder: Path) -> None:
    """Run one scenario and write what it returned to ``FOLDER/NAME.json``, whole or not at all."""
    with (folder / f"{name}.log").open("w") as log:
        os.dup2(log.fileno(), sys.stderr.fileno())
    work = folder / "work"
    work.mkdir(exist_ok=True)
    began = time.monotonic()
    tree = SCENARIOS[name](quick, work)
    result = {"tree": tree, "seconds": time.monotonic() - began, "processor seconds": sum(os.times()[:4])}
    write_result(folder, name, result)


def write_result(folder: Path, name: str, result: Any) -> None:
    """Write a scenario's result."""
    path = folder / f"{name}.json"
    path.with_suffix(".part").write_text(json.dumps(result))
    path.with_suffix(".part").rename(path)


def main() -> None:
    """Run scenarios one after the other, each in a fork of this process, which has imported everything once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where results go")
    parser.add_argument("source", type=Path, help="where esper must come from")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of scenarios; without them all")
    parser.add_argument("--quick", action="store_true", help="smaller ones")
    arguments = parser.parse_args()
    if strangers := [name for name in arguments.names if name not in SCENARIOS]:
        sys.exit(f"no scenario is called {strangers[0]!r}; choose from {', '.join(SCENARIOS)}")
    chosen = arguments.names or SCENARIOS.keys() - (THOROUGH if arguments.quick else ())
    names = [name for name in SCENARIOS if name in chosen]
    if not Path(esper.__file__).is_relative_to(arguments.source):
        sys.exit(f"esper was imported from {esper.__file__} instead of {arguments.source}")
    write_result(arguments.folder, "names", names)
    torch.set_num_threads(1)
    Loop(PROBLEMS["mlp"], "look", horizon=HORIZON)  # imports, once for all, what is imported on demand
    shutil.rmtree(arguments.folder / "work", ignore_errors=True)
    fork = multiprocessing.get_context("fork")
    for name in names:
        process = fork.Process(target=run_scenario, args=(name, arguments.quick, arguments.folder))
        process.start()
        process.join()
        if process.exitcode != 0:
            lines = (arguments.folder / f"{name}.log").read_text().splitlines()
            write_result(arguments.folder, name, {"error": lines[-1] if lines else f"exit code {process.exitcode}"})
    shutil.rmtree(arguments.folder / "work", ignore_errors=True)


if __name__ == "__main__":
    main()
