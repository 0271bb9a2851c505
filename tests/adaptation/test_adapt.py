"""What grows on a trained model is found by trying, kept if it is worth it, and reported on a page."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.adaptation.adapt import Adaptation, Search, Trial
from esper.adaptation.trainer import FineTuneConfig, ForgettingReport, Metrics, Structure, Trainer
from esper.errors import ConfigError
from esper.growth.model import GrowingModel
from strangers import FRACTION, NONE, NUMBER, TRUTH, ZERO, Fits, named, require_refused

CLASSES = 3
OFFERS = {"0": ["lora_2"], "1": ["mlp", "norm"], "2": ["lora_2"]}
SINGLES = [{"0": "lora_2"}, {"1": "mlp"}, {"1": "norm"}, {"2": "lora_2"}]
Batch = tuple[Tensor, Tensor]


def data(count: int, seed: int, shift: int = 0) -> list[Batch]:
    """Points whose class is determined by an angle; ``shift`` renames the classes. In batches of ten."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(count, 2, generator=generator)
    labels = ((points[:, 1].atan2(points[:, 0]) + math.pi) / (2 * math.pi) * CLASSES).long().clamp(max=CLASSES - 1)
    return list(zip(points.split(10), ((labels + shift) % CLASSES).split(10), strict=True))


def host() -> nn.Module:
    """It has learned the classes without a shift."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, CLASSES))
    optimizer = torch.optim.Adam(made.parameters(), 0.03)
    for _ in range(20):
        for points, labels in data(100, 0):
            optimizer.zero_grad()
            F.cross_entropy(made(points), labels).backward()
            optimizer.step()
    return made.eval()


HOST = host()


def attached(offers: dict[str, list[str]] = OFFERS, **options: Any) -> GrowingModel:
    return esper.attach(copy.deepcopy(HOST), offers, torch.zeros(2, 2), **{"freeze_host": True, **options})


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def diverging(model: nn.Module, batch: Batch) -> Tensor:
    return loss(model, batch) * (math.nan if torch.is_grad_enabled() else 1.0)


def accuracy(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


def fast(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, 0.05)


def adapt(model: GrowingModel, **options: Any) -> Adaptation:
    usual = {"loss": loss, "target": data(40, 1, shift=1), "score": accuracy, "optimizer": fast, "epochs": 8}
    return esper.adapt(model, **{**usual, **options})


def mean(model: nn.Module, measure: Callable[[Any, Batch], Tensor], batches: list[Batch]) -> float:
    with torch.no_grad():
        return sum(float(measure(model, batch)) for batch in batches) / len(batches)


@pytest.mark.landing
def test_it_learns_new_data_and_leaves_the_host_as_it_was() -> None:
    model, new, points = attached(), data(200, 2, shift=1), data(40, 3)[0][0]
    before = HOST(points)
    found = adapt(model)
    assert mean(HOST, accuracy, new) < 0.3
    assert mean(model, accuracy, new) > 0.7
    assert found.kept is not None
    assert {name: seed.blueprint.name for name, seed in model.seeds.items()} == found.kept.structure
    with model.without_growth():
        assert torch.equal(model(points), before)
    for mine, theirs in zip(model.host.state_dict().values(), HOST.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    torch.testing.assert_close(model.finalize("raise")(points), model(points))


def test_single_seeds_are_tried_then_kinds_then_the_best_together() -> None:
    found = adapt(attached())
    tried = [one.structure for one in found.trials]
    assert all(single in tried for single in SINGLES)
    assert {"0": "lora_2", "2": "lora_2"} in tried
    sizes = [len(one) for one in tried]
    assert sizes.count(3) == 1
    ranks = {next(iter(one.structure.items())): one.found.rank for one in found.trials if len(one.structure) == 1}
    three = next(one for one in tried if len(one) == 3)
    assert three["1"] == max(("mlp", "norm"), key=lambda name: ranks["1", name])
    best = sorted(three, key=lambda slot: ranks[slot, three[slot]])[-2:]
    assert {slot: three[slot] for slot in best} in tried
    assert len(tried) == len({tuple(sorted(one.items())) for one in tried})


def test_the_best_first_and_it_is_what_is_kept() -> None:
    found = adapt(attached())
    ranks = [one.found.rank for one in found.trials]
    assert ranks == sorted(ranks, reverse=True)
    assert found.kept == found.trials[0]
    assert found.before.score == pytest.approx(mean(HOST, accuracy, data(40, 1, shift=1)))


def test_a_trial_is_measured_on_what_it_did_not_learn_from() -> None:
    """Labels at random: whoever measured on the same examples would find that much can be learned."""
    generator = torch.Generator().manual_seed(5)
    target = [
        (torch.randn(10, 2, generator=generator), torch.randint(CLASSES, (10,), generator=generator)) for _ in "1234"
    ]
    found = adapt(attached({"1": ["mlp"]}), target=target, epochs=60)
    model = attached({"1": ["mlp"]})
    model.slots["1"].germinate("mlp", torch.Generator().manual_seed(0), alpha=1.0)
    optimizer = fast(model.parameter_groups())
    for _ in range(60):
        for batch in target:
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
    assert found.trials[0].found.loss > found.before.loss
    assert mean(model, loss, target) < found.before.loss


def test_what_a_seed_earned_is_what_the_score_loses_without_it() -> None:
    found = adapt(attached({"1": ["mlp"]}))
    assert found.kept is not None
    halves = data(40, 1, shift=1)[0::2], data(40, 1, shift=1)[1::2]
    alone = sum(mean(HOST, accuracy, half) for half in halves) / 2
    assert found.kept.earned == {"1": pytest.approx(found.kept.found.score - alone, abs=1e-6)}


def test_nothing_is_kept_where_nothing_does_better() -> None:
    model = attached()
    found = adapt(model, loss=lambda model, batch: 0 * model(batch[0]).sum() + 1.0, score=None)
    assert found.kept is None
    assert not model.seeds
    assert "Nothing was kept" in repr(found)


@pytest.mark.landing
def test_other_data_are_not_forgotten_beyond_the_tolerance() -> None:
    source = data(100, 0)
    watched = source[1::2]
    model = attached()
    found = adapt(model, source=source, tolerance=0.5)
    before = mean(HOST, loss, watched)
    assert found.source_loss == pytest.approx(before)
    assert mean(model, loss, watched) / before - 1 == pytest.approx(found.retention.rise, abs=1e-5)
    assert found.retention.rise <= 0.5
    assert all(one.retention.rise <= 0.5 for one in found.trials)
    assert any(one.retention.share < 1 for one in found.trials)
    free = attached()
    adapt(free)
    assert mean(free, loss, watched) / before - 1 > 0.5


def test_what_grew_counts_for_as_much_as_other_data_allow() -> None:
    source, model = data(100, 0), attached({"1": ["mlp"]})
    found = adapt(model, source=source, tolerance=0.5)
    assert 0 < found.retention.share < 1
    model.seeds["1"].alpha.fill_(found.retention.share + 0.1)
    assert mean(model, loss, source[1::2]) / found.source_loss - 1 > 0.5


def test_every_second_batch_of_other_data_is_learned_and_the_others_are_not() -> None:
    source, learned = data(60, 0), []

    def seen(model: nn.Module, batch: Batch) -> Tensor:
        if torch.is_grad_enabled():
            learned.extend(at for at, one in enumerate(source) if batch[0] is one[0])
        return loss(model, batch)

    remembering, free = attached({"1": ["mlp"]}), attached({"1": ["mlp"]})
    adapt(remembering, loss=seen, source=source, tolerance=1e6)
    adapt(free)
    assert set(learned) == {0, 2, 4}
    assert mean(remembering, loss, source[0::2]) < mean(free, loss, source[0::2])


def test_without_other_data_all_that_was_learned_stays() -> None:
    found = adapt(attached())
    assert math.isnan(found.source_loss)
    assert {one.retention.share for one in found.trials} == {1.0}
    assert "Source" not in repr(found)


def test_more_parameters_than_allowed_are_not_even_tried() -> None:
    found = adapt(attached(), parameters=60)
    assert found.trials
    assert all(one.parameters <= 60 for one in found.trials)
    assert {"1": "mlp"} not in [one.structure for one in found.trials]
    with pytest.raises(ConfigError, match="every available blueprint adds more than 3"):
        adapt(attached(), parameters=3)


@pytest.mark.landing
def test_a_budget_is_kept_and_what_was_left_out_is_reported() -> None:
    whole = adapt(attached())
    assert whole.flops is not None
    assert whole.untried == 0
    some = adapt(attached(), training_flops=whole.flops / 2)
    assert some.flops is not None
    assert some.flops <= whole.flops / 2
    assert 0 < len(some.trials) < len(whole.trials)
    little = adapt(attached(), seconds=1e-9)
    assert len(little.trials) == 1
    assert little.untried >= len(SINGLES) - 1
    assert f"{little.untried} skipped" in repr(little)
    assert little.trials[0].structure == {"1": "mlp"}  # the largest
    most = adapt(attached(), training_flops=0.95 * whole.flops)
    assert most.untried == len(whole.trials) - len(most.trials) > 0


@pytest.mark.landing
def test_it_does_not_depend_on_global_random_numbers_nor_change_them() -> None:
    torch.manual_seed(1)
    first = attached()
    state = torch.get_rng_state()
    before = adapt(first, seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    second = attached()
    again = adapt(second, seed=4)
    other = adapt(attached(), seed=5)
    assert [one.found for one in before.trials] == [one.found for one in again.trials]
    assert [one.found for one in before.trials] != [one.found for one in other.trials]
    for mine, theirs in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.landing
def test_where_loss_and_score_are_random_all_is_measured_by_the_same_numbers() -> None:
    def noisy(model: nn.Module, batch: Batch) -> Tensor:
        return loss(model, (batch[0] + 0.3 * torch.randn_like(batch[0]), batch[1]))

    def score(model: nn.Module, batch: Batch) -> Tensor:
        return -noisy(model, batch)

    adaptations: list[Adaptation] = []
    for seed in (1, 2):
        model = attached()
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        adaptations.append(adapt(model, loss=noisy, score=score, seed=4))
        assert torch.equal(torch.get_rng_state(), state)
    assert [one.found for one in adaptations[0].trials] == [one.found for one in adaptations[1].trials]
    assert adaptations[0].before == adaptations[1].before


def test_the_page_has_the_share_of_what_was_learned() -> None:
    found, kept = Metrics(0.5, 1.0, 10), ForgettingReport(0.1, 0.0)
    trial = Trial({"head": "lora"}, found, ForgettingReport(0.25, 0.0), {"head": 0.1}, 10)
    page = repr(Adaptation((trial,), 0, Metrics(0.4, 1.0, 10), trial, (), kept, 2.0, None, 1.0))
    assert "Cross-validated on new data, at 25% of the learned weight:\nscore 0.5 (host 0.4)" in page
    assert "+0.00% now, at 10% of the learned weight" in page


@pytest.mark.landing
def test_who_stops_it_finds_the_bare_host() -> None:
    model, calls = attached(), iter(range(200))

    def stopping(model: nn.Module, batch: Batch) -> Tensor:
        if next(calls) == 100:
            raise KeyboardInterrupt
        return loss(model, batch)

    with pytest.raises(KeyboardInterrupt):
        adapt(model, loss=stopping)
    assert not model.seeds
    assert not model.tap.pass_counters
    adapt(model)  # and may begin anew


def test_disabled_slots_stay_free() -> None:
    model = attached()
    model.disable("1")
    assert all("1" not in one.structure for one in adapt(model).trials)
    model = attached()
    for slot in model.slots.values():
        model.disable(slot.name)
    with pytest.raises(ConfigError, match="all slots are disabled"):
        adapt(model)


def test_batches_may_differ_in_size() -> None:
    """Where nothing can be learned, parts of different size do not make anything look better than the host."""
    points, labels = (torch.cat(parts) for parts in zip(*data(40, 1), strict=True))
    target = list(zip(points.split([10, 10, 10, 9, 1]), labels.split([10, 10, 10, 9, 1]), strict=True))
    still = adapt(attached(), target=target, optimizer=lambda groups: torch.optim.SGD(groups, 0.0))
    assert still.kept is None
    assert {one.found.score for one in still.trials} == {still.before.score}
    assert still.before.score == pytest.approx(float((HOST(points).argmax(1) == labels).float().mean()))


def test_all_of_the_new_data_are_learned_in_every_epoch_of_the_last_training() -> None:
    steps: list[tuple[bool, float]] = []
    model, target = attached({"1": ["mlp"]}), data(40, 1, shift=1)

    def seen(model: GrowingModel, batch: Batch) -> Tensor:
        if torch.is_grad_enabled():
            steps.append((model.training, float(model.seeds["1"].alpha)))
        return loss(model, batch)

    found = adapt(model, loss=seen, target=target, epochs=6)
    assert found.kept is not None
    assert len(found.trials) == 1
    assert len(steps) == 6 * len(target) * (1 + len(found.trials))
    assert all(training for training, _ in steps)
    alphas = [alpha for _, alpha in steps[-6 * len(target) :]]
    assert alphas[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert set(alphas[4:]) == {1.0}


def test_first_values_follow_from_the_seed() -> None:
    def grow(seed: int) -> Tensor:
        model = attached({"1": ["mlp"]})
        config = FineTuneConfig(loss, None, lambda groups: torch.optim.SGD(groups, 0.0), 1, [], 0.0, seed)
        Trainer(model, config).fit({"1": "mlp"}, data(40, 1))
        return torch.cat([one.flatten() for one in model.seeds["1"].parameters()])

    assert torch.equal(grow(1), grow(1))
    assert not torch.equal(grow(1), grow(2))


def test_dropout_and_shuffling_follow_from_the_seed() -> None:
    dropping = nn.Sequential(copy.deepcopy(HOST), nn.Sequential(nn.Linear(CLASSES, CLASSES), nn.Dropout(0.5)))
    points, labels = (torch.cat(parts) for parts in zip(*data(40, 1, shift=1), strict=True))

    def run(global_seed: int) -> list[Any]:
        torch.manual_seed(global_seed)
        loader = DataLoader(TensorDataset(points, labels), batch_size=10, shuffle=True)
        model = esper.attach(copy.deepcopy(dropping), {"1": ["block_copy"]}, torch.zeros(2, 2), freeze_host=True)
        return [one.found for one in adapt(model, target=loader).trials]

    assert run(1) == run(2)


def test_what_diverges_is_worse_than_all_else() -> None:
    def explode(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        large = sum(one.numel() for group in groups for one in group["params"]) > 100
        return torch.optim.SGD(groups, 1e30 if large else 0.05)

    found = adapt(attached(), optimizer=explode)
    assert found.kept is not None
    assert "mlp" not in found.kept.structure.values()
    failed = [one for one in found.trials if one.structure == {"1": "mlp"}]
    assert [one.found.score for one in failed] == [-math.inf]
    assert found.trials[-1] in failed or found.trials[-1].found.score == -math.inf


def test_where_the_budget_left_structures_out_that_is_reported_if_all_others_diverge() -> None:
    def exploding(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=1e30)

    with pytest.raises(ConfigError, match=r"of all 1 structures that were tried, which are all but \d+ that"):
        adapt(attached(), optimizer=exploding, training_flops=1.0)


EMPTY = [(torch.zeros(0, 2), torch.zeros(0, dtype=torch.long))] * 2


def summed_loss(model: nn.Module, batch: Any) -> Tensor:
    """Finite for an empty batch, too."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def make_lbfgs(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS([one for group in groups for one in group["params"]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": EMPTY, "score": None, "loss": summed_loss}, "no example"),
        ({"loss": lambda model, batch: loss(model, batch) * 1j}, "one real number"),
        ({"optimizer": make_lbfgs}, "LBFGS"),
    ],
)
def test_what_training_cannot_use_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        adapt(attached(), **options)


def explode_at_last(trials: int, count: int) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
    """Optimizers of which ``count`` explode, once ``trials`` in two folds each were trained."""
    made = itertools.count()

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        explodes = 2 * trials <= next(made) < 2 * trials + count
        return torch.optim.SGD(groups, 1.0, weight_decay=math.inf) if explodes else fast(groups)

    return make


@pytest.mark.landing
def test_where_the_last_training_diverges_the_next_best_grows() -> None:
    usual = adapt(attached())
    model = attached()
    found = adapt(model, optimizer=explode_at_last(len(usual.trials), 2))
    assert found.diverged == usual.trials[:2]
    assert found.kept == usual.trials[2]
    assert {name: seed.blueprint.name for name, seed in model.seeds.items()} == usual.trials[2].structure
    assert mean(model, accuracy, data(40, 1, shift=1)) > found.before.score
    assert "2 scored higher, but diverged" in repr(found)


@pytest.mark.landing
def test_where_every_last_training_diverges_nothing_is_kept_and_the_search_is_not_lost() -> None:
    usual = adapt(attached())
    model = attached()
    found = adapt(model, optimizer=explode_at_last(len(usual.trials), 99))
    assert found.kept is None
    assert not model.seeds
    assert found.trials == usual.trials
    assert found.diverged == tuple(one for one in usual.trials if one.found.rank > usual.before.rank)
    assert "give an optimizer with a lower learning rate" in repr(found)


@pytest.mark.landing
def test_what_counts_for_nothing_in_the_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Trainer.fit

    def forgetful(trainer: Trainer, structure: Structure, batches: list[Batch], *key: int) -> ForgettingReport:
        found = fit(trainer, structure, batches, *key)
        return ForgettingReport(0.0, 0.0) if len(batches) == 4 else found

    monkeypatch.setattr(Trainer, "fit", forgetful)
    model = attached()
    found = adapt(model, source=data(100, 0), tolerance=10.0)
    assert found.kept is None
    assert not model.seeds
    assert any(one.found.rank > found.before.rank for one in found.trials)
    assert "Nothing was kept: trained on all new data, the best structure raises the source loss too much" in repr(
        found
    )


@pytest.mark.landing
@pytest.mark.parametrize("training", [True, False])
def test_the_model_stays_in_its_mode(training: bool) -> None:
    model = attached().train(training)
    assert adapt(model).kept is not None
    assert model.training == training
    assert {slot.training for slot in model.slots.values()} == {training}
    assert {seed.training for seed in model.seeds.values()} == {training}
    assert not model.host.training, "what is frozen"
    model.swap(None)
    with pytest.raises(ConfigError, match="diverges"):
        adapt(model, loss=diverging)
    assert model.training == training


def test_a_loss_of_parts_is_refused_though_the_model_was_called_before() -> None:
    model = attached()
    model(torch.zeros(7, 2))
    with pytest.raises(ConfigError, match="does not call the model as a whole"):
        adapt(model, loss=lambda model, batch: F.cross_entropy(nn.Sequential(*model.host)(batch[0]), batch[1]))


def play(monkeypatch: pytest.MonkeyPatch, scores: Callable[[Structure], float], worthless: str = "") -> Adaptation:
    """An adaptation whose trials have set scores instead of being made; the seed in one slot earns nothing."""

    def cross_validate(search: Search, structure: Structure) -> Trial:
        earned = {slot: 0.0 if slot == worthless else 0.1 for slot in structure}
        found = Metrics(scores(structure), 1.0, 40)
        parameters = search._count_parameters(structure)
        return Trial(structure, found, ForgettingReport(1.0, 0.0), earned, parameters)

    monkeypatch.setattr(Search, "_cross_validate", cross_validate)
    return adapt(attached())


def test_the_best_is_tried_without_what_earned_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = play(monkeypatch, len, worthless="0")
    assert {"0", "1", "2"} in [set(one.structure) for one in found.trials]
    assert {"1", "2"} in [set(one.structure) for one in found.trials]


def test_of_equals_the_smaller_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    found = play(monkeypatch, lambda _: 1.0)
    assert found.kept is not None
    assert found.kept.parameters == min(one.parameters for one in found.trials)


@pytest.mark.landing
def test_every_trial_prints_a_line_if_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    found = adapt(attached(), verbose=True)
    assert len(capsys.readouterr().out.splitlines()) == len(found.trials)
    adapt(attached())
    assert not capsys.readouterr().out


@pytest.mark.landing
def test_the_page_lists_what_was_tried_kept_earned_and_forgotten() -> None:
    page = repr(adapt(attached(), source=data(100, 0), tolerance=10.0))
    for part in ("Kept: ", "earned", "structures tried", "GFLOP", "Source data", "parameters"):
        assert part in page
    assert max(map(len, page.splitlines())) < 140


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": data(10, 1)}, "target has 1 batches for 2 folds"),
        ({"target": data(40, 1), "folds": 5}, "target has 4 batches for 5 folds"),
        ({"source": []}, "source has 0 batches"),
        ({"source": data(10, 0)}, "source has 1 batches"),
        ({"tolerance": 0.1}, "tolerance has no effect without source"),
        ({"loss": lambda model, batch: model(batch[0])}, "it must return a tensor with one real number"),
        ({"loss": lambda model, batch: model(batch[0]).sum() * math.nan}, "is nan for the host without growth"),
        ({"loss": lambda model, batch: HOST(batch[0]).sum()}, "does not call the model"),
        ({"loss": lambda model, batch: loss(model, batch).detach()}, "does not depend on what grows"),
        ({"loss": diverging}, r"of all \d+ structures that were tried diverges in training.*lr=1e-3\)$"),
        ({"optimizer": lambda groups: None}, "it must return a torch optimizer"),
        ({"optimizer": lambda groups: torch.optim.SGD(HOST.parameters(), 1e-3)}, "an optimizer of other parameters"),
        ({"score": lambda model, batch: "good"}, "it must return a finite number"),
        ({"source": data(20, 1), "loss": lambda model, batch: 0 * model(batch[0]).sum()}, "losses above 0 alone"),
    ],
)
def test_what_cannot_be_used_is_refused(options: dict[str, Any], message: str) -> None:
    model = attached()
    with pytest.raises(ConfigError, match=message):
        adapt(model, **options)
    assert not model.seeds


def test_a_model_that_is_not_ready_is_refused() -> None:
    with pytest.raises(ConfigError, match="attach with freeze_host=True"):
        adapt(attached(freeze_host=["0"]))
    model = attached()
    adapt(model)
    with pytest.raises(ConfigError, match=r"taken: remove and keep its seeds with model.swap\(None\)"):
        adapt(model)


FITS: dict[str, Fits] = {
    "model": (),
    "loss": (),
    "target": (),
    "score": (NONE,),
    "source": (NONE, "a list of none"),
    "tolerance": (NONE, ZERO, NUMBER, FRACTION),
    "optimizer": (),
    "epochs": (NUMBER,),
    "folds": (NUMBER,),
    "parameters": (NONE,),
    "training_flops": (NONE, NUMBER, FRACTION),
    "seconds": (NONE, NUMBER, FRACTION),
    "seed": (ZERO, NUMBER),
    "verbose": (TRUTH,),
}


def test_every_argument_is_looked_at() -> None:
    assert set(named(esper.adapt)) == set(FITS)


@pytest.mark.parametrize("argument", [name for name in FITS if name not in ("loss", "score", "optimizer")])
def test_an_argument_of_another_kind_is_refused(argument: str) -> None:
    right = {"model": attached({"1": ["norm"]}), "loss": loss, "target": data(40, 1), "epochs": 1}

    def call(**given: Any) -> None:
        given["model"].swap(None) if isinstance(given["model"], GrowingModel) else None
        esper.adapt(**given)

    require_refused(
        call, right | ({"source": data(20, 0)} if argument == "tolerance" else {}), argument, FITS[argument]
    )


@pytest.mark.parametrize("argument", ["loss", "score", "optimizer"])
def test_what_is_no_function_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match=f"^{argument} is a str, 'x': give a function"):
        adapt(attached(), **{argument: "x"})
