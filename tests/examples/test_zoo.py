"""Hosts and data of the examples: hosts read their tasks, data are whole and split for good, or a sentence helps."""

import gzip
import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from zoo import data
from zoo.data import TASKS, Labelled, Splits, Windows, fetch, load
from zoo.hosts import HOSTS, build_host
from zoo.training import build_model, host_for, make_optimizer, measure, numpy_generator, train_epoch

from esper.errors import TaskError
from esper.growth.attach import attach
from esper.tasks import image_files
from esper.tasks.image_files import CIFAR_FILES, CIFAR_TEST
from examples.planted_data import cifar_records, write_fashion_mnist, write_tar

CLASSES, PER_FILE = 7, 12
SHAPES: dict[str, tuple[int, ...]] = {
    "digits": (1, 8, 8),
    "mnist1d": (1, 40),
    "fashion-mnist": (1, 28, 28),
    "cifar10": (3, 32, 32),
    "charlm": (16,),
}
SUITED = [(task, host) for task, hosts in TASKS.items() for host in hosts]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of cached data."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(image_files, "PACKAGED", tmp_path / "packaged")
    return tmp_path / "cache" / "esper"


# Hosts


@pytest.mark.parametrize(("task", "name"), SUITED)
def test_hosts_read_their_tasks_and_every_blueprint_fits_where_it_is_on_offer(task: str, name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    shape = (3, *SHAPES[task])
    text = task == "charlm"
    inputs = torch.randint(CLASSES, shape) if text else torch.randn(shape, generator=generator)
    model = attach(HOSTS[name].build(SHAPES[task], CLASSES, generator), HOSTS[name].slots, inputs)
    logits = model(inputs)
    assert logits.shape == ((*shape, CLASSES) if text else (3, CLASSES))
    (logits**2).sum().backward()
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []
    for slot in model.slots.values():
        assert slot.site.causal == (name == "gpt")
        for blueprint in slot.blueprints:
            slot.germinate(blueprint, generator, alpha=1.0)
            model(inputs)
            slot.prune()


def test_weights_follow_from_the_generator_alone_and_a_layer_without_a_rule_is_refused() -> None:
    before = torch.get_rng_state()
    first, same, other = (
        HOSTS["vit"].build((1, 8, 8), CLASSES, torch.Generator().manual_seed(seed)).state_dict() for seed in (0, 0, 1)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)
    with pytest.raises(TypeError, match="GRUCell"):
        build_host(lambda: nn.GRUCell(2, 2), torch.Generator())


def test_names_that_do_not_exist_or_do_not_suit() -> None:
    assert host_for("digits") == "conv"
    for task, host, words in (("digit", None, "no task"), ("digits", "resne", "no host"), ("digits", "gpt", "read")):
        with pytest.raises(TaskError, match=words):
            host_for(task, host)
    with pytest.raises(TaskError, match="reads no text of yours"):
        load("digits", text=Path("a.txt"))


def test_a_host_learns_and_the_same_seed_gives_the_same_figures() -> None:
    splits, figures = load("digits"), []
    for seed in (1, 1, 2):
        model = build_model("mlp", splits, seed)
        optimizer = make_optimizer(model, HOSTS["mlp"])
        before = measure(model, splits.validation)
        for epoch in (1, 2):
            train_epoch(model, optimizer, splits.train, 64, numpy_generator(seed, 2, epoch))
        figures.append(measure(model, splits.validation))
        assert figures[-1].loss < before.loss
    assert figures[0] == figures[1] != figures[2]


# Examples and minibatches


def rows(part: Labelled | Windows) -> list[tuple[float, ...]]:
    return [tuple(row) for row in part.inputs.flatten(1).tolist()]


def test_minibatches_are_whole_random_and_standardised() -> None:
    part = Labelled(torch.arange(25.0)[:, None], torch.arange(25), mean=3.0, deviation=2.0)
    batches = list(part.epoch(10, np.random.default_rng(0)))
    assert [len(batch.targets) for batch in batches] == [10, 10]
    assert len({int(label) for batch in batches for label in batch.targets}) == 20
    assert all(torch.equal(batch.inputs[:, 0], (batch.targets - 3.0) / 2.0) for batch in batches)
    assert [len(batch.targets) for batch in part.epoch(99, np.random.default_rng(0))] == [25]
    assert torch.cat([batch.targets for batch in part.in_order(10)]).tolist() == list(range(25))


def test_targets_of_a_text_are_the_next_tokens_and_windows_in_order_do_not_overlap() -> None:
    part = Windows(np.arange(31, dtype=np.uint8), 5)
    for batch in [*part.epoch(2, np.random.default_rng(0)), *part.in_order(2)]:
        assert torch.equal(batch.targets, batch.inputs + 1)
    assert torch.cat([batch.inputs.flatten() for batch in part.in_order(2)]).tolist() == list(range(30))
    with pytest.raises(TaskError, match="5 characters.*longer text"):
        Windows(np.arange(5, dtype=np.uint8), 5)


@pytest.mark.parametrize(("name", "total"), [("digits", 1797), ("mnist1d", 5000)])
def test_offline_data_are_split_into_disjoint_parts_that_never_change(name: str, total: int) -> None:
    splits = load(name)
    parts = [rows(part) for part in splits[:3]]
    assert len({row for part in parts for row in part}) == total  # no two examples are equal in these sets
    assert rows(load(name).validation) == parts[1]


# Text


def test_a_text_is_split_by_position_into_tokens_of_its_own_alphabet(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes("".join(map(chr, range(1000, 3000))).encode())  # every character once
    splits = load("charlm", text=text)
    parts = [part.tokens.tolist() for part in splits[:3] if isinstance(part, Windows)]
    assert [len(part) for part in parts] == [1700, 100, 200]
    assert [token for part in parts for token in part] == list(range(2000))
    assert splits.classes == 2000
    assert splits.train.tokens.dtype == np.uint16


def test_the_usual_text_is_pythons_help() -> None:
    splits = load("charlm")
    assert next(splits.train.in_order(2)).inputs.dtype is torch.int64
    assert 50 < splits.classes < 300
    assert len(splits.train) > 1000


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\xff\xfeab", "not UTF-8"), (b"aaa", "nothing to learn"), (b"ab" * 99, "longer text"), (None, "cannot read")],
)
def test_texts_that_cannot_be_learned(content: bytes | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TaskError, match=words):
        load("charlm", text=path)


# CIFAR-10


def write_cifar(cache: Path, changes: dict[str, bytes | None], links: dict[str, str] | None = None) -> str:
    """An archive of small files with these changes in the cache; returns its hash."""
    names = (*CIFAR_FILES, CIFAR_TEST)
    members = {name: cifar_records(PER_FILE, seed).tobytes() for seed, name in enumerate(names)} | changes
    path = cache / "cifar10" / "cifar-10-binary.tar.gz"
    write_tar(path, {name: content for name, content in members.items() if content is not None}, links)
    return hashlib.md5(path.read_bytes()).hexdigest()


def load_cifar(md5: str) -> Splits:
    return data.load_cifar10(False, md5, validation=10)


def test_cifar10_that_is_missing_or_damaged(cache: Path) -> None:
    with pytest.raises(TaskError, match=f"{cache}.*--download"):
        load("cifar10")
    md5 = write_cifar(cache, {})
    path = cache / "cifar10" / "cifar-10-binary.tar.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TaskError, match="md5.*delete it"):
        load_cifar(md5)


def test_cifar10_is_never_unpacked_and_links_in_it_are_not_followed(cache: Path, tmp_path: Path) -> None:
    md5 = write_cifar(cache, {CIFAR_TEST: None, "../outside.bin": b"x"}, {CIFAR_TEST: CIFAR_FILES[0]})
    with pytest.raises(TaskError, match=f"lacks {CIFAR_TEST}"):
        load_cifar(md5)
    assert not list(tmp_path.rglob("*.bin"))


def test_cifar10_with_a_file_of_another_size_or_a_label_that_does_not_exist(cache: Path) -> None:
    with pytest.raises(TaskError, match="has 36875 bytes, not 3073 for each"):
        load_cifar(write_cifar(cache, {CIFAR_TEST: bytes(36875)}))
    records = cifar_records(PER_FILE, 0)
    records[3, 0] = 10
    with pytest.raises(TaskError, match="a label 10"):
        load_cifar(write_cifar(cache, {CIFAR_TEST: records.tobytes()}))


# Fashion-MNIST


@pytest.mark.parametrize(("compressed", "packaged"), [(True, False), (False, True)])
def test_fashion_mnist_is_read_from_either_place(cache: Path, tmp_path: Path, compressed: bool, packaged: bool) -> None:
    folder = tmp_path / "packaged" if packaged else cache / "fashion-mnist"
    arrays = write_fashion_mnist(folder, 20, 6, compressed=compressed)
    splits = data.load_fashion_mnist(False, 5)
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (15, 5, 6)
    test = splits.test
    assert np.array_equal(test.inputs[:, 0].numpy(), arrays["t10k-images-idx3-ubyte"])
    assert test.labels.tolist() == arrays["t10k-labels-idx1-ubyte"].tolist()
    assert not {*rows(splits.train)} & {*rows(splits.validation)}


def test_fashion_mnist_that_is_missing_or_not_whole(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=f"{cache}.*{tmp_path / 'packaged'}.*--download.*dataset-fashion-mnist"):
        load("fashion-mnist")
    write_fashion_mnist(cache / "fashion-mnist", 20, 6, compressed=True)
    (cache / "fashion-mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(TaskError, match="neither in"):
        load("fashion-mnist")


@pytest.mark.parametrize("damage", ["torn", "long", "foreign", "not gzip"])
def test_fashion_mnist_that_is_damaged(cache: Path, damage: str) -> None:
    write_fashion_mnist(cache / "fashion-mnist", 20, 6, compressed=True)
    path = cache / "fashion-mnist" / "train-images-idx3-ubyte.gz"
    whole = gzip.decompress(path.read_bytes())
    spoilt = {
        "torn": gzip.compress(whole)[:-100],
        "long": gzip.compress(whole + b"x"),
        "foreign": gzip.compress(b"\0\0\x09" + whole[3:]),
        "not gzip": whole,
    }
    path.write_bytes(spoilt[damage])
    with pytest.raises(TaskError, match=str(path)):
        data.load_fashion_mnist(False, 5)


# Downloads

CONTENT = b"some data" * 1000
MD5 = hashlib.md5(CONTENT).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Serves CONTENT at /whole, half of it at /torn, and nothing elsewhere."""

    def do_GET(self) -> None:
        if self.path not in ("/whole", "/torn"):
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT if self.path == "/whole" else CONTENT[: len(CONTENT) // 2])

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Not to stderr."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    served = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{served.server_port}"
    served.shutdown()
    served.server_close()
    thread.join()


def test_a_file_arrives_in_a_new_folder(server: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "data"
    fetch(f"{server}/whole", MD5, path, most_bytes=len(CONTENT))
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("place", "md5", "most", "sentence"),
    [
        ("whole", "0" * 32, len(CONTENT), "gave something else"),
        ("torn", MD5, len(CONTENT), "gave something else|cannot download"),
        ("nowhere", MD5, len(CONTENT), "cannot download .*404"),
        ("whole", MD5, len(CONTENT) - 1, "gave more than"),
    ],
)
def test_what_is_not_right_leaves_nothing(
    server: str, tmp_path: Path, place: str, md5: str, most: int, sentence: str
) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"from before")
    with pytest.raises(TaskError, match=sentence):
        fetch(f"{server}/{place}", md5, path, most_bytes=most)
    assert path.read_bytes() == b"from before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="cannot download"):
        fetch("http://127.0.0.1:1/data", MD5, tmp_path / "data", most_bytes=len(CONTENT))
    assert not list(tmp_path.iterdir())
