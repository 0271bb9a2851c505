"""sb3-contrib's MaskablePPO and RecurrentPPO against Esper's own PPO, on equal environment steps.

`python benchmarks/interop.py FOLDER` trains each with every seed, in turns, lets the greedy policies play the same
held-out instances, and prints their mean scores, last as JSON. Stopped, it goes on: trials that are done are only read.
Whatever PPO's variants have in common they are given Esper's defaults for; nothing was tuned for any of them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from esper.lab.experiment import Experiment, Trial, run_experiment
from pydantic import TypeAdapter
from sb3_contrib import MaskablePPO, RecurrentPPO

from esper.config.loading import load_settings
from esper.errors import ConfigError, EsperError
from esper.files import write_atomically
from esper.integrations.joint import JointVectorEnv
from esper.integrations.sb3 import GrowthVecEnv, ModelController
from esper.tasks.registry import get_suite
from esper.train.evaluation import evaluate_controllers, make_evaluation_config
from esper.train.iteration import Iteration
from esper.train.settings import TrainSettings
from esper.train.workers import LocalWorkers, prepare_process

OURS = "esper"
THEIRS = ("maskable_ppo", "recurrent_ppo")


@dataclass(frozen=True)
class Setup:
    """What all trials have in common."""

    steps: int
    """Environment steps of training: decisions for one network each."""
    environments: int
    """Networks that grow side by side."""
    instances: int
    """Held-out instances that every policy plays."""
    suite: str

    @property
    def horizon(self) -> int:
        """Decisions in an episode."""
        return get_suite(self.suite).steps

    @property
    def settings(self) -> TrainSettings:
        """Esper's training; the others take from it what they have in common."""
        iterations, rest = divmod(self.steps, self.environments * self.horizon)
        if rest or not iterations:
            rollout = self.environments * self.horizon
            raise ConfigError(f"{self.steps} steps are no whole rollouts of {rollout}: ask for a multiple of that")
        alone = {"policy.advice": "null", "policy.op_prior": "{wait: 1.5, fossilize: 1, prune: -2}"}
        chosen = {
            "suite": self.suite,
            "iterations": iterations,
            "environments": self.environments,
            "shards": 1,
            **alone,
        }
        return load_settings(TrainSettings, None, [f"{name}={value}" for name, value in chosen.items()])


@dataclass(frozen=True)
class Done:
    """A trial of another library that need not be done again."""

    setup: Setup
    scores: list[float]
    """One per instance."""


_DONE = TypeAdapter(Done)


def main(
    folder: tyro.conf.Positional[Path],
    steps: int = 76_800,
    environments: int = 128,
    seeds: int = 5,
    instances: int = 256,
    suite: str = "tokens",
) -> None:
    """Compare learners of growth.

    Args:
        folder: Where trials are kept; one comparison per folder.
        steps: Environment steps of each training: a multiple of environments times the suite's steps.
        environments: Networks that grow side by side.
        seeds: Trainings of each learner.
        instances: Held-out instances that every policy plays.
        suite: Which learning problems.
    """
    prepare_process()
    setup = Setup(steps, environments, instances, suite)
    scores: dict[str, list[float]] = {name: [] for name in (OURS, *THEIRS)}
    for seed in range(seeds):
        scores[OURS].append(ours(folder, setup, seed))
        for name in THEIRS:
            scores[name].append(float(np.mean(theirs(folder, setup, name, seed).scores)))
    for name, values in scores.items():
        listed = " ".join(f"{value:.3f}" for value in values)
        sys.stdout.write(f"{name:<14} mean {np.mean(values):.3f}, by seed {listed}\n")
    summary = {"steps": steps, "environments": environments, "instances": instances, "suite": suite, "scores": scores}
    sys.stdout.write(f"{json.dumps(summary)}\n")


def ours(folder: Path, setup: Setup, seed: int) -> float:
    """Mean score of Esper's policy."""
    experiment = Experiment(folder, {OURS: setup.settings}, seed + 1, setup.instances)
    (arm,) = run_experiment(experiment, _progress)
    return float(np.mean([outcome.score for outcome in arm.seeds[seed].outcomes]))


def _progress(done: int, total: int, trial: Trial, iteration: Iteration | None) -> None:
    if done == total - 1 and iteration is None:  # seeds before it were told of in their turn
        _say(trial.arm, trial.seed)


def theirs(folder: Path, setup: Setup, name: str, seed: int) -> Done:
    """The scores of another library's policy, trained now if it was not before."""
    path = folder / name / f"seed-{seed}.json"
    if path.exists():
        done = _DONE.validate_json(path.read_bytes())
        if done.setup != setup:
            raise ConfigError(f"{path} comes of another comparison ({done.setup}): choose another folder")
        return done
    _say(name, seed)
    controller = trained(name, setup, seed)
    instances = Experiment(folder, {OURS: setup.settings}, 1, setup.instances).sample_instances()
    with LocalWorkers(1) as workers:
        played = evaluate_controllers(workers, [controller], make_evaluation_config(setup.settings), instances)[0]
    done = Done(setup, [record.score for record in played.records])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _DONE.dump_json(done))
    return done


def trained(name: str, setup: Setup, seed: int) -> ModelController:
    """A model of sb3-contrib after its training."""
    settings = setup.settings
    envs = JointVectorEnv(setup.environments, suite=setup.suite, rules=settings.rules, conduct=settings.conduct)
    # Network i is seeded with seed + i: no two trainings may share a stream.
    shared = {**hyperparameters(setup), "seed": seed * setup.environments, "device": "cpu"}
    env = GrowthVecEnv(envs)
    if name == "maskable_ppo":
        model = MaskablePPO("MlpPolicy", env, **shared)
    else:
        memory = {"lstm_hidden_size": settings.policy.hidden}
        model = RecurrentPPO("MlpLstmPolicy", env, policy_kwargs=memory, **shared)
    model.learn(setup.steps)
    return ModelController(name, model, envs.actions)


def hyperparameters(setup: Setup) -> dict[str, Any]:
    """Esper's defaults by stable_baselines3's names; what these do not cover keeps the library's own default.

    The entropy's weight is constant there and per nat of the whole action, not per head and relative to what is legal:
    it is the floor of our operation's.
    """
    ppo = setup.settings.ppo
    return {
        "learning_rate": lambda left: ppo.learning_rate_at(1.0 - left),
        "n_steps": setup.horizon,
        "batch_size": setup.environments * setup.horizon // ppo.minibatches,
        "n_epochs": ppo.epochs,
        "gamma": ppo.gamma,
        "gae_lambda": ppo.gae_lambda,
        "clip_range": ppo.clip,
        "ent_coef": ppo.entropy_floor.op,
        "vf_coef": ppo.value_weight,
        "max_grad_norm": ppo.max_gradient_norm,
        "target_kl": ppo.target_kl,
    }


def _say(name: str, seed: int) -> None:
    sys.stderr.write(f"{name}, seed {seed}\n")


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except EsperError as error:
        sys.exit(f"error: {error}")
