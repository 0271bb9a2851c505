"""Every view gives the same verdicts: the terminal, the page, the dashboard and JSON.

The comparison is of one policy, several runs together, or ways of training; a clear win, a clear loss and a
difference that is not shown are planted in each. The dashboard shows single runs; several runs together have no JSON.
"""

import html
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from esper.cli import main
from esper.dash.app import Access, dashboard
from esper.dash.formats import p_value, signed_score
from esper.dash.run_view import RunFinder
from esper.lab.analysis import FEWEST_SEEDS, Claim, Contrast, Verdict, estimate_differences
from esper.lab.experiment import arm_file
from esper.lab.standings import RULE
from esper.runs.events import RunStarted
from esper.runs.store import RunStore
from esper.train.results import Arm, ArmResults, Result, load_or_compute
from lab.figures_cases import BEHAVIOUR, evaluated
from train.results_cases import planted

Capture = pytest.CaptureFixture[str]
Claims = dict[str, tuple[str, str, str]]
"""Of each other arm: the verdict's words, the difference and p, as written."""
Rendered = dict[str, Claims]
FIRST, MEANS = "policy", {"policy": 0.6, "none": 0.5, "better": 0.7, "equal": 0.6}
WORDS = {
    Verdict.ABOVE: "policy better",
    Verdict.BELOW: "better better",
    Verdict.OPEN: "no difference shown",
    Verdict.TOO_FEW: "too few seeds to say",
}
LUCK = np.vstack([np.zeros(len(MEANS)), np.random.default_rng(3).normal(0, 0.01, (FEWEST_SEEDS - 1, len(MEANS)))])
"""Of training seed and name; the first seed has none, so that its claims are as planted."""


def of_seed(seed: int) -> list[Result]:
    """All of ``MEANS``, each with the luck of this seed."""
    means = {name: mean + LUCK[seed, index] for index, (name, mean) in enumerate(MEANS.items())}
    return planted(means, stream=seed)


def expected(seeds: int, claim: Claim, *, paired: bool, own_instances: bool = False) -> Claims:
    """The verdicts of the analysis itself on the planted scores."""
    results = [of_seed(seed) for seed in range(seeds)]
    tables = {
        name: np.array([[one.score for one in own if one.controller == name] for own in results]) for name in MEANS
    }
    families = None if own_instances else [one.family for one in results[0] if one.controller == FIRST]
    others = [name for name in MEANS if name != FIRST]
    compared = estimate_differences([Contrast(tables[FIRST], tables[name], paired) for name in others], families, claim)
    return {
        name: (WORDS[found.verdict], signed_score(found.estimate), "" if found.p is None else p_value(found.p))
        for name, found in zip(others, compared, strict=True)
    }


def of_record(record: dict[str, Any]) -> Claims:
    """As machines read it."""
    claims = {
        one["name"]: (one["verdict"], signed_score(one["difference"]), "" if one["p"] is None else p_value(one["p"]))
        for one in record["standings"]
        if one["name"] != record["reference"]
    }
    return with_rule(claims, record["basis"])


def of_terminal(text: str) -> Claims:
    pattern = rf"^(\w+): ([\w ]+), {FIRST} minus \1 (\S+?)(?: \([^)]*\), p (\S+?))?[;,] {FIRST} better in"
    claims = {name: (words, ahead, p) for name, words, ahead, p in re.findall(pattern, text, re.MULTILINE)}
    return with_rule(claims, text)


def of_page(page: str) -> Claims:
    claims: Claims = {}
    for row in re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL):
        if verdict := re.search(r'<td><b class="(?:above|below|other)">([^<]*)</b></td>', row):
            name = re.search(r"<th[^>]*>([^<]*)</th>", row)
            cells = re.findall(r"<td>(.*?)</td>", row)
            ahead, _, p = (re.sub(r"<small>.*?</small>|<[^>]*>", "", cell).strip() for cell in cells[-4:-1])
            claims[name[1]] = (verdict[1], ahead, html.unescape(p))
    return with_rule(claims, html.unescape(page))


def with_rule(claims: Claims, text: str) -> Claims:
    """The claims in ``text``, which states the rule behind them if it has any p."""
    assert (RULE in " ".join(text.split())) == any(p for _, _, p in claims.values())
    return claims


def one_policy(folder: Path, seeds: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> Rendered:
    assert seeds == 1
    run = evaluated(folder / "run", of_seed(0))
    monkeypatch.setattr("esper.commands.evaluate.evaluate_run", lambda *_: (of_seed(0), BEHAVIOUR))
    assert main(["evaluate", str(run.path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    page = run.report.read_text()
    assert main(["report", str(run.path)]) == 0
    testing = pytest.importorskip("starlette.testclient")
    client = testing.TestClient(dashboard(RunFinder((folder,)), Access("127.0.0.1")), base_url="http://127.0.0.1")
    (shown,) = client.get("/api/compare?run=run").json()["runs"]
    assert shown["evaluation"] == {"heldout": record["heldout"]}
    return {
        "json": of_record(record["heldout"]),
        "terminal": of_terminal(capsys.readouterr().out),
        "page": of_page(page),
        "dashboard": of_record(shown["evaluation"]["heldout"]),
    }


def runs_together(folder: Path, seeds: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> Rendered:
    runs = [str(evaluated(folder / f"seed{seed}", of_seed(seed), seed=seed).path) for seed in range(seeds)]
    assert main(["report", *runs, "--out", str(folder / "out")]) == 0
    page = (folder / "out" / "report.html").read_text()
    return {"terminal": of_terminal(capsys.readouterr().out), "page": of_page(page)}


def ways_of_training(folder: Path, seeds: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> Rendered:
    seeds_of: dict[str, list[ArmResults]] = {name: [] for name in MEANS}
    for seed in range(seeds):
        for name, found in seeds_of.items():
            results = [asdict(one) for one in of_seed(seed) if one.controller == name]
            fields = [{key: value for key, value in one.items() if key != "split"} for one in results]
            own = ArmResults(7, [Result(**{**one, "flops": 9_000_000}) for one in fields])
            found.append(own)
            trial = folder / "all" / name / f"seed-{seed}"
            trial.mkdir(parents=True)
            (trial / "config.yaml").write_text("{}\n")
            load_or_compute(arm_file(trial, FIRST), "", lambda own=own: own)
            with RunStore.create(trial / "run.db") as store:
                store.emit(RunStarted(iteration=0, platform={"esper": "1.0"}, seed=seed))
    assert main(["report", str(folder / "all")]) == 0
    reported = of_terminal(capsys.readouterr().out)
    for name in MEANS:
        (folder / f"{name}.yaml").write_text("{}\n")
    monkeypatch.setattr("esper.commands.compare.run_experiment", lambda *_: [Arm(*one) for one in seeds_of.items()])
    configs = [str(folder / f"{name}.yaml") for name in MEANS]
    assert main(["compare", *configs, "--run-dir", str(folder / "all"), "--seeds", str(seeds), "--json"]) == 0
    captured = capsys.readouterr()
    return {
        "json": of_record(json.loads(captured.out)["configurations"]),
        "terminal": of_terminal(captured.err),
        "terminal of the report": reported,
        "page": of_page((folder / "all" / "report.html").read_text()),
    }


CASES: dict[str, tuple[Callable[..., Rendered], int, Claims]] = {
    "one policy": (one_policy, 1, expected(1, Claim.POLICY, paired=True)),
    **{
        f"{name}, {seeds} seeds": (render, seeds, expected(seeds, Claim.TRAINING, paired=paired, own_instances=paired))
        for name, render, paired in (("runs", runs_together, True), ("ways", ways_of_training, False))
        for seeds in (FEWEST_SEEDS - 1, FEWEST_SEEDS)
    },
}


def test_what_is_planted_has_every_verdict() -> None:
    for _, seeds, claims in CASES.values():
        words = [words for words, _, _ in claims.values()]
        enough = ["policy better", "better better", "no difference shown"]
        assert words == (["too few seeds to say"] * 3 if seeds == FEWEST_SEEDS - 1 else enough)


@pytest.mark.landing
@pytest.mark.parametrize("case", CASES)
def test_all_renderings_say_what_the_analysis_says(
    case: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    render, seeds, claims = CASES[case]
    rendered = render(tmp_path, seeds, capsys, monkeypatch)
    assert rendered == dict.fromkeys(rendered, claims)
