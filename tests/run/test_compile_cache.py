"""The persistent compilation cache: where it is, and that a second launch uses it."""

import collections
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest
from jax._src import compiler

from tsfl_jax.prepare import backend
from tsfl_jax.types import UserError

ROOT = pathlib.Path(__file__).parents[2]

SECOND_LAUNCH = """
import json, sys, jax
from jax import monitoring
seen = []
monitoring.register_event_listener(lambda name, **_: seen.append(name))
import tsfl_jax
config = tsfl_jax.Config(num_intervals=1, report_every=1, compile_cache=sys.argv[1])
config.algorithm, config.num_clients = "fedavg", 4
config.schedule.kind, config.schedule.data_size = "case1", 64
config.devices = 1  # as many on a machine that is busy during one launch only
accuracy = tsfl_jax.simulate(config).history["test_accuracy"].tolist()
names = [n.split("/")[-1] for n in seen]
print(json.dumps({
    "hits": names.count("cache_hits"), "misses": names.count("cache_misses"),
    "accuracy": accuracy, "folder": jax.config.jax_compilation_cache_dir}))
"""


def launch(choice, **environment):
    left_out = ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME")
    kept = {k: v for k, v in os.environ.items() if k not in left_out}
    done = subprocess.run(
        [sys.executable, "-c", SECOND_LAUNCH, str(choice)],
        cwd=ROOT,
        env=kept | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "rror" not in done.stderr and "arning" not in done.stderr, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_second_launch_compiles_nothing_and_gives_the_same(tmp_path):
    home = tmp_path / "home"
    first = launch("auto", HOME=str(home))
    second = launch("auto", HOME=str(home))
    assert first["folder"] == str(home / ".cache" / "tsfl_jax" / "xla")
    assert first["hits"] == 0 and first["misses"] > 0
    assert second["misses"] == 0 and second["hits"] > 0
    assert second["accuracy"] == first["accuracy"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UserError, match=r"compile_cache=.*file/x: cannot write there"):
        backend.use_cache(str(file / "x"))


def test_winners_of_autotuning_on_a_gpu_are_kept_and_named(tmp_path, monkeypatch):
    """JAX's default beside a cache of programs, which the note relies on."""
    old = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        options = compiler.get_compile_options(1, 1).executable_build_options
    finally:
        jax.config.update("jax_compilation_cache_dir", old)
    folder = pathlib.Path(options.debug_options.xla_gpu_per_fusion_autotune_cache_dir)
    assert folder.parent == tmp_path
    monkeypatch.setattr(backend, "use_cache", lambda choice: tmp_path)
    gpu = collections.namedtuple("Device", "platform")("gpu")
    assert backend.autotuning_note(gpu) == ""
    folder.mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / name).touch()
    assert backend.autotuning_note(gpu) == f"note: kernels of 2 products from {folder}"
    assert backend.autotuning_note(jax.devices()[0]) == ""
