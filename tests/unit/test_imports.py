"""Who may import whom (section 3 of the design), read from the source without running it.

Each package of ours may import the standard library, itself, the packages listed for it, and nothing else.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
OURS = (
    "config",
    "ipc",
    "kernels",
    "frontend",
    "tokenizer_proc",
    "scheduler_proc",
    "gpu_workers",
    "launch",
    "tools",
    "tests",
)
PROCESSES = ("frontend", "tokenizer_proc", "scheduler_proc", "gpu_workers")

ALLOWED = {
    "config": {"msgspec"},
    "ipc": {"msgspec", "zmq"},
    "kernels": {"torch", "triton", "numpy"},
    "frontend": {"ipc", "config", "msgspec", "aiohttp", "uvloop", "prometheus_client"},
    "tokenizer_proc": {
        "ipc",
        "config",
        "msgspec",
        "uvloop",
        "tokenizers",
        "jinja2",
        "markupsafe",
        "gguf",
        "numpy",
        "llguidance",
    },
    "scheduler_proc": {"ipc", "config", "msgspec", "uvloop", "numpy"},
    "gpu_workers": {"kernels", "ipc", "config", "msgspec", "torch", "numpy", "gguf", "safetensors", "llguidance"},
    "launch": {"config", "ipc", "msgspec", "psutil"},
}
# Imports that stay inside a function, because most runs do without them.
LAZILY_ALLOWED = {"launch": {"huggingface_hub"}, "frontend": {"opentelemetry"}}

# Names that run or unpickle what comes from elsewhere.
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_ATTRIBUTES = {"send_pyobj", "recv_pyobj", "send_serialized", "recv_serialized", "trust_remote_code"}
FORBIDDEN_CALLS = {"eval", "exec"}
FORBIDDEN_DOTTED = {"torch.load", "torch.save", "torch.jit.load", "torch.hub.load", "numpy.load", "np.load"}


def sources(*packages: str) -> list[Path]:
    skipped = {".venv", "build", "__pycache__"}
    found = [path for package in packages for path in (REPOSITORY / package).rglob("*.py")]
    return sorted(path for path in found if not skipped & set(path.relative_to(REPOSITORY).parts))


def name_of(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def imports_of(tree: ast.Module) -> Iterator[tuple[str, int, bool]]:
    """(module, level of a relative import, whether it is inside a function) for every import."""
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0, id(node) in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.level, id(node) in inside


def violations(package: str, tree: ast.Module) -> list[str]:
    found = []
    for module, level, lazy in imports_of(tree):
        top = module.partition(".")[0]
        if package == "ipc" and level == 0 and top == "ipc":
            found.append(f"{module}: inside ipc imports are relative, since it is also the package tokenmill_client")
        if level or top == package or top in sys.stdlib_module_names:
            continue
        if top not in ALLOWED[package] and not (lazy and top in LAZILY_ALLOWED.get(package, ())):
            found.append(module)
    return found


@pytest.mark.parametrize("path", sources(*ALLOWED), ids=name_of)
def test_a_package_imports_only_what_its_layer_allows(path: Path) -> None:
    package = path.relative_to(REPOSITORY).parts[0]
    assert violations(package, ast.parse(path.read_text())) == []


def test_no_process_package_is_allowed_another_and_nothing_is_allowed_tests_or_tools() -> None:
    for package, allowed in ALLOWED.items():
        assert not allowed & {"tests", "tools", "launch"}
        assert not allowed & set(PROCESSES)
        if package not in ("gpu_workers", "kernels"):
            assert not allowed & {"torch", "transformers", "kernels"}


@pytest.mark.parametrize(
    ("package", "source", "found"),
    [
        ("config", "import torch", ["torch"]),
        ("frontend", "def f():\n    from tokenizer_proc import main", ["tokenizer_proc"]),
        ("launch", "import huggingface_hub", ["huggingface_hub"]),
        ("launch", "def f():\n    import huggingface_hub", []),
        ("scheduler_proc", "import asyncio, numpy.random\nfrom config.schema import Config", []),
        ("gpu_workers", "from launch.machine import look_around", ["launch.machine"]),
        ("ipc", "from .codec import encode\nimport zmq.asyncio", []),
    ],
)
def test_the_rule_finds_what_it_should(package: str, source: str, found: list[str]) -> None:
    assert violations(package, ast.parse(source)) == found


def dangers(tree: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            if (node.module or "").partition(".")[0] in FORBIDDEN_MODULES:
                found.append(str(node.module))
            found += [name for name in names if name in FORBIDDEN_DOTTED]
        elif isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if node.attr in FORBIDDEN_ATTRIBUTES or dotted in FORBIDDEN_DOTTED:
                found.append(dotted)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            found.append(node.func.id)
        elif isinstance(node, ast.keyword) and node.arg in FORBIDDEN_ATTRIBUTES:
            found.append(str(node.arg))
    return found


@pytest.mark.parametrize("path", sources(*OURS), ids=name_of)
def test_nothing_unpickles_or_runs_foreign_code(path: Path) -> None:
    assert dangers(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import dumps",
        "def f(s):\n    s.send_pyobj(1)",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "eval('1')",
        "exec('1')",
        "f(trust_remote_code=True)",
    ],
)
def test_every_danger_is_seen(source: str) -> None:
    assert len(dangers(ast.parse(source))) == 1


def test_ordinary_names_are_no_danger() -> None:
    assert dangers(ast.parse("model.eval()\nimport torch\njson.load(f)\nre.compile('x')")) == []


TORCH_FREE = (
    "launch.__main__",
    "launch.child",
    "frontend.main",
    "tokenizer_proc.main",
    "tokenizer_proc.template_child",
    "tokenizer_proc.grammar_child",
    "scheduler_proc.main",
    "ipc.sdk",
)


@pytest.mark.parametrize("module", TORCH_FREE)
def test_torch_is_not_loaded_even_through_a_library(module: str) -> None:
    program = (
        f"import sys, {module}\nprint(*(name for name in ('torch', 'transformers', 'xgrammar') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_the_kernels_package_cannot_be_mistaken_for_another_of_that_name() -> None:
    # transformers probes for a package called "kernels" and asks for its version.
    assert (REPOSITORY / "kernels" / "__init__.py").read_text() == ""
