"""Data flows one way: who may import whom; docs/architecture.md shows the table."""

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "tsfl_jax"

MAY_IMPORT = {
    "types": "",
    "rng": "types",
    "host_memory": "types",
    "command": "types",
    "config": "",
    "validate": "config host_memory types",
    "theory": "types",
    "water_filling": "",
    "dms": "theory types water_filling",
    "bound_minimum": "theory types water_filling",
    "fixed_point": "theory types",
    "metrics": "types",
    "optimizers": "types",
    "sources": "host_memory rng types",
    "arrays": "sources types",
    "npz_source": "arrays types",
    "tfds_prepare": "types",
    "tfds_source": "sources tfds_prepare types",
    "data": "npz_source rng sources tfds_source types",
    "allocation": "",
    "partition": "allocation host_memory types",
    "distribution": "types",
    "table": "types",
    "trace": "table types",
    "quadratic": "",
    "quadratic_source": "distribution quadratic rng types",
    "schedule": "distribution trace types",
    "riders": "types",
    "fleet": "distribution table types",
    "timeline": "fleet types",
    "rounds": "fleet timeline types",
    "arrivals": "fleet timeline types",
    "frameworks": "arrivals fleet rounds timeline",
    "tasks": "arrivals fleet timeline",
    "segments": "fleet tasks",
    "replay": "timeline types",
    "progress": "",
    "statistics": "",
    "draw": "config fleet frameworks progress replay riders rng schedule timeline "
    "types",
    "winograd": "types",
    "convolution": "types winograd",
    "pooling": "convolution types",
    "models": "convolution metrics pooling rng types",
    "client": "metrics models rng types",
    "exact_sums": "types",
    "estimate": "client exact_sums models rng types",
    "client_gradients": "client models rng types",
    "mapping": "client exact_sums types",
    "devices": "types",
    "rendezvous": "types",
    "processes": "rendezvous types",
    "choices": "",
    "compile_cache": "types",
    "local_work": "rng types",
    "robust": "types",
    "aggregate": "dms local_work types",
    "bound_rule": "aggregate bound_minimum theory types",
    "rules": "aggregate bound_rule local_work robust types",
    "evaluation": "client exact_sums metrics models types",
    "bases": "types",
    "probe": "aggregate client client_gradients estimate models types",
    "interval": "aggregate bases client evaluation exact_sums mapping metrics models "
    "probe rng types",
    "engine": "aggregate devices interval models types",
    "describe": "",
    "prepare": "aggregate arrays choices client config data describe draw host_memory "
    "local_work models optimizers partition quadratic quadratic_source replay rng "
    "rules types validate",
    "identity": "config data prepare",
    "memory": "engine host_memory optimizers prepare rng",
    "experiment": "aggregate client compile_cache config devices engine evaluation "
    "identity memory optimizers prepare quadratic rng types validate",
    "checkpoint": "types",
    "report": "types",
    "plot_style": "report statistics",
    "plots": "plot_style report types",
    "results": "engine experiment plots replay report types",
    "runner": "aggregate checkpoint config devices engine experiment optimizers "
    "progress report results types",
    "axes": "config host_memory types validate",
    "lanes": "aggregate client devices engine experiment identity prepare types",
    "theory_run": "report theory types",
    "theory_report": "bound_minimum command dms fixed_point plot_style report rng "
    "theory theory_run types",
    "sweep_report": "plot_style report statistics",
    "sweeps": "aggregate axes config devices engine experiment host_memory identity "
    "lanes memory optimizers prepare progress report results sweep_report types "
    "validate",
    "gantt": "plot_style segments tasks",
    "explain": "devices draw gantt identity memory prepare replay segments tasks "
    "theory timeline types",
    "explain_text": "explain gantt",
    "tensorboard": "command report types",
    "paper": "",
    "sensitivity": "plot_style statistics",
    "reproduce_files": "paper plot_style report sensitivity statistics sweep_report",
    "compare_files": "plot_style report statistics",
    "compare": "axes command compare_files config data devices draw experiment prepare "
    "report runner timeline types",
    "heterogeneity": "axes compare compare_files config plot_style report statistics "
    "sweep_report sweeps theory types",
    "bound_study": "axes command config devices experiment plot_style "
    "prepare quadratic report sweeps theory types",
    "rider_study": "axes config plot_style report statistics sweeps",
    "reproduce": "axes command config devices heterogeneity paper prepare report "
    "reproduce_files rider_study sensitivity sweeps types",
    "__init__": "aggregate arrays bound_minimum config dms fixed_point "
    "models rules runner sweeps theory types",
}


def imported(module: str) -> set[str]:
    """Modules of the package that `module` imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            if node.module == "tsfl_jax":
                found |= {alias.name for alias in node.names}
            elif (node.module or "").startswith("tsfl_jax."):
                found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            found |= {n.split(".")[1] for n in names if n.startswith("tsfl_jax.")}
    return found


MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_what_the_table_allows(module):
    assert imported(module) <= set(MAY_IMPORT[module].split())


def test_table_names_only_what_exists_and_has_no_cycle():
    assert sorted(MAY_IMPORT) == MODULES
    order = list(MAY_IMPORT)
    for module, allowed in MAY_IMPORT.items():
        for name in allowed.split():
            assert order.index(name) < order.index(module), (module, name)


@pytest.mark.parametrize("module", MODULES)
def test_modules_stay_short_and_say_what_they_do(module):
    text = (PACKAGE / f"{module}.py").read_text()
    assert len(text.splitlines()) <= 500
    assert ast.get_docstring(ast.parse(text))
    for node in ast.parse(text).body:
        public = isinstance(node, ast.FunctionDef | ast.ClassDef)
        if public and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{module}.{node.name} has no docstring"


def test_only_the_border_reads_settings():
    readers = {m for m in MODULES if "config" in imported(m)}
    only_the_type = {"runner", "axes", "sweeps", "__init__"}
    only_the_type |= {"reproduce", "compare", "heterogeneity", "rider_study"}
    only_the_type |= {"bound_study"}
    readers -= {"validate", "draw", "prepare", "identity", "experiment"}
    assert readers == only_the_type
    for module in only_the_type:
        for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert node.value.id != "config", f"{module}: config.{node.attr}"


@pytest.mark.parametrize("module", MODULES)
def test_libraries_of_tables_and_figures_are_imported_when_used(module):
    body = ast.parse((PACKAGE / f"{module}.py").read_text()).body
    for node in body:  # not `if TYPE_CHECKING`, and not inside functions
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [
                getattr(node, "module", None) or alias.name for alias in node.names
            ]
            for name in names:
                assert name.split(".")[0] not in ("matplotlib", "scipy", "tensorboardX")
