"""The recurrent policy: acting and evaluating agree, and nothing depends on what it should not."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from control.situations import SMALL, SPEC, generator, masks, observations, policy, uniforms
from esper.control.policy import OpPrior, Policy, PolicySettings, PolicyStep
from esper.control.policy.heads import (
    OBSERVATION_BOUND,
    WINDOW,
    ObservationNormaliser,
    RunningMoments,
    compute_normalised_entropy,
    find_legal_choices,
    gather_log_probs,
    masked_log_softmax,
    mix_with_uniform,
    sample_choices,
)
from esper.control.policy.network import ValueHead
from esper.engine.observation import MaskTensors, Observation, make_mask_tensors
from esper.errors import IllegalActionError
from esper.lifecycle.actions import RELEVANT, Blend, Head, Op, PerHead
from esper.lifecycle.rules import Isolation, Rules, legal_actions
from esper.lifecycle.table import SeedMeasurements, SeedTable, Stage
from esper.lifecycle.transitions import step as take_step
from open_rules import open_rules

STEPS, ENVIRONMENTS = 6, 5


def at(parts: Observation | MaskTensors, step: int) -> Observation | MaskTensors:
    return type(parts)(*(part[step] for part in parts))


def play(actor: Policy, seen: Observation, legality: MaskTensors, noise: Tensor | None) -> list[PolicyStep]:
    state, steps = actor.initial_state(seen.globals.shape[1]), []
    for t in range(seen.globals.shape[0]):
        step = actor.act(at(seen, t), at(legality, t), state, None if noise is None else noise[t])
        state = step.state
        steps.append(step)
    return steps


def actions_of(steps: list[PolicyStep]) -> Tensor:
    return torch.stack([step.actions for step in steps])


@pytest.fixture
def seen() -> Observation:
    return observations((STEPS, ENVIRONMENTS))


@pytest.fixture
def legality() -> MaskTensors:
    return masks((STEPS, ENVIRONMENTS))


@pytest.fixture
def noise() -> Tensor:
    return uniforms((STEPS, ENVIRONMENTS))


def lively() -> Policy:
    """A policy whose heads differ visibly from uniform."""
    return policy(SMALL.model_copy(update={"head_gain": 1.0}))


def test_acting_and_evaluating_give_the_same_log_probabilities_and_values(
    seen: Observation, legality: MaskTensors, noise: Tensor
) -> None:
    actor = lively()
    steps = play(actor, seen, legality, noise)
    now = actor.evaluate(seen, legality, actions_of(steps), actor.initial_state(ENVIRONMENTS))
    torch.testing.assert_close(now.log_prob, torch.stack([s.log_prob for s in steps]), atol=1e-5, rtol=0)
    torch.testing.assert_close(now.value, torch.stack([s.value for s in steps]), atol=1e-5, rtol=1e-5)


def test_evaluation_continues_from_a_stored_state(seen: Observation, legality: MaskTensors, noise: Tensor) -> None:
    actor = lively()
    steps = play(actor, seen, legality, noise)
    late = tuple(type(parts)(*(part[3:] for part in parts)) for parts in (seen, legality))
    now = actor.evaluate(*late, actions_of(steps)[3:], steps[2].state)
    torch.testing.assert_close(now.log_prob, torch.stack([s.log_prob for s in steps[3:]]), atol=1e-5, rtol=0)


def test_actions_are_canonical_and_legal_head_by_head(seen: Observation, legality: MaskTensors, noise: Tensor) -> None:
    actions = actions_of(play(lively(), seen, legality, noise))
    relevant = torch.from_numpy(RELEVANT)[actions[..., Head.OP]]
    assert (actions[~relevant] == 0).all()
    assert legality.op.gather(-1, actions[..., Head.OP, None]).all()


def test_what_an_environment_draws_depends_on_its_own_noise_only(
    seen: Observation, legality: MaskTensors, noise: Tensor
) -> None:
    actor = lively()
    together = actions_of(play(actor, seen, legality, noise))
    alone = play(
        actor, Observation(*(p[:, 2:3] for p in seen)), MaskTensors(*(p[:, 2:3] for p in legality)), noise[:, 2:3]
    )
    assert torch.equal(actions_of(alone), together[:, 2:3])
    changed = noise.clone()
    changed[:, 2] = 1 - changed[:, 2]
    others = [0, 1, 3, 4]
    again = actions_of(play(actor, seen, legality, changed))
    assert torch.equal(again[:, others], together[:, others])
    assert not torch.equal(again[:, 2], together[:, 2])


def test_permuting_environments_permutes_everything(seen: Observation, legality: MaskTensors, noise: Tensor) -> None:
    actor, order = lively(), torch.tensor([3, 0, 4, 1, 2])
    straight = play(actor, seen, legality, noise)
    permuted = play(
        actor, Observation(*(p[:, order] for p in seen)), MaskTensors(*(p[:, order] for p in legality)), noise[:, order]
    )
    assert torch.equal(actions_of(permuted), actions_of(straight)[:, order])
    torch.testing.assert_close(permuted[-1].value, straight[-1].value[order], atol=1e-5, rtol=1e-5)


def test_permuting_slots_permutes_the_choice_of_slot_and_nothing_else() -> None:
    actor, order = lively(), torch.tensor([2, 0, 3, 1])
    seen, legality = observations((8,), slots=4), masks((8,), slots=4)
    # Only GERMINATE: its slot mask, unlike WAIT's, treats all slots alike.
    legality = legality._replace(op=(torch.arange(legality.op.shape[-1]) == Op.GERMINATE).expand_as(legality.op))
    moved_seen = seen._replace(slots=seen.slots[:, order], blueprints=seen.blueprints[:, order])
    moved_legality = legality._replace(
        slot=legality.slot[:, :, order],
        blueprint=legality.blueprint[:, order],
        alpha_target=legality.alpha_target[:, order],
    )
    state = actor.initial_state(8)
    straight, moved = actor.act(seen, legality, state), actor.act(moved_seen, moved_legality, state)

    for head in Head:
        expected = straight.head_log_probs[head]
        if head is Head.SLOT:
            expected = expected[:, order]
        torch.testing.assert_close(moved.head_log_probs[head], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(moved.value, straight.value, atol=1e-5, rtol=1e-5)
    assert torch.equal(order[moved.actions[:, Head.SLOT]], straight.actions[:, Head.SLOT])


@pytest.mark.parametrize(("slots", "blueprints"), [(1, 1), (2, 7), (9, 3)])
def test_one_policy_serves_any_number_of_slots_and_blueprints(slots: int, blueprints: int) -> None:
    actor = policy()
    step = actor.act(
        observations((4,), slots, blueprints), masks((4,), slots, blueprints), actor.initial_state(4), uniforms((4,))
    )
    assert step.head_log_probs[Head.SLOT].shape == (4, slots)
    assert step.head_log_probs[Head.BLUEPRINT].shape == (4, blueprints)


def test_without_noise_every_head_takes_its_likeliest_choice(seen: Observation, legality: MaskTensors) -> None:
    for step in play(lively(), seen, legality, None):
        for head in Head:
            assert torch.equal(step.actions[:, head], step.head_log_probs[head].argmax(-1))


def test_the_first_policy_is_nearly_uniform_over_what_is_legal(
    seen: Observation, legality: MaskTensors, noise: Tensor
) -> None:
    actor = policy()
    actions = actions_of(play(actor, seen, legality, noise))
    now = actor.evaluate(seen, legality, actions, actor.initial_state(ENVIRONMENTS))
    chosen = actor.find_open_heads(legality, actions)
    assert now.entropy[chosen].min() > 0.99
    assert (now.entropy[~chosen] == 0).all()


def test_the_first_policy_draws_operations_by_its_prior(
    seen: Observation, legality: MaskTensors, noise: Tensor
) -> None:
    prior = OpPrior(wait=1.5, germinate=0.2, advance=-0.3, set_alpha=0.5, fossilize=1.0, prune=-2.0)
    actor = policy(SMALL.model_copy(update={"op_prior": prior}))
    step = play(actor, seen, legality, noise)[0]
    expected = torch.tensor([1.5, 0.2, -0.3, 0.5, 1.0, -2.0]).masked_fill(~legality.op[0], -torch.inf).softmax(-1)
    torch.testing.assert_close(step.head_log_probs[Head.OP].exp(), expected, atol=0.02, rtol=0)


def test_the_joint_log_probability_sums_relevant_heads_only(
    seen: Observation, legality: MaskTensors, noise: Tensor
) -> None:
    relevance = torch.from_numpy(RELEVANT)
    for step in play(lively(), seen, legality, noise):
        chosen = torch.stack(
            [p.gather(1, step.actions[:, h, None])[:, 0] for h, p in enumerate(step.head_log_probs)], -1
        )
        relevant = relevance[step.actions[:, Head.OP]]
        torch.testing.assert_close(step.log_prob, (chosen * relevant).sum(-1))


def learning_heads(actor: Policy, op: Op) -> set[Head]:
    """The heads whose own parameters get a gradient where ``op`` is the only legal operation."""
    seen, legality = observations((2, 6)), masks((2, 6))
    only = torch.zeros_like(legality.op)
    only[..., op] = True
    legality = legality._replace(op=only)
    steps = play(actor, seen, legality, uniforms((2, 6)))
    now = actor.evaluate(seen, legality, actions_of(steps), actor.initial_state(6))
    (now.log_prob.sum() + now.entropy.sum()).backward()
    gradients = {head: [p.grad for p in actor.heads.output_parameters(head)] for head in Head}
    return {head for head in Head if any(g is not None and g.any() for g in gradients[head])}


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize("make", [lively, lambda: floored(*Head)], ids=["plain", "with floors"])
def test_heads_that_the_operation_does_not_read_get_exactly_no_gradient(make: Callable[[], Policy], op: Op) -> None:
    """Nor does the operation's own: the only legal one is certain."""
    assert learning_heads(make(), op) == {head for head in Head if RELEVANT[op, head]} - {Head.OP}


def closed_masks(legality: MaskTensors, rules: Rules) -> MaskTensors:
    """Of each closed head the last of its choices alone is legal, whatever else is."""
    changes = {}
    for head in rules.closed_heads:
        only = torch.zeros_like(legality[head])
        only[..., -1] = True
        changes[head.name.lower()] = only
    return legality._replace(**changes)


CLOSABLE = ("blends", "tempos", "alpha_targets", "alpha_speeds", "alpha_curves")


@pytest.mark.parametrize("closed", [*((kind,) for kind in CLOSABLE), CLOSABLE])
def test_heads_that_rules_close_have_no_parameters_and_take_their_one_choice(
    closed: tuple[str, ...], seen: Observation, legality: MaskTensors, noise: Tensor
) -> None:
    choices = open_rules(blends=tuple(Blend)).model_dump()
    operations = [op for op in choices["operations"] if op != "set_alpha"]
    rules = open_rules(**choices | {kind: choices[kind][-1:] for kind in closed} | {"operations": operations})
    full, part = lively(), Policy(SPEC, lively().settings, generator(), rules.closed_heads)
    assert len(rules.closed_heads) == len(closed)
    assert part.heads.present == tuple(head for head in Head if head not in rules.closed_heads)
    assert not any(head.name in name for head in rules.closed_heads for name, _ in part.named_parameters())
    assert (part.heads.details is None) == (closed == CLOSABLE)

    # The first weights of all others are the same, and so is what is chosen where the rules hold.
    own = part.state_dict()
    assert own.keys() < full.state_dict().keys()
    assert all(torch.equal(own[name], full.state_dict()[name]) for name in own)
    legality = closed_masks(legality, rules)
    for ours, theirs in zip(play(part, seen, legality, noise), play(full, seen, legality, noise), strict=True):
        assert torch.equal(ours.actions, theirs.actions)
        assert torch.equal(ours.chosen_log_prob, theirs.chosen_log_prob)
        assert not ours.chosen_log_prob[:, sorted(rules.closed_heads)].any()


def test_memory_reaches_later_decisions(seen: Observation, legality: MaskTensors) -> None:
    actor = lively()
    straight = play(actor, seen, legality, None)
    other_start = seen._replace(globals=torch.cat((seen.globals[:1] + 1, seen.globals[1:])))
    assert not torch.equal(play(actor, other_start, legality, None)[-1].value, straight[-1].value)


def test_building_a_policy_reads_only_its_own_generator() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = policy(seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = policy(seed=3), policy(seed=4)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.lstm.weight_hh_l0, other.lstm.weight_hh_l0)


def test_a_state_dict_restores_weights_and_statistics(seen: Observation, legality: MaskTensors) -> None:
    actor = lively()
    actor.update_statistics([seen], torch.randn(STEPS, ENVIRONMENTS, generator=generator()))
    copy = Policy(SPEC, SMALL, generator(9))
    copy.load_state_dict(actor.state_dict())
    for ours, theirs in zip(play(actor, seen, legality, None), play(copy, seen, legality, None), strict=True):
        assert torch.equal(ours.value, theirs.value)
        assert torch.equal(ours.log_prob, theirs.log_prob)


def test_statistics_move_with_the_policy(seen: Observation) -> None:
    """Tensors without data stand for those of an accelerator: torch refuses to compute with those of two devices."""
    far = torch.device("meta")
    actor = lively().to(far)
    values = actor.value_head(torch.zeros(ENVIRONMENTS, SMALL.hidden, device=far))
    assert {part.device for part in (*actor.normaliser(seen.to(far)), values)} == {far}


def test_width_must_suit_the_attention_heads() -> None:
    with pytest.raises(ValidationError, match="not a multiple"):
        PolicySettings(advice=None, width=30, attention_heads=4)


FLOOR = 0.08


def floored(*heads: Head, floor: float = FLOOR) -> Policy:
    """A policy sure of itself whose ``heads`` have a floor."""
    floors = PerHead.fill(0.0).model_copy(update={head.name.lower(): floor for head in heads})
    return policy(SMALL.model_copy(update={"head_gain": 1.0, "probability_floor": floors}))


def sure(actor: Policy) -> Policy:
    """With outputs so large that nearly every choice is certain."""
    with torch.no_grad():
        for head in Head:
            for parameter in actor.heads.output_parameters(head):
                parameter.mul_(300.0)
    return actor


def legal_of(legality: MaskTensors, head: Head, actions: Tensor) -> Tensor:
    op, slot = actions[:, Head.OP], actions[:, Head.SLOT]
    return find_legal_choices(legality, head, op, slot, torch.from_numpy(RELEVANT)[op])


@pytest.mark.parametrize("head", list(Head))
def test_a_floor_holds_for_every_legal_choice_of_its_head_and_for_no_other_head(head: Head) -> None:
    actor, legality = sure(floored(head)), masks((400,))
    step = actor.act(observations((400,)), legality, actor.initial_state(400), uniforms((400,)))
    for other in Head:
        legal = legal_of(legality, other, step.actions)
        probabilities = step.head_log_probs[other].exp()
        assert (probabilities[~legal] == 0).all()
        smallest = probabilities[legal].amin().item()
        assert smallest == pytest.approx(FLOOR, rel=1e-4) if other is head else smallest < FLOOR / 2


@pytest.mark.parametrize("floor", [0.0, FLOOR, 0.4])
def test_acting_and_evaluating_agree_under_floors(
    floor: float, seen: Observation, legality: MaskTensors, noise: Tensor
) -> None:
    """In log-probabilities, head by head, and in entropies, which are those of the distributions drawn from."""
    actor = floored(*Head, floor=floor)
    steps = play(actor, seen, legality, noise)
    now = actor.evaluate(seen, legality, actions_of(steps), actor.initial_state(ENVIRONMENTS))
    torch.testing.assert_close(now.chosen_log_prob, torch.stack([s.chosen_log_prob for s in steps]), atol=1e-5, rtol=0)
    for t, step in enumerate(steps):
        for head in Head:
            legal = legal_of(at(legality, t), head, step.actions)
            expected = compute_normalised_entropy(step.head_log_probs[head], legal)
            torch.testing.assert_close(now.entropy[t, :, head], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("floor", [FLOOR, 0.4])
def test_floors_change_nothing_in_greedy_play(floor: float, seen: Observation, legality: MaskTensors) -> None:
    """Not even one that makes all choices equally likely."""
    plain = play(floored(), seen, legality, None)
    assert torch.equal(actions_of(play(floored(*Head, floor=floor), seen, legality, None)), actions_of(plain))


def test_floors_change_what_is_drawn(seen: Observation, legality: MaskTensors, noise: Tensor) -> None:
    plain = play(sure(floored()), seen, legality, noise)
    raised = play(sure(floored(*Head, floor=0.4)), seen, legality, noise)
    assert not torch.equal(actions_of(raised), actions_of(plain))


def test_a_floor_that_leaves_nothing_to_choose_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"0\.5 for tempo leaves nothing to choose"):
        PolicySettings(advice=None, probability_floor={"tempo": 0.5})


@pytest.mark.parametrize("op", list(Op))
def test_a_prior_of_one_operation_changes_its_first_logit_alone(op: Op) -> None:
    def first(prior: OpPrior) -> Tensor:
        return policy(SMALL.model_copy(update={"op_prior": prior})).heads.outputs[Head.OP.name].get_parameter("bias")

    difference = first(OpPrior(**{op.name.lower(): 7.0})) - first(OpPrior())
    assert difference.nonzero().flatten().tolist() == [op]
    assert first(OpPrior(**{op.name.lower(): 7.0}))[op] == 7.0


# Masked distributions: nothing illegal is drawn, and nothing illegal learns.


DRAWS = 100_000


def test_no_illegal_choice_in_many_draws_even_at_extreme_logits_and_uniforms() -> None:
    random = generator(1)
    logits = torch.randn(DRAWS, 6, generator=random) * 30
    legal = torch.rand(DRAWS, 6, generator=random) < 0.4
    legal[torch.arange(DRAWS), torch.randint(6, (DRAWS,), generator=random)] = True
    uniforms = torch.rand(DRAWS, generator=random)
    uniforms[: DRAWS // 4] = 0.0
    uniforms[DRAWS // 4 : DRAWS // 2] = 1.0

    choices = sample_choices(masked_log_softmax(logits, legal), legal, uniforms)

    assert legal.gather(1, choices[:, None]).all()


@given(st.floats(0, 1), st.integers(1, 15))
def test_a_draw_inverts_the_cumulated_distribution(uniform: float, pattern: int) -> None:
    legal = torch.tensor([[bool(pattern >> i & 1) for i in range(4)]])
    choice = sample_choices(masked_log_softmax(torch.zeros(1, 4), legal), legal, torch.tensor([uniform]))
    lawful = legal[0].nonzero().flatten().tolist()
    expected = {lawful[min(int(u * len(lawful)), len(lawful) - 1)] for u in (uniform - 1e-6, uniform, uniform + 1e-6)}
    assert int(choice) in expected


@pytest.mark.parametrize("count", [2, 3, 6])
def test_uniform_choice_has_entropy_one_however_many_are_legal(count: int) -> None:
    legal = torch.arange(6)[None] < count
    entropy = compute_normalised_entropy(masked_log_softmax(torch.zeros(1, 6), legal), legal)
    assert entropy.item() == pytest.approx(1.0)


def test_entropy_is_in_units_of_the_legal_maximum() -> None:
    legal = torch.tensor([[True, True, False]])
    entropy = compute_normalised_entropy(masked_log_softmax(torch.tensor([[math.log(3.0), 0.0, 5.0]]), legal), legal)
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(2)
    assert entropy.item() == pytest.approx(expected)


FLOORS = [0.0, 1e-6, 0.01, 0.1, 0.25, 1 / 3, 0.49]


@given(
    st.sampled_from(FLOORS), st.lists(st.tuples(st.floats(-200, 200, width=32), st.booleans()), min_size=1, max_size=9)
)
def test_no_legal_choice_is_below_its_floor_and_no_illegal_one_above_zero(
    floor: float, choices: list[tuple[float, bool]]
) -> None:
    legal = torch.tensor([[allowed for _, allowed in choices]])
    legal[0, 0] = True
    count = int(legal.sum())
    before = masked_log_softmax(torch.tensor([[logit for logit, _ in choices]]), legal)
    after = mix_with_uniform(before, legal, floor)
    probabilities, unmixed = after.double().exp(), before.double().exp()
    least = min(floor, 1 / count)
    assert after.isfinite().all()
    assert probabilities[legal].amin() >= least * (1 - 1e-5)
    assert (probabilities[~legal] == 0).all()
    assert probabilities.sum().item() == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(probabilities[legal], (1 - count * least) * unmixed[legal] + least, atol=1e-6, rtol=1e-5)
    if count == 1:
        assert after[legal].item() == 0


@pytest.mark.parametrize("floor", FLOORS)
def test_floors_pass_the_gradient_of_the_mixed_distribution_and_none_to_what_is_illegal(floor: float) -> None:
    """Against automatic differentiation of the plain formula in double precision, with the legal logits alone."""
    logits = (torch.randn(60, 5, generator=generator()) * 3).requires_grad_()
    legal = torch.rand(60, 5, generator=generator(1)) < 0.5
    legal[:, 2] = True
    log_probs = mix_with_uniform(masked_log_softmax(logits, legal), legal, floor)
    (log_probs[:, 2].sum() + compute_normalised_entropy(log_probs, legal).sum()).backward()
    assert (logits.grad[~legal] == 0).all()
    assert (logits.grad[legal.sum(1) == 1] == 0).all()
    for row in range(60):
        plain = logits[row].detach().double()[legal[row]].requires_grad_()
        count = len(plain)
        least = min(floor, 1 / count)
        mixed = (1 - count * least) * plain.softmax(-1) + least
        entropy = -(mixed * mixed.log()).sum() / math.log(max(count, 2))
        place = int(legal[row, :2].sum())
        (expected,) = torch.autograd.grad(mixed[place].log() + entropy, plain)
        torch.testing.assert_close(logits.grad[row][legal[row]].double(), expected, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("floor", [0.02, 0.2, 0.4])
def test_draws_follow_the_distribution_with_its_floor(floor: float) -> None:
    legal = torch.tensor([[True, False, True, True]]).expand(DRAWS, -1)
    logits = torch.tensor([[0.0, 9.0, 30.0, -30.0]]).expand(DRAWS, -1)
    log_probs = mix_with_uniform(masked_log_softmax(logits, legal), legal, floor)
    choices = sample_choices(log_probs, legal, torch.rand(DRAWS, generator=generator()))
    frequencies = torch.bincount(choices, minlength=4) / DRAWS
    least = min(floor, 1 / 3)
    torch.testing.assert_close(frequencies, torch.tensor([least, 0.0, 1 - 2 * least, least]), atol=5e-3, rtol=0)
    torch.testing.assert_close(gather_log_probs(log_probs[:1], torch.tensor([3])).exp(), torch.tensor([least]))


# Running statistics: right, floored, windowed, and without effect on predictions.


def test_batches_merge_to_the_moments_of_their_union() -> None:
    data = torch.randn(90, 4, generator=generator()) * torch.tensor([1.0, 10.0, 0.1, 3.0]) + 5
    moments = RunningMoments(4, floor=1e-6)
    for batch in data.split([10, 50, 30]):
        moments.update(batch)
    torch.testing.assert_close(moments.mean, data.double().mean(0))
    torch.testing.assert_close(moments.variance, data.double().var(0, correction=0))


def test_old_batches_fade_so_that_statistics_follow_a_changed_policy() -> None:
    moments = RunningMoments(1, floor=1e-6)
    for _ in range(10 * WINDOW):
        moments.update(torch.zeros(5, 1))
    for _ in range(5 * WINDOW):
        moments.update(torch.ones(5, 1))
    assert moments.mean.item() > 0.99


def test_a_feature_that_hardly_varied_cannot_explode() -> None:
    normaliser = ObservationNormaliser(SPEC)
    seen = observations((6,))
    seen = seen._replace(globals=1 + 1e-4 * seen.globals)
    normaliser.update(seen)
    surprising = seen._replace(globals=seen.globals + 100)
    assert normaliser(surprising).globals.abs().max() == OBSERVATION_BOUND


def test_statistics_take_in_parts_of_several_shapes_as_one_batch() -> None:
    whole, apart = ObservationNormaliser(SPEC), ObservationNormaliser(SPEC)
    for _ in range(3):
        seen = observations((30, 4))
        whole.update(seen)
        apart.update(*(Observation(*(part[rows] for part in seen)) for rows in (slice(0, 3), slice(3, 30))))
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(apart.state_dict()[name], value)


@pytest.mark.parametrize("value", [0.0, 0.1, 1.0])
def test_what_never_varied_in_training_is_not_shown(value: float) -> None:
    normaliser = ObservationNormaliser(SPEC)
    seen = observations((7, 5))
    seen.globals[..., 2] = value
    assert normaliser(seen).globals[..., 2].eq(value).all(), "nothing is known before the first batch"
    for _ in range(50):
        normaliser.update(seen)
    elsewhere = seen._replace(globals=seen.globals + 100)
    shown = normaliser(elsewhere).globals
    assert not shown[..., 2].any()
    assert shown[..., [0, 1, 3]].abs().min() == OBSERVATION_BOUND


def test_normalised_observations_are_standard_and_reading_changes_nothing() -> None:
    normaliser = ObservationNormaliser(SPEC)
    seen = observations((50, 4))
    seen = seen._replace(slots=seen.slots * 0.3 + 2)
    normaliser.update(seen)
    before = {name: value.clone() for name, value in normaliser.state_dict().items()}
    slots = normaliser(seen).slots.flatten(0, -2)
    torch.testing.assert_close(slots.mean(0), torch.zeros(SPEC.slots), atol=1e-4, rtol=0)
    torch.testing.assert_close(slots.std(0), torch.ones(SPEC.slots), atol=1e-2, rtol=0)
    assert all(torch.equal(value, before[name]) for name, value in normaliser.state_dict().items())


@pytest.mark.parametrize("offset", [0.0, 40.0])
def test_rescaling_the_value_head_keeps_every_prediction(offset: float) -> None:
    head = ValueHead(12, 8, generator())
    memory = torch.randn(20, 12, generator=generator(1))
    for seed, spread in enumerate((3.0, 0.2, 7.0)):
        before = head(memory)
        head.update_scale(torch.randn(30, 4, generator=generator(seed)) * spread + offset)
        torch.testing.assert_close(head(memory), before, atol=1e-4, rtol=1e-5)
    assert head.scale.item() == pytest.approx(head.returns.variance.sqrt().item())


# The policy plays the real lifecycle and never makes an illegal move.


MANY, LONG, SLOTS, BLUEPRINTS = 1000, 50, 3, 4


def measurements(random: np.random.Generator) -> SeedMeasurements:
    shape = (MANY, SLOTS)
    return replace(
        SeedMeasurements.none(*shape),
        probed=np.ones(shape, np.bool_),
        gradient_healthy=random.random(shape) < 0.8,
        contribution=random.normal(size=shape).astype(np.float32),
        contribution_age=random.integers(0, 4, shape).astype(np.int16),
    )


@pytest.mark.parametrize("isolation", list(Isolation))
def test_no_illegal_action_in_fifty_thousand_decisions(isolation: Isolation) -> None:
    random = np.random.default_rng(0)
    actor = policy(SMALL.model_copy(update={"head_gain": 1.0}))
    rules = open_rules(isolation=isolation, cooldown=(1, 1, 1))
    compatible = random.random((MANY, SLOTS, BLUEPRINTS)) < 0.5
    table, state, used = SeedTable.dormant(MANY, SLOTS), actor.initial_state(MANY), set[int]()
    for t in range(LONG):
        seen, measured = observations((MANY,), SLOTS, BLUEPRINTS, seed=t), measurements(random)
        legality = make_mask_tensors(legal_actions(table, measured, rules, compatible), torch.device("cpu"))
        decision = actor.act(seen, legality, state, uniforms((MANY,), seed=t))
        actions, state = decision.actions.numpy(), decision.state
        table = take_step(table, measured, actions, rules, compatible).table  # raises if one of them is illegal
        used.update(actions[:, Head.OP].tolist())
    possible = set(Op) - ({Op.ADVANCE} if isolation is Isolation.NONE else set())
    assert used == possible
    assert (table.stage == Stage.FOSSILIZED).any()


def test_a_policy_shown_wrong_masks_does_make_illegal_actions() -> None:
    actor, rules = policy(), open_rules()
    empty = SeedTable.dormant(MANY, SLOTS)
    nothing = SeedMeasurements.none(MANY, SLOTS)
    everywhere = np.ones((MANY, SLOTS, BLUEPRINTS), np.bool_)
    masks = make_mask_tensors(legal_actions(empty, nothing, rules, everywhere), torch.device("cpu"))
    wrong = masks._replace(op=torch.ones_like(masks.op))
    seen = observations((MANY,), SLOTS, BLUEPRINTS)
    actions = actor.act(seen, wrong, actor.initial_state(MANY), uniforms((MANY,))).actions
    with pytest.raises(IllegalActionError):
        take_step(empty, nothing, actions.numpy(), rules, everywhere)
