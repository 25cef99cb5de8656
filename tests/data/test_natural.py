"""Federated data by client, read from small files in each documented layout."""

import io
import json
import sqlite3
import sys
import zlib

import numpy as np
import pytest

from tsfl_jax import data, simulate
from tsfl_jax.config import Config, replace
from tsfl_jax.data import tokens
from tsfl_jax.types import UserError

h5py = pytest.importorskip("h5py")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
msgpack = pytest.importorskip("msgpack")
Image = pytest.importorskip("PIL.Image")

# Samples of two clients, in the order of their names; client b has no test sample, and
# a third has only one.
TRAIN = {"a": ([[0.0, 0.5], [1.0, 0.25]], [0, 1]), "b": ([[0.75, 1.0]], [2])}
TEST = {"a": ([[0.5, 0.5]], [4]), "c": ([[0.125, 0.0]], [0])}
TEXT = {"a": ["to be", "or"], "b": ["not to"]}


def write_leaf(folder, parts):
    for part, users in parts.items():
        (folder / part).mkdir(parents=True)
        content = {
            "users": list(users),
            "num_samples": [len(x) for x, _ in users.values()],
            "user_data": {u: {"x": x, "y": y} for u, (x, y) in users.items()},
        }
        name = f"all_data_niid_05_keep_0_{part}_9.json"
        (folder / part / name).write_text(json.dumps(content))


def write_tff(folder, parts):
    for part, users in parts.items():
        with h5py.File(folder / f"fed_emnist_{part}.h5", "w") as file:
            for user, features in users.items():
                for name, value in features.items():
                    kind = h5py.string_dtype() if isinstance(value, list) else None
                    file.create_dataset(f"examples/{user}/{name}", None, kind, value)


def write_fedjax(folder, parts):
    def packed(value):
        if isinstance(value, list):
            texts = [one.encode() for one in value]
            return msgpack.ExtType(4, msgpack.packb(((len(texts),), texts)))
        content = (value.shape, value.dtype.name, value.tobytes())
        return msgpack.ExtType(1, msgpack.packb(content))

    for part, users in parts.items():
        file = sqlite3.connect(folder / f"federated_emnist_{part}.sqlite")
        file.execute(
            "CREATE TABLE federated_data (client_id BLOB NOT NULL PRIMARY KEY, "
            "data BLOB NOT NULL, num_examples INTEGER NOT NULL);"
        )
        for user, features in users.items():
            number = len(next(iter(features.values())))
            arrays = {name: packed(value) for name, value in features.items()}
            blob = zlib.compress(msgpack.packb(arrays))
            row = (user.encode(), blob, number)
            file.execute("INSERT INTO federated_data VALUES (?, ?, ?)", row)
        file.commit()
        file.close()


def tables(parts):
    """Arrow tables of samples with a column of clients."""
    return {
        part: pa.table(
            {
                "image": [x for xs, _ in users.values() for x in xs],
                "label": [y for _, ys in users.values() for y in ys],
                "writer_id": [u for u, (xs, _) in users.items() for _ in xs],
            }
        )
        for part, users in parts.items()
    }


def write_arrow(folder, parts):
    """As datasets.DatasetDict.save_to_disk does."""
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for part, table in tables(parts).items():
        (folder / part).mkdir()
        path = str(folder / part / "data-00000-of-00001.arrow")
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as w:
            w.write_table(table)


def write_parquet(folder, parts):
    (folder / "data").mkdir()
    for part, table in tables(parts).items():
        parquet.write_table(table, folder / "data" / f"{part}-00000-of-00001.parquet")


def features(parts):
    return {
        part: {
            user: {"pixels": np.array(x, np.float32), "label": np.array(y, np.int32)}
            for user, (x, y) in users.items()
        }
        for part, users in parts.items()
    }


WRITERS = {
    "leaf": write_leaf,
    "tff": lambda folder, parts: write_tff(folder, features(parts)),
    "fedjax": lambda folder, parts: write_fedjax(folder, features(parts)),
    "hugging_face": write_arrow,
    "hugging_face parquet": write_parquet,
}
ENDINGS = dict(zip(WRITERS, ("json", "h5", "sqlite", "arrow", "parquet"), strict=True))


PARTS = ("train", "test")


def encoded(mode, pixels=((0, 255), (255, 0))):
    """A PNG in a mode of PIL."""
    buffer = io.BytesIO()
    Image.fromarray(np.array(pixels, np.uint8)).convert(mode).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": None}


def refused(name, folder, message, **settings):
    """Loading ends with one line that has this message."""
    with pytest.raises(UserError, match=message) as caught:
        load(name, folder, **settings)
    assert "\n" not in str(caught.value)


def load(name, folder, **settings):
    values = {"name": name.split()[0], "dir": str(folder)} | settings
    values = {f"data.{name}": value for name, value in values.items()}
    return data.load(replace(Config(), values).data)


@pytest.mark.parametrize("name", WRITERS)
def test_every_layout_gives_the_same_table_of_samples(tmp_path, name):
    WRITERS[name](tmp_path, {"train": TRAIN, "test": TEST})
    dataset = load(name, tmp_path)
    assert dataset.x_train.tolist() == [x for xs, _ in TRAIN.values() for x in xs]
    assert dataset.x_train.dtype == np.float32
    assert dataset.y_train.tolist() == [0, 1, 2] and dataset.y_test.tolist() == [4, 0]
    assert dataset.x_test.tolist() == [[0.5, 0.5], [0.125, 0]]
    assert dataset.client.tolist() == [0, 0, 1]
    assert dataset.test_client.tolist() == [0, 2]  # c has no training sample
    assert dataset.num_classes == 5  # a class may be in the test part only


@pytest.mark.parametrize("name", ["tff", "fedjax"])
def test_pixels_of_floats_are_gray_images_and_one_of_several_files(tmp_path, name):
    users = {"a": (np.ones((2, 28, 28)), [0, 1])}
    WRITERS[name](tmp_path, {"train": users, "test": users})
    dataset = load(name, tmp_path)
    assert dataset.x_train.shape == (2, 28, 28, 1)
    assert dataset.x_train.dtype == np.float32
    for path in list(tmp_path.iterdir()):
        path.with_name(f"other_{path.name}").write_bytes(b"damaged")
    refused(name, tmp_path, "got .*other_.*data.file chooses")
    stem = {"tff": "fed_emnist", "fedjax": "federated_emnist"}[name]
    assert len(load(name, tmp_path, file=stem).x_train) == 2


@pytest.mark.parametrize("name", ["tff", "fedjax"])
def test_text_of_clients_becomes_rows_of_tokens(tmp_path, name):
    users = {u: {"snippets": texts} for u, texts in TEXT.items()}
    writer = {"tff": write_tff, "fedjax": write_fedjax}[name]
    writer(tmp_path, {"train": users, "test": users})
    dataset = load(name, tmp_path, tokens="words", length=2)
    # to is the most frequent word; the others by the alphabet.
    to, be, no, either = (tokens.RESERVED + i for i in range(4))
    rows = [[1, to, be], [be, 2, 0], [1, either, 2], [1, no, to], [to, 2, 0]]
    assert dataset.x_train.tolist() == rows and dataset.x_train.dtype == np.int32
    assert dataset.client.tolist() == dataset.test_client.tolist() == [0, 0, 0, 1, 1]
    assert dataset.num_classes == tokens.RESERVED + 4
    shorter = load(name, tmp_path, tokens="words", length=2, vocabulary=1)
    assert shorter.x_train[0].tolist() == [1, to, tokens.UNKNOWN]


def test_each_token_is_predicted_once():
    texts = ["abcdefg", "", "hi"]
    vocabulary = tokens.vocabulary(texts, "characters", 100)
    for length in (1, 2, 3, 8, 20):
        x, row_text = tokens.sequences(texts, vocabulary, "characters", length)
        assert x.shape[1] == length + 1
        for i, text in enumerate(texts):
            predicted = x[row_text == i, 1:].ravel()
            predicted = predicted[predicted != tokens.PADDING].tolist()
            assert predicted == [*(vocabulary[c] for c in text), tokens.END]


def test_leaf_text_images_and_tweets(tmp_path):
    users = {"ROMEO": (["abca", "bcab"], ["b", "c"])}
    write_leaf(tmp_path / "c", {"train": users, "test": users})
    dataset = load("leaf", tmp_path / "c", length=5)
    a, b, c = (tokens.RESERVED + i for i in (1, 0, 2))  # b is the most frequent
    assert dataset.x_train.tolist() == [[0, a, b, c, a], [0, b, c, a, b]]
    assert dataset.y_train.tolist() == [b, c]
    assert dataset.num_classes == tokens.RESERVED + 3
    x = np.linspace(0, 1, 2 * 784).reshape(2, 784)
    write_leaf(tmp_path / "i", {p: {"f": (x.tolist(), [0, 61])} for p in PARTS})
    assert load("leaf", tmp_path / "i").x_train.shape == (2, 28, 28, 1)
    tweet = ["1467", "Mon", "NO_QUERY", "sue", "so good", "training"]
    users = {"sue": ([tweet], [1]), "tom": ([[*tweet[:4], "bad"]], [0])}
    write_leaf(tmp_path / "t", {part: users for part in PARTS})
    dataset = load("leaf", tmp_path / "t", tokens="words", length=2)
    assert dataset.x_train.tolist() == [[6, 5], [0, 4]]
    assert dataset.y_train.tolist() == [1, 0]
    users = {"a": (["good one", "bad one"], ["good", "bad"])}
    write_leaf(tmp_path / "l", {part: users for part in PARTS})
    assert load("leaf", tmp_path / "l", tokens="words").y_train.tolist() == [5, 4]


def test_images_of_the_hub_and_a_tenth_for_tests(tmp_path):
    drawn = np.random.default_rng(0).integers(0, 256, (40, 4, 4), np.uint8)
    table = {
        "image": [encoded("L", pixels) for pixels in drawn],
        "hsf_id": np.arange(40),
        "writer_id": np.repeat([7, 3, 5], [21, 10, 9]),
        "character": np.arange(40) % 4,
    }
    parquet.write_table(pa.table(table), tmp_path / "train-00000-of-00001.parquet")
    dataset = load("hugging_face", tmp_path, columns="image,character,writer_id")
    assert dataset.x_train.dtype == np.uint8 and dataset.x_train.shape == (37, 4, 4, 1)
    assert np.bincount(dataset.client).tolist() == [9, 9, 19]
    assert np.bincount(dataset.test_client).tolist() == [1, 0, 2]
    both = np.concatenate([dataset.x_train, dataset.x_test])[..., 0]
    assert sorted(both.tolist()) == sorted(drawn.tolist())


def test_a_subset_keeps_the_clients_of_test_samples(tmp_path):
    users = {f"u{i}": ([[i, 0.5]], [i % 2]) for i in range(9)}
    write_leaf(tmp_path, {"train": users, "test": users})
    dataset = load("leaf", tmp_path, train_size=4)
    assert dataset.client.tolist() == [0, 1, 2, 3]
    first = [*dataset.x_train[:, 0]]
    names = first + [x for x in range(9) if x not in first]
    assert dataset.test_client.tolist() == [names.index(x) for x in range(9)]


@pytest.mark.parametrize("name", WRITERS)
def test_a_damaged_file_is_one_line(tmp_path, name):
    refused(name, "", "data.dir")
    refused(name, tmp_path, "expected")
    WRITERS[name](tmp_path, {"train": TRAIN, "test": TEST})
    for path in tmp_path.rglob(f"*.{ENDINGS[name]}"):
        path.write_bytes(path.read_bytes()[:40])
    refused(name, tmp_path, f"{ENDINGS[name]}: cannot be read")


def test_a_missing_column_or_package_is_named(tmp_path, monkeypatch):
    write_parquet(tmp_path, {"train": TRAIN, "test": TEST})
    wrong = {"columns": "image,label,author"}
    refused("hugging_face", tmp_path, "holds image, label, writer_id; ex", **wrong)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused("hugging_face", tmp_path, r"pip install 'tsfl_jax\[natural\]'")


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ({"0": 1, "1": 2}, [0, 1], "cannot be read"),
        ([[1, 2]], [0, 1], "client a: expected a label per sample"),
    ],
)
def test_wrong_users_of_leaf_are_one_line(tmp_path, x, y, message):
    write_leaf(tmp_path, {part: {"a": (x, y)} for part in PARTS})
    refused("leaf", tmp_path, message)


@pytest.mark.slow
def test_the_next_character_of_a_period_is_learned(tmp_path):
    """Text that repeats itself: from the command line's settings alone."""
    users = {u: {"snippets": ["abcd" * 12] * 4} for u in ("x", "y")}
    write_tff(tmp_path, {"train": users, "test": users})
    settings = {"data.name": "tff", "data.dir": str(tmp_path), "data.length": 6}
    settings |= {"partition.kind": "client", "num_clients": 2, "num_intervals": 12}
    settings |= {"schedule.kind": "explicit", "schedule.tau": (4,), "devices": 1}
    settings |= {"algorithm": "fedavg", "mu": 0.0, "model.hidden": 16}
    config = replace(Config(), settings | {"batch_size": 8, "lr": 0.5})
    with pytest.raises(UserError, match="are tokens, which"):
        simulate(config)
    learner = replace(config, {"model.name": "next_token_lstm"})
    assert simulate(learner).history["test_accuracy"][-1] > 0.7


# ---- Folders of Hugging Face ----


def write_train(folder, column, values):
    """A folder of one Parquet file, train, of ten times these values in a column."""
    table = {"image": [[0.0, 1.0]], "label": [0], "client": ["a"]}
    table = {name: value * 10 * len(values) for name, value in table.items()}
    parquet.write_table(
        pa.table(table | {column: values * 10}), folder / "train.parquet"
    )


def test_caches_beside_the_files_are_left_out(tmp_path):
    write_arrow(tmp_path, {"train": TRAIN, "test": TEST})
    for path in tmp_path.glob("*/*.arrow"):
        path.with_name("cache-b96228922b64d407.arrow").write_bytes(path.read_bytes())
    got = load("hugging_face", tmp_path)
    assert len(got.x_train) == 3 and len(got.x_test) == 2


def test_parquet_files_as_the_hub_converts_them(tmp_path):
    for part, table in tables({"train": TRAIN, "test": TEST}).items():
        (tmp_path / "default" / part).mkdir(parents=True)
        for shard in range(2):
            rows = table.slice(shard, 1 if shard == 0 else None)
            parquet.write_table(
                rows, tmp_path / "default" / part / f"000{shard}.parquet"
            )
    for folder in (tmp_path, tmp_path / "default"):
        got = load("hugging_face", folder)
        assert got.x_train.tolist() == [x for xs, _ in TRAIN.values() for x in xs]
        assert got.y_test.tolist() == [4, 0] and got.test_client.tolist() == [0, 2]
    (tmp_path / "default").rename(tmp_path / "a")
    write_parquet(tmp_path, {"train": TRAIN})
    refused("hugging_face", tmp_path, "got a/train/0000.parquet, data/train-.*name the")


@pytest.mark.parametrize("mode, channels", [("1", 1), ("P", 3)])
def test_images_of_few_bits_are_decoded_without_loss(tmp_path, mode, channels):
    write_train(tmp_path, "image", [encoded(mode)])
    dataset = load("hugging_face", tmp_path)
    black, white = [0] * channels, [255] * channels
    assert dataset.x_train.dtype == np.uint8
    assert dataset.x_train.tolist() == [[[black, white], [white, black]]] * 9


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("client", ["a", None, "b"], "client: .*10 values are null"),
        ("image", [[1, 2], [1], [3, 4]], "image: .*values of one shape"),
        ("image", [encoded("RGBA")] * 3, "mode RGBA;"),
    ],
)
def test_a_wrong_column_is_one_line(tmp_path, column, values, message):
    write_train(tmp_path, column, values)
    refused("hugging_face", tmp_path, message)
