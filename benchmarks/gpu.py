"""``python -m benchmarks.gpu``: the speeds that docs/performance.md leaves open.

Runs every benchmark on the GPU of this machine, unattended, each in a process with a
limit of its own, and writes their tables to one Markdown file. A part that fails or
takes too long is reported there; the others go on. Compiling the programs of a part
took one to two minutes on an H200, and those of VGG11 and ResNet-18 in all forms more
than four: JAX_COMPILATION_CACHE_DIR keeps it for a next run, ``--parts`` chooses.
"""

import argparse
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

DEFAULT = "--mappings vmap --forms slices"
PRECISIONS = "implementations --precisions float32 highest"
# (title, seconds at most, module and arguments), the most wanted first.
PARTS = (
    ("CNN of a user", 240, "own --networks CNN --forms auto lax"),
    ("ResNet-20", 240, "own --networks 'ResNet-20, batch norm'"),
    ("Lanes", 180, "lanes --lanes 1 10"),
    ("ResNet-18", 300, "implementations --models resnet18 " + DEFAULT),
    ("Clients", 120, "clients --repeats 1 --clients 20 200 2000"),
    ("Transformer", 240, "own --networks transformer"),
    ("LSTM", 240, "own --networks LSTM"),
    ("VGG11", 400, f"{PRECISIONS} --models vgg11 {DEFAULT}"),
    ("MNIST CNN", 240, "implementations --models mnist_cnn --mappings vmap"),
    ("Precisions", 300, f"{PRECISIONS} tf32 --models mnist_cnn {DEFAULT}"),
    ("Compilation", 200, "compile --repeats 1"),
    ("Evaluation and estimates", 120, "shares --repeats 5"),
    ("Fashion-MNIST CNN", 240, "implementations --models fashion_cnn --mappings vmap"),
    ("Against PyTorch", 500, "interval --repeats 5"),
)


def measure(command: str, seconds: float) -> str:
    """The table of one benchmark, or why there is none."""
    module, *arguments = shlex.split(command)
    words = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A group of its own: its workers must not go on beside the next part.
    with subprocess.Popen(words, start_new_session=True, **pipes) as process:
        try:
            out, error = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"not measured: more than {seconds:.0f} s"
    if process.returncode:
        return f"not measured: {(error.strip().splitlines() or ['?'])[-1]}"
    return out.strip() or "(no output)"


def main() -> None:
    """Writes the tables; prints where."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpu.md"))
    parser.add_argument("--minutes", type=float, default=20, help="for all parts")
    titles = [title for title, _, _ in PARTS]
    parser.add_argument("--parts", nargs="+", default=titles, choices=titles)
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    text = "# Measured on a GPU\n"
    for title, seconds, command in PARTS:
        if title not in options.parts:
            continue
        left = end - time.monotonic()
        found = measure(command, min(seconds, left)) if left > 0 else "no time left"
        text += f"\n## {title}\n\n`python -m benchmarks.{command}`\n\n{found}\n"
        part = options.out.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        part.replace(options.out)
        print(f"{title}: {found.splitlines()[-1][:100]}", flush=True)
    print(options.out)


if __name__ == "__main__":
    main()
