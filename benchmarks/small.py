"""``python -m benchmarks.small``: small networks on one CPU device, whole processes.

Digits, 20 clients of 44 samples, τ = 2 for all, batches of 8: the MLP and logistic
regression, in 1, 8 and 64 lanes (seeds), against `hand_written`, with the same batches,
evaluation and result. Each figure is the CPU time (user and system) of a child process
with many intervals less that of one with few, by the intervals between: start-up and
compilation cancel. *Program* is the compiled program alone, in one process by turns.
``--host`` measures 20,000 intervals of one tiny problem with all files instead.
"""

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import tsfl_jax
from benchmarks import common
from tsfl_jax import rng
from tsfl_jax.engine import devices
from tsfl_jax.experiment import backend, lanes, prepare, program, sweeps

HIDDEN = {"MLP": 64, "logistic": 0}
# By lanes: intervals of the short and of the long process.
LENGTHS = {1: (100, 1100), 8: (20, 220), 64: (4, 36)}
LR, MOMENTUM, BATCH, TAU = 0.03, 0.9, 8, 2


def make_config(model: str, intervals: int, **settings) -> tsfl_jax.Config:
    """FedAvg of the digits; `settings` in place of the defaults."""
    config = tsfl_jax.Config(algorithm="fedavg", num_intervals=intervals, devices=1)
    config.lr, config.momentum, config.batch_size = LR, MOMENTUM, BATCH
    config.compile_cache = "off"
    config.schedule.kind, config.schedule.tau = "explicit", (TAU,)
    config.schedule.data_size, config.model.hidden = 44, HIDDEN[model]
    for name, value in settings.items():
        setattr(config, name, value)
    return config


def hand_written(intervals: int, data: tuple, lanes_by: str = "vmap") -> Callable:
    """What a user would write for this one experiment: jit(vmap(scan(vmap(scan)))).

    Args:
      intervals: T.
      data: x, y, x_test, y_test; scaled, flat.
      lanes_by: seeds side by side ("vmap") or one after another ("map").

    Returns:
      (parameters [L, …], keys [L], rows [L, N, D]) → (parameters, accuracy, loss).
    """
    x, y, x_test, y_test = data

    def logits(w, x):
        *hidden, last = (w["params"][name] for name in sorted(w["params"]))
        for layer in hidden:
            x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
        return x @ last["kernel"] + last["bias"]

    def losses(w, x, y):
        hot = jax.nn.one_hot(y, 10)
        return optax.softmax_cross_entropy(logits(w, x), hot)

    def batch_loss(w, rows, mask):
        return jnp.where(mask, losses(w, x[rows], y[rows]), 0).sum() / mask.sum()

    def client(w, key, rows):
        key, size = rng.fold(key, "sample order"), len(rows)
        keys = jax.vmap(lambda h: jax.random.fold_in(key, h))(jnp.arange(TAU))
        draw = jax.vmap(lambda k: jax.random.uniform(k, (size,)))
        places = np.arange(-(-size // BATCH) * BATCH)  # a short last batch is masked
        batches = rows[jnp.argsort(draw(keys), axis=1)[:, places % size]]
        masks = np.tile((places < size).reshape(-1, BATCH), (TAU, 1))

        def step(carry, batch):
            w, v = carry
            gradient = jax.grad(batch_loss)(w, *batch)
            v = jax.tree.map(lambda v, g: MOMENTUM * v + g, v, gradient)
            return (jax.tree.map(lambda w, v: w - LR * v, w, v), v), None

        start = w, jax.tree.map(jnp.zeros_like, w)
        return lax.scan(step, start, (batches.reshape(-1, BATCH), masks))[0][0]

    def experiment(w, key, rows):
        def interval(w, t):
            stream = jax.random.fold_in(rng.fold(key, "training"), t)
            keys = jax.vmap(lambda i: jax.random.fold_in(stream, i))(
                jnp.arange(len(rows))
            )
            models = jax.vmap(client, (None, 0, 0))(w, keys, rows)
            w = jax.tree.map(lambda m: m.mean(axis=0), models)
            right = (logits(w, x_test).argmax(axis=1) == y_test).mean()
            return w, (right, losses(w, x_test, y_test).mean())

        return lax.scan(interval, w, jnp.arange(intervals))

    over = jax.vmap(experiment)
    if lanes_by == "map":
        over = lambda *own: lax.map(lambda one: experiment(*one), own)  # noqa: E731
    return jax.jit(over)


def arrays_of(several: list[prepare.Prepared]) -> tuple[tuple, tuple]:
    """Data and (parameters, keys, rows) of `hand_written`, from prepared seeds."""
    dataset, model = several[0].dataset, several[0].network.model
    scale = [
        (x - dataset.mean) / dataset.std for x in (dataset.x_train, dataset.x_test)
    ]
    x, x_test = (jnp.asarray(a.reshape(len(a), -1), jnp.float32) for a in scale)
    data = x, jnp.asarray(dataset.y_train), x_test, jnp.asarray(dataset.y_test)
    init, keys = zip(*map(program.keys_of, several), strict=True)
    first = jax.jit(lambda keys: lax.map(lambda k: model.init(k, x[:1]), keys))
    rows = np.stack([p.partition.indices for p in several])
    return data, (first(jnp.stack(init)), jnp.stack(keys), jnp.asarray(rows))


def seeds(model: str, intervals: int, count: int) -> list[prepare.Prepared]:
    """Experiments that differ in their seed."""
    configs = [make_config(model, intervals, seed=s) for s in range(count)]
    return prepare.prepare_all(configs)


def child(kind: str, model: str, intervals: int, count: int) -> None:
    """One whole process: hand-written, or ours in memory or with files."""
    if kind in ("vmap", "map"):
        data, own = arrays_of(seeds(model, intervals, count))
        result = hand_written(intervals, data, kind)(*own)
        with tempfile.TemporaryFile() as file:
            np.savez(file, *map(np.asarray, jax.tree.leaves(result)))
        return
    config = make_config(model, intervals)
    with tempfile.TemporaryDirectory() as folder:
        workdir = f"{folder}/run" if kind == "files" else None
        if count == 1:
            tsfl_jax.simulate(config, workdir=workdir)
        else:
            tsfl_jax.sweep(config, {"seed": range(count)}, workdir=workdir)


def cpu_seconds(*arguments: str | int) -> float:
    """User and system seconds of a child process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "benchmarks.small", "--child"]
    subprocess.run([*command, *map(str, arguments)], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def processes(model: str, count: int, repeats: int) -> dict[str, list[float]]:
    """CPU milliseconds of an interval of all lanes, by kind of process."""
    kinds = (
        ("vmap", "map", "memory", "files")
        if count > 1
        else (
            "vmap",
            "memory",
            "files",
        )
    )
    few, many = LENGTHS[count]
    found = {kind: [] for kind in kinds}
    for _, kind in itertools.product(range(repeats), kinds):
        times = [cpu_seconds(kind, model, length, count) for length in (many, few)]
        found[kind].append(1e3 * (times[0] - times[1]) / (many - few))
    return found


def programs(model: str, count: int, repeats: int) -> dict[str, list[float]]:
    """CPU milliseconds of an interval of all lanes, of the compiled programs alone."""
    intervals = max(LENGTHS[count][1] // 8, 4)
    several = seeds(model, intervals, count)
    data, own = arrays_of(several)
    runs = {}
    for kind in ("vmap", "map") if count > 1 else ("vmap",):
        call = hand_written(intervals, data, kind).lower(*own).compile()
        runs[kind] = lambda call=call: jax.block_until_ready(call(*own))
    config = several[0].config
    config.report_every = intervals
    mesh, width = backend.start_jax(config), 1
    if count == 1:
        one = program.make_program(several, mesh)
        arrays = program.make_arrays(several[0], mesh)
    else:
        group = lanes.make_group(several, mesh)
        width = min(count, sweeps.lanes_of_call(group))
        one, arrays = group.program, lanes.make_lanes(group, several[:width], width)
    runs["ours"] = common.first_chunk(one, arrays, evaluate=True)[0]
    lanes_of = {"vmap": count, "map": count, "ours": width}
    found = {kind: [] for kind in runs}
    for turn, (kind, run) in itertools.product(range(repeats + 1), runs.items()):
        begun = time.process_time()
        run()
        spent = time.process_time() - begun
        if turn:
            scale = count / lanes_of[kind] / intervals
            found[kind].append(1e3 * spent * scale)
    return found


def rows_of(model: str, count: int, repeats: int, what: str) -> list[dict]:
    """Rows of the table: the best hand-written program, then ours."""
    measure = {"process": processes, "program": programs}[what]
    found = measure(model, count, repeats)
    by_hand = [kind for kind in ("vmap", "map") if kind in found]
    best = min(by_hand, key=lambda kind: statistics.median(found[kind]))
    rows = []
    for kind in [best, *(kind for kind in found if kind not in by_hand)]:
        ratio = common.ratios(found[kind], found[best])
        rows.append(
            {
                "network": model,
                "lanes": count,
                "what": what,
                "kind": f"by hand ({kind})" if kind in by_hand else kind,
                "CPU ms an interval": common.spread(found[kind], 3),
                "of the best by hand": common.spread(ratio),
            }
        )
    return rows


def host_rows(intervals: int, repeats: int) -> list[dict]:
    """What files, progress and checkpoints add to T intervals of a tiny problem."""
    rows = []
    for kind in ("memory", "files"):
        for _ in range(repeats):
            times = json.loads(
                subprocess.run(
                    [sys.executable, "-m", "benchmarks.small", "--child", "host"]
                    + [kind, str(intervals), "1"],
                    check=True,
                    capture_output=True,
                ).stdout
            )
            rows.append({"kind": kind, **times})
    return rows


def host(kind: str, intervals: int) -> None:
    """Prints seconds of T intervals of logistic regression: all, and in the program."""
    from tsfl_jax.experiment import assemble, runner

    exp = assemble.build(make_config("logistic", intervals))
    with tempfile.TemporaryDirectory() as folder, open("/dev/null", "w") as stream:
        begun, cpu = time.perf_counter(), time.process_time()
        workdir = f"{folder}/run" if kind == "files" else None
        summary = runner.run(exp, workdir, stream).summary
        wall, cpu = time.perf_counter() - begun, time.process_time() - cpu
    inside = summary["train_seconds"]
    outside = wall - summary["compile_seconds"] - inside
    print(
        json.dumps(
            {
                "T": intervals,
                "program, s": f"{inside:.2f}",
                "host, s": f"{outside:.2f}",
                "host / program": f"{outside / inside:.3f}",
                "CPU, s": f"{cpu:.2f}",
            }
        )
    )


def main() -> None:
    """Prints the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(HIDDEN), choices=HIDDEN)
    parser.add_argument("--lanes", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument(
        "--what", nargs="+", default=["process", "program"], metavar="WHAT"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--host", type=int, default=0, metavar="T")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    devices.start(1)
    if options.child:
        kind, model, intervals, count = options.child
        if kind == "host":
            return host(model, int(intervals))
        return child(kind, model, int(intervals), int(count))
    rows = []
    if options.host:
        rows = host_rows(options.host, options.repeats)
    else:
        for model, count in itertools.product(options.models, options.lanes):
            for what in options.what:
                rows += rows_of(model, count, options.repeats, what)
    common.show(rows)


if __name__ == "__main__":
    main()
