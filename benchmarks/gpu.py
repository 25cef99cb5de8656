"""``python -m benchmarks.gpu --out FOLDER``: the speeds of a GPU that are open.

Runs benchmarks on the GPU of this machine, unattended, the most wanted first, each in a
process with a limit of its own, and writes one file per part. Parts whose file is there
are skipped, so that the same command goes on after a limit or a failure, which is in
NAME.failed; compiled programs stay in FOLDER/cache. ``--tiny`` runs every part in a
tiny size, which tests this script on a CPU.
"""

import argparse
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

VMAP = "implementations --mappings vmap --models"
BOTH = "--forms slices quarters"
# (name of the file, seconds at most, module and arguments), the most wanted first.
PARTS = (
    ("profile_mnist_cnn", 120, "profile mnist_cnn"),
    ("mnist_cnn", 180, f"{VMAP} mnist_cnn {BOTH} --precisions float32 highest"),
    ("sweep_mnist_cnn", 180, "lanes --lanes 1 10 40"),
    ("sweep_digits_mlp", 120, "lanes --model mlp --lanes 1 10 40"),
    ("fashion_cnn", 180, f"{VMAP} fashion_cnn {BOTH}"),
    ("vgg11", 240, f"{VMAP} vgg11 --forms quarters"),
    ("custom_cnn", 120, "own --networks CNN"),
    ("resnet18", 300, f"{VMAP} resnet18 --forms quarters"),
    ("lstm", 240, "own --networks LSTM"),
    ("transformer", 240, "own --networks transformer"),
    ("clients", 120, "clients --repeats 1 --clients 20 200 2000"),
    ("precisions", 180, "precisions"),
    ("profile_fashion_cnn", 120, "profile fashion_cnn"),
    ("profile_custom_cnn", 120, "profile CNN --clients 50 --size 50"),
    ("profile_vgg11", 180, "profile vgg11"),
    ("resnet20", 240, "own --networks 'ResNet-20, batch norm'"),
    ("forms_mnist_cnn", 240, f"{VMAP} mnist_cnn"),
    ("compile", 200, "compile --repeats 1"),
    ("shares", 120, "shares --repeats 5"),
    ("interval", 500, "interval --repeats 5"),
)
TINY = {  # by module, after the part's own arguments
    "profile": "--clients 1 --size 32",
    "implementations": "--clients 1 --size 32 --repeats 1",
    "lanes": "--lanes 1 2 --repeats 1",
    "own": "--repeats 1",
    "clients": "--clients 2 4",
    "precisions": "--models mnist_cnn --intervals 2",
    "compile": "--programs 'MNIST CNN, FedAvg'",
    "shares": "--clients 4 --repeats 1",
    "interval": "--models mnist_cnn --clients 2 --repeats 1",
}


def measure(command: str, seconds: float) -> tuple[bool, str]:
    """Whether one benchmark ran, and its table or why there is none."""
    module, *arguments = shlex.split(command)
    words = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A group of its own: its workers must not go on beside the next part.
    with subprocess.Popen(words, start_new_session=True, **pipes) as process:
        try:
            out, error = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return False, f"not measured: more than {seconds:.0f} s"
    if process.returncode:
        return False, f"not measured: {(error.strip().splitlines() or ['?'])[-1]}"
    return True, out.strip() or "(no output)"


def main() -> None:
    """Writes the tables; prints the last line of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpu"))
    parser.add_argument("--minutes", type=float, default=9, help="for all parts")
    names = [name for name, _, _ in PARTS]
    parser.add_argument("--parts", nargs="+", default=names, choices=names)
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on a CPU")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    cache = str((options.out / "cache").absolute())
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    for name, seconds, command in PARTS:
        file, left = options.out / f"{name}.md", end - time.monotonic()
        if name not in options.parts or file.exists() or left <= 0:
            continue
        if options.tiny:
            command += " " + TINY.get(command.split()[0], "")
        begun = time.monotonic()
        done, text = measure(command, min(seconds, left))
        took = f"{time.monotonic() - begun:.0f} s"
        text = f"`python -m benchmarks.{command}` ({took})\n\n{text}\n"
        failed = file.with_suffix(".failed")
        failed.unlink(missing_ok=True)
        part = file.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        part.replace(file if done else failed)
        print(f"{name}, {took}: {text.splitlines()[-1][:100]}", flush=True)


if __name__ == "__main__":
    main()
