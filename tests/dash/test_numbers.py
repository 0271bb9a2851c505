"""The dashboard writes numbers as terminal and report do."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import esper.dash
from esper.dash.formats import MINUS, p_value, score, signed_score

NODE = shutil.which("node")
FORMATS = Path(esper.dash.__file__).parent / "static" / "js" / "formats.js"
VALUES = (0.0, 0.0001, -0.0001, 0.0004, 0.0006, -0.05, 0.21, -0.2, 0.04, 0.5, 1.0)


@pytest.mark.skipif(NODE is None, reason="needs node: apt install nodejs")
def test_numbers_of_a_verdict_are_written_alike(tmp_path: Path) -> None:
    (tmp_path / "formats.mjs").write_text(FORMATS.read_text())
    (tmp_path / "written.mjs").write_text(
        'import { pValue, score, signed } from "./formats.mjs";\n'
        f"const values = {json.dumps(VALUES)};\n"
        "const written = values.map((one) => [signed(one), score(one), pValue(Math.abs(one))]);\n"
        "console.log(JSON.stringify(written));\n"
    )
    words = [str(NODE), str(tmp_path / "written.mjs")]
    written = json.loads(subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout)
    assert written == [[signed_score(one), score(one), p_value(abs(one))] for one in VALUES]
    assert MINUS in written[5][0]
