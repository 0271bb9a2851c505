"""Put one defect after the other into Esper, and check that tests catch each.

    python tools/mutations.py --lineage     # the rows of docs/architecture/lineage.md, and the tests that they name
    python tools/mutations.py               # these, and others beside the fast tests of their rooms
    python tools/mutations.py D4 29 52      # rows, or numbers of the list below

Each defect is a replacement of one passage, made in a copy of the working tree, on which tests are run: for a row of
docs/architecture/lineage.md just those that the row names, otherwise those of the defect's rooms that `make test` runs.
Prints a table, and at the end how many rows name a test that catches their defects. Exits with 1 if a defect survives.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "esper"
LINEAGE = ROOT / "docs" / "architecture" / "lineage.md"
CHECK = "`make check`"
"""How a row names lint, types and import contracts."""
FAST = "not slow and not landing and not matrix"
"""The selection of `make test`."""
NAMED = "not slow and not matrix"
"""Of the tests that a row names: those of the landing ring too, by the cover of their matrices."""


@dataclass(frozen=True)
class Mutation:
    """A defect: in which file of ``src/esper`` which passage becomes which."""

    defect: str
    """What goes wrong, in a few words."""
    file: str
    before: str
    """Occurs once in the file."""
    after: str
    row: str = ""
    """The row of docs/architecture/lineage.md that the defect is of."""
    rooms: str = ""
    """Folders of tests that are run, where it is of no row."""


MUTATIONS = (
    # The defects of docs/architecture/lineage.md, in its order.
    Mutation(
        "a seed that is pruned before its first minibatch leaves its parameters and moments behind",
        "population/population.py",
        "pruned = changes.after == Stage.PRUNED",
        "pruned = (changes.after == Stage.PRUNED) & (changes.before != Stage.GERMINATED)",
        "D1",
    ),
    Mutation(
        "a decision that fails halfway has changed the table of slots",
        "population/population.py",
        "        parameters = state.parameters\n        pruned",
        "        self.state = replace(state, table=result.table)\n"
        "        parameters = state.parameters\n        pruned",
        "D2",
    ),
    Mutation(
        "moments are lost whenever a seed comes or goes",
        "population/parameters.py",
        "moments={name: gather_by(place, [source.moments[name] for source in sources]) for name in moment_names}",
        "moments={name: torch.zeros(count, dtype=sources[0].values.dtype, device=device) for name in moment_names}",
        "D3",
    ),
    Mutation(
        "a model's moments survive a rollback",
        "grower/governor.py",
        "            optimizer.state.pop(parameter, None)\n            if name in self._moments:",
        "            if parameter not in optimizer.state and name in self._moments:",
        "D4",
    ),
    Mutation(
        "a row's moments survive a rollback",
        "population/parameters.py",
        "new = self.make_rows(values, buffers, learning_rates, self.owners[rows])",
        "new = replace(self.select(rows), values=values, buffers=dict(buffers), learning_rates=learning_rates)",
        "D4",
    ),
    Mutation(
        "a rollback replaces parameters, which orphans the optimizer",
        "grower/governor.py",
        "                tensor.copy_(self._values[name])",
        "                self.model.load_state_dict({name: self._values[name]}, strict=False, assign=True)",
        "D5",
    ),
    Mutation(
        "snapshots at every check, whatever the loss did",
        "engine/governor.py",
        "self._take_snapshots(diagnosis.good, loss)",
        "self._take_snapshots(running, loss)",
        "D6",
    ),
    Mutation(
        "networks are computed on a CUDA stream of their own",
        "population/learning.py",
        "                outputs = joint_pass.run(inputs, host.parameters)",
        "                with torch.cuda.stream(torch.cuda.Stream()):\n"
        "                    outputs = joint_pass.run(inputs, host.parameters)",
        "D7",
    ),
    Mutation(
        "the policy acts on normalised observations and learns from raw ones",
        "control/policy/network.py",
        "normalised = self.normaliser(flat)",
        "normalised = flat",
        "D8",
    ),
    Mutation(
        "statistics change between acting and learning",
        "rl/ppo.py",
        "        generator = torch_generator(self.seed, self.updates)",
        "        policy.normaliser.update(*(rollout.observations for rollout in rollouts))\n"
        "        generator = torch_generator(self.seed, self.updates)",
        "D8",
    ),
    Mutation(
        "an update learns from four episodes",
        "train/settings.py",
        "environments: int = Field(default=128,",
        "environments: int = Field(default=4,",
        "D9",
    ),
    Mutation(
        "advantages hold what an instance is worth, whatever was done",
        "rl/ppo.py",
        "if settings.group > 1:",
        "if settings.group < 1:",
        "D9",
    ),
    Mutation(
        "nothing is expected after the last step of a rollout that was cut",
        "rl/rollout.py",
        "final_value=final_value.masked_fill(terminated, 0.0)",
        "final_value=torch.zeros_like(final_value)",
        "D10",
    ),
    Mutation(
        "statistics stay on the CPU when the policy moves to its device",
        "control/policy/heads.py",
        'self.register_buffer("mean", torch.zeros(features, dtype=torch.float64))',
        "self.mean = torch.zeros(features, dtype=torch.float64)",
        "D11",
    ),
    Mutation(
        "each minibatch is fetched from the CPU",
        "population/learning.py",
        "inputs = self._inputs.flatten(0, 1).index_select(0, index.flatten())",
        "inputs = self._inputs.cpu().flatten(0, 1).index_select(0, index.flatten().cpu()).to(index.device)",
        "D12",
    ),
    Mutation(
        "all networks are computed at once",
        "population/forward.py",
        "population.size, population.config.networks_per_pass or population.size",
        "population.size, population.size",
        "D13",
    ),
    Mutation(
        "populations compute in float32 only",
        "population/forward.py",
        "torch.bfloat16) if config.bf16 else",
        "torch.bfloat16) if False else",
        "D13",
    ),
    Mutation(
        "a minibatch is computed at once",
        "population/learning.py",
        "most = population.config.examples_per_pass or examples",
        "most = examples",
        "D13",
    ),
    Mutation(
        "an update holds the activations of all steps at once",
        "rl/ppo.py",
        "length, state = settings.chunk or rollout.steps,",
        "length, state = rollout.steps,",
        "D13",
    ),
    Mutation(
        "losses are scaled for float16",
        "population/learning.py",
        "total = mean_losses.sum()",
        "total = torch.amp.GradScaler().scale(mean_losses.sum())",
        "D14",
    ),
    Mutation(
        "where compiling fails, the policy stays uncompiled from then on",
        "rl/ppo.py",
        "                    evaluated = self._evaluate(observations, masks, rollout.actions[chunk], state)",
        "                    try:\n"
        "                        evaluated = self._evaluate(observations, masks, rollout.actions[chunk], state)\n"
        "                    except RuntimeError:\n"
        "                        self._evaluate = policy.evaluate\n"
        "                        evaluated = self._evaluate(observations, masks, rollout.actions[chunk], state)",
        "D15",
    ),
    Mutation(
        "the forward passes are prepared anew for each minibatch",
        "population/learning.py",
        "        batch_losses: list[Tensor] = []\n",
        "        batch_losses: list[Tensor] = []\n"
        "        joint_passes = prepare_forward(population, select_blended(population), generators)\n",
        "D16",
    ),
    Mutation(
        "in one stage of several a seed cannot be pruned",
        "lifecycle/rules.py",
        "slot[:, Op.PRUNE] = table.live & ~table.pruning",
        "slot[:, Op.PRUNE] = table.live & ~table.pruning & (table.stage != Stage.HOLDING)",
        "D17",
    ),
    Mutation(
        "stages that end by time last a step longer",
        "lifecycle/transitions.py",
        "(table.stage_age >= steps)",
        "(table.stage_age > steps)",
        "D17",
    ),
    Mutation(
        "no plateau ends an episode",
        "engine/engine.py",
        "return (plateau_age >= self.plateau) & ~table.live.any(axis=1)",
        "return np.zeros(len(plateau_age), np.bool_)",
        "D18",
    ),
    Mutation(
        "no divergence ends an episode",
        "engine/governor.py",
        "exhausted = rows & (self.rollbacks > self.settings.max_rollbacks)",
        "exhausted = rows & (self.rollbacks < 0)",
        "D18",
    ),
    Mutation(
        "networks are evaluated under `no_grad`",
        "population/evaluation.py",
        "@torch.inference_mode()\ndef start_evaluation(",
        "@torch.no_grad()\ndef start_evaluation(",
        "D18",
    ),
    Mutation(
        "a norm that is a mean",
        "population/learning.py",
        "hosts.square().sum(1).sqrt()",
        "hosts.square().mean(1).sqrt()",
        "D19",
    ),
    Mutation(
        "norms by a private function of torch",
        "population/learning.py",
        "hosts.square().sum(1).sqrt()",
        "torch.stack(torch._foreach_norm(list(hosts)))",
        "D19",
    ),
    Mutation(
        "norms are read in every minibatch",
        "population/learning.py",
        "    hosts, *seeds = gradients\n",
        "    hosts, *seeds = gradients\n    assert hosts.square().sum().item() >= 0\n",
        "D19",
    ),
    Mutation(
        "an unknown blueprint becomes one that does nothing at birth",
        "growth/blueprints/registry.py",
        'raise UnknownBlueprintError(f"unknown blueprint {name!r}{hint}")',
        'return _registry["norm" if hint else name]',
        "D20",
    ),
    Mutation(
        "an illegal action becomes WAIT",
        "lifecycle/rules.py",
        "raise IllegalActionError(_explain_refusal(actions[environment], environment, masks))",
        "actions[environment] = Op.WAIT",
        "D20",
    ),
    Mutation(
        "rules act in slot 0 only",
        "control/rules.py",
        "possible = due & self._masks.slot[:, op] & self.open[:, None]",
        "possible = due & self._masks.slot[:, op] & self.open[:, None] & (np.arange(due.shape[1]) == 0)",
        "D21",
    ),
    Mutation(
        "a private field of the governor is reset from outside",
        "engine/engine.py",
        "        self.governor.restart(rows)",
        "        self.governor._snapshot_loss[rows] = np.nan",
        "D22",
    ),
    Mutation(
        "a slot without a seed contributes 0",
        "population/evaluation.py",
        "figures[~(table.owning & due)] = np.nan",
        "figures[~(table.owning & due)] = 0.0",
        "D23",
    ),
    Mutation(
        "whether there is a result is decided by `in locals()`",
        "rl/episodes.py",
        "if ending.any() else None",
        'if "ending" in locals() else None',
        "D23",
    ),
    Mutation(
        "one training seed is enough for a winner",
        "lab/analysis.py",
        "FEWEST_SEEDS = 5",
        "FEWEST_SEEDS = 1",
        "D24",
    ),
    Mutation(
        "the higher mean wins",
        "lab/analysis.py",
        "verdict = Verdict.OPEN if p > SIGNIFICANCE else side",
        "verdict = side",
        "D24",
    ),
    Mutation(
        "one group is trained after the other",
        "lab/experiment.py",
        "for seed in range(self.seeds) for place in range(count)",
        "for place in range(count) for seed in range(self.seeds)",
        "D24",
    ),
    Mutation(
        "a reward mode takes any family",
        "rl/rewards.py",
        "if self.family not in mode.families:",
        "if self.family not in get_args(Family):",
        "D25",
    ),
    Mutation(
        "the multiple of the KL target is written down a second time",
        "rl/ppo.py",
        "kl > KL_STOP * settings.target_kl",
        "kl > 1.5 * settings.target_kl",
        "D26",
    ),
    Mutation(
        "a head's terms are averaged over all steps",
        "rl/ppo.py",
        "return (figures * is_open).sum((0, 1)) / occurrences.clamp(min=1)",
        "return (figures * is_open).sum((0, 1)) / is_open[..., 0].numel()",
        "D27",
    ),
    Mutation(
        "heads have no floor of probability",
        "control/policy/heads.py",
        "    if floor == 0:\n",
        "    if floor >= 0:\n",
        "D27",
    ),
    Mutation(
        "entropy is summed over heads",
        "rl/ppo.py",
        "(figures * (weights * active / active.sum().clamp(min=1))).sum()",
        "(figures * (weights * active)).sum()",
        "D28",
    ),
    Mutation(
        "a memory of another size than the policy's gets through",
        "control/policy/network.py",
        "if state.output.shape != fitting or state.cell.shape != fitting:",
        "if state.output.shape != state.cell.shape:",
        "D29",
    ),
    Mutation(
        "the memory of a policy of another width gets through to the LSTM",
        "control/policy/network.py",
        "if state.output.shape != fitting or state.cell.shape != fitting:",
        "if state.output.dim() != len(fitting):",
        "D29",
    ),
    Mutation(
        "a device is recognised by how it is written",
        "rl/ppo.py",
        'device.type != "cuda"',
        'not str(device).startswith("cuda")',
        "D30",
    ),
    Mutation(
        "the policy is compiled, and what is not compiled is fished out of it",
        "rl/ppo.py",
        "        self._evaluate = torch.compile(policy.evaluate) if settings.compile else policy.evaluate",
        "        self.policy = torch.compile(policy) if settings.compile else policy\n"
        "        self._evaluate = self.policy._orig_mod.evaluate if settings.compile else policy.evaluate",
        "D31",
    ),
    Mutation(
        "masks are read in the update",
        "control/policy/heads.py",
        "            preferences = masked_log_softmax(logits, legal)",
        "            assert legal.any().item()\n            preferences = masked_log_softmax(logits, legal)",
        "D32",
    ),
    Mutation(
        "updates are remembered without end",
        "train/iteration.py",
        "(*history, update)[-HISTORY:]",
        "(*history, update)",
        "D33",
    ),
    Mutation(
        "what a checkpoint lacks is taken from defaults",
        "rl/ppo.py",
        "sorted(tensors.keys() ^ expected.keys())",
        "sorted(tensors.keys() - expected.keys())",
        "D34",
    ),
    Mutation(
        "no norms per head",
        "rl/ppo.py",
        "            **{head.name.lower(): policy.heads.output_parameters(head) for head in policy.heads.present},\n",
        "",
        "D35",
    ),
    Mutation(
        "an import in a function hides a cycle",
        "engine/governor.py",
        "        diagnosis = self._monitor.check(loss, skill, finite, diverged)",
        "        from esper.rl.episodes import Episodes\n\n"
        "        assert not isinstance(self._networks, Episodes)\n"
        "        diagnosis = self._monitor.check(loss, skill, finite, diverged)",
        "D36",
    ),
    Mutation(
        "the size of minibatches depends on the number of networks",
        "population/learning.py",
        "        self._batch_size = batch_size\n",
        "        self._batch_size = max(1, batch_size // len(data))\n",
        "D37",
    ),
    Mutation(
        "a network's gradient depends on the number of networks",
        "population/learning.py",
        "total = mean_losses.sum()",
        "total = mean_losses.mean()",
        "D37",
    ),
    Mutation(
        "controllers and rewards see the test set",
        "rl/episodes.py",
        'validation = stack_data([suite.data(instance, "validation") for instance in instances], device)',
        'validation = stack_data([suite.data(instance, "test") for instance in instances], device)',
        "D38",
    ),
    Mutation(
        "a seed is paid for as long as it is not kept",
        "rl/rewards.py",
        "return state.contribution[settings.family].sum(axis=1)",
        "return (state.contribution[settings.family] * (state.stage != Stage.FOSSILIZED)).sum(axis=1)",
        "D39",
    ),
    Mutation(
        "only the first slot is paid for its progress",
        "rl/rewards.py",
        "_PROGRESS_BY_STAGE[state.stage].sum(axis=1)",
        "_PROGRESS_BY_STAGE[state.stage][:, 0]",
        "D39",
    ),
    Mutation(
        "both maps of a branch are zero at birth",
        "growth/blueprints/channels.py",
        "self.down = lecun_normal(generator, rank, site.width, fan_in=site.width)",
        "self.down = zeros(generator, rank, site.width)",
        "D40",
    ),
    # Others, by room.
    Mutation(
        "harmful modules may be kept",
        "lifecycle/rules.py",
        "contribution >= -rules.harm_tolerance",
        "contribution >= -1.0",
        rooms="lifecycle",
    ),
    Mutation(
        "WAIT may be disallowed",
        "lifecycle/rules.py",
        "allowed[:, Op.WAIT] = True",
        "pass",
        rooms="lifecycle rl",
    ),
    Mutation(
        "patience lasts a check longer",
        "engine/governor.py",
        'lost & (now["unusual"] >= settings.patience)]',
        'lost & (now["unusual"] > settings.patience)]',
        rooms="engine",
    ),
    Mutation(
        "a loss far above the usual is trouble although nothing was lost",
        "engine/governor.py",
        "settings.patience, lost & (",
        "settings.patience, (",
        rooms="engine",
    ),
    Mutation(
        "the surrogate takes the better of both ratios",
        "rl/ppo.py",
        "torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)",
        "torch.maximum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)",
        rooms="rl",
    ),
    Mutation(
        "errors of values are not discounted",
        "rl/rollout.py",
        "rewards + gamma * next_values - values, gamma * lam",
        "rewards + gamma * next_values - values, lam",
        rooms="rl",
    ),
    Mutation(
        "a head's largest deviation is that of the first chunk",
        "rl/ppo.py",
        "torch.stack(column).amax(0), largest",
        "torch.stack(column)[0], largest",
        rooms="rl",
    ),
    Mutation(
        "a fitted promise is measured by the examples that it was fitted to",
        "growth/promise.py",
        "((gradients, gradients), (first, second), (second, first))",
        "((gradients, gradients), (first, first), (second, second))",
        rooms="growth population",
    ),
    Mutation(
        "clipping lengthens short gradients",
        "population/learning.py",
        ".clamp(max=1)",
        ".clamp(max=2)",
        rooms="population",
    ),
    Mutation(
        "gradients are never clipped",
        "population/learning.py",
        "if settings.clip_norm is not None:",
        "if False:",
        rooms="population",
    ),
    Mutation(
        "optimizers count steps in any type",
        "population/population.py",
        "if self.dtype not in _DTYPES:",
        "if not self.dtype.is_floating_point:",
        rooms="population",
    ),
    Mutation(
        "after a rollback the governor has forgotten what was usual",
        "engine/governor.py",
        "self._monitor.restore(rows)",
        "pass",
        rooms="engine grower",
    ),
    Mutation(
        "after a rollback only the turn's modules are measured",
        "engine/engine.py",
        "due | intervention.rows[:, None]",
        "due",
        rooms="engine rl",
    ),
    Mutation(
        "promises that could not be measured are not overdue",
        "engine/engine.py",
        "np.where(due, promises.missing, self._overdue)",
        "self._overdue",
        rooms="engine grower",
    ),
    Mutation(
        "turns go by the next decision's number",
        "engine/engine.py",
        "self.decisions - running",
        "self.decisions",
        rooms="engine rl",
    ),
    Mutation(
        "progress goes by the loss where a metric is named",
        "engine/history.py",
        "improves(evaluation.progress, self.best_progress)",
        "lower",
        rooms="engine grower",
    ),
    Mutation(
        "all seeds count as incumbents",
        "engine/gradients.py",
        "* fossils).sum(1)",
        ").sum(1)",
        rooms="engine population",
    ),
    Mutation(
        "gate G2 takes any gradient",
        "lifecycle/rules.py",
        "measurements.gradient_healthy, Reason",
        "table.owning, Reason",
        rooms="engine lifecycle",
    ),
    Mutation(
        "a gradient is healthy if the newest decision's are",
        "engine/gradients.py",
        "settings.decay * measurements.gradient_weight + 1",
        "1.0",
        rooms="engine",
    ),
    Mutation(
        "exploded gradients are healthy",
        "engine/gradients.py",
        "np.maximum(vanished, exploded)",
        "vanished",
        rooms="engine",
    ),
    Mutation(
        "a rollback keeps the health of gradients of the training that it undid",
        "engine/engine.py",
        "self.networks.measurements = replace_where(kept",
        "replace_where(kept",
        rooms="engine",
    ),
    Mutation(
        "a gate's new reason is no event",
        "engine/recorder.py",
        "(reasons != self.reasons) | ",
        "",
        rooms="train grower",
    ),
    Mutation(
        "a constant output may show skill",
        "grower/backend.py",
        "(0.0, 0.0) if constant",
        "(0.0, 0.0) if False",
        rooms="grower",
    ),
    Mutation(
        "a module may be kept that breaks a constraint",
        "grower/grower.py",
        "disallowed.add(Op.FOSSILIZE)",
        "pass",
        rooms="grower",
    ),
    Mutation(
        "a controller may prune while only its user may",
        "grower/grower.py",
        "disallowed.discard(Op.PRUNE)",
        "pass",
        rooms="grower",
    ),
    Mutation(
        "a search's interval is that of its own mean, not of the difference",
        "lab/search.py",
        "mean_interval((found - scores)[None], families)",
        "mean_interval((found - scores.mean())[None], families)",
        rooms="lab/arms",
    ),
)


def read_lineage() -> dict[str, list[str]]:
    """The tests that each row of docs/architecture/lineage.md names, as pytest names them; `CHECK` as it is.

    A row's last cell reads ``file: test, test; file: test``.
    """
    rows: dict[str, list[str]] = {}
    for row, cell in re.findall(r"^\| (D\d+) \|.*\| ([^|]+) \|$", LINEAGE.read_text(), re.MULTILINE):
        rows[row] = []
        for part in cell.split("; "):
            file, _, tests = part.partition(": ")
            rows[row] += [CHECK] if part == CHECK else [f"tests/{file}::test_{test}" for test in tests.split(", ")]
    return rows


def apply(mutation: Mutation, source: Path) -> None:
    """Put the defect into a copy of ``src/esper``.

    Raises:
        ValueError: its passage is not there once.
    """
    path = source / mutation.file
    text = path.read_text()
    if (count := text.count(mutation.before)) != 1:
        raise ValueError(f"{mutation.file} has {mutation.before!r} {count} times, not once: adapt tools/mutations.py")
    path.write_text(text.replace(mutation.before, mutation.after))


def find_catchers(mutation: Mutation, named: Sequence[str]) -> tuple[list[str], str]:
    """The tests and checks that catch a defect in a copy of the tree, and how pytest ended.

    ``named`` are those that the defect's row names.
    """
    tests = [name for name in named if name != CHECK] or [f"tests/{room}" for room in mutation.rooms.split()]
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = Path(folder)
        for part in ("src", "tests", "benchmarks", "examples", "tools", "pyproject.toml"):
            (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, copy / part)
        apply(mutation, copy / "src" / "esper")

        def run(*command: str) -> subprocess.CompletedProcess[str]:
            environment = {**os.environ, "PYTHONPATH": str(copy / "src")}
            return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)

        caught, ending = list[str](), "no test was named"
        if tests:
            options = ("-m", NAMED) if mutation.row else ("-x", "-m", FAST)
            completed = run(sys.executable, "-m", "pytest", "--tb=no", "-rf", "-n", "0", *options, *tests)
            caught = list(dict.fromkeys(re.findall(r"^FAILED \S+::test_(\w+)", completed.stdout, re.MULTILINE)))
            ending = f"pytest ended with {completed.returncode}"
        if CHECK in named and not caught:
            changed = str(copy / "src" / "esper" / mutation.file)
            tools = (
                ("ruff", "check", changed),
                ("pyright", "--pythonpath", sys.executable, changed),
                ("lint-imports",),
            )
            installed = Path(sys.executable).parent  # of this environment, which need not be active
            caught = [tool for tool, *arguments in tools if run(str(installed / tool), *arguments).returncode]
    return caught, ending


def main(words: Sequence[str] | None = None) -> int:
    """Apply the mutations of these names, or all; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rows, numbers = read_lineage(), [str(number) for number in range(1, len(MUTATIONS) + 1)]
    help_text = f"a row of docs/architecture/lineage.md, such as D4, or a number, 1 to {len(MUTATIONS)}; by default all"
    parser.add_argument("names", nargs="*", metavar="NAME", help=help_text)
    parser.add_argument("--lineage", action="store_true", help="all defects of docs/architecture/lineage.md")
    options = parser.parse_args(words)
    if unknown := [name for name in options.names if name not in (*rows, *numbers)]:
        parser.error(f"there is no {unknown[0]}: give {help_text}")
    names = options.names or ([*rows] if options.lineage else numbers)

    print("| # | row | defect | caught by | seconds |\n|---|---|---|---|---|", flush=True)  # noqa: T201
    noticed: dict[str, bool] = {}
    survivors = 0
    for number, mutation in enumerate(MUTATIONS, start=1):
        if str(number) not in names and mutation.row not in names:
            continue
        start = time.monotonic()
        caught, ending = find_catchers(mutation, rows.get(mutation.row, []))
        survivors += not caught
        if mutation.row:
            noticed[mutation.row] = noticed.get(mutation.row, True) and bool(caught)
        outcome = ", ".join(caught) or f"**survived** ({ending})"
        seconds = round(time.monotonic() - start)
        print(f"| {number} | {mutation.row} | {mutation.defect} | {outcome} | {seconds} |", flush=True)  # noqa: T201
    rows_caught = f"{sum(noticed.values())} of {len(noticed)} rows name a test that catches their defects"
    print(f"\n{rows_caught}; {survivors} defects survived")  # noqa: T201
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
