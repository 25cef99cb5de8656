"""Folders of Hugging Face: which files are read, images, and wrong columns."""

import io
import json

import numpy as np
import pytest

from tests.data.test_natural import (
    PARTS,
    TEST,
    TRAIN,
    load,
    tables,
    write_arrow,
    write_parquet,
)
from tsfl_jax.types import UserError

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def write_train(folder, column, values):
    """A folder of one Parquet file, train, of ten times these values in a column."""
    table = {"image": [[0.0, 1.0]], "label": [0], "client": ["a"]}
    table = {name: value * 10 * len(values) for name, value in table.items()}
    parquet.write_table(
        pa.table(table | {column: values * 10}), folder / "train.parquet"
    )


def encoded(mode, **options):
    """A PNG, or a TIFF of modes without one, of 2x2 pixels in a mode of PIL."""
    image = pytest.importorskip("PIL.Image")
    drawn = image.fromarray(np.array([[0, 255], [255, 0]], np.uint8))
    drawn = image.new(mode, (2, 2)) if mode == "I;16" else drawn.convert(mode)
    buffer = io.BytesIO()
    drawn.save(buffer, "TIFF" if mode == "CMYK" else "PNG", **options)
    return {"bytes": buffer.getvalue(), "path": None}


def test_files_that_state_json_does_not_name_are_left_out(tmp_path):
    write_arrow(tmp_path, {"train": TRAIN, "test": TEST})
    for part in PARTS:
        (path,) = (tmp_path / part).glob("*.arrow")
        entries = [{"filename": path.name}]
        path.with_name("state.json").write_text(json.dumps({"_data_files": entries}))
        path.with_name("cache-b96228922b64d407.arrow").write_bytes(path.read_bytes())
    got = load("hugging_face", tmp_path)
    assert len(got.x_train) == 3 and len(got.x_test) == 2
    (tmp_path / "train" / "state.json").write_text("{}")
    with pytest.raises(UserError, match="state.json: cannot be read"):
        load("hugging_face", tmp_path)


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
    said = "got a/train/0000.parquet, data/train-.*name the subfolder"
    with pytest.raises(UserError, match=said):
        load("hugging_face", tmp_path)


@pytest.mark.parametrize(
    "mode, pixels",
    [
        ("1", [[[0], [255]], [[255], [0]]]),
        ("P", [[[0] * 3, [255] * 3], [[255] * 3, [0] * 3]]),
        ("RGB", [[[0] * 3, [255] * 3], [[255] * 3, [0] * 3]]),
    ],
)
def test_images_of_few_bits_are_decoded_without_loss(tmp_path, mode, pixels):
    write_train(tmp_path, "image", [encoded(mode)])
    dataset = load("hugging_face", tmp_path)
    assert dataset.x_train.dtype == np.uint8
    assert dataset.x_train.tolist() == [pixels] * 9


def test_nested_lists_are_pixels_up_to_255(tmp_path):
    write_train(tmp_path, "image", [[[255, 0]]])
    dataset = load("hugging_face", tmp_path)
    assert dataset.x_train.dtype == np.uint8
    assert dataset.x_train[0, 0, :, 0].tolist() == [255, 0]
    for wrong in (300, -1):
        write_train(tmp_path, "image", [[[wrong, 0]]])
        with pytest.raises(UserError, match=r"expected uint8 \(0..255\)"):
            load("hugging_face", tmp_path)


GRAY = "image", lambda: [encoded("L"), encoded("RGB"), encoded("L")]
WRONG_COLUMNS = {
    "null client": ("client", ["a", None, "b"], "client: .*10 values are null"),
    "null image": ("image", lambda: [encoded("L"), None, encoded("L")], "are null"),
    "path": ("image", [{"bytes": None, "path": "a.png"}] * 3, "without bytes"),
    "damaged": ("image", [{"bytes": b"\x89PNG", "path": None}] * 3, "cannot be read"),
    "gray and RGB": (*GRAY, "image: .*images of one size and mode"),
    "ragged": ("image", [[1, 2], [1], [3, 4]], "image: .*values of one shape"),
    "null token": ("image", [[1, None], [1, 2], [3, 4]], "numbers of one shape"),
    "lists of texts": ("image", [["a", "b"]] * 3, "numbers of one shape"),
    "files": ("image", ["a.jpg", "b.jpg", "c.png"], "'a.jpg' is a file's name"),
    **{
        f"mode {mode}": ("image", lambda m=mode: [encoded(m)] * 3, f"mode {mode};")
        for mode in ("RGBA", "LA", "CMYK", "I;16")
    },
    "transparent": ("image", lambda: [encoded("P", transparency=0)] * 3, "mode P;"),
}


@pytest.mark.parametrize("name", WRONG_COLUMNS)
def test_a_wrong_column_is_one_line(tmp_path, name):
    column, values, said = WRONG_COLUMNS[name]
    write_train(tmp_path, column, values() if callable(values) else values)
    with pytest.raises(UserError, match=said) as caught:
        load("hugging_face", tmp_path)
    assert "\n" not in str(caught.value)
