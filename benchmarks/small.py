"""``python -m benchmarks.small``: small networks on one CPU device, host and files.

Digits, 20 clients of 44 samples, batches of 8: the MLP and logistic regression, in 1, 8
and 64 lanes (seeds), against `hand_written`, with the same batches, evaluation and
result. *Even*: τ = 2 for all. *Uneven*: τ = 1 to 4 by client (Case 2). A figure is the
CPU time (user and system) that many intervals take more than few, by the intervals
between, both run in the same process by the public functions: start-up and compilation
cancel. ``--what program`` is the compiled program alone, in one process by turns.
``--host`` measures 20,000 intervals of one tiny problem with all files instead.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import tsfl_jax
from benchmarks import common
from tsfl_jax import rng
from tsfl_jax.engine import devices
from tsfl_jax.prepare import backend, prepare
from tsfl_jax.run import lanes, program

HIDDEN = {"MLP": 64, "logistic": 0}
# By lanes: intervals of the short and of the long run.
LENGTHS = {1: (50, 1050), 8: (10, 130), 64: (2, 18)}
WORKS = ("even", "uneven")
LR, MOMENTUM, BATCH, CLIENTS = 0.03, 0.9, 8, 20


def taus_of(work: str) -> tuple[int, ...]:
    """τ of the clients; Case 2 deals them in equal parts."""
    groups = (2, 2, 2, 2) if work == "even" else (1, 2, 3, 4)
    return tuple(tau for tau in groups for _ in range(CLIENTS // 4))


def make_config(
    model: str, intervals: int, work: str = "even", **settings
) -> tsfl_jax.Config:
    """FedAvg of the digits; `settings` in place of the defaults."""
    config = tsfl_jax.Config(algorithm="fedavg", num_intervals=intervals, devices=1)
    config.lr, config.momentum, config.batch_size = LR, MOMENTUM, BATCH
    config.compile_cache = "off"
    config.schedule.kind = "explicit"
    config.schedule.tau = tuple(dict.fromkeys(taus_of(work)))
    config.schedule.data_size, config.model.hidden = 44, HIDDEN[model]
    for name, value in settings.items():
        setattr(config, name, value)
    return config


def hand_written(
    intervals: int, data: tuple, lanes_by: str = "vmap", work: str = "even"
) -> Callable:
    """What a user would write for this one experiment: jit(vmap(scan(vmap(scan)))).

    Args:
      intervals: T.
      data: x, y, x_test, y_test; scaled, flat.
      lanes_by: seeds and clients side by side ("vmap"), seeds one after another
        ("map"), or both one after another, each client with its own work ("loop").
      work: of `WORKS`; side by side, steps that a client does not make are masked.

    Returns:
      (parameters [L, …], keys [L], rows [L, N, D]) → (parameters, accuracy, loss).
    """
    x, y, x_test, y_test = data
    taus, most = jnp.asarray(taus_of(work)), max(taus_of(work))

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

    def client(w, key, rows, tau):
        key, size = rng.fold(key, "sample order"), len(rows)
        places = np.arange(-(-size // BATCH) * BATCH)  # a short last batch is masked
        steps, masks = len(places) // BATCH, (places < size).reshape(-1, BATCH)

        def one_pass(h):
            scores = jax.random.uniform(jax.random.fold_in(key, h), (size,))
            return rows[jnp.argsort(scores)[places % size]].reshape(-1, BATCH)

        def step(carry, batch):
            w, v = carry
            gradient = jax.grad(batch_loss)(w, *batch)
            v = jax.tree.map(lambda v, g: MOMENTUM * v + g, v, gradient)
            return jax.tree.map(lambda w, v: w - LR * v, w, v), v

        def at_work(carry, inputs):
            k, *batch = inputs
            new = step(carry, batch)
            if work == "uneven":
                new = jax.tree.map(
                    lambda n, o: jnp.where(k < tau * steps, n, o), new, carry
                )
            return new, None

        start = w, jax.tree.map(jnp.zeros_like, w)
        if lanes_by == "loop":
            whole = lambda h, carry: lax.scan(  # noqa: E731
                lambda c, b: (step(c, b), None), carry, (one_pass(h), masks)
            )[0]
            return lax.fori_loop(0, tau, whole, start)[0]
        batches = jax.vmap(one_pass)(jnp.arange(most)).reshape(-1, BATCH)
        every = jnp.arange(len(batches)), batches, np.tile(masks, (most, 1))
        return lax.scan(at_work, start, every)[0][0]

    def average(w, keys, rows):
        if lanes_by != "loop":
            models = jax.vmap(client, (None, 0, 0, 0))(w, keys, rows, taus)
            return jax.tree.map(lambda m: m.mean(axis=0), models)
        add = lambda total, one: (  # noqa: E731
            jax.tree.map(jnp.add, total, client(w, *one)),
            None,
        )
        total = lax.scan(add, jax.tree.map(jnp.zeros_like, w), (keys, rows, taus))[0]
        return jax.tree.map(lambda m: m / CLIENTS, total)

    def experiment(w, key, rows):
        def interval(w, t):
            stream = jax.random.fold_in(rng.fold(key, "training"), t)
            keys = jax.vmap(lambda i: jax.random.fold_in(stream, i))(
                jnp.arange(len(rows))
            )
            w = average(w, keys, rows)
            right = (logits(w, x_test).argmax(axis=1) == y_test).mean()
            return w, (right, losses(w, x_test, y_test).mean())

        return lax.scan(interval, w, jnp.arange(intervals))

    if lanes_by == "vmap":
        return jax.jit(jax.vmap(experiment))
    return jax.jit(lambda *own: lax.map(lambda one: experiment(*one), own))


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


def seeds(
    model: str, intervals: int, count: int, work: str = "even"
) -> list[prepare.Prepared]:
    """Experiments that differ in their seed."""
    configs = [make_config(model, intervals, work, seed=s) for s in range(count)]
    return prepare.prepare_all(configs)


def by_hand(work: str, count: int) -> list[str]:
    """The hand-written programs to compare with."""
    kinds = ["vmap"] if count == 1 else ["vmap", "map"]
    return kinds + ["loop"] * (work == "uneven")


def carry_out(kind: str, model: str, intervals: int, count: int, work: str) -> None:
    """One experiment, settings to results: by hand, or ours without or with files."""
    with tempfile.TemporaryDirectory() as folder:
        if kind not in ("memory", "files"):
            data, own = arrays_of(seeds(model, intervals, count, work))
            result = hand_written(intervals, data, kind, work)(*own)
            np.savez(f"{folder}/all.npz", *map(np.asarray, jax.tree.leaves(result)))
            return
        config = make_config(model, intervals, work)
        workdir = f"{folder}/run" if kind == "files" else None
        if count == 1:
            tsfl_jax.simulate(config, workdir=workdir)
        else:
            tsfl_jax.sweep(config, {"seed": range(count)}, workdir=workdir)


def child(kind: str, model: str, count: int, work: str, repeats: int) -> None:
    """Print CPU milliseconds of an interval of all lanes, once for each repeat."""
    few, many = LENGTHS[count]

    def seconds(intervals: int) -> float:
        begun = time.process_time()
        carry_out(kind, model, intervals, count, work)
        return time.process_time() - begun

    # The first run of each length fills JAX's caches; compiling again is not.
    seconds(few), seconds(many)
    found = [seconds(many) - seconds(few) for _ in range(repeats)]
    print(json.dumps([1e3 * s / (many - few) for s in found]))


def run_child(*arguments: str | int, cache: str = "") -> Any:
    """What a child process prints, as JSON."""
    command = [sys.executable, "-m", "benchmarks.small", "--child"]
    environment = os.environ | ({"JAX_COMPILATION_CACHE_DIR": cache} if cache else {})
    done = subprocess.run(
        [*command, *map(str, arguments)],
        check=True,
        stdout=subprocess.PIPE,
        env=environment,
    )
    return json.loads(done.stdout)


def processes(model: str, count: int, work: str, repeats: int) -> dict[str, list]:
    """CPU milliseconds of an interval of all lanes, by kind of process."""
    with tempfile.TemporaryDirectory() as cache:
        return {
            kind: run_child(kind, model, count, work, repeats, cache=cache)
            for kind in (*by_hand(work, count), "memory", "files")
        }


def programs(model: str, count: int, work: str, repeats: int) -> dict[str, list]:
    """CPU milliseconds of an interval of all lanes, of the compiled programs alone."""
    intervals = max(LENGTHS[count][1] // 8, 4)
    several = seeds(model, intervals, count, work)
    data, own = arrays_of(several)
    runs, lanes_of = {}, {}
    for kind in by_hand(work, count):
        call = hand_written(intervals, data, kind, work).lower(*own).compile()
        runs[kind] = lambda call=call: jax.block_until_ready(call(*own))
        lanes_of[kind] = count
    for mapping in ("auto", "vmap", "sequential"):
        width, run = our_program(model, intervals, count, work, mapping)
        runs[f"ours, {mapping}"], lanes_of[f"ours, {mapping}"] = run, width
    found = {kind: [] for kind in runs}
    for turn, (kind, run) in itertools.product(range(repeats + 1), runs.items()):
        begun = time.process_time()
        run()
        spent = time.process_time() - begun
        if turn:
            scale = count / lanes_of[kind] / intervals
            found[kind].append(1e3 * spent * scale)
    return found


def our_program(
    model: str, intervals: int, count: int, work: str, mapping: str
) -> tuple[int, Callable]:
    """Lanes of one call, and the call with all intervals in one chunk."""
    settings = {"mapping": mapping, "report_every": intervals}
    several = prepare.prepare_all(
        [make_config(model, intervals, work, seed=s, **settings) for s in range(count)]
    )
    mesh = backend.start_jax(several[0].config)
    group = lanes.make_group(several, mesh)
    width = min(count, lanes.runs_per_call(group))
    arrays = lanes.make_arrays(group, several[:width])
    return width, common.first_chunk(group.program, arrays, evaluate=True)[0]


def rows_of(model: str, count: int, work: str, repeats: int, what: str) -> list[dict]:
    """Rows of the table: the best hand-written program, then ours."""
    measure = {"process": processes, "program": programs}[what]
    found = measure(model, count, work, repeats)
    hand = by_hand(work, count)
    best = min(hand, key=lambda kind: statistics.median(found[kind]))
    rows = []
    for kind in [best, *(kind for kind in found if kind not in hand)]:
        ratio = common.ratios(found[kind], found[best])
        rows.append(
            {
                "network": model,
                "work": work,
                "lanes": count,
                "what": what,
                "kind": f"by hand ({kind})" if kind in hand else kind,
                "CPU ms an interval": common.spread(found[kind], 3),
                "of the best by hand": common.spread(ratio),
            }
        )
    return rows


def host_rows(intervals: int, repeats: int) -> list[dict]:
    """What files, progress and checkpoints add to T intervals of a tiny problem."""
    return [
        {"kind": kind, **run_child("host", kind, intervals)}
        for kind in ("memory", "files")
        for _ in range(repeats)
    ]


def host(kind: str, intervals: int) -> None:
    """Print CPU seconds of T intervals of logistic regression: program and host."""
    from tsfl_jax.run import runner

    # What the program reports then is CPU time: others may hold the cores.
    program.time = types.SimpleNamespace(perf_counter=time.process_time)
    exp = runner.build(make_config("logistic", intervals))
    with tempfile.TemporaryDirectory() as folder, open("/dev/null", "w") as stream:
        begun, cpu = time.perf_counter(), time.process_time()
        workdir = f"{folder}/run" if kind == "files" else None
        summary = runner.run(exp, workdir, stream).summary
        wall, cpu = time.perf_counter() - begun, time.process_time() - cpu
    inside = summary["train_seconds"]
    outside = cpu - summary["compile_seconds"] - inside
    print(
        json.dumps(
            {
                "T": intervals,
                "program, CPU s": f"{inside:.2f}",
                "host, CPU s": f"{outside:.2f}",
                "host / program": f"{outside / inside:.3f}",
                "whole, s": f"{wall:.1f}",
            }
        )
    )


def main() -> None:
    """Prints the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(HIDDEN), choices=HIDDEN)
    parser.add_argument("--lanes", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--work", nargs="+", default=list(WORKS), choices=WORKS)
    parser.add_argument("--what", nargs="+", default=["process"], metavar="WHAT")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--host", type=int, default=0, metavar="T")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    devices.start(1)
    if options.child:
        kind, *given = options.child
        if kind == "host":
            return host(given[0], int(given[1]))
        model, count, work, repeats = given
        return child(kind, model, int(count), work, int(repeats))
    if options.host:
        return common.show(host_rows(options.host, options.repeats))
    rows = []
    for each in itertools.product(options.models, options.work, options.lanes):
        model, work, count = each
        for what in options.what:
            rows += rows_of(model, count, work, options.repeats, what)
    common.show(rows)


if __name__ == "__main__":
    main()
