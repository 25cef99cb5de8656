"""A change that can change a result changes the text, and nothing else does."""

import functools
import importlib
import io
import json
import os
import pathlib
import subprocess
import sys
import threading
import types

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tsfl_jax
from tsfl_jax.experiment import fingerprints, packages
from tsfl_jax.experiment.fingerprints import describe
from tsfl_jax.types import UserError

ROOT = pathlib.Path(__file__).parents[2]
IMPORTS = """
import dataclasses, enum, functools, typing
import flax.linen as nn, jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
import own_helpers
from own_helpers import scale
"""
HELPERS = """
RATE = VALUE
UNUSED = 1
def scale(x):
    return RATE * x
class Scale:
    def __init__(self):
        self.rate = VALUE
"""
# Each makes a `thing`; VALUE is 1, and 2 in the changed one.
CASES = {
    "global number": """
POWER = VALUE
def thing(s):
    return s.tau**POWER
""",
    "global text": """
HOW = "VALUE"
thing = lambda x: getattr(x, HOW)
""",
    "helper": """
def helper(x):
    return VALUE * x
def thing(s):
    return helper(s.tau)
""",
    "helper of a helper": """
def first(x):
    return x + VALUE
def second(x):
    return first(x)
thing = lambda x: second(x)
""",
    "recursion": """
def even(n):
    return n == 0 or odd(n - 1)
def odd(n):
    return n > VALUE and even(n - 1)
thing = even
""",
    "inner function": """
RATE = VALUE
def thing(x):
    def inner(y):
        return RATE * y
    return inner(x)
""",
    "comprehension": """
RATE = VALUE
thing = lambda x: [RATE * y for y in x]
""",
    "class inside": """
RATE = VALUE
def thing(x):
    class Inner:
        "A class."
        rate = RATE
    return Inner.rate * x
""",
    "keyword default": """
def thing(x, *, rate=VALUE):
    return rate * x
""",
    "name of an argument": """
def thing(x, aVALUE):
    return x
""",
    "attribute of a function": """
def helper(x):
    return x
helper.rate = VALUE
thing = lambda x: helper.rate * x
""",
    "set in the code": """
thing = lambda x: x in {"a", "b", "c", "dVALUE"}
""",
    "deep closure": """
def wrapped(f):
    return lambda x: f(x)
thing = lambda x: VALUE * x
for _ in range(30):
    thing = wrapped(thing)
""",
    "wraps": """
def twice(f):
    @functools.wraps(f)
    def called(x):
        return VALUE * f(x)
    return called
@twice
def thing(x):
    return x
""",
    "module of helpers": """
thing = lambda x: own_helpers.scale(x)
""",
    "name from helpers": """
thing = lambda x: scale(x)
""",
    "class of helpers": """
thing = lambda: own_helpers.Scale()
""",
    "number of helpers": """
thing = lambda x: own_helpers.RATE * x
""",
    "checked annotations": """
import beartype, jaxtyping
from jaxtyping import Array, Float
@jaxtyping.jaxtyped(typechecker=beartype.beartype)
def thing(x: Float[Array, "n"]) -> Float[Array, "n"]:
    return VALUE * x
""",
    "checked by beartype": """
import beartype
@beartype.beartype
def thing(x: int) -> int:
    return VALUE * x
""",
    "import inside": """
def thing(x):
    import own_helpers as inside
    return inside.scale(x)
""",
    "import of a name inside": """
def thing(x):
    from own_helpers import RATE
    return RATE * x
""",
    "module in an inner function": """
def thing(x):
    return (lambda y: own_helpers.scale(y))(x)
""",
    "attribute of an import": """
def thing(x):
    import own_helpers
    inside = own_helpers.__dict__["RATE"]
    return inside * x
""",
    "closure over a module": """
def made(module):
    return lambda x: module.scale(x)
thing = made(own_helpers)
""",
    "class in a lambda": """
class Net(nnx.Module):
    def __init__(self, rngs):
        self.dropout = nnx.Dropout(0.VALUE, rngs=rngs)
    def __call__(self, x):
        return self.dropout(x)
thing = lambda rngs: Net(rngs)
""",
    "class": """
class thing(nnx.Module):
    def __init__(self, rngs):
        self.rate = VALUE
""",
    "nnx module": """
class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 3, rngs=rngs)
        self.act = lambda x: VALUE * x
thing = Net(nnx.Rngs(0))
""",
    "nnx parameters": """
thing = nnx.Linear(2, 3, rngs=nnx.Rngs(VALUE))
""",
    "private method": """
class Net(nn.Module):
    def _features(self, x):
        return VALUE * x
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(self._features(x))
thing = Net()
""",
    "setup": """
class Net(nn.Module):
    def setup(self):
        self.dense = nn.Dense(VALUE)
    def __call__(self, x):
        return self.dense(x)
thing = Net()
""",
    "field of a linen module": """
class Net(nn.Module):
    act: typing.Any = nn.relu
    @nn.compact
    def __call__(self, x):
        return self.act(x)
thing = Net(act=lambda x: VALUE * x)
""",
    "linen module of a library": """
thing = nn.Dense(2, bias_init=lambda *_: VALUE)
""",
    "transformed linen module": """
class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(VALUE)(x)
thing = nn.remat(Net)()
""",
    "long array": """
class Loss:
    def __init__(self):
        self.table = np.zeros(2000)
        self.table[1000] = VALUE
    def __call__(self, outputs, labels):
        return self.table[labels]
thing = Loss()
""",
    "global array": """
TABLE = jnp.zeros(2000).at[1000].set(VALUE)
thing = lambda row: TABLE[row]
""",
    "mask of an array": """
thing = np.ma.array([1, 2, 3], mask=[0, 1, VALUE == 1])
""",
    "key": """
thing = jax.random.key(VALUE)
""",
    "bfloat16": """
thing = jnp.full(3, VALUE, jnp.bfloat16)
""",
    "objects in an array": """
thing = np.array([None, "a", VALUE], object)
""",
    "dunder method": """
class Rule:
    def __getitem__(self, x):
        return VALUE * x
thing = Rule()
""",
    "static method": """
class Rule:
    @staticmethod
    def weights(x):
        return VALUE * x
thing = Rule.weights
""",
    "class method": """
class Rule:
    rate = VALUE
    @classmethod
    def weights(cls, x):
        return cls.rate * x
thing = Rule.weights
""",
    "property": """
class Rule:
    @property
    def rate(self):
        return VALUE
thing = Rule()
""",
    "cached property": """
class Rule:
    @functools.cached_property
    def rate(self):
        return VALUE
thing = Rule()
""",
    "base class": """
class Base:
    def rate(self):
        return VALUE
class Rule(Base):
    pass
thing = Rule()
""",
    "metaclass": """
class Meta(type):
    def rate(cls):
        return VALUE
class Rule(metaclass=Meta):
    pass
thing = Rule
""",
    "bound method": """
class Rule:
    def __init__(self, rate):
        self.rate = rate
    def weights(self, x):
        return self.rate * x
thing = Rule(VALUE).weights
""",
    "slots": """
class Rule:
    __slots__ = ("rate",)
    def __init__(self, rate):
        self.rate = rate
thing = Rule(VALUE)
""",
    "dataclass": """
@dataclasses.dataclass
class Rule:
    rate: int = 0
    def __post_init__(self):
        self.both = [self.rate]
thing = Rule(VALUE)
""",
    "post init": """
@dataclasses.dataclass(frozen=True)
class Rule:
    rate: int = 0
    def __post_init__(self):
        object.__setattr__(self, "rate", VALUE)
thing = lambda: Rule()
""",
    "default factory": """
@dataclasses.dataclass
class Rule:
    rate: list = dataclasses.field(default_factory=lambda: [VALUE])
thing = Rule
""",
    "NamedTuple": """
class Rule(typing.NamedTuple):
    rate: int
    def weights(self, x):
        return self.rate * x
thing = Rule(VALUE)
""",
    "method of a NamedTuple": """
class Rule(typing.NamedTuple):
    rate: int
    def weights(self, x):
        return VALUE * x
thing = Rule(3)
""",
    "Enum": """
class Kind(enum.Enum):
    FIRST = VALUE
thing = lambda x: Kind.FIRST.value * x
""",
    "subclass of dict": """
class Table(dict):
    pass
thing = Table(a=VALUE)
""",
    "subclass of set": """
class Names(set):
    pass
thing = Names({"a", "b", "VALUE"})
""",
    "what pickle leaves out": """
class Rule:
    def __init__(self):
        self.rate = VALUE
    def __getstate__(self):
        return {}
thing = Rule()
""",
    "a name for pickle": """
class Rule:
    def __init__(self):
        self.rate = VALUE
    def __reduce__(self):
        return "thing"
thing = Rule()
""",
    "attribute of an array": """
class Table(np.ndarray):
    pass
thing = np.zeros(3).view(Table)
thing.rate = VALUE
""",
    "partial": """
def rate(x, y):
    return x * y
thing = functools.partial(rate, y=VALUE)
""",
    "nested structure": """
thing = {"a": [1, (2, {"b", "c", "dVALUE"})], "e": None}
""",
    "jit": """
RATE = VALUE
@jax.jit
def thing(x):
    return RATE * x
""",
    "vmap": """
thing = jax.vmap(lambda x: x, in_axes=VALUE)
""",
    "custom derivative": """
@jax.custom_vjp
def thing(x):
    return x
thing.defvjp(lambda x: (x, None), lambda _, g: (VALUE * g,))
""",
    "cache": """
@functools.lru_cache
def thing(x):
    return VALUE * x
""",
    "single dispatch": """
@functools.singledispatch
def scaled(x):
    return x
@scaled.register
def _(x: float):
    return VALUE * x
thing = lambda x: scaled(x)
""",
    "universal function": """
from scipy.special import expit
thing = lambda x: VALUE * expit(x)
""",
    "optimizer": """
thing = lambda hparams: optax.adam(hparams.lr, b1=0.VALUE)
""",
    "schedule of a library": """
thing = optax.adam(optax.cosine_decay_schedule(0.1, VALUE))
""",
    "rule": """
import tsfl_jax
POWER = VALUE
thing = tsfl_jax.rule(lambda situation: situation.tau**POWER)
""",
}


def module(name, text, value, above=""):
    """Make a module of a user's, as `import` would from another folder and line."""
    made = types.ModuleType(name)
    made.__file__ = f"/somewhere{len(above)}/{name}.py"
    sys.modules[name] = made  # as classes and dataclasses expect
    code = compile(above + text.replace("VALUE", str(value)), made.__file__, "exec")
    exec(code, vars(made))
    return made


def thing(name, value=1, above=""):
    module("own_helpers", HELPERS, value, above)
    return module("own_module", IMPORTS + CASES[name], value, above).thing


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    """Forget the modules that a test makes."""
    for name in ("own_module", "own_helpers"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("name", CASES)
def test_a_change_gives_another_text(name):
    assert describe(thing(name, 1)) != describe(thing(name, 2))


@pytest.mark.parametrize("name", CASES)
def test_another_place_gives_the_same_text(name):
    first = describe(thing(name))
    assert first == describe(thing(name, above="# A comment.\n" * 300))
    assert "0x" not in first and "/" not in first and len(first) < 1000
    assert "cannot be compared" not in first


def test_use_changes_no_text():
    for name in ("slots", "cached property", "jit", "cache", "single dispatch"):
        made = thing(name)
        first = describe(made)
        if name == "cached property":
            assert made.rate == 1
        elif callable(made):
            made(2.0)
        assert describe(made) == first


def texts():
    """The texts of all cases, and of one that cannot be compared."""
    return [describe(thing(name)) for name in CASES], describe(threading.Lock())


def test_another_process_gives_the_same_texts():
    program = (
        "import json; from tests.experiment import test_fingerprints as tests; "
        "print(json.dumps(tests.texts()))"
    )
    seed = "7" if os.environ.get("PYTHONHASHSEED") != "7" else "8"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    there, lock = json.loads(done.stdout.splitlines()[-1])
    here, other_lock = texts()
    assert dict(zip(CASES, there, strict=True)) == dict(zip(CASES, here, strict=True))
    assert lock != other_lock


def loaded(text, value=1, name="own_module"):
    return describe(module(name, IMPORTS + text, value).thing)


def test_what_is_not_used_is_not_in_the_text():
    for unused in (
        "POWER = VALUE\nthing = lambda x: x.POWER",  # an attribute
        "POWER = VALUE\ndef thing(POWER): return POWER",  # an argument
        'def thing(x):\n    "Say VALUE."\n    return x',
        'def thing():\n    class Inner:\n        "VALUE"\n    return Inner',
        "def thing(x: 'aVALUE') -> 'bVALUE': return x",
        "def thing(x):\n    # VALUE\n    return x",
    ):
        module("own_helpers", HELPERS, 1)
        assert loaded(unused, 1) == loaded(unused, 2), unused
    used = "thing = lambda x: own_helpers.scale(x)"
    module("own_helpers", HELPERS, 1)
    before = loaded(used)
    module("own_helpers", HELPERS.replace("UNUSED = 1", "UNUSED = 2"), 1)
    assert loaded(used) == before


def test_what_a_library_has_is_its_name():
    assert describe(optax.adam) == "optax._src.alias.adam"
    assert describe(jnp.tanh) == "jax.numpy.tanh"
    assert describe(nn.Dense) == "flax.linen.linear.Dense"
    assert describe(np) == "numpy" and describe(max) == "builtins.max"
    assert describe(tsfl_jax.simulate) == "tsfl_jax.experiment.from_python.simulate"
    module("own_helpers", HELPERS, 1)
    assert "global" not in loaded("thing = lambda x: max(x, 1)")


def test_a_shadowed_builtin_is_followed():
    module("own_helpers", HELPERS, 1)
    shadow = "def max(x): return VALUE * x\nthing = lambda x: max(x)"
    assert loaded(shadow, 1) != loaded(shadow, 2)


def test_what_a_class_calls_itself_need_not_be_true():
    """As of `exec` with names of its own, whose classes claim to be builtins."""
    found = []
    for value in (1, 1, 2):
        space = {}
        exec(f"class A:\n    def f(self): return {value}\nthing = A()", space)
        found.append(describe(space["thing"]))
    assert found[0] == found[1] != found[2]


class Held:
    def __init__(self, held):
        self.held = held


@pytest.mark.parametrize(
    "make",
    [
        threading.Lock,
        lambda: (i for i in range(3)),
        lambda: io.TextIOWrapper(io.BytesIO()),
    ],
    ids=["lock", "generator", "file"],
)
def test_what_cannot_be_described_is_never_equal_by_accident(make, monkeypatch):
    one, other = make(), make()
    text = describe(Held(one))
    assert "with what cannot be compared: " in text and "0x" not in text
    assert text == describe(Held(one)) != describe(Held(other))
    monkeypatch.setattr(fingerprints, "_PROCESS", "another")
    assert text != describe(Held(one))


def test_code_that_makes_names_cannot_be_compared():
    module("own_helpers", HELPERS, 1)
    text = loaded('thing = lambda x: eval("x")')
    assert text.endswith("with what cannot be compared: eval() in <lambda>")


@pytest.mark.parametrize(
    "text",
    [
        "thing = lambda: vars(own_helpers)",
        'thing = lambda: getattr(own_helpers, "A")',
        "def thing():\n    import own_helpers as inside\n    return vars(inside)",
        "def made(m): return lambda: vars(m)\nthing = made(own_helpers)",
        "thing = [own_helpers]",
    ],
)
def test_a_module_that_goes_elsewhere_is_all_its_code(text, tmp_path, monkeypatch):
    """It is not known which of its attributes are used there."""
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for source in ("A = 1\n", "# A comment.\nA = 1\n", "A = 23\n"):
        monkeypatch.delitem(sys.modules, "own_helpers", raising=False)
        (tmp_path / "own_helpers.py").write_text(source + "scale = None\n")
        found.append(loaded(text))
    assert found[0] == found[1] != found[2]
    module("own_helpers", HELPERS, 1)  # without a file
    assert "cannot be compared: builtins.module" in loaded(text)


@pytest.mark.parametrize(
    "text",
    [
        "thing = Held(own_helpers)",
        "class thing:\n    helpers = own_helpers",
        "def thing(x, helpers=own_helpers): return helpers.scale(x)",
        "thing = functools.partial(used, own_helpers)",
        "thing = lambda x: used(own_helpers, x)",
        "thing = lambda x: own_helpers.scale(x)",
    ],
)
def test_what_the_module_imports_is_followed(text, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    helpers = "from own_deeper import deeper\ndef scale(x): return deeper(x)\n"
    (tmp_path / "own_helpers.py").write_text(helpers)
    above = "class Held:\n    def __init__(self, held): self.held = held\n"
    above += "def used(helpers, x): return helpers.scale(x)\n"
    found = []
    for value in ("1", "1 ", "23"):
        for name in ("own_helpers", "own_deeper"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        text_of = f"def deeper(x): return {value} * x\n"
        (tmp_path / "own_deeper.py").write_text(text_of)
        found.append(loaded(above + text))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("text", ["weigh", "Net", "made(3)", "module"])
def test_an_installed_package_may_be_the_users(text, tmp_path, monkeypatch):
    """It is installed anew when its code changes, under the same version."""
    folder = tmp_path / "site-packages" / "own_package"
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(folder.parent)
    found = []
    for value in (1, 1, 23):
        source = f"from own_package.deep import POWER\nVALUE = {value}\n"
        source += "weigh = lambda s: s.tau**POWER\nclass Net: pass\n"
        source += "def made(n): return lambda s: n * s.tau**POWER\n"
        (folder / "__init__.py").write_text(source)
        (folder / "deep.py").write_text(f"POWER = {value}\n")
        for name in ("own_package", "own_package.deep"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        packages._files_of.cache_clear()
        made = importlib.import_module("own_package")
        space = vars(made) | {"module": made}
        found.append(describe([eval(text, space)]))
    assert found[0] == found[1] != found[2]
    assert packages.release("numpy.linalg") == packages.release("functools") == ""


def test_what_code_shares_cannot_be_compared():
    module("own_helpers", HELPERS, 1)
    for text in ("from random import gauss as draw", "draw = np.random.normal"):
        found = loaded(f"{text}\nthing = lambda x: draw(x, 1)")
        why = "cannot be compared: the state of a random generator of all code"
        assert found.endswith(why)
    made = loaded("thing = np.frompyfunc(lambda x: x, 1, 1)")
    assert made.endswith("cannot be compared: numpy.ufunc")


def test_objects_of_sets_that_refer_to_each_other_end(monkeypatch):
    several = [Held(None) for _ in range(40)]
    for one in several:
        one.held = {other for other in several if other is not one}
    monkeypatch.setattr(fingerprints, "_MOST_PARTS", 3000)
    assert "cannot be compared: more than 3,000 parts" in describe(several[0])
    few = several[:3]
    for one in few:
        one.held = {other for other in few if other is not one}
    assert describe(few[0]) == describe(few[1])


def test_cycles_and_size_end():
    loop, table = [1], {}
    loop.append(loop)
    table["self"] = table
    held = Held(None)
    held.held = held
    assert describe(loop) == "[1, ^1]" and describe(table) == "{'self': ^1}"
    assert describe(held) == describe(held)
    deep = functools.reduce(lambda inner, _: [inner], range(5000), [])
    assert "cannot be compared: what is nested too deeply" in describe(deep)
    wide = functools.reduce(lambda inner, _: (inner, inner), range(60), ())
    assert len(describe(wide)) < 1000
    many = [[i, [i]] for i in range(1000)]
    assert describe(many) == describe([[i, [i]] for i in range(1000)])


def test_what_is_too_large_is_never_equal(monkeypatch):
    monkeypatch.setattr(fingerprints, "_MOST_PARTS", 10)
    many = [[i] for i in range(100)]
    assert describe(many) != describe(many)


def small():
    config = tsfl_jax.Config(num_intervals=1, num_clients=2, batch_size=8)
    config.algorithm, config.schedule.data_size = "fedavg", 16
    config.schedule.kind, config.compile_cache = "case1", "off"
    return config


def own_rule(power):
    return thing("rule", power)


def test_a_run_with_a_changed_global_is_refused(tmp_path):
    first = tsfl_jax.simulate(small(), aggregator=own_rule(1), workdir=tmp_path)
    again = tsfl_jax.simulate(small(), aggregator=own_rule(1), workdir=tmp_path)
    assert again.summary["final_test_loss"] == first.summary["final_test_loss"]
    with pytest.raises(UserError) as error:
        tsfl_jax.simulate(small(), aggregator=own_rule(3), workdir=tmp_path)
    text = str(error.value)
    assert "\n" not in text and "holds a checkpoint of another experiment" in text
    assert "own rule: " in text and "choose another --workdir" in text
    assert "global POWER: 1]" in text and "global POWER: 3]" in text


def test_a_sweep_with_a_changed_global_is_trained_anew(tmp_path):
    found = [
        tsfl_jax.sweep(small(), {"seed": [0]}, aggregator=rule, workdir=tmp_path)
        for rule in (own_rule(0), own_rule(3))
    ]
    assert np.ptp(found[0].history["rho"]) < 1e-6 < np.ptp(found[1].history["rho"])
