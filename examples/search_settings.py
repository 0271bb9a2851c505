"""Search over settings of growth, with Optuna or as a sweep at Weights & Biases.

    python examples/search_settings.py --trials 10          # needs optuna
    python examples/search_settings.py --wandb --trials 10  # needs wandb, and an account there

Digits are parted in four: training, decisions about growth, the choice between settings, and the one score at the end.
"""

import argparse
from typing import Any

import torch
from digits import digits, score, small_network
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import esper

SPACE = {"learning_rate": (1e-3, 3e-2), "rent": (1e-3, 0.1), "horizon": (6, 16)}
train, held_back, test = digits()
validation, choice = (TensorDataset(*held_back[part]) for part in (slice(0, 200), slice(200, 400)))


def grown(learning_rate: float, rent: float, horizon: int) -> nn.Module:
    """The plain network that training with these settings ends with."""
    model = esper.attach(small_network(), {"1": ["mlp", "lowrank"], "3": ["mlp", "lowrank"]}, train[:2][0])
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=learning_rate))
    validate = esper.Validation("classification", [validation.tensors])
    grower = esper.Grower(model, optimizer, evaluate=validate, rent=rent, horizon=horizon)
    inputs, labels = train[:]
    for _ in range(horizon):
        model.train()
        for x, y in zip(inputs.split(50), labels.split(50), strict=True):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        grower.step(train_loss=loss)
    grower.finish()
    return model.finalize()


def worth(plain: nn.Module) -> float:
    """Accuracy on the data that settings are chosen by, less a price for parameters."""
    return score(plain, choice)[1] - 1e-5 * sum(parameter.numel() for parameter in plain.parameters())


def search_by_optuna(trials: int) -> dict[str, Any]:
    """The best settings of so many trials."""
    import optuna  # noqa: PLC0415 - only this search needs it

    def objective(trial: optuna.Trial) -> float:
        return worth(
            grown(
                trial.suggest_float("learning_rate", *SPACE["learning_rate"], log=True),
                trial.suggest_float("rent", *SPACE["rent"], log=True),
                trial.suggest_int("horizon", *SPACE["horizon"]),
            )
        )

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(objective, n_trials=trials)
    return study.best_params


def sweep_configuration() -> dict[str, Any]:
    """The same space, as `wandb.sweep` takes it."""
    parameters = {
        name: {"distribution": "log_uniform_values", "min": SPACE[name][0], "max": SPACE[name][1]}
        for name in ("learning_rate", "rent")
    }
    parameters["horizon"] = {"min": SPACE["horizon"][0], "max": SPACE["horizon"][1]}
    return {"method": "bayes", "metric": {"name": "worth", "goal": "maximize"}, "parameters": parameters}


def search_by_wandb(trials: int) -> None:
    """Run so many trials of a new sweep; its page shows the best."""
    import wandb  # noqa: PLC0415 - only this search needs it

    def trial() -> None:
        with wandb.init() as run:
            run.log({"worth": worth(grown(**run.config))})

    wandb.agent(wandb.sweep(sweep_configuration(), project="esper"), trial, count=trials)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--wandb", action="store_true", help="a sweep at Weights & Biases instead")
    arguments = parser.parse_args()
    if arguments.wandb:
        search_by_wandb(arguments.trials)
    else:
        best = search_by_optuna(arguments.trials)
        print(f"best settings: {best}")
        plain = grown(**best)
        print(f"test accuracy {score(plain, test)[1]:.3f}")
