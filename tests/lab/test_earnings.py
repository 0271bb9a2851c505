"""What kept seeds earned: measured on the committed networks, stored with the behaviour, and summed up."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from esper.control.controller import Controller
from esper.errors import RunError
from esper.lab.evaluate import (
    Behaviour,
    Usage,
    evaluate_run,
    read_behaviour,
    summarise_blueprints,
    summarise_pairs,
    write_behaviour,
)
from esper.lifecycle.rules import Rules
from esper.lifecycle.table import Stage
from esper.population.evaluation import evaluate_committed
from esper.population.learning import stack_data
from esper.rl.episodes import Episodes
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.train.evaluation import (
    EvaluationConfig,
    EvaluationProgress,
    attribute_kept_seeds,
    create_baselines,
    evaluate_cohort,
    split_into_cohorts,
)
from esper.train.results import KeptPair, SeedShapley, SeedValue
from esper.train.workers import LocalWorkers
from train.runs import ignore, started, tiny

pytestmark = pytest.mark.landing

DRIFT = 4


def keeper() -> Controller:
    """One that fossilizes several seeds in most networks."""
    return next(one for one in create_baselines(get_suite("short")) if one.name == "all_at_start")


def instances() -> list[Instance]:
    drawn = get_suite("short").sample(8, "heldout", np.random.default_rng(1))
    return [one if one.drift_step is None else replace(one, drift_step=DRIFT) for one in drawn]


@pytest.fixture(scope="module")
def episodes() -> Episodes:
    """Finished ones, with fossils, live seeds and a drift."""
    running, controller = Episodes(get_suite("short"), instances(), Rules()), keeper()
    state = controller.start([one.seed for one in running.instances])
    while not running.finished.all():
        actions, state = controller.act(running.observe(), running.legal_actions(), state)
        running.step(actions)
    stage = running.population.table.stage
    assert (stage == Stage.FOSSILIZED).any()
    assert (running.population.table.blended & (stage != Stage.FOSSILIZED)).any()
    assert any(one.drift_step == DRIFT for one in running.instances)
    return running


def test_fossils_earn_what_they_add_to_their_host_on_validation_data(episodes: Episodes) -> None:
    suite, table = episodes.suite, episodes.population.table
    fossils = table.stage == Stage.FOSSILIZED
    last = [suite.data(one, "validation", int(one.drift_step is not None)) for one in episodes.instances]
    batch, count = stack_data(last, episodes.device), suite.validation_size
    whole = evaluate_committed(episodes.population, batch).accuracy
    for row, one in enumerate(attribute_kept_seeds(episodes, "orders")):
        instance, kept = episodes.instances[row], np.flatnonzero(fossils[row])
        assert (one.instance, one.family) == (instance.name, instance.family)
        assert [seed.slot for seed in one.seeds] == kept.tolist()
        assert [seed.blueprint for seed in one.seeds] == [suite.blueprints[table.blueprint[row, slot]] for slot in kept]
        assert len(one.pairs) == len(kept) * (len(kept) - 1) // 2
        assert all(seed.standard_error == 0 for seed in one.seeds)
        # The host alone gets a whole number of examples right.
        right = count * (whole[row] - sum(seed.value for seed in one.seeds))
        assert right == pytest.approx(round(right), abs=1e-4)


def test_where_growth_is_about_the_loss_they_earn_shares_of_it(
    episodes: Episodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = episodes.suite
    last = [suite.data(one, "validation", int(one.drift_step is not None)) for one in episodes.instances]
    whole = evaluate_committed(episodes.population, stack_data(last, episodes.device)).loss
    monkeypatch.setattr(type(suite), "objective", "loss", raising=False)
    for row, (instance, one) in enumerate(
        zip(episodes.instances, attribute_kept_seeds(episodes, "orders"), strict=True)
    ):
        model = suite.host(instance)
        alone = whole[row] + np.log(suite.classes) * sum(seed.value for seed in one.seeds)
        values = episodes.population.host.values.detach()[row]
        named = episodes.population.host.layout.unflatten(values.unsqueeze(0))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(named[name][0][tuple(slice(extent) for extent in parameter.shape)])
            loss = F.cross_entropy(model.eval()(last[row].inputs), last[row].labels)
        assert alone == pytest.approx(float(loss), abs=1e-4), "that of the host by itself"


def test_cohorts_tell_of_earnings_only_if_asked(tmp_path: Path) -> None:
    terms = EvaluationConfig("short", Rules())
    (plain,) = split_into_cohorts([keeper()], terms, instances())
    (attributed,) = split_into_cohorts([keeper()], terms, instances(), shapley="orders")
    first, second = evaluate_cohort(plain)[0], evaluate_cohort(attributed)[0]
    assert first.earnings == []
    assert first.records == second.records
    assert [one.instance for one in second.earnings] == [one.instance for one in second.records]
    assert sum(len(one.pairs) for one in second.earnings) > 3
    # And they survive being stored.
    EvaluationProgress(tmp_path / "progress", {}, [attributed]).evaluate_cohorts(LocalWorkers(1), [attributed])
    known = EvaluationProgress(tmp_path / "progress", {}, [attributed])
    assert known.cached_count == 1
    assert known.evaluate_cohorts(LocalWorkers(1), [attributed])[0][0].earnings == second.earnings
    assert EvaluationProgress(tmp_path / "progress", {}, [plain]).cached_count == 0


def test_an_evaluation_stores_what_the_policy_alone_kept(tmp_path: Path) -> None:
    with started(
        tmp_path / "run",
        tiny(
            "iterations=1",
            "policy.advice=null",
            "policy.op_prior={wait: 0, germinate: 2, advance: 1, fossilize: 2, prune: 0}",
        ),
    ) as trainer:
        trainer.train(ignore)
        with LocalWorkers(1) as workers:
            found = evaluate_run(trainer.run, workers, 8, 3)[1]
        assert read_behaviour(trainer.run.behaviour) == found
    assert found.earnings is not None
    assert len(found.earnings) == 8 + 3
    kept = sum(plant.kept * one.episodes for one in found.usage for plant in one.plants)
    assert sum(len(one.seeds) for one in found.earnings) == pytest.approx(kept)
    assert kept > 0


SEED = SeedValue(0, "norm", 0.1, 0.0)
OTHER = SeedValue(1, "mlp", -0.1, 0.0)
KEPT = SeedShapley("plain/mean/1", "plain", (SEED, OTHER), (KeptPair(0, 1, 0.02),))
BEHAVIOUR = Behaviour(1, ("layer0", "layer1"), ("norm", "mlp"), (Usage("plain", "heldout", 2, {"wait": 1.0}, ()),), ())


def test_older_files_have_no_earnings_but_the_gradients_of_blueprints(tmp_path: Path) -> None:
    path = tmp_path / "behaviour.json"
    write_behaviour(path, replace(BEHAVIOUR, earnings=(KEPT,)))
    assert read_behaviour(path).earnings == (KEPT,)
    old = json.loads(path.read_text())
    del old["earnings"]
    gradients = [{"blueprint": "norm", "seeds": 2, "vanished": 0.5, "exploded": 0.0, "ratio": 1.5}]
    path.write_text(json.dumps({**old, "gradients": gradients}))
    assert read_behaviour(path) == BEHAVIOUR


@pytest.mark.parametrize(
    ("damaged", "reason"),
    [
        (replace(KEPT, seeds=(SEED, replace(OTHER, slot=2))), "seeds that there cannot be"),
        (replace(KEPT, seeds=(SEED, replace(OTHER, slot=0)), pairs=()), "seeds that there cannot be"),
        (replace(KEPT, seeds=(SEED,)), "interaction of seeds that it did not keep"),
        (replace(KEPT, pairs=(KeptPair(1, 1, 0.0),)), "interaction of seeds that it did not keep"),
        (replace(KEPT, seeds=(replace(SEED, value=float("nan")), OTHER)), "should be a valid number"),
    ],
)
def test_impossible_earnings_are_refused(tmp_path: Path, damaged: SeedShapley, reason: str) -> None:
    path = tmp_path / "behaviour.json"
    write_behaviour(path, replace(BEHAVIOUR, earnings=(damaged,)))
    with pytest.raises(RunError, match=reason):
        read_behaviour(path)


def kept(family: str, *values: tuple[str, float], pairs: tuple[KeptPair, ...] = ()) -> SeedShapley:
    seeds = tuple(SeedValue(slot, blueprint, value, 0.0) for slot, (blueprint, value) in enumerate(values))
    return SeedShapley(family, family, seeds, pairs)


def test_earners_are_summed_up_by_blueprint() -> None:
    few = [kept("plain", ("norm", 0.1), ("norm", -0.3), ("mlp", 0.2)), kept("plain", ("norm", 0.4)), kept("order")]
    norm, mlp = summarise_blueprints(few)
    assert norm == {
        "blueprint": "norm",
        "kept": 3,
        "episodes": 2 / 3,
        "value": pytest.approx((-0.1 + 0.4) / 2),  # seeds of one network count as one
        "value_low": None,
        "value_high": None,
        "negative": pytest.approx(1 / 3),
    }
    assert [mlp[key] for key in ("blueprint", "kept", "episodes", "value", "negative")] == ["mlp", 1, 1 / 3, 0.2, 0.0]
    assert mlp["value_low"] is None
    norm, mlp = summarise_blueprints(few * 4)
    assert norm["value_low"] < norm["value"] < norm["value_high"]
    assert mlp["value_low"] is None


def test_interactions_are_summed_up_by_slots() -> None:
    three = tuple(KeptPair(*slots, 0.1 * place) for place, slots in enumerate([(0, 1), (0, 2), (1, 2)]))
    rest = [kept("order", pairs=(KeptPair(0, 2, value),)) for value in np.linspace(0.2, 0.4, 7)]
    found = summarise_pairs([kept("plain", pairs=three), *rest, kept("order")], "abc")
    assert [(row["slots"], row["episodes"]) for row in found] == [("a, b", 1), ("a, c", 8), ("b, c", 1)]
    assert [row["value"] for row in found] == pytest.approx([0.0, (0.1 + 7 * 0.3) / 8, 0.2])
    assert [row["value_low"] is None for row in found] == [True, False, True]
    for shapley in ([], [kept("plain")]):
        assert summarise_blueprints(shapley) == summarise_pairs(shapley, "abc") == []
