"""Strict JAX settings for every test."""

import functools
import gc
import os

import jax
import jaxlib
import pytest

# What is imported and collected stays to the end: looking through it for garbage again
# and again was a quarter of the collection's time.
gc.disable()

# Modules whose annotations `CHECK_ANNOTATIONS=1 pytest` checks at run time, shapes and
# dtypes included; before the package is imported. Not by default: it takes two fifths
# of the suite's time. Not fleets and frameworks, which answer wrong types.
CHECKED = [
    "tsfl_jax.data",
    "tsfl_jax.engine",
    "tsfl_jax.run.explain",
    "tsfl_jax.run.lanes",
    "tsfl_jax.run.memory",
    "tsfl_jax.prepare.prepare",
    "tsfl_jax.run.program",
    "tsfl_jax.prepare.workload",
    "tsfl_jax.models",
    "tsfl_jax.report.bands",
    "tsfl_jax.report.statistics",
    "tsfl_jax.report.style",
    "studies.theory",
    "tsfl_jax.report.gantt",
    "tsfl_jax.rules",
    "studies.bounds",
    "studies.compare",
    "studies.riders",
    "studies.sensitivity",
    "tsfl_jax.theory",
    "tsfl_jax.timeline.csv_tables",
    "tsfl_jax.timeline.distributions",
    "tsfl_jax.timeline.free_riders",
    "tsfl_jax.timeline.deliveries",
    "tsfl_jax.timeline.schedule",
    "tsfl_jax.timeline.segments",
    "tsfl_jax.trees",
    "tsfl_jax.uplink",
]
if os.environ.get("CHECK_ANNOTATIONS"):
    import jaxtyping

    import tests.checked  # noqa: F401, the hook imports `tests` alone

    jaxtyping.install_import_hook(CHECKED, "tests.checked.checked")

from tests import launches  # noqa: E402
from tsfl_jax import config, registry  # noqa: E402
from tsfl_jax.engine import devices  # noqa: E402
from tsfl_jax.report import files, style  # noqa: E402

# Nearly all the time of the suite goes to XLA compiling small programs that run for
# milliseconds, so they are compiled plainly. XLA ends the process at a flag it does
# not know, and may drop the second one some day; what was set before stays.
_PLAIN = [
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if jaxlib.__version__.startswith("0.10."):
    _PLAIN.append("--xla_cpu_use_fusion_emitters=false")
_flags = os.environ.get("XLA_FLAGS", "")
_new = [flag for flag in _PLAIN if flag.split("=")[0] not in _flags]

# Before JAX starts: four virtual devices, for the tests that use several. Flags are
# part of a program's key in the cache, so those of `devices.start` are there as well.
os.environ["XLA_FLAGS"] = " ".join([*_new, _flags]).strip()
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_traceback_in_locations_limit", 0)  # lines of code, for profilers
devices.start(4)


def pytest_collection_finish():
    """From here on garbage is collected, of what the tests themselves make.

    Seldom: programs and their traces stay in caches, and looking through them after
    every 700 new objects was a tenth of the tests' time.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def compile_once(pytestconfig, tmp_path_factory):
    """A program comes from a cache that all tests share, and later runs of the suite.

    `pytest --cache-clear` empties it, as 2 GiB do; without pytest's cache it is as old
    as the suite. JAX's own limit would look through the whole folder for each program.
    """
    cache = getattr(pytestconfig, "cache", None)
    folder = cache.mkdir("xla") if cache else tmp_path_factory.mktemp("xla")
    entries = [*folder.iterdir()]
    is_first = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"
    if is_first and sum(path.stat().st_size for path in entries) > 2**31:
        for path in entries:
            path.unlink(missing_ok=True)
    for name, value in (
        ("jax_compilation_cache_dir", str(folder)),
        ("jax_persistent_cache_min_compile_time_secs", 0.1),
        ("jax_persistent_cache_min_entry_size_bytes", -1),
    ):
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)  # for the processes that tests start


def _look(figure) -> tuple:
    """What makes drawing a figure another task: its panels, and what is in them."""
    return tuple(
        (
            *(axes.get_xlabel(), axes.get_ylabel(), axes.get_title()),
            *(axes.get_xscale(), axes.get_yscale()),
            *(len(a) for a in (axes.lines, axes.patches, axes.collections, axes.texts)),
        )
        for axes in figure.axes
    )


@pytest.fixture(autouse=True, scope="session")
def draw_each_kind_once():
    """A figure whose panels have been drawn already has the picture of the first.

    Runs with a folder spent more time on pictures than on training. Nor does git look
    at the whole checkout for every summary.
    """
    save, pictures = style.save, {}

    def save_kind(figure, path):
        kind = _look(figure), path.name
        if kind not in pictures:
            pictures[kind] = save(figure, path).read_bytes()
        with files.replacing(path) as file:
            file.write(pictures[kind])
        return path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "save", save_kind)
        patch.setattr(files, "_commit", functools.cache(files._commit))
        yield


@pytest.fixture(scope="session")
def launch(compile_once):
    """Runs launch.py: (*arguments, cwd) → (exit code, stdout, stderr)."""
    with launches.launcher() as run:
        yield run


@pytest.fixture(autouse=True)
def strict_rank_promotion():
    """Silent broadcasting between ranks hides mistakes in client axes."""
    with jax.numpy_rank_promotion("raise"):
        yield


def _mapped() -> int:
    """Memory regions of this process, 0 where /proc is not to be had."""
    try:
        with open("/proc/self/maps", "rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


@pytest.fixture(autouse=True, scope="module")
def few_programs_in_memory():
    """Forget compiled programs before the kernel's 65,530 regions are used up.

    Each program takes several, more with newer compilers, and a process that gets no
    more of them ends in a segmentation fault.
    """
    yield
    if _mapped() > 25_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def _tables_without_components_of_a_test():
    """What a test registers ends with it."""
    yield
    names = [(by, name) for by, parts in config.OWN.items() for name in parts]
    for by, name in names:
        del config.OWN[by][name], (config.TABLES | config.LISTS)[by][name]
    registry.registered.clear()
    if names:
        config.assemble()
