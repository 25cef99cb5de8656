"""Launches of launch.py that share their imports, which are most of a start."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).parents[1]

# This process imports, and splits once for each line of its input: arguments of
# launch.py, the folder it starts in and the one for what it prints. It answers with
# the exit code. JAX starts in the children only.
_SERVER = """
import json, os, runpy, signal, sys, traceback, warnings
import matplotlib.pyplot
import sklearn.datasets, tsfl_jax, tsfl_jax.report.gantt
warnings.simplefilter("ignore")  # JAX dislikes a split; here it has not started yet
print("ready", flush=True)
for line in sys.stdin:
    arguments, cwd, folder = json.loads(line)
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(code, flush=True)
        continue
    signal.alarm(300)  # seconds; a test that waits for ever says nothing
    os.chdir(cwd)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY), number)
    warnings.resetwarnings()
    sys.argv, code = [sys.argv[1], *arguments], 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as stopped:
        code = stopped.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)
"""

Launch = Callable[..., tuple[int, str, str]]


def environment() -> dict[str, str]:
    """What the processes see."""
    return os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


@contextlib.contextmanager
def launcher() -> Iterator[Launch]:
    """A function (*arguments, cwd) → (exit code, stdout, stderr) of launch.py."""
    command = [sys.executable, "-c", _SERVER, str(ROOT / "launch.py")]
    with (
        tempfile.TemporaryDirectory() as root,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env=environment(),
        ) as server,
    ):
        assert server.stdin is not None and server.stdout is not None
        assert server.stdout.readline() == "ready\n"

        def launch(*arguments: object, cwd: pathlib.Path) -> tuple[int, str, str]:
            folder = pathlib.Path(tempfile.mkdtemp(dir=root))
            line = json.dumps([list(map(str, arguments)), str(cwd), str(folder)])
            print(line, file=server.stdin, flush=True)
            code = int(server.stdout.readline())
            return code, *((folder / n).read_text() for n in ("out", "err"))

        yield launch
        server.stdin.close()
