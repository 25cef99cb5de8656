"""The report of runs, sweeps and studies: whole, escaped, and equal to their files."""

import html.parser
import json
import shutil
import subprocess

import numpy as np
import pandas as pd
import pytest

import tsfl_jax
from tsfl_jax.config import SETTINGS, Config, get
from tsfl_jax.report import collect, files, page, repeat
from tsfl_jax.types import UserError

VOID = {"meta", "img", "br"}
ODD = "<b>&\"'x"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


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
    settings = {n: get(Config(), n) for n in SETTINGS} | {"seed": seed} | changes
    nested = {n: v for n, v in settings.items() if "." not in n}
    for name, value in settings.items():
        if "." in name:
            section, last = name.split(".")
            nested.setdefault(section, {})[last] = value
    files.write_json(folder / "config.json", nested)
    accuracy = [row["test_accuracy"] for row in rows]
    summary = {"algorithm": "dms", "data": "digits", "bytes_moved": 2_345_000}
    summary |= {"best_test_accuracy": max(accuracy), "versions": {"jax": "9.8.7"}}
    summary |= {"final_test_accuracy": accuracy[-1], "final_test_loss": 1 / 6}
    summary |= {"fingerprints": {"data": "abc123"}, "notes": ["a note of the run"]}
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
    files.write_json(folder / "sweep.json", {"config": settings, "points": points})
    return rows


def check_whole(text):
    """A balanced page that needs no other file; its parts."""
    found = Page(text)
    assert "@import" not in text
    for address in found.addresses:
        assert address.startswith(("#", "data:")), address
    return found


def test_a_run_has_the_numbers_of_its_files(tmp_path):
    rows = run_folder(tmp_path / "a", **{"data.dir": ODD, "lr": 0.125})
    text = page.make_page([tmp_path / "a"], target=0.5)
    found = check_whole(text)
    row = found.table(0).loc[0]
    reached = next(r for r in rows if r["test_accuracy"] >= 0.5)
    assert row["final accuracy, %"] == f"{100 * rows[-1]['test_accuracy']:.2f}"
    assert row["final loss"] == "0.1667" and row["MB moved"] == "2.345"
    assert row["intervals"] == "12" and row["virtual time, s"] == "24"
    assert row["s to 50 %"] == f"{reached['virtual_time']:.2f}"
    settings = found.table(2).set_index("").value
    assert settings["data.dir"] == repr(ODD) and settings["lr"] == "0.125"
    assert "<b>&" not in text and "abc123" in text and "9.8.7" in text
    assert "a note of the run" in found.text and "--config.lr=0.125" in text
    assert text.count("<svg") == 4


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
    found = check_whole(page.make_page([tmp_path / "sweep"]))
    results = found.table(0).set_index("group")
    assert list(results.index) == ["lr=0.1", "lr=0.2"]
    assert list(results["diverged"]) == ["0", "1"]
    best = 100 * rows[2]["best_test_accuracy"]
    assert results["best accuracy, %"]["lr=0.2"] == f"{best:.2f}"
    assert "diverged in interval 4" in found.text
    # Of an unfinished sweep the finished runs are shown, and a damaged line is named.
    (tmp_path / "sweep" / "sweep.json").unlink()
    (tmp_path / "sweep" / "history.csv").unlink()
    with open(tmp_path / "sweep" / "results.jsonl", "a") as file:
        file.write("{oops\n")
    missing = " ".join(collect.read_source(tmp_path / "sweep").missing)
    assert "damaged lines" in missing and "no curves" in missing
    assert "the sweep has not finished; 4 runs have" in missing
    check_whole(page.make_page([tmp_path / "sweep"]))


@pytest.mark.slow
def test_bytes_count_each_delivery_of_a_client_in_one_update(tmp_path):
    """Under FedBuff a fast client delivers several times: the run as the sweep."""
    config = Config(num_intervals=6, num_clients=5, batch_size=8, devices=1)
    config.algorithm, config.schedule.data_size = "scaffold", 32
    config.model.hidden = 0
    done = tsfl_jax.simulate(config)
    model = 8 * done.summary["num_parameters"]
    assert done.summary["bytes_moved"] == 2 * model * (done.history["rho"] > 0).sum()
    config.algorithm = config.timeline.framework = "fedbuff"
    config.timeline.buffer, config.timeline.local_iterations = 4, 1
    config.timeline.speed = "constant(0.1); constant(1)"
    done = tsfl_jax.simulate(config, workdir=tmp_path / "run")
    swept = tsfl_jax.sweep(config, {"seed": [0]})
    count = int(tsfl_jax.explain(config).work.deliveries.sum())
    tau = files.read_arrays(tmp_path / "run" / "clients.npz")["tau"]
    assert (tau > 0).sum() == count
    assert done.summary["bytes_moved"] == model * count
    assert swept.rows[0]["bytes_moved"] == model * count
    labelled = swept.to_xarray()["bytes_moved"]
    assert labelled.item() == model * count and labelled.attrs["units"] == "B"


def test_studies_show_their_tables_and_figures(tmp_path):
    run_folder(tmp_path / "runs" / "afl-seed0")
    rows = [{"framework": ODD, "s to 90 %": "4.00 ± 0.10"}]
    files.write_table(tmp_path, "compare", rows, "digits")
    (tmp_path / "compare.png").write_bytes(b"\x89PNG")
    found = check_whole(page.make_page([tmp_path]))
    assert found.tables[0][1][0] == "afl"
    assert found.tables[2][1] == [ODD, "4.00 ± 0.10"]
    assert sum(a.startswith("data:image/png") for a in found.addresses) == 1


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
    for text in (
        f"{tmp_path / 'a'} has not finished: its summary.json is missing or damaged",
        f"{tmp_path / 'b' / 'config.json'} is missing or damaged",
        "line 13: not JSON",
        f"{tmp_path / 'cells' / 'e'}: none of the sweep's runs has finished",
    ):
        assert text in found.text


def test_an_infinite_loss_is_in_the_mean(tmp_path):
    for seed in (0, 1):
        run_folder(tmp_path / f"a-seed{seed}", seed=seed)
    path = tmp_path / "a-seed1" / "summary.json"
    files.write_json(path, files.read_json(path) | {"final_test_loss": None})
    results = check_whole(page.make_page([tmp_path])).table(0)
    assert results["final loss"][0] == "inf (1 of 2)"


def test_wrong_folders_are_answered_in_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name in "ab":
        run_folder(tmp_path / name)
    (tmp_path / "b" / "summary.json").unlink()
    for arguments, message in (
        ([tmp_path / "none"], "there is no such folder"),
        ([tmp_path / "file"], "is a file"),
        ([tmp_path / "empty"], "holds no run, sweep, comparison or study"),
        ([tmp_path / "b"], "has not finished"),
        ([tmp_path / "a", f"--out={tmp_path}"], "cannot use .*: Is a directory"),
        ([tmp_path / "a", "--out=/dev/null/x/y.html"], "choose another --out"),
        ([tmp_path / "a", "--target=90"], r"expected an accuracy in \(0, 1\]"),
    ):
        with pytest.raises(UserError, match=message) as error:
            page.main([str(a) for a in arguments])
        assert "\n" not in str(error.value)
    assert not list(tmp_path.rglob("*.html"))


def test_the_command_writes_one_file_and_the_same_one_again(tmp_path, capsys):
    run_folder(tmp_path / "a")
    page.main([str(tmp_path / "a")])
    path = tmp_path / "a" / "report.html"
    assert capsys.readouterr().out.strip() == str(path)
    first = path.read_bytes()
    page.main([str(tmp_path / "a"), f"--out={tmp_path / 'b' / 'x.html'}"])
    assert (tmp_path / "b" / "x.html").read_bytes() == first


def test_command_lines_repeat_settings(monkeypatch):
    default = files.plain({n: get(Config(), n) for n in SETTINGS})
    assert repeat.run_command(default).startswith("tsfl run --config=")
    known = {"first": default, "second": default | {"lr": 0.5, "momentum": 0.1}}
    monkeypatch.setattr(repeat, "_experiments", lambda: known)
    own = default | {"lr": 0.5, "data.file": "a b", "schedule.tau": [1, 4]}
    command = repeat.run_command(own)
    assert command.startswith("tsfl run --config=first ")
    assert "'--config.data.file=a b'" in command
    assert "'--config.schedule.tau=(1,4)'" in command
    points = [{"lr": lr, "seed": seed} for lr in (0.1, 0.2) for seed in (0, 1)]
    command = repeat.sweep_command(default, points)
    assert command == "tsfl sweep --config=first --sweep=lr=0.1,0.2 --sweep=seed=0,1"
    assert repeat.sweep_command(default, points[:3]) == ""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_in_a_browser(tmp_path):
    sweep_folder(tmp_path / "sweep")
    page.main([str(tmp_path / "sweep")])
    address = (tmp_path / "sweep" / "report.html").as_uri()
    names = "headless no-sandbox disable-gpu no-first-run disable-sync"
    names += " disable-background-networking disable-component-update"
    flags = [f"--{name}" for name in names.split()]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr"]
    done = subprocess.run(
        [CHROMIUM, *flags, "--dump-dom", address],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr, done.stderr  # neither errors nor refusals
    assert json.dumps(Page(done.stdout).tables)
