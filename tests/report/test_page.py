"""The report of runs, sweeps and studies: whole, escaped, and equal to their files."""

import dataclasses
import html.parser
import itertools
import os

import numpy as np
import pandas as pd
import pytest

import tsfl_jax
from tsfl_jax.config import SETTINGS, Config, get, replace
from tsfl_jax.report import collect, files, page
from tsfl_jax.types import UserError


@tsfl_jax.component("ours")
class Ours:
    """ρ_i ∝ τ_i^f."""

    factor: float = tsfl_jax.setting(1.0, "f", low=0)

    def weights(self, info):
        return info.tau**self.factor


VOID = {"meta", "img", "br"}
ODD = "<b>&\"'x"


class Page(html.parser.HTMLParser):
    """Tables by their heading, open elements, addresses."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tables, self.addresses, self.text = [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        names = ("src", "href", "xlink:href", "action", "data", "srcset")
        self.addresses += [value for name, value in attrs if name in names]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.text += text
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += text

    def table(self, index):
        """A table as a data frame of strings."""
        head, *rows = self.tables[index]
        return pd.DataFrame(rows, columns=head)


def run_folder(folder, seed=0, **changes):
    """The files of a run."""
    rows = [
        {"interval": n, "virtual_time": 2.0 * n, "test_accuracy": 1 - np.exp(-n / 5)}
        | {"test_loss": 2 / n, "train_loss": 2.1 / n}
        for n in range(1, 13)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    files.write_metrics(folder / "metrics.jsonl", rows)
    config = replace(Config(), {"seed": seed} | changes)
    files.write_json(folder / "config.json", dataclasses.asdict(config))
    accuracy = [row["test_accuracy"] for row in rows]
    summary = {"algorithm": "dms", "data": "digits", "bytes_moved": 2_345_000}
    summary |= {"best_test_accuracy": max(accuracy), "versions": {"jax": "9.8.7"}}
    summary |= {"final_test_accuracy": accuracy[-1], "final_test_loss": 1 / 6}
    summary |= {"fingerprints": {"data": "abc123"}, "notes": ["a note of the run"]}
    summary |= {"command": f"tsfl run --config.lr={config.lr}"}
    files.write_json(folder / "summary.json", summary)
    return rows


def sweep_folder(folder):
    """The files of a sweep of four runs, of which the last diverged."""
    folder.mkdir(parents=True)
    points = [{"lr": lr, "seed": seed} for lr in (0.1, 0.2) for seed in (0, 1)]
    rng, rows, history = np.random.default_rng(0), [], []
    settings = files.plain({n: get(Config(num_clients=3), n) for n in SETTINGS})
    for lane, point in enumerate(points):
        lost, accuracy = lane == 3, np.sort(rng.random(5))
        last = 3 if lost else 4
        scores = {"best_test_accuracy": float(accuracy[last])}
        scores |= {"final_test_accuracy": float(accuracy[last])}
        scores |= {"final_test_loss": 1 - float(accuracy[last])}
        scores |= {"diverged_at": 4 if lost else None, "bytes_moved": 1000 * lane}
        rows.append({"run": lane} | settings | point | scores)
        history += [
            {"run": lane, "interval": t + 1, "virtual_time": t + 1.0}
            | {"test_accuracy": accuracy[t], "test_loss": 1 - accuracy[t]}
            for t in range(5)
        ]
    files.write_metrics(folder / "results.jsonl", rows)
    files.write_csv(folder / "history.csv", history)
    files.write_json(folder / "sweep.json", {"command": "tsfl sweep --sweep=lr=0.1"})
    return rows


def check_whole(text):
    """A balanced page that needs no other file; its parts."""
    parsed = Page(text)
    assert "@import" not in text
    assert all(a.startswith(("#", "data:")) for a in parsed.addresses)
    return parsed


def test_a_run_and_a_study_have_the_numbers_of_their_files(tmp_path):
    folder = tmp_path / "runs" / "afl-seed0"
    rows = run_folder(folder, **{"data.dir": ODD, "lr": 0.125})
    cells = [{"framework": ODD, "s to 90 %": "4.00 ± 0.10"}]
    files.write_table(tmp_path, "compare", cells, "digits")
    for image in (tmp_path / "compare.png", folder / "participation.png"):
        image.write_bytes(b"\x89PNG")
    text = page.make_page([tmp_path], target=0.5)
    parsed = check_whole(text)
    row = parsed.table(0).loc[0]
    reached = next(r for r in rows if r["test_accuracy"] >= 0.5)
    assert row["group"] == "afl"
    assert row["final accuracy, %"] == f"{100 * rows[-1]['test_accuracy']:.2f}"
    assert row["final loss"] == "0.1667" and row["moved, MB"] == "2.345"
    assert row["intervals"] == "12" and row["virtual time, s"] == "24"
    assert row["virtual time to 50 %, s"] == f"{reached['virtual_time']:.2f}"
    assert parsed.tables[2][1] == [ODD, "4.00 ± 0.10"]
    settings = parsed.table(3).set_index("").value
    assert settings["data.dir"] == repr(ODD) and settings["lr"] == "0.125"
    assert "<b>&" not in text and "abc123" in text and "9.8.7" in text
    assert "a note of the run" in parsed.text and "--config.lr=0.125" in text
    assert text.count("<svg") == 3  # over seconds they would be the same
    assert "The run</summary>" in text and "All 1" not in text
    assert sum(a.startswith("data:image/png") for a in parsed.addresses) == 2


def test_seeds_are_one_line_and_settings_that_differ_are_shown(tmp_path):
    for seed in (0, 1, 2):
        run_folder(tmp_path / f"a-seed{seed}", seed=seed)
        run_folder(tmp_path / f"{ODD}-seed{seed}", seed=seed, lr=0.5)
    (tmp_path / "a-seed2" / "summary.json").unlink()
    summary = files.read_json(tmp_path / "a-seed1" / "summary.json")
    summary["final_test_accuracy"] -= 0.02
    files.write_json(tmp_path / "a-seed1" / "summary.json", summary)
    found = check_whole(page.make_page([tmp_path]))
    results = found.table(0).set_index("group")
    assert list(results.index) == [ODD, "a"] and len(found.table(1)) == 5
    assert list(results["runs"]) == ["3", "2"]
    high = 100 * (1 - np.exp(-12 / 5))
    text = f"{high - 1:.2f} ({high - 2:.2f} to {high:.2f})"
    assert results["final accuracy, %"]["a"] == text
    differing = found.table(2).set_index("")
    assert set(differing) == {"seed", "lr"} and differing["lr"][ODD] == "0.5"
    assert f"{tmp_path / 'a-seed2'} has not finished" in found.text


def test_a_sweep_counts_what_diverged_and_takes_it_into_no_mean(tmp_path):
    rows = sweep_folder(tmp_path / "sweep")
    source = collect.read_source(tmp_path / "sweep")
    assert source.missing == []
    assert [len(run.curves) for run in source.runs] == [5, 5, 5, 4]
    for run, row in zip(source.runs, rows, strict=True):
        assert run.facts["algorithm"] == row["algorithm"] == run.settings["algorithm"]
    parsed = check_whole(page.make_page([tmp_path / "sweep"]))
    results = parsed.table(0).set_index("group")
    assert list(results.index) == ["lr=0.1", "lr=0.2"]
    assert list(results["diverged"]) == ["0", "1"]
    best = 100 * rows[2]["best_test_accuracy"]
    assert results["best accuracy, %"]["lr=0.2"] == f"{best:.2f}"
    assert "diverged in interval 4" in parsed.text
    assert parsed.text.count("tsfl sweep --sweep=lr=0.1") == 1
    # Of an unfinished sweep the finished runs are shown, and a damaged line is named.
    (tmp_path / "sweep" / "sweep.json").unlink()
    curves = source.runs[1].curves
    (tmp_path / "sweep" / "history.csv").unlink()
    lane = {n: curves[n].to_numpy() for n in ("virtual_time", "test_accuracy")}
    (tmp_path / "sweep" / "lanes").mkdir()
    files.write_arrays(
        tmp_path / "sweep" / "lanes" / "x.npz", lane | {"tau": np.eye(5)}
    )
    rows[1]["file"] = "../lanes/x.npz"
    files.write_metrics(tmp_path / "sweep" / "results.jsonl", rows)
    with open(tmp_path / "sweep" / "results.jsonl", "a") as file:
        file.write("{oops\n")
    missing = " ".join(collect.read_source(tmp_path / "sweep").missing)
    assert "damaged lines" in missing
    unfinished = [run.curves for run in collect.read_source(tmp_path / "sweep").runs]
    assert [len(frame) for frame in unfinished] == [0, 5, 0, 0]
    curves = curves[["interval", *lane]].reset_index(drop=True)
    pd.testing.assert_frame_equal(unfinished[1], curves)
    assert "the sweep has not finished; finished: 4" in missing
    text = check_whole(page.make_page([tmp_path / "sweep"])).text
    assert f"# {tmp_path / 'sweep'}, run 0: of a Python program" in text


@pytest.mark.slow
def test_settings_of_a_custom_rule_are_groups(tmp_path, capsys):
    config = Config(num_intervals=2, num_clients=3, batch_size=4)
    config.model.hidden, config.schedule.data_size = 0, 16
    points = [
        {"ours.factor": factor, "seed": seed}
        for factor, seed in itertools.product((0.0, 4.0), (0, 1))
    ]
    folder = tmp_path / "sweep"
    result = tsfl_jax.sweep(config, points, aggregator=Ours(), workdir=folder)
    scores = [100 * row["final_test_accuracy"] for row in result.rows]
    means = [np.mean(scores[:2]), np.mean(scores[2:])]
    names = ["ours.factor=0.0", "ours.factor=4.0"]
    found = check_whole(page.make_page([folder]))
    results = found.table(0).set_index("group")["final accuracy, %"]
    assert list(results.index) == names
    assert [float(text.split()[0]) for text in results] == pytest.approx(
        means, abs=0.01
    )
    assert set(found.table(2)) == {"", "ours.factor", "seed"}
    assert "dms" not in found.text.split("Results")[0]
    page.main([str(folder), "--table", f"--base={names[0]}"])
    table = pd.read_csv(folder / "table.csv").set_index("group")
    assert list(table["mean"]) == pytest.approx(means) and list(table.index) == names
    assert table.loc[names[1], "difference"] == pytest.approx(means[1] - means[0])
    # The same of an unfinished sweep, and the name of the rule in every file.
    columns = ["interval", "virtual_time", "test_accuracy", "test_loss"]
    whole = collect.read_source(folder).runs
    for name in ("sweep.json", "history.csv"):
        (folder / name).unlink()
    runs = collect.read_source(folder).runs
    for run, before in zip(runs, whole, strict=True):
        after = before.curves[columns].reset_index(drop=True)
        pd.testing.assert_frame_equal(run.curves[columns], after)
    assert [run.name for run in runs] == [n for n in names for _ in "ab"]
    assert {run.settings["algorithm"] for run in runs} == {"ours"}
    assert {row["algorithm"] for row in result.rows} == {"ours"}


def test_runs_with_other_custom_parts_are_other_experiments(tmp_path):
    for seed, digest in enumerate(["loss 1", "loss 1", "loss 2"]):
        folder = tmp_path / f"a-seed{seed}"
        run_folder(folder, seed=seed)
        summary = files.read_json(folder / "summary.json")
        files.write_json(folder / "summary.json", summary | {"custom loss": digest})
    run_folder(tmp_path / "b")
    found = check_whole(page.make_page([tmp_path]))
    results = found.table(0).set_index("group")["runs"]
    assert dict(results) == {"a": "2", "a (2)": "1", "b": "1"}
    assert found.table(2).set_index("")["custom loss"]["a (2)"] == "'loss 2'"


@pytest.mark.slow
def test_bytes_count_each_delivery_of_a_client_in_one_update(tmp_path):
    """Under FedBuff a fast client delivers several times: the run as the sweep."""
    config = Config(num_intervals=6, num_clients=5, batch_size=8, devices=1)
    config.schedule.data_size, config.model.hidden = 32, 0
    config.algorithm = "scaffold"  # control variates, too
    result = tsfl_jax.simulate(config)
    model, uploads = 8 * result.summary["num_parameters"], result.history["rho"] > 0
    assert result.summary["bytes_moved"] == 2 * model * uploads.sum()
    config.algorithm = config.timeline.framework = "fedbuff"
    config.timeline.buffer, config.timeline.local_iterations = 4, 1
    config.timeline.speed = "constant(0.1); constant(1)"
    result = tsfl_jax.simulate(config, workdir=tmp_path)
    count = int((files.read_arrays(tmp_path / "clients.npz")["tau"] > 0).sum())
    assert count == tsfl_jax.explain(config).work.deliveries.sum()
    assert result.summary["bytes_moved"] == model * count
    labelled = tsfl_jax.sweep(config, {"seed": [0]}).to_xarray()["bytes_moved"]
    assert labelled.item() == model * count and labelled.attrs["units"] == "B"


def test_what_is_damaged_is_named_and_left_out(tmp_path):
    for name in "abcd":
        run_folder(tmp_path / name)
    (tmp_path / "a" / "summary.json").write_text("[")
    (tmp_path / "b" / "config.json").unlink()
    with open(tmp_path / "c" / "metrics.jsonl", "a") as file:
        file.write("{oops\n")
    (tmp_path / "cells" / "e" / "lanes").mkdir(parents=True)
    found = check_whole(page.make_page([tmp_path]))
    assert [row[0] for row in found.tables[0][1:]] == ["d"]
    assert "a, seed 0, unfinished" in found.text  # a line in each figure
    for text in (
        f"{tmp_path / 'a'} has not finished: its summary.json is missing or damaged",
        f"{tmp_path / 'b'}: its config.json is missing or damaged; left out",
        "line 13: not JSON",
        f"cannot use {tmp_path / 'cells' / 'e' / 'results.jsonl'}: No such file",
    ):
        assert text in found.text


def test_only_regular_files_are_read(tmp_path):
    """A folder that was received may link to the secrets of who reads it."""
    folder, secret = tmp_path / "a", tmp_path / "secret"
    secret.write_text("secret,text\n1,2\n")
    run_folder(folder)
    pictures = [folder / f"{name}.png" for name in ("link", "pipe")]
    pictures[0].symlink_to(secret)
    os.mkfifo(pictures[1])
    (folder / "small.png").write_bytes(b"\x89PNG")
    for name in ("good", "one"):
        files.write_table(folder, name, [{"a": 1}], "text")
    (folder / "one.md").unlink()
    (folder / "one.md").symlink_to(secret)
    found = check_whole(page.make_page([folder]))
    assert [a for a in found.addresses if a.startswith("data:")] == [
        "data:image/png;base64,iVBORw=="
    ]
    assert "secret,text" not in found.text
    for path in (*pictures, folder / "one.md"):
        assert f"{path}: expected a regular file, no link" in found.text
    (folder / "config.json").rename(tmp_path / "config.json")
    (folder / "config.json").symlink_to(tmp_path / "config.json")
    source = collect.read_source(folder)
    assert source.runs == [] and str(folder) in " ".join(source.missing)


def test_wrong_folders_are_answered_in_one_line(tmp_path):
    run_folder(tmp_path / "a")
    for arguments, message in (
        ([tmp_path / "none"], "no run, sweep, comparison or study there"),
        ([tmp_path / "a", "--out=/dev/null/x/y.html"], "choose another --out"),
        (
            [tmp_path / "a", "--table", "--score=algorithm"],
            "expected one of .*test_loss",
        ),
        ([tmp_path / "a", "--target=90"], r"expected an accuracy in \(0, 1\]"),
    ):
        with pytest.raises(UserError, match=message) as error:
            page.main([str(a) for a in arguments])
        assert "\n" not in str(error.value)
    assert not list(tmp_path.rglob("*.html"))


def test_the_command_writes_one_file_and_the_same_one_again(tmp_path, capsys):
    for seed in (0, 1):
        rows = run_folder(tmp_path / f"a-seed{seed}", seed=seed)
    path = tmp_path / "a-seed1" / "summary.json"
    files.write_json(path, files.read_json(path) | {"final_test_loss": None})
    rows[-1]["virtual_time"] += 1.0  # intervals that are not equally long
    files.write_metrics(path.with_name("metrics.jsonl"), rows)
    page.main([str(tmp_path)])
    path = tmp_path / "report.html"
    assert capsys.readouterr().out.strip() == str(path)
    text = path.read_text()
    assert text.count("<svg") == 5  # accuracy and loss over seconds, too
    # A loss that is no number was infinite, and is in the mean.
    assert check_whole(text).table(0)["final loss"][0] == "inf (1 of 2)"
    page.main([str(tmp_path), f"--out={tmp_path / 'b' / 'x.html'}"])
    assert (tmp_path / "b" / "x.html").read_text() == text
