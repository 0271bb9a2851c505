"""Models of several sizes from one training: what they are, what they cost, and that a ladder goes on once killed."""

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import esper
import tiny_transformers
from esper.errors import CheckpointError, ConfigError, DivergedError
from esper.ladders import ladder as loop
from esper.ladders.ladder import plan_ladder
from esper.ladders.plan import warmup_stable_decay
from esper.ladders.rungs import TABLE, Ladder
from esper.ladders.training import LadderTraining
from ladders import climbing
from ladders.climbing import Killed, climb
from ladders.small import DEPTHS, STEPS, Decoder, evaluate, learn, make_optimizer, tokens

TOTAL = 36


def make(folder: Path, model: nn.Module | None = None, **options: Any) -> Ladder:
    model = Decoder(dropout=0) if model is None else model
    settings = {"depths": DEPTHS, "steps": STEPS, "data": [tokens(16), tokens(16, seed=4)], "evaluate": evaluate}
    settings |= {"train_step": learn, "optimizer": make_optimizer(model), "folder": folder}
    return esper.ladder(model, **{**settings, **options})


def load(rung: Any) -> dict[str, torch.Tensor]:
    return load_file(rung.path / "model.safetensors")


def test_rungs_are_those_of_branches_that_are_copies(tmp_path: Path) -> None:
    """The obvious ladder: every branch is a copy, and every deeper model is built anew and filled."""
    made = make(tmp_path)
    data, step = [tokens(16), tokens(16, seed=4)], 0
    model = Decoder(dropout=0)
    optimizer = make_optimizer(model)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, factors: list[float]) -> None:
        nonlocal step
        for _, factor in zip(range(steps), factors, strict=True):
            for group, rate in zip(optimizer.param_groups, (1e-2, 2e-2), strict=True):
                group["lr"] = rate * factor
            learn(model, optimizer, data[step % 2])
            step += 1

    fall = [warmup_stable_decay(part / 4, warmup=0, decay=1) for part in range(4)]
    for rung, depth in zip(made.rungs, DEPTHS, strict=True):
        rise = [warmup_stable_decay(part / STEPS, decay=0) for part in range(16)]
        train(model, optimizer, 16 if depth == 1 else 4, rise if depth == 1 else [1.0] * 4)
        branch, branch_optimizer = copy.deepcopy((model, optimizer))
        train(branch, branch_optimizer, 4, fall)
        assert load(rung).keys() == branch.state_dict().keys()
        assert all(torch.equal(value, branch.state_dict()[name]) for name, value in load(rung).items())
        assert rung.loss == evaluate(branch.eval()).item()

        # The deeper model.
        deeper = Decoder(2 * depth, dropout=0)
        origins = {name: name for name, _ in deeper.named_parameters()}
        for name in origins:
            if name.startswith("blocks."):
                _, number, rest = name.split(".", 2)
                origins[name] = f"blocks.{int(number) // 2}.{rest}"
        former, successor = dict(model.named_parameters()), make_optimizer(deeper)
        for name, parameter in deeper.named_parameters():
            parameter.data.copy_(former[origins[name]].data)
            successor.state[parameter] = copy.deepcopy(optimizer.state[former[origins[name]]])
        model, optimizer = deeper, successor


def test_the_plan_is_printed_before_training_and_lines_come_regularly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "SECONDS_BETWEEN_LINES", 0.05)
    printed: list[str] = []

    def note(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        printed.append(capsys.readouterr().out)
        learn(model, optimizer, batch)

    model = Decoder()
    esper.ladder(model, note, data=[tokens(16)], depths=[1, 2], steps=100, folder=tmp_path, example_input=tokens(16))
    assert "2 sizes from one training" in printed[0]
    lines = "".join(printed) + capsys.readouterr().out
    assert "of 140 done" in lines
    assert lines.count("rung of ") >= 2


def test_a_language_model_of_hugging_face_becomes_folders_that_from_pretrained_reads(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    gpt2 = tiny_transformers.gpt2(n_layer=1, vocab_size=11)
    words = tokens(8)

    def learn_words(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(input_ids=words, labels=words).loss.backward()
        optimizer.step()

    made = esper.ladder(gpt2, depths=[1, 2, 4], train_step=learn_words, steps=20, folder=str(tmp_path))
    assert [rung.loss for rung in made.rungs] == [None] * 3
    for rung in made.rungs:
        plain = transformers.AutoModelForCausalLM.from_pretrained(rung.path)
        assert plain.config.n_layer == rung.depth
        assert plain.num_parameters() == rung.parameters
    assert torch.equal(plain.eval()(words).logits, gpt2.eval()(words).logits)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Ladder:
    """A ladder that nothing ended."""
    return climb(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("last", [3, *(pytest.param(last, marks=pytest.mark.landing) for last in (16, 18, 22, 35))])
def test_a_ladder_that_ended_anywhere_goes_on_to_the_same_rungs(last: int, whole: Ladder, tmp_path: Path) -> None:
    def end() -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
        patch.setattr(loop, "WRITING_SHARE", 1e9)
        with pytest.raises(Killed):
            climb(tmp_path, last, end)
    assert max(int(path.stem[-8:]) for path in (tmp_path / loop.CHECKPOINTS).glob("*.json")) == last
    require_same(climb(tmp_path), whole)


def require_same(made: Ladder, whole: Ladder) -> None:
    assert len(made.rungs) == len(whole.rungs) == len(DEPTHS)
    for rung, like in zip(made.rungs, whole.rungs, strict=True):
        assert (rung.depth, rung.loss, rung.flops) == (like.depth, like.loss, like.flops)
        assert all(torch.equal(value, load(like)[name]) for name, value in load(rung).items())


@pytest.mark.landing
def test_a_killed_process_goes_on_from_its_last_rung(whole: Ladder, tmp_path: Path) -> None:
    """Checkpoints come once a minute, so what is lost is the work since the last rung."""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(str(root / part) for part in ("src", "tests", "examples"))
    killed = subprocess.run(
        [sys.executable, climbing.__file__, str(tmp_path), "23"],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [row["depth"] for row in json.loads((tmp_path / TABLE).read_text())["rungs"]] == [1]
    steps = 0
    original = LadderTraining.end_step

    def count(training: LadderTraining) -> bool:
        nonlocal steps
        steps += 1
        return original(training)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LadderTraining, "end_step", count)
        made = climb(tmp_path)
    assert steps == TOTAL - 20
    require_same(made, whole)


def test_a_finished_ladder_has_a_table_and_is_read_again(tmp_path: Path) -> None:
    made = make(tmp_path)
    assert [rung.depth for rung in made.rungs] == list(DEPTHS)
    assert [rung.flops for rung in made.rungs] == [rung.flops for rung in made.plan.rungs]
    assert all(rung.latency > 0 for rung in made.rungs)
    table = json.loads((tmp_path / TABLE).read_text())
    for row, rung in zip(table["rungs"], made.rungs, strict=True):
        assert row["parameters"] == sum(value.numel() for value in load(rung).values()) == rung.parameters
        assert (row["loss"], row["flops"], row["latency"]) == (rung.loss, rung.flops, rung.latency)
        assert json.loads((rung.path / "rung.json").read_text())["depth"] == rung.depth
    assert len(str(made).splitlines()) == 5
    model = Decoder(dropout=0, seed=5)
    again = make(tmp_path, model)
    assert again.rungs == made.rungs
    assert len(model.blocks) == DEPTHS[-1]
    assert all(torch.equal(value, load(made.rungs[-1])[name]) for name, value in model.state_dict().items())
    # Without its checkpoints it is trained again.
    shutil.rmtree(tmp_path / "checkpoints")  # the branching points are left
    assert [rung.loss for rung in make(tmp_path).rungs] == [rung.loss for rung in made.rungs]


@pytest.mark.parametrize("given", [False, True])
def test_a_learn_function_gets_the_step_or_data_whether_or_not_that_has_a_default(given: bool, tmp_path: Path) -> None:
    seen: list[int] = []

    def learn_by_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
        seen.append(step)
        learn(model, optimizer, tokens(8, seed=step))

    def learn_with(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        learn_by_step(model, optimizer, step)

    own = learn_by_step if given else learn_with
    make(tmp_path, train_step=own, data=None, depths=[1, 2], steps=10, example_input=tokens(8))
    assert seen == list(range(14))

    def learn_batch(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any = None) -> None:
        assert batch is not None
        learn(model, optimizer, tokens(16))

    make(tmp_path / "with data", train_step=learn_batch, depths=[1, 2], steps=5)


def test_a_cache_that_grows_with_its_inputs_does_not_stop_a_ladder(tmp_path: Path) -> None:
    """Such as one of positions, in a buffer outside the state dict."""

    class Cached(Decoder):
        def __init__(self) -> None:
            super().__init__(dropout=0)
            self.register_buffer("cache", torch.zeros(2), persistent=False)

        def forward(self, indices: torch.Tensor) -> torch.Tensor:
            if indices.shape[1] > len(self.cache):
                self.cache = torch.zeros(indices.shape[1])
            return super().forward(indices) + self.cache[: indices.shape[1], None]

    def learn_longer(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        learn(model, optimizer, tokens(8, seed=step)[:, : 4 if step < 17 else 6])  # the first branch begins at 16

    model = Cached()
    options = {"data": None, "train_step": learn_longer, "example_input": tokens(8)[:, :4]}
    plain = make(tmp_path / "plain", **options)
    cached = make(tmp_path / "cached", model, optimizer=make_optimizer(model), **options)
    assert [rung.loss for rung in cached.rungs] == [rung.loss for rung in plain.rungs]


def test_a_folder_holds_one_ladder(tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(CheckpointError, match="another plan"):
        make(tmp_path, steps=STEPS + 1)
    with pytest.raises(CheckpointError, match="another plan"):
        plan_ladder(Decoder(), example_input=tokens(2), depths=[1, 2], steps=STEPS, folder=tmp_path)
    (tmp_path / TABLE).write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        make(tmp_path)


def test_a_folder_goes_on_with_its_optimizer_whose_state_is_by_parameter(tmp_path: Path) -> None:
    make(tmp_path, depths=[1, 2], steps=5)
    model = Decoder(dropout=0)
    for other in (torch.optim.SGD(model.parameters(), lr=1e-2), torch.optim.AdamW(model.parameters(), lr=1e-2)):
        with pytest.raises(CheckpointError, match="trained by AdamW at 0.01, 0.02, and the optimizer given"):
            make(tmp_path, model, depths=[1, 2], steps=5, optimizer=other)
    assert len(model.blocks) == 1

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            self.state["count"] = 1

    with pytest.raises(CheckpointError, match="has 'count', which belongs to no parameter"):
        make(tmp_path / "new", model, optimizer=Counting(model.parameters(), lr=1e-2))


@pytest.mark.parametrize("sampled", ["no", "sampler", "batch sampler"])
@pytest.mark.few(1)
def test_a_loader_with_a_generator_of_its_own_goes_on_where_it_was(sampled: str, tmp_path: Path) -> None:
    def climb_until(folder: Path, last: int, **options: Any) -> Ladder:
        own, done, data = torch.Generator().manual_seed(5), 0, TensorDataset(tokens())
        sampler = RandomSampler(data, generator=own)
        order: dict[str, Any] = {
            "no": {"batch_size": 12, "shuffle": True, "generator": own},
            "sampler": {"batch_size": 12, "sampler": sampler},
            "batch sampler": {"batch_sampler": BatchSampler(sampler, 12, drop_last=False)},
        }[sampled]

        def learn_or_end(model: nn.Module, optimizer: torch.optim.Optimizer, batch: list[torch.Tensor]) -> None:
            nonlocal done
            if done == last:
                raise Killed
            learn(model, optimizer, batch[0])
            done += 1

        model = Decoder(dropout=0)
        return make(folder, model, train_step=learn_or_end, data=DataLoader(data, **order), depths=[1, 2], **options)

    given = climb_until(tmp_path / "given", -1, example_input=tokens(12))
    found = climb_until(tmp_path / "found", -1)  # by a step on a copy, with a batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
        patch.setattr(loop, "WRITING_SHARE", 1e9)
        with pytest.raises(Killed):
            climb_until(tmp_path / "killed", 11, example_input=tokens(12))
    again = climb_until(tmp_path / "killed", -1, example_input=tokens(12))
    losses = [[rung.loss for rung in made.rungs] for made in (given, found, again)]
    assert losses[0] == losses[1] == losses[2]


def test_a_learn_function_with_a_scheduler_is_refused(tmp_path: Path) -> None:
    model = Decoder(dropout=0)
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def learn_and_schedule(*arguments: Any) -> None:
        learn(*arguments)
        scheduler.step()

    optimizer.step()  # of nothing, as the scheduler expects

    with pytest.raises(ConfigError, match="train_step changed a learning rate from 0.01 to 0.005"):
        make(tmp_path, model, train_step=learn_and_schedule, optimizer=optimizer)


@pytest.mark.parametrize(("spoiled", "finished"), [(3, 0), (22, 1), (35, 2)])
def test_a_ladder_that_diverged_stops_and_keeps_nothing_of_it(spoiled: int, finished: int, tmp_path: Path) -> None:
    def learn_until(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        learn(model, optimizer, tokens(16))
        if step == spoiled:
            nn.init.constant_(next(model.parameters()), float("nan"))

    with pytest.raises(DivergedError, match=f"training diverged.*{finished} rungs? (is|are) finished"):
        make(tmp_path, train_step=learn_until, data=None)
    assert len(json.loads((tmp_path / TABLE).read_text())["rungs"]) == finished
    files = list(tmp_path.rglob("*.safetensors"))
    assert all(bool(value.isfinite().all()) for file in files for value in load_file(file).values())


def test_running_statistics_of_a_branch_do_not_stay(tmp_path: Path) -> None:
    class Normed(Decoder):
        def __init__(self) -> None:
            super().__init__(dropout=0)
            self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

        def forward(self, indices: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.passes += 1
            return super().forward(indices)

    made = make(tmp_path, Normed(), example_input=tokens(2))
    assert [int(load(rung)["passes"]) for rung in made.rungs] == [20, 24, 28]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1)}, "no parameter of the model's blocks"),
        ({"evaluate": lambda model: "low"}, "evaluate\\(model\\) returned a str"),
        ({"train_step": 3}, "train_step is"),
        ({"train_step": lambda model: None}, r"\(model\) cannot be called as train_step\(model, optimizer, batch\)"),
        (
            {"train_step": lambda model: None, "data": None},
            r"be called as train_step\(model, optimizer\[, step\]\)",
        ),
        ({"train_step": lambda model, optimizer: None}, "cannot be called"),
        ({"data": 3}, "data is"),
        ({"data": [], "example_input": tokens(2)}, "has no batch"),
        ({"folder": 3}, "folder is"),
    ],
)
def test_what_cannot_be_used_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = Decoder()
    settings = {"train_step": learn, "depths": [1, 2], "steps": 10, "data": [tokens(8)], "folder": tmp_path / "made"}
    with pytest.raises(ConfigError, match=message):
        esper.ladder(model, **{**settings, **options})
