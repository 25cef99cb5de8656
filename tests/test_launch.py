"""The command line: results in plain sight, one clear line for every slip."""

import json
import os
import pathlib

SMALL = [
    "--config.num_intervals=2",
    "--config.num_clients=2",
    "--config.batch_size=4",
    "--config.schedule.data_size=16",
    "--config.model.name=mlp",
    "--config.report_every=1",
]


def test_default_is_digits_and_the_same_workdir_resumes(tmp_path, launch):
    arguments = [*SMALL, "--workdir=here", "--config.algorithm=fedavg"]
    code, out, err = launch(*arguments, cwd=tmp_path)
    assert code == 0, err
    assert "digits" in out and "test accuracy" in out
    assert "interval 1/2, accuracy" in err and "interval 2/2, accuracy" in err
    cores = len(os.sched_getaffinity(0))
    assert f"on {min(cores, 2)} device" in err, "the run must use every core"
    first = (tmp_path / "here/metrics.jsonl").read_bytes()
    code, _, err = launch(*arguments, cwd=tmp_path)
    assert code == 0, err
    assert "resuming after interval 2 of 2" in err
    assert (tmp_path / "here/metrics.jsonl").read_bytes() == first


def test_a_slip_is_answered_in_one_line(tmp_path, launch):
    code, out, err = launch(*SMALL, "--config.momentun=0.9", cwd=tmp_path)
    assert code == 2 and out == "" and "Traceback" not in err
    last = err.strip().splitlines()[-1]
    assert last.startswith("launch.py: ") and "did you mean 'momentum'" in last
    assert not list(tmp_path.iterdir()), "a slip must not leave a folder"


def test_a_sweep_from_the_command_line(tmp_path, launch):
    """Into a folder of the home: a shell does not expand the ~ of --workdir=~/swept."""
    place = os.path.relpath(tmp_path / "swept", pathlib.Path.home().resolve())
    swept = [
        "--sweep=seed=0:2",
        "--sweep=algorithm=fedbuff,fedavg",
        f"--workdir=~/{place}",
    ]
    code, out, err = launch(*SMALL, *swept, cwd=tmp_path)
    assert code == 0, err
    assert "4 runs; results in " in err
    assert "interval 4/8, best accuracy " in err
    assert "interval 8/8, best accuracy " in err
    assert "| fedbuff | 2 |" in out and "| fedavg | 2 |" in out
    rows = (tmp_path / "swept" / "results.jsonl").read_text().splitlines()
    # There are two clients.
    used = min(len(os.sched_getaffinity(0)), 2)
    assert {json.loads(row)["num_devices"] for row in rows} == {used}
