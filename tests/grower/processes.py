"""Two processes that train one model: run by `test_distributed` as a program of its own, once per rank."""

import copy
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import esper
from esper import Grower
from esper.control.rules import LookRule, LookSettings
from esper.grower.evaluation import Evaluate
from esper.grower.scores import Score
from esper.growth.persist import GrowthInStateDict
from esper.growth.promise import PromiseSettings
from esper.ladders.plan import warmup_stable_decay
from esper.lifecycle.rules import Rules
from factories import HELD, RINGS, make_data, make_growing, make_host, packed, validate

TESTS = Path(__file__).parent.parent
RANKS = 2
DECISIONS = 12
EARLY = 5
"""Decisions after which training that ends early has unfinished seeds."""
BLOWN_UP = 9
"""Decision at which the first process is told of a loss that is not finite."""
FALSE_ALARM = 7
"""Decision at which the second one is."""
SAVED_AFTER = 6
SEED = 7
BUDGET = 1e6
"""FLOPs, of which twelve decisions take more."""
EAGER = LookRule(LookSettings(promise=PromiseSettings(every=2, first=1, examples=16), threshold=-1.0), 20)
"""Plants what promises most, however little that is."""
UNITS = {("0", "1", "2"): ["units_4"], ("2", "3", "4"): ["units_4"]}
"""Hidden units on offer between the layers of the host."""
RUN = "run"
"""Folder of the run that fresh processes begin and resumed ones go on with."""


def start_processes(module: str, folder: Path, *words: str) -> list[str]:
    """Run a module as a program, once per rank, to its end; what each process said."""
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", module, str(folder), str(rank), *words],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    said = [process.communicate() for process in started]
    assert [process.returncode for process in started] == [0] * RANKS, "\n".join(errors for _, errors in said)
    return [words for words, _ in said]


def main(folder: Path, rank: int, how: str) -> None:
    """Train, and leave behind what each process held at the end."""
    torch.set_num_threads(1)
    resume, rules = how == "resume", HELD if how == "refit" else Rules()
    store = distributed.FileStore(str(folder / f"store-{how}"), RANKS)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    model = (
        esper.attach(make_host(), UNITS, torch.zeros(2, 4)) if how == "units" else make_growing(frozen=how == "frozen")
    )
    carrier = GrowthInStateDict(model)
    saved = torch.load(folder / "checkpoint.pt", weights_only=True) if resume else None
    if saved is not None:
        model.load_state_dict(saved["model"])
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=1e-2))
    # Torch refuses to wrap what does not learn; the gradients of seeds are averaged by the grower.
    network = model if how == "frozen" else DistributedDataParallel(model, find_unused_parameters=resume)
    evaluate: Any = _only_first(rank, constrained=how == "constrained")
    if how == "constrained":
        evaluate = esper.Constrained(evaluate, "target", {"source": 0.01})
    if how == "refit":
        evaluate = esper.Refit(evaluate)
    # Only the first process's controller and seed matter.
    grower = Grower(
        model,
        optimizer,
        evaluate,
        controller=EAGER if how == "look" else "random",
        horizon=20,
        seed=SEED + rank,
        rules=rules,
        loss=lambda inputs, labels: F.cross_entropy(model(inputs), labels),
        run=folder / RUN,
        verbose=True,
        training_flops=BUDGET if how == "budget" else None,
    )
    schedule = LambdaLR(optimizer, lambda _: warmup_stable_decay(grower.spending.share) if how == "budget" else 1.0)
    carrier.add_part("grower", grower)
    if saved is not None:
        optimizer.load_state_dict(saved["optimizer"])
    mine = slice(rank * 48, (rank + 1) * 48)
    told: list[str] = []
    gradients: list[float] = []
    rates: list[float] = []
    forks: list[dict[str, Any]] = []
    for number in range(grower.decisions, EARLY if how == "early" else DECISIONS):
        false_alarm = bool(rank) and number == FALSE_ALARM
        gradient, decision = train(network, grower, mine, blown_up=number == BLOWN_UP, false_alarm=false_alarm)
        gradients.append(gradient)
        told.append(decision)
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
        forks.append(copy_forks(grower))
        if grower.decisions == SAVED_AFTER and rank == 0 and not resume:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "checkpoint.pt")
    ending = str(grower.finish())
    held = {name: tensor for name, tensor in model.state_dict().items() if name != "growth"}
    state = {"model": held, "told": told, "gradients": gradients, "grower": packed(grower.state_dict())}
    state |= {"forks": forks, "ending": ending, "rates": rates}
    torch.save(state, folder / f"rank-{rank}-{how}.pt")
    distributed.destroy_process_group()


def train(
    network: nn.Module, grower: Grower, part: slice, *, blown_up: bool, false_alarm: bool = False
) -> tuple[float, str]:
    """One minibatch and one decision: the norm of the gradient, which is clipped, and the decision."""
    inputs, labels = make_data()
    network.train()
    grower.optimizer.zero_grad()
    loss = F.cross_entropy(network(inputs[part]), labels[part])
    grower.isolated_backward(loss, inputs[part], labels[part])
    loss.backward()
    gradient = float(nn.utils.clip_grad_norm_(network.parameters(), 0.5))
    grower.optimizer.step()
    if blown_up:
        nn.init.constant_(next(network.parameters()), float("nan"))
    return gradient, str(grower.step(train_loss=float("nan") if blown_up or false_alarm else loss))


def copy_forks(grower: Grower) -> dict[str, dict[str, Any]]:
    """The tensors of all forks there are now, by slot."""
    return {
        slot: {name: copy.deepcopy(value) for name, value in fork.items() if not isinstance(value, str)}
        for slot, fork in grower.backend.forks.state_dict()["forks"].items()
    }


def _only_first(rank: int, *, constrained: bool) -> Evaluate:
    def evaluate(model: nn.Module) -> Any:
        assert rank == 0, "only the first process evaluates"
        return _validate_sets(model) if constrained else validate(model)

    return evaluate


@torch.no_grad()
def _validate_sets(model: nn.Module) -> dict[str, Score]:
    """Two sets that ask for different answers to the same."""
    inputs, labels = make_data(64, seed=1)
    logits = model.eval()(inputs)
    return {
        name: Score(F.cross_entropy(logits, (labels + turned) % RINGS))
        for name, turned in {"target": 0, "source": 1}.items()
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
