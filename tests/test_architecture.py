"""Rules for the whole code base: allowed imports, limits of size, and forbidden constructs.

Each test collects the violations of its rule, file by file, and expects none.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sweeps.search.verdicts import VERDICTS
from tests.support.paths import ROOT
from train_entry.contract import FailureKind

OURS = ("sweeps", "train_entry", "analysis", "sweep")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50
MAX_NESTED_BLOCKS = 3
BROAD_EXCEPTS = {"train_entry/main.py", "sweeps/tracking/background.py"}  # a job's entry; the tracker
# Assembled from parts, so that the test does not find this file.
PATHS_OF_ONE_MACHINE = tuple(f"/{name}/" for name in ("work", "farm"))


def sources(*folders: str) -> list[str]:
    """Return the Python files below folders, as paths relative to the root."""
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


PRODUCT = ["sweep.py", *sources("sweeps", "train_entry", "analysis")]
# A package of sweeps/ imports only packages that stand before it in this list.
STOREYS = (
    *("errors", "machine", "paths", "config", "space", "plan", "estimate", "cluster", "search", "study"),
    *("tracking", "show", "commands", "_hydra", "__main__"),
)
# These folders are pure: they use no files, processes or clocks, and no third-party package except where
# DOORS allows it.
PURE_FOLDERS = ("sweeps/space", "sweeps/plan", "sweeps/estimate", "sweeps/search")
DOORS: dict[str, tuple[str, ...]] = {
    "optuna": ("sweeps/search/sampler.py",),
    "numpy": ("sweeps/estimate/robust.py", "sweeps/search/gaussian_process.py", "train_entry/", "analysis/"),
    "scipy": ("sweeps/estimate/robust.py", "sweeps/search/students_t.py"),
    "submitit": ("sweeps/cluster/",),
    "mlflow": ("sweeps/tracking/mlflow.py",),
    "sqlalchemy": ("sweeps/tracking/mlflow.py",),
    "hydra": ("sweeps/config/", "sweeps/space/grammar.py", "sweep.py", "sweeps/_hydra/"),
    "omegaconf": ("sweeps/config/", "sweep.py", "sweeps/_hydra/"),
    "yaml": ("sweeps/config/", "sweeps/search/advice.py"),
    "pynvml": (
        "sweeps/cluster/node/devices.py",
        "train_entry/install/torch_check.py",
        "train_entry/measure/health.py",
    ),
    "psutil": ("sweeps/cluster/node/processes.py",),
    "rich": ("sweeps/show/display.py", "analysis/"),
    "deepspeed": (
        "train_entry/engines/deepspeed.py",
        "train_entry/engines/pipeline.py",
        "train_entry/engines/zero_init.py",
        "train_entry/install/operators.py",
    ),
    "safetensors": ("train_entry/model/weights.py",),
    "torch": ("train_entry/",),
    "transformers": ("train_entry/",),
}


@functools.cache
def nodes(path: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))))


@functools.cache
def imports(path: str) -> frozenset[str]:
    """Return the dotted names of all modules that a file imports, also inside functions."""
    plain = {alias.name for node in nodes(path) if isinstance(node, ast.Import) for alias in node.names}
    named = {node.module or "." for node in nodes(path) if isinstance(node, ast.ImportFrom)}
    return frozenset(plain | named | set(submodules(path)))


def submodules(path: str) -> Iterator[str]:
    """Yield the modules behind imports such as `from train_entry import data`: train_entry.data."""
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module in OURS:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def under(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def third_party(path: str) -> set[str]:
    tops = {module.partition(".")[0] for module in imports(path)}
    return tops - set(sys.stdlib_module_names) - set(OURS) - {"__main__"}


def ours_beyond(paths: list[str], *allowed: str) -> set[tuple[str, str]]:
    """Return pairs of a file and a module of ours that it imports against the rules."""
    return {
        (path, module)
        for path in paths
        for module in imports(path)
        if under(module, *OURS) and not under(module, *allowed) and module not in OURS
    }


def others_among(paths: list[str], *forbidden: str) -> set[tuple[str, str]]:
    """Return pairs of a file and a third-party package that it imports against the rules."""
    return {(path, package) for path in paths for package in third_party(path) if package in forbidden}


def functions(path: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in nodes(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def blocks_deep(node: ast.AST, depth: int = 0) -> int:
    """Return how deeply blocks are nested in a node. An `elif` is as deep as its `if`."""
    block = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
    deepest = depth
    for child in ast.iter_child_nodes(node):
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, blocks_deep(child, depth + (isinstance(child, block) and not is_elif)))
    return deepest


def catches_everything(node: ast.AST) -> bool:
    names = (None, "Exception", "BaseException")
    if not isinstance(node, ast.ExceptHandler):
        return False
    reraises = any(isinstance(inner, ast.Raise) and inner.exc is None for inner in node.body)
    return (ast.unparse(node.type) if node.type else None) in names and not reraises


# ---------------------------------------------------------------- imports between our packages


def test_the_contract_imports_the_standard_library_only() -> None:
    contract = sources("train_entry/contract")
    assert {(path, package) for path in contract for package in third_party(path)} == set()
    assert ours_beyond(contract, "train_entry.contract") == set()


def test_a_job_knows_nothing_else_of_ours() -> None:
    assert ours_beyond(sources("train_entry"), "train_entry") == set()
    assert [path for path in sources("train_entry") if imports(path) & {"sweeps", "analysis", "sweep"}] == []


def test_the_orchestrator_knows_only_the_contract_of_a_job() -> None:
    assert ours_beyond(sources("sweeps"), "sweeps", "train_entry.contract") == set()
    assert [path for path in sources("sweeps") if imports(path) & {"analysis", "sweep"}] == []


def test_reports_know_only_the_contract_of_a_job() -> None:
    assert ours_beyond(sources("analysis"), "analysis", "train_entry.contract") == set()
    assert [path for path in sources("analysis") if imports(path) & {"sweeps", "sweep"}] == []


def test_the_wiring_knows_only_the_contract_of_a_job_too() -> None:
    assert ours_beyond(["sweep.py"], "sweeps", "analysis", "train_entry.contract") == set()


def test_imports_are_absolute() -> None:
    relative = [
        path
        for path in PRODUCT
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]
    assert relative == []


def test_the_orchestrator_never_imports_what_trains() -> None:
    assert others_among(["sweep.py", *sources("sweeps")], "torch", "deepspeed", "transformers") == set()


def test_a_job_knows_nothing_of_searches() -> None:
    searching = ("hydra", "omegaconf", "optuna", "submitit", "mlflow")
    assert others_among(sources("train_entry"), *searching) == set()


def test_reports_need_neither_a_search_nor_torch() -> None:
    foreign = ("optuna", "submitit", "torch", "deepspeed", "hydra", "omegaconf", "mlflow")
    assert others_among(sources("analysis"), *foreign) == set()


# ---------------------------------------------------------------- few importers per third-party package


@pytest.mark.parametrize("package", DOORS)
def test_a_package_has_its_door(package: str) -> None:
    importers = {path for path in PRODUCT if package in third_party(path)}
    assert importers != set()
    assert [path for path in importers if not path.startswith(DOORS[package])] == []


def test_every_package_of_others_has_a_door() -> None:
    known = {package for path in PRODUCT for package in third_party(path)}
    assert known <= {*DOORS, "hydra_plugins"}


def test_what_decides_touches_no_other_system() -> None:
    effects = {"subprocess", "socket", "shutil", "tempfile", "threading", "time"}
    pure = sources(*PURE_FOLDERS)
    undeclared = [
        (path, package)
        for path in pure
        for package in third_party(path)
        if path not in DOORS.get(package, ())
    ]
    assert undeclared == []
    assert [path for path in pure if imports(path) & effects] == []


# ---------------------------------------------------------------- packages and folders


def storey(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def test_a_package_imports_only_packages_above_it() -> None:
    wrong = [
        (path, module)
        for path in sources("sweeps")
        for module in imports(path)
        if under(module, "sweeps") and module != "sweeps"
        if (own := Path(path).parts[1].removesuffix(".py")) != storey(module)
        if own != "__init__" and STOREYS.index(storey(module)) >= STOREYS.index(own)
    ]
    assert wrong == []


def test_few_modules_stand_beside_the_folders() -> None:
    assert len(list((ROOT / "sweeps").glob("*.py"))) <= 5


@pytest.mark.parametrize("top", ["sweeps", "train_entry", "analysis"])
def test_no_folder_imports_in_a_circle(top: str) -> None:
    """Check the modules and folders of each parent, at every depth."""
    for parent in {Path(path).parent for path in sources(top)}:
        edges = {(one, other) for one, other in folder_imports(parent) if one != other}
        while edges:
            ends = {one for one, _ in edges}
            kept = {(one, other) for one, other in edges if other in ends}
            assert kept != edges, f"a circle in {parent}: {sorted(edges)}"
            edges = kept


def folder_imports(parent: Path) -> Iterator[tuple[str, str]]:
    """Yield pairs of a folder's child and a child that it imports. Children are modules and folders."""
    depth = len(parent.parts)
    for path in sources(str(parent)):
        for module in imports(path):
            parts = tuple(module.split("."))
            if parts[:depth] == parent.parts and len(parts) > depth:
                child = ROOT / parent / parts[depth]
                if child.is_dir() or child.with_suffix(".py").exists():
                    yield Path(path).parts[depth].removesuffix(".py"), parts[depth]


# ---------------------------------------------------------------- size


def test_files_are_short() -> None:
    lengths = {path: len((ROOT / path).read_text().splitlines()) for path in PRODUCT + sources("tests")}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    lengths = {
        (path, node.name): (node.end_lineno or 0) - node.lineno + 1
        for path in PRODUCT
        for node in functions(path)
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}


def test_functions_are_flat() -> None:
    depths = {(path, node.name): blocks_deep(node) for path in PRODUCT for node in functions(path)}
    assert {name: depth for name, depth in depths.items() if depth > MAX_NESTED_BLOCKS} == {}


def test_nesting_is_counted_as_a_reader_sees_it() -> None:
    chain = "def f():\n if a: pass\n elif b: pass\n elif c: pass\n"
    nested = "def f():\n for a in b:\n  if a:\n   with a: pass\n"
    assert [blocks_deep(ast.parse(text)) for text in (chain, nested)] == [1, 3]


# ---------------------------------------------------------------- forbidden constructs


def test_all_exceptions_are_caught_at_two_edges_only() -> None:
    broad = [path for path in PRODUCT for node in nodes(path) if catches_everything(node)]
    assert len(broad) <= 2
    assert set(broad) <= BROAD_EXCEPTS


def test_no_text_is_run_as_code_or_by_a_shell() -> None:
    calls = [(path, node) for path in PRODUCT for node in nodes(path) if isinstance(node, ast.Call)]
    evaluating = {"eval", "exec", "os.system", "os.popen", "__import__"}
    assert [path for path, call in calls if ast.unparse(call.func) in evaluating] == []
    assert [path for path, call in calls if any(word.arg == "shell" for word in call.keywords)] == []


def test_nothing_is_pickled() -> None:
    pickles = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
    assert [path for path in PRODUCT if imports(path) & pickles] == []


def test_importing_the_job_package_does_nothing() -> None:
    assert (ROOT / "train_entry" / "__init__.py").read_text() == ""


def test_every_kind_of_failure_has_a_verdict() -> None:
    assert set(VERDICTS) == set(FailureKind)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_no_tracked_file_names_a_path_of_one_machine() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = [ROOT / name for name in listed.stdout.split("\0") if name]
    texts = {path: path.read_text(errors="replace") for path in tracked if path.is_file()}
    assert [str(path) for path, text in texts.items() if any(p in text for p in PATHS_OF_ONE_MACHINE)] == []
