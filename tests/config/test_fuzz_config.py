"""Whatever a configuration holds, loading it gives settings or a ConfigError."""

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from esper.config.loading import load_settings
from esper.errors import EsperError
from esper.tasks.registry import get_suite, suite_names
from esper.train.settings import TrainSettings
from fuzzing import MOST_CALLS, Mutator, assert_legible, harmless

pytestmark = pytest.mark.landing

CORPUS = [
    b"seed: 3\niterations: 20\nsuite: digits\nppo: {clip: 0.1, epochs: 4}\n",
    b"# a comment\nppo:\n  learning_rate: 1e-3\n  adam_betas: [0.9, 0.999]\npolicy:\n  hidden: 64\n",
    b"rules:\n  isolation: shadow\n  cooldown: [1, 2, 3]\n  operations:\n  - 0\n  - 1\n  - 2\nenvironments: 64\n",
    b'reward: "sparse"\nstrategy: looped\nshards: &n 2\nkeep_checkpoints: *n\n',
    "---\nsuite: 'tokens' # näh\nreward: outcome\n".encode(),
]
TOKENS = [
    *(b"!!python/object/apply:os.system ['true']", b"!!python/name:os.system", b"!!python/object/new:os.system [x]"),
    *(b"!!int", b"!!float", b"!!bool", b"!!binary", b"!!timestamp", b"!!set", b"!!omap", b"!!pairs", b"!!merge"),
    b"!<x>",
    *(b"!%1b%5b31m", b"!!str", b"!!null", b"!", b"&a", b"*a", b"<<: *n", b"<<", b"=", b"? ", b": ", b"- "),
    *(b"---\n", b"...\n"),
    *(b"%YAML 9.9\n", b"%TAG ! tag:x,2000:\n", b"|", b">", b"'", b'"', b"\\x", b"\\uD800", b"\\0", b"#", b"@"),
    *(b"`", b"\t"),
    *(b"[" * 2000, b"{" * 2000, b"- " * 2000, b"? " * 500, b"[a,", b"{a: b,", b"*" * 50, b"&" * 50, b"!" * 50),
    b"1:60" * 400,
    *(b"9" * 5000, b"0x" + b"f" * 5000, b"0b1", b"0o7", b"1e999", b".inf", b"-.inf", b".nan", b"-0"),
    *(b"2001-13-45", b"1_0"),
    *(b"\x00", b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf", b"\x85", b"\xe2\x80\xa8", b"\xed\xa0\x80", b"\x7f"),
    *(b"\x1b[2J", b"\r"),
    *(b"\nseed: ", b"\nppo.clip: 1\n", b"\nsuite: ../../etc\n", b"\nrules: []\n", b"\nppo:\n", b"null", b"yes"),
    *(b"~", b"{}"),
    b"a0: &a0 [x,x,x]\n"
    + b"".join(b"a%d: &a%d [*a%d,*a%d,*a%d]\n" % (i, i, i - 1, i - 1, i - 1) for i in range(1, 20)),
    b"m0: &m0 {x: 1}\n" + b"".join(b"m%d: &m%d {<<: [*m%d,*m%d]}\n" % (i, i, i - 1, i - 1) for i in range(1, 20)),
]


class Target:
    """A configuration file and overrides, drawn from mutations of valid ones."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self._path = folder / "config.yaml"
        self._mutator = Mutator(CORPUS, TOKENS, seed)
        lines = [line for text in CORPUS for line in text.replace(b": ", b"=").splitlines()]
        self._overrides = Mutator(
            [*lines, b"ppo.clip=0.1", b"rules.cooldown=[1,1,1]", b"ppo={epochs: 3}"], TOKENS, seed
        )

    def outcome(self) -> str:
        """Load one: how far it got."""
        overriding = self._mutator.random.random() < 0.3
        overrides = [self._overrides.draw().decode(errors="surrogateescape")] if overriding else []
        self._path.write_bytes(CORPUS[0] if overriding else self._mutator.draw())
        with harmless(self.folder):
            try:
                loaded = load_settings(TrainSettings, self._path, overrides)
            except EsperError as error:
                assert_legible(error)
                return "values" if isinstance(error.__cause__, ValidationError | None) else "syntax"
        assert isinstance(loaded, TrainSettings)
        return "loaded"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None)).resolve()
    for name in suite_names():
        get_suite(name)  # what is imported on first use is no harm
    yield path
    shutil.rmtree(path)


def test_endless_work_is_noticed(folder: Path):
    def work():
        with harmless(folder):
            for _ in range(MOST_CALLS):
                len(CORPUS)

    with pytest.raises(AssertionError):
        work()


@pytest.mark.parametrize(("damages", "seed"), [(1000, 1), pytest.param(50_000, 2, marks=pytest.mark.slow)])
def test_any_damage_ends_in_settings_or_an_error_of_ours(
    damages: int, seed: int, folder: Path, count_figure: Callable[[str, int], None]
):
    target = Target(folder, seed)
    reached = Counter(target.outcome() for _ in range(damages))
    assert_deep(reached)
    count_figure("configurations fuzzed", reached.total())


def assert_deep(reached: Counter[str]) -> None:
    """A fair share is refused by the parser, a fair share by the settings, and some are valid."""
    for stage in ("syntax", "values", "loaded"):
        assert reached[stage] > 0.1 * reached.total()
