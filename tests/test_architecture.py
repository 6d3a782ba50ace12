"""The house keeps its shape: who imports whom, what is public, which modules stay out of which rooms."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "pagemill"
SOURCES = sorted(PACKAGE.rglob("*.py"))

FOUNDATION = {"errors", "config", "params", "param_types", "model_config", "__init__"}
# room -> rooms it may import; itself and the foundation always
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "config": set(),
    "params": set(),
    "param_types": set(),
    "model_config": set(),
    "platform": set(),
    "memory_plan": {"platform", "core"},
    "core": set(),
    "kernels": {"platform", "_native"},
    "quant": {"platform", "kernels", "_native", "models"},
    "layers": {"platform", "kernels", "quant"},
    "models": {"platform", "kernels", "quant", "layers"},
    "sampling": {"platform", "kernels", "_native"},
    "worker": {"platform", "memory_plan", "core", "kernels", "quant", "layers", "models", "sampling", "_native"},
    "engine": {"core", "worker", "models", "memory_plan"},
    "server": {"engine", "models"},
    "cli": {"engine", "server", "models", "bench", "worker", "memory_plan", "platform"},
    "bench": {"engine", "models"},
    "__main__": {"cli"},
}
MODULE_LIMITS: dict[str, set[str]] = {
    "engine -> worker": {"pagemill.worker.executor"},
    "worker -> core": {"pagemill.core.messages", "pagemill.core.kv_cache"},
    "memory_plan -> core": {"pagemill.core.kv_cache"},
    "engine -> models": {
        "pagemill.models.sources",
        "pagemill.models.checkpoint",
        "pagemill.models.tokenizer",
        "pagemill.models.chat_template",
    },
    "quant -> models": {"pagemill.models.checkpoint", "pagemill.models.gguf_blocks", "pagemill.models.gguf"},
}


def room(path: Path) -> str:
    """The top-level room of a source file."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported_modules(path: Path) -> Iterator[str]:
    """Absolute names of the modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            for alias in node.names:
                inner = PACKAGE.parent / Path(*node.module.split("."))
                is_module = (inner / f"{alias.name}.py").exists() or (inner / alias.name).is_dir()
                yield f"{node.module}.{alias.name}" if is_module else node.module


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_stay_within_the_rules(path: Path) -> None:
    here = room(path)
    if here == "__init__":
        return
    assert here in ALLOWED, f"{here} is a new room: say in this test what it may import"
    for module in imported_modules(path):
        if not module.startswith("pagemill."):
            continue
        there = module.split(".")[1]
        if there == here or there in FOUNDATION:
            continue
        assert there in ALLOWED[here], f"{path.relative_to(PACKAGE)} imports {module}"
        limits = MODULE_LIMITS.get(f"{here} -> {there}")
        assert limits is None or module in limits, f"{path.relative_to(PACKAGE)} imports {module}"


@pytest.mark.parametrize(
    ("needle", "allowed"),
    [
        ("torch.cuda", {"platform.py", "worker/graphs.py"}),
        ("torch.distributed", {"worker/parallel.py"}),
        ("os.environ", {"config.py"}),
    ],
)
def test_names_that_only_some_modules_may_use(needle: str, allowed: set[str]) -> None:
    users = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith(needle):
                users.add(str(path.relative_to(PACKAGE)))
    assert {user for user in users if not user.startswith("kernels/triton")} <= allowed


@pytest.mark.parametrize(
    "module",
    [
        "pagemill",
        "pagemill.core.scheduler",
        "pagemill.config",
        "pagemill.params",
        "pagemill.server.app",
        "pagemill.engine.client",
        "pagemill.models.tokenizer",
    ],
)
def test_importing_what_needs_no_torch_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_package_has_no_import_cycles() -> None:
    graph: dict[str, set[str]] = {}
    names = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__") for path in SOURCES
    }
    for path in SOURCES:
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(path.read_text())
        lazy = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for inner in ast.walk(node)
        }
        graph[name] = {
            target
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in lazy
            for target in _targets(node)
            if target in names and target != name
        }
    state: dict[str, int] = {}

    def visit(name: str, trail: list[str]) -> None:
        if state.get(name) == 2:
            return
        assert state.get(name) != 1, f"import cycle: {' -> '.join([*trail, name])}"
        state[name] = 1
        for target in graph[name]:
            visit(target, [*trail, name])
        state[name] = 2

    for name in sorted(graph):
        visit(name, [])


def _targets(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]


def test_public_names_are_the_documented_ones() -> None:
    import pagemill

    assert set(pagemill.__all__) == {
        "LLM", "AsyncLLM", "SamplingParams", "RequestOutput", "CompletionOutput", "Logprob", "FinishReason",
        "BeamSearchParams", "EngineConfig", "ServerConfig", "StructuredOutputsParams", "errors", "__version__",
        "PoolingParams", "EmbeddingRequestOutput", "ScoringRequestOutput",
    }  # fmt: skip
    for name in pagemill.__all__:
        assert getattr(pagemill, name) is not None


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_says_what_it_is_and_stays_readable(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), f"{path}: no docstring"
    assert text.count("\n") <= 500, f"{path}: more than 500 lines"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60, f"{path}: {node.name} is longer than 60 lines"
