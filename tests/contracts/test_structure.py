"""The public surface, and what an import brings with it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import stquant

SOURCE = Path(stquant.__file__).parent


def test_the_public_names_are_these() -> None:
    assert set(stquant.__all__) == {
        *("AdamW", "Adam", "SGD", "Lion", "Fixed", "Budget", "Tolerance", "Policy"),
        *("cast_model", "export_fp32", "formats"),
        *("memory", "register_policy", "release_gradients"),
        *("StquantError", "AgreementError", "BackendError", "BudgetError", "CheckpointError", "FormatError"),
    }
    for exported in stquant.__all__:
        assert getattr(stquant, exported).__doc__


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("stquant.codecs.catalog", ("stquant.kernels", "stquant.storage", "stquant.optim")),
        ("stquant.kernels.backend", ("stquant.storage", "stquant.policy", "stquant.optim")),
        ("stquant.policy.policies", ("stquant.kernels", "stquant.storage", "stquant.optim")),
    ],
)
def test_floors_do_not_load_what_stands_above(module: str, absent: tuple[str, ...]) -> None:
    """The package itself is skipped: its `__init__` gathers the public names from above."""
    script = (
        "import sys, types, importlib\n"
        f"package = types.ModuleType('stquant'); package.__path__ = [{str(SOURCE)!r}]\n"
        "sys.modules['stquant'] = package\n"
        f"importlib.import_module({module!r})\n"
        "print(*sorted(m for m in sys.modules if m.startswith('stquant.')))"
    )
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not [name for name in loaded if name.startswith(absent)]


def test_importing_prints_nothing_and_loads_no_extra() -> None:
    script = (
        "import sys, stquant\n"
        "extras = {'transformers', 'mlxtend', 'matplotlib', 'typer', 'rich', 'triton'}\n"
        "sys.exit(' '.join(extras & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_only_checkpoint_and_distributed_may_import_torch_distributed() -> None:
    for path in SOURCE.rglob("*.py"):
        names = {
            alias
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        }
        if path.parent.name not in ("checkpoint", "distributed"):
            assert not any(name.startswith("torch.distributed") for name in names), path


def test_only_the_triton_kernels_import_triton() -> None:
    for path in SOURCE.rglob("*.py"):
        if path.parent.name != "triton":
            imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import)]
            assert not [alias for node in imports for alias in node.names if alias.name.split(".")[0] == "triton"], path


def test_without_triton_the_package_works() -> None:
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, stquant\n"
        "from stquant.kernels import backend\n"
        "parameter = torch.nn.Parameter(torch.ones(64, 128)); parameter.grad = torch.ones(64, 128)\n"
        "stquant.AdamW([parameter]).step()\n"
        "print({e.name: e.available for e in backend.explain()}['triton'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_files_stay_readable() -> None:
    long = {str(path): n for path in SOURCE.rglob("*.py") if (n := len(path.read_text().splitlines())) > 400}
    assert not long
