"""What was tried and why reads as a sentence, and as a table."""

import pytest
import torch

from esper.growth.attach import attach
from esper.growth.tried import ModuleJudgement, TriedModule, count_tried
from factories import mlp

TRIED = (
    TriedModule("0", "mlp", 1280, 4, 9, False, "look", ModuleJudgement(0.016, 0.0041, 0.0, 0.0, 0.012, 0.02, 0.03)),
    TriedModule("2", "norm", 1, 10, 12, True, "heuristic", ModuleJudgement(0.5, None, 0.1, 0.12)),
    TriedModule("2", "mlp", 36, 13, 14, False, "governor"),
    TriedModule(
        "4", "mlp", 36, 14, 16, False, "finish", ModuleJudgement(None, None, 0.1, 0.1, note="had no effect yet")
    ),
    TriedModule("0", "norm", 36, 15),
)
SENTENCES = (
    "pruned mlp in 0 at decision 9 by look: contribution +0.016 ± 0.0041, rent 0, minimum 0; "
    "loss 1.20% ± 2.00% higher without it, minimum 3.00% (planted at decision 4, 1,280 parameters)",
    "kept norm in 2 at decision 12 by heuristic: contribution +0.5, rent 0.1, minimum +0.12 "
    "(planted at decision 10, 1 parameter)",
    "pruned mlp in 2 at decision 14 by governor (planted at decision 13, 36 parameters)",
    "pruned mlp in 4 at decision 16 by finish: had no effect yet (planted at decision 14, 36 parameters)",
    "on trial norm in 0 (planted at decision 15, 36 parameters)",
)


@pytest.mark.parametrize(("module", "sentence"), zip(TRIED, SENTENCES, strict=True))
def test_a_module_reads_as_a_sentence(module: TriedModule, sentence: str) -> None:
    assert str(module) == sentence


@pytest.mark.parametrize(
    ("judgement", "text"),
    [
        (ModuleJudgement(-0.016, None, 0.0, None), "contribution -0.016, rent 0"),
        (ModuleJudgement(0.0, None, 0.25, 0.25), "contribution 0, rent 0.25, minimum +0.25"),
        (ModuleJudgement(0.1, None, 0.0, 0.0, note="so"), "contribution +0.1, rent 0, minimum 0; so"),
        (
            ModuleJudgement(0.1, 0.02, 0.0, 0.0, -0.005, None, 0.0),
            "contribution +0.1 ± 0.02, rent 0, minimum 0; loss 0.50% lower without it, minimum 0.00%",
        ),
        (ModuleJudgement(0.1, 0.02, 0.0, 0.0, 0.005, 0.01, None), "contribution +0.1 ± 0.02, rent 0, minimum 0"),
        (ModuleJudgement(None, None, 0.0, 0.02), "contribution not measured"),
    ],
)
def test_figures_that_are_not_known_are_left_out(judgement: ModuleJudgement, text: str) -> None:
    assert str(judgement) == text


def test_the_count_leaves_out_what_is_not_settled() -> None:
    assert count_tried(TRIED) == "5 modules tried, 1 kept, 1 on trial"
    assert count_tried(TRIED[:1]) == "1 module tried, 0 kept"


def test_a_summary_lists_what_was_tried() -> None:
    model = attach(mlp(), {"0": ["norm", "mlp"]}, torch.zeros(2, 7))
    assert "tried" not in str(model.summary())
    model.tried = TRIED
    lines = str(model.summary()).splitlines()
    start = lines.index("5 modules tried, 1 kept, 1 on trial")
    names = "slot blueprint outcome by planted judged parameters"
    figures = "contribution error rent minimum loss without it loss error loss minimum"
    assert lines[start + 1].split() == f"{names} {figures}".split()
    assert [line.split() for line in lines[start + 2 :]] == [
        ["0", "mlp", "pruned", "look", "4", "9", "1,280", "+0.016", "0.0041", "0", "0", "+1.20%", "2.00%", "3.00%"],
        ["2", "norm", "kept", "heuristic", "10", "12", "1", "+0.5", "-", "0.1", "+0.12", *"---"],
        ["2", "mlp", "pruned", "governor", "13", "14", "36", *"-------"],
        ["4", "mlp", "pruned", "finish", "14", "16", "36", "-", "-", "0.1", "+0.1", *"---"],
        ["0", "norm", "on", "trial", "-", "15", "-", "36", *"-------"],
    ]
