"""What an import costs and pulls in, and which room may import which."""

import ast
import functools
import json
import statistics
import subprocess
import sys

import pytest

from tests.helpers import ROOT

# What each room of vit3/ may import from vit3/; rooms not named here are held by FORBIDDEN alone.
ALLOWED = {
    "ops": {"ops"},
    "inner": {"inner", "ops"},
    "layers": {"layers", "ops"},
    "mixers": {"mixers", "layers", "inner", "ops"},
    "models": {"models", "layers", "mixers", "inner", "ops", "files"},
    "analysis": {"analysis", "sweeps", "diffusion", "models", "layers", "mixers", "inner", "ops", ""},
    "data": {"data", "seeding", "files", "errors"},
    "detection": {"detection", "analysis", "models", "data", "engine", "config", "errors"},
    "diffusion": {"diffusion", "seeding", "errors"},
    "generation": {
        "generation",
        "diffusion",
        "analysis",
        "models",
        "data",
        "engine",
        "config",
        "seeding",
        "files",
        "errors",
    },
    "tasks": {"tasks", "diffusion"},
    "engine": {"engine", "data", "seeding", "files", "errors", "__version__"},
    "sweeps": {"sweeps", "engine", "config", "arguments", "files", "errors"},
    "doctor": {"doctor", "engine", "data", "mixers", "ops", "config", "errors", ""},
    "export": {
        *("export", "analysis", "models", "layers", "mixers", "inner", "ops"),
        *("files", "errors", "__version__", ""),
    },
    "openmmlab": {
        *("openmmlab", "models", "layers", "mixers", "inner", "ops"),
        *("engine", "data", "analysis", "doctor", "config", "errors"),
    },
}
# Doors open one way: only tools import build, and build imports the rest. inference.py stands at the top, as tools do;
# the package hands out its predict when it is asked for.
FORBIDDEN = {"build", "tools", "inference"}
TOP = {"inference.py": {"build"}, "__init__.py": {"inference"}}
TORCH_ONLY = ("ops/", "inner/", "mixers/", "layers/")


def files(*rooms):
    paths = sorted((ROOT / "vit3").rglob("*.py"))
    paths = [path.relative_to(ROOT / "vit3").as_posix() for path in paths]
    return [path for path in paths if not rooms or path.startswith(rooms)]


@functools.cache
def imports(path):
    """Dotted names that a file imports, at its top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / "vit3" / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def rooms_of(path):
    return {(name.split(".") + [""])[1] for name in imports(path) if name.split(".")[0] == "vit3"}


def python(code, *args):
    """Run code in a fresh interpreter; returns what it printed as JSON."""
    result = subprocess.run([sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("path", files(*(f"{room}/" for room in ALLOWED)))
def test_doors(path):
    assert rooms_of(path) <= ALLOWED[path.split("/")[0]]


@pytest.mark.parametrize("path", ["errors.py", "files.py", "seeding.py"])
def test_ground_floor_stands_on_nothing(path):
    assert rooms_of(path) == set()


@pytest.mark.parametrize("path", [p for p in files() if not p.startswith("build/")])
def test_nothing_reaches_up(path):
    assert not rooms_of(path) & FORBIDDEN - TOP.get(path, set())
    assert not {name for name in imports(path) if name.split(".")[0] in ("tools", "configs", "tests")}


@pytest.mark.parametrize("path", files(*TORCH_ONLY))
def test_torch_only(path):
    allowed = {"torch", "vit3", *sys.stdlib_module_names}
    if path == "ops/launch.py" or path.startswith("ops/") and path.endswith("triton.py"):
        allowed.add("triton")
    assert {name.split(".")[0] for name in imports(path)} <= allowed


@functools.cache
def measured_import(_repeat):
    """What ``import vit3`` does after ``import timm``: seconds of both, modules added, global switches."""
    return python(
        """
import json, sys, time
def switches():
    return [str(torch.get_default_dtype()), torch.get_num_threads(), torch.is_grad_enabled(), torch.initial_seed(),
            torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()]
a = time.perf_counter()
import timm
b = time.perf_counter()
import torch
torch.manual_seed(3)
modules, before = set(sys.modules), switches()
c = time.perf_counter()
import vit3
d = time.perf_counter()
print(json.dumps(dict(timm=b - a, vit3=d - c, added=sorted(set(sys.modules) - modules), switches=[before, switches()])))
"""
    )


def test_import_adds_no_heavy_package():
    added = {name.split(".")[0] for name in measured_import(0)["added"]}
    assert "vit3" in added and "vit3.diffusion.guidance" in measured_import(0)["added"]  # vit3.diffusion.guided
    heavy = {"triton", "hydra", "omegaconf", "wandb", "matplotlib", "sklearn", "rich", "onnx", "diffusers"}
    assert not {name for name in added if name in heavy or name.startswith("mm")}


def test_import_time():
    """``import vit3`` takes at most 1.3 times as long as ``import timm``, which it contains.

    Each run takes seconds: where most of three say so is known after two of them, if they agree.
    """
    bound, ratios = 1.3, []
    while len(ratios) < 2 or len(ratios) < 3 and (ratios[0] <= bound) != (ratios[1] <= bound):
        run = measured_import(len(ratios))
        ratios.append((run["timm"] + run["vit3"]) / run["timm"])
    assert statistics.median(ratios) <= bound


def test_mixer_needs_torch_alone():
    """With everything but torch made unimportable, the mixer trains."""
    code = """
import json, sys
for name in ("timm", "torchvision", "hydra", "omegaconf", "triton", "safetensors", "PIL", "sklearn"):
    sys.modules[name] = None
import torch, vit3
from vit3.layers.rope import RoPE2d
from vit3.mixers import MIXERS, create_mixer
from vit3.ops import glu_ttt
from vit3.inner import inner_train
for mixer in (vit3.TTT(16, 2), *(create_mixer(name, 16, 2) for name in MIXERS)):
    y = mixer(torch.randn(2, 15, 16), 3, 5, rope=RoPE2d(16))
    y.square().sum().backward()
    assert all(p.grad is not None for p in mixer.parameters())
try:
    vit3.create_model("vit3_tiny")
except ModuleNotFoundError as error:
    print(json.dumps(str(error)))
"""
    assert python(code) == "vit3.create_model needs timm: pip install timm"


def test_nothing_global_changes():
    before, after = measured_import(0)["switches"]
    assert before == after
