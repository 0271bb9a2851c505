"""A run sets where its networks are computed, and workers check whether that is possible."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.control.policy import PolicyState
from esper.control.rules import Never
from esper.errors import ConfigError, RunError
from esper.lab.evaluate import load_policy
from esper.lab.static_networks import StaticNetwork, StaticTask, train_cohort
from esper.lifecycle.actions import Blend
from esper.lifecycle.rules import Rules
from esper.numerics.devices import list_devices, require_device
from esper.population.execution import Execution, Parameters
from esper.population.parameters import SeedKind
from esper.rl.episodes import CPU, Episodes
from esper.rl.rollout import Rollout
from esper.runs.run_directory import RunDirectory
from esper.tasks.registry import get_suite
from esper.train import evaluation, trainer
from esper.train.evaluation import (
    EvaluationConfig,
    create_baselines,
    evaluate_cohort,
    make_evaluation_config,
    split_into_cohorts,
)
from esper.train.recorder import EpisodeRecorder
from esper.train.settings import TrainSettings
from esper.train.trainer import (
    ShardTask,
    collect_rollout,
    create_controller,
    create_policy,
    run_policy,
    sample_instances,
)
from esper.train.workers import Backend, Shared, require_devices
from factories import iterate_arrays
from rl.far_away import FAR, FarAway
from train.runs import ENVIRONMENT, ignore, started, tiny
from train.worker_tasks import Placed, find_lent_gpu

pytestmark = pytest.mark.landing


def task(settings: TrainSettings, shard: int = 0) -> ShardTask:
    return ShardTask(settings, 0, shard, Shared(create_policy(settings).state_dict()))


def tensors(rollout: Rollout) -> list[torch.Tensor]:
    return [part for _, part in iterate_arrays(rollout)]


def test_shards_take_the_devices_in_turns() -> None:
    settings = tiny("environments=16", "shards=4", "devices=[cuda:0, cuda:1, cpu]")
    assert [task(settings, shard).device for shard in range(4)] == ["cuda:0", "cuda:1", "cpu", "cuda:0"]
    assert make_evaluation_config(settings).device == "cuda:0"
    assert EvaluationConfig("short", Rules()).device == "cpu"


def test_one_device_may_be_named_without_brackets() -> None:
    assert tiny("devices=cuda").devices == ("cuda",)


def test_a_device_without_a_shard_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="2 devices for only 1 shards: raise shards or name fewer devices"):
        tiny("devices=[cpu, cpu]")
    with pytest.raises(ConfigError, match="devices"):
        tiny("devices=[]")


@pytest.mark.parametrize("name", ["nonsense", "cpu:1", "", "meta", "cuda:99"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"no device '{name}' on this machine: choose from cpu"):
        require_device(name)


@pytest.mark.parametrize(("name", "usable"), [("cuda", True), ("cuda:1", True), ("cuda:2", False), ("xpu", False)])
def test_a_device_may_be_named_with_its_number_and_without(
    monkeypatch: pytest.MonkeyPatch, name: str, usable: bool
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert list_devices() == ("cpu", "cuda:0", "cuda:1")
    if usable:
        assert require_device(name) == torch.device(name)
    else:
        with pytest.raises(ConfigError, match="choose from cpu, cuda:0, cuda:1"):
            require_device(name)


def test_a_run_asks_for_its_devices_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    settings = tiny("environments=12", "shards=3", "devices=[cpu, cpu, 'cuda:77']")
    with pytest.raises(ConfigError, match="'cuda:77'"), started(tmp_path / "run", settings):
        pass
    assert list(RunDirectory.open(tmp_path / "run").checkpoints.iterdir()) == []


@pytest.mark.slow
def test_ray_refuses_what_it_has_no_gpu_for() -> None:
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    with Backend("ray", workers=1).open_workers(1) as workers:
        if ray.cluster_resources().get("GPU"):
            pytest.skip("Ray has found a GPU")
        require_devices(["cpu"], workers)
        with pytest.raises(ConfigError, match=r"Ray has none: set devices=\[cpu\]"):
            require_devices(["cpu", "cuda"], workers)
        with pytest.raises(ConfigError, match="there is no device 'nonsense'"):
            require_devices(["nonsense"], workers)


@pytest.mark.slow
def test_every_gpu_task_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has opened a GPU would stay on it, whichever GPU Ray lends to its next task."""
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    monkeypatch.setattr(ray, "init", partial(ray.init, num_gpus=2))  # it does not look whether they are there
    with Backend("ray", workers=2).open_workers(2) as workers:
        lent = workers.map(find_lent_gpu, [Placed("cuda")] * 5)
        on_cpu = workers.map(find_lent_gpu, [Placed("cpu")] * 6)
    assert len({process for process, _ in lent}) == 5
    assert {gpu for _, gpu in lent} <= {"0", "1"}
    assert {gpu for _, gpu in on_cpu} <= {"", None}
    assert len({process for process, _ in on_cpu}) < 6


def test_a_policy_elsewhere_makes_one_transfer_per_decision_and_its_rollout_comes_back() -> None:
    settings = tiny("environments=4", "shards=1", "policy.advice=null")
    with FarAway() as far:
        policy = create_policy(settings).to(FAR)
        running = Episodes(get_suite("short"), sample_instances(settings, 0, 0), settings.rules, device=FAR)
        recorder = EpisodeRecorder(running, 1, events="steps", watched=range(4))
        noise = torch.zeros(running.suite.steps, 4, 8)
        far.forget()
        result = run_policy(policy, None, running, noise, recorder)
        assert {part.device for part in tensors(result.rollout)} == {CPU}
        assert far.reads.count("control/policy/network.py to_cpu") == running.suite.steps
        empty_memory = ["control/policy/network.py to"] * len(PolicyState._fields)
        of_population = "population", "numerics/devices.py to_arrays"
        rest = [place for place in far.reads if not place.startswith(of_population) and not place.endswith("to_cpu")]
        assert rest == empty_memory
        # Per decision, observation and masks each go there as one.
        assert far.sent.count("numerics/devices.py move_together") == 2 * running.suite.steps
        assert far.waits == []
        assert {part.device for part in tensors(result.rollout.to(FAR))} == {FAR}
        assert far.waits == []


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device `meta` is there."""
    for module in (evaluation, trainer):
        monkeypatch.setattr(module, "prepare_device", lambda name, deterministic: torch.device(name))
    monkeypatch.setattr(trainer, "require_devices", lambda names, workers: None)
    monkeypatch.setattr("os.cpu_count", lambda: 1)


def compute_tasks(settings: TrainSettings) -> Iterator[tuple[torch.Tensor, ...]]:
    """The figures of a rollout, of evaluated controllers and of static networks."""
    result = collect_rollout(task(settings))
    yield tuple(tensors(result.rollout))

    config, instances = make_evaluation_config(settings), sample_instances(settings, 0, 0)[:3]
    controllers = [*create_baselines(get_suite("short")), create_controller(create_policy(settings), settings)]
    for cohort in split_into_cohorts(controllers, config, instances, shapley="pairs"):
        played = evaluate_cohort(cohort)
        records = [(one.score, one.test_accuracy, one.added_parameters) for part in played for one in part.records]
        values = [seed.value for part in played for shapley in part.earnings for seed in shapley.seeds]
        yield torch.tensor(records), torch.tensor(values)

    kinds = (SeedKind(0, 0, Blend.ADD),)
    static = [
        StaticNetwork(instance, kinds, decisions) for instance, decisions in zip(instances, (2, 4, 4), strict=True)
    ]
    outcomes = [one for one, _ in train_cohort(StaticTask(config, "static", static))]
    yield (torch.tensor([(one.score, one.added_parameters) for one in outcomes]),)


@pytest.mark.usefixtures("pretended")
def test_tasks_have_the_same_results_on_another_device() -> None:
    words = "environments=8", "shards=1", "policy.advice=null", "ppo.no_growth_baseline=true"
    with FarAway() as far:
        found = list(compute_tasks(tiny(*words, "devices=meta")))
    assert far.undetermined == []
    for one, other in zip(found, compute_tasks(tiny(*words)), strict=True):
        for part, expected in zip(one, other, strict=True):
            torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("pretended")
def test_a_policy_learns_on_another_device_what_it_learns_on_the_cpu(tmp_path: Path) -> None:
    found: list[dict[str, torch.Tensor]] = []
    for device in ("meta", "cpu"):
        settings = tiny("iterations=1", "shards=1", f"devices={device}")
        with FarAway(), started(tmp_path / device, settings) as running:
            running.train(ignore)
            found.append({name: value.cpu() for name, value in running.learner.state_tensors().items()})
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-3, atol=1e-4, msg=name)


def test_what_is_fetched_is_what_was_decided() -> None:
    settings = tiny()
    policy = create_policy(settings)
    running = Episodes(get_suite("short"), sample_instances(settings, 0, 0), settings.rules)
    result = collect_rollout(task(settings))
    rollout = result.rollout
    state = policy.initial_state(running.size)
    again = policy.evaluate(rollout.observations, rollout.masks, rollout.actions, state)
    torch.testing.assert_close(again.chosen_log_prob, rollout.chosen_log_prob, atol=1e-5, rtol=0)
    torch.testing.assert_close(again.value, rollout.value, atol=1e-5, rtol=1e-5)
    assert rollout.actions.dtype == torch.int64


def test_a_policy_that_learned_with_bf16_is_loaded_without(tmp_path: Path) -> None:
    settings = tiny("iterations=1")
    with started(tmp_path, settings) as trainer:
        trainer.train(ignore)
        expected = trainer.policy.state_dict()
    elsewhere = settings.model_copy(
        update={"devices": ("cuda",), "ppo": settings.ppo.model_copy(update={"bf16": True})}
    )
    found = load_policy(RunDirectory.open(tmp_path), elsewhere).controller.policy.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_networks_per_pass_change_a_rollout_by_rounding_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    run = Execution.run_stacked

    def noted(execution: Execution, parameters: Parameters, buffers: Parameters, inputs: torch.Tensor, grafts: Any):
        sizes.append(len(inputs))
        return run(execution, parameters, buffers, inputs, grafts)

    monkeypatch.setattr(Execution, "run_stacked", noted)
    whole, parts = (collect_rollout(task(tiny("environments=8", *words))) for words in ([], ["networks_per_pass=3"]))
    assert set(sizes) == {2, 3, 8}
    for one, other in zip(tensors(parts.rollout), tensors(whole.rollout), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_fixed_kernels_are_refused_nowhere_and_others_where_they_change_nothing() -> None:
    with pytest.raises(ConfigError, match=r"deterministic=false has no effect on the CPU: remove it, or set devices"):
        tiny("deterministic=false", "devices=[cpu, cpu]", "shards=2")
    assert tiny("deterministic=true").deterministic
    settings = tiny("deterministic=false", "devices=[cpu, cuda]", "shards=2")
    assert not make_evaluation_config(settings).deterministic


@pytest.mark.parametrize("deterministic", [True, False])
def test_every_task_prepares_its_device(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[tuple[str, bool]] = []

    def prepare(name: str, deterministic: bool) -> torch.device:
        prepared.append((name, deterministic))
        return CPU

    for module in (evaluation, trainer):
        monkeypatch.setattr(module, "prepare_device", prepare)
    settings = tiny("devices=cuda", f"deterministic={str(deterministic).lower()}")
    list(compute_tasks(settings))
    assert len(prepared) >= 5
    assert set(prepared) == {("cuda", deterministic)}


@pytest.mark.parametrize("playing", [True, False])
@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            RuntimeError(
                "adaptive_avg_pool2d_backward_cuda does not have a deterministic implementation, but you set "
                "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation"
            ),
            r"adaptive_avg_pool2d_backward_cuda has no kernel .*set deterministic=false",
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), "memory ran out: set networks_per_pass"),
    ],
    ids=["an operation that cannot be repeated", "memory that runs out"],
)
def test_what_a_device_cannot_do_is_a_sentence(
    error: Exception, sentence: str, playing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(Execution, "run_stacked", refuse)
    settings = tiny()
    cohort = split_into_cohorts([Never()], make_evaluation_config(settings), sample_instances(settings, 0, 0))[0]
    with pytest.raises(RunError, match=sentence):
        evaluate_cohort(cohort) if playing else collect_rollout(task(settings))
