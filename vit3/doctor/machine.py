"""The machine and its packages, whatever is to be run on it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from packaging.requirements import Requirement

import vit3
from vit3.doctor.check import FAIL, OK, WARNING, Check
from vit3.ops.backend import implementation

# distribution: what it is for, and how to get it
OPTIONAL = {
    "triton": ("fused kernels on a GPU", "pip install triton"),
    "wandb": ("logger=wandb", "pip install wandb"),
    "tensorboard": ("curves in TensorBoard", "pip install tensorboard"),
    "webdataset": ("data in tar shards", "pip install webdataset"),
    "datasets": ("data of the Hugging Face hub", "pip install datasets"),
    "onnx": ("export", "pip install 'vit3[export]'"),
    "diffusers": ("image generation", "pip install 'vit3[gen]'"),
    "mmdet": ("detection", "pip install 'vit3[mm]'"),
    "mmsegmentation": ("segmentation", "pip install 'vit3[mm]'"),
    "hydra-submitit-launcher": ("runs on a Slurm cluster", "pip install 'vit3[cluster]'"),
}
_ALIASES = {"mmdet": ("onedl-mmdetection",), "mmsegmentation": ("onedl-mmsegmentation",)}  # maintained forks


def machine_checks() -> Iterator[Check]:
    """Everything about the machine, without regard to a configuration."""
    yield python()
    yield required_packages(requirements())
    yield optional_packages()
    yield processors()
    yield from graphics()
    yield kernels()


def python() -> Check:
    """Python's version against what the package asks for."""
    version = platform.python_version()
    if tuple(map(int, version.split(".")[:2])) < (3, 10):
        return Check("python", FAIL, f"Python {version} is too old", "use Python 3.10 or newer")
    return Check("python", OK, f"{version} on {platform.system()} {platform.machine()}")


def requirements() -> list[str]:
    """Lines of requirements.txt in a checkout, else what the installed package says of itself."""
    file = Path(vit3.__file__).parent.parent / "requirements.txt"
    if file.exists():
        lines = [line.split("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines()]
        return [line for line in lines if line]
    return [line for line in importlib.metadata.requires("vit3") or [] if "extra ==" not in line]


def required_packages(wanted: list[str]) -> Check:
    """Installed versions against ``wanted``, lines such as ``torch>=2.6``."""
    found, wrong = [], []
    for requirement in map(Requirement, wanted):
        version = installed(requirement.name)
        found.append(f"{requirement.name} {version}")
        if version is None or not requirement.specifier.contains(version.split("+")[0], prereleases=True):
            wrong.append(f"{requirement.name} is {version or 'not installed'}, needed: {requirement.specifier}")
    if wrong:
        return Check("packages", FAIL, ", ".join(wrong), "pip install -r requirements.txt")
    return Check("packages", OK, ", ".join(found))


def installed(name: str) -> str | None:
    """Version of a distribution, None where it is not installed."""
    for candidate in (name, *_ALIASES.get(name, ())):
        try:
            return importlib.metadata.version(candidate)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def optional_packages() -> Check:
    """What is there and what is not, and what for; nothing of it is a fault."""
    versions = {name: installed(name) for name in OPTIONAL}
    there = [f"{name} {version}" for name, version in versions.items() if version]
    missing = [f"{name} ({use}: {cure})" for name, (use, cure) in OPTIONAL.items() if not versions[name]]
    lacking = f"; not installed: {', '.join(missing)}" if missing else ""
    return Check("optional", OK, (", ".join(there) or "none") + lacking)


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processors() -> Check:
    """CPU cores against threads."""
    threads, available = torch.get_num_threads(), cores()
    detail = f"{available} cores for this process, PyTorch uses {threads} threads"
    if threads > available:
        return Check("cpu", WARNING, detail, f"set engine.threads={available}, or OMP_NUM_THREADS={available}")
    return Check("cpu", OK, detail)


def graphics() -> Iterator[Check]:
    """One line for each GPU, or why PyTorch sees none."""
    build = f"torch {torch.__version__} (CUDA {torch.version.cuda or 'none'})"
    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") and torch.version.cuda is None:
            yield Check("gpu", WARNING, f"this machine has an NVIDIA driver, but {build} is a build without CUDA",
                        "install a CUDA build of torch (pytorch.org)")  # fmt: skip
        elif shutil.which("nvidia-smi"):
            yield Check("gpu", WARNING, f"this machine has an NVIDIA driver, but {build} sees no GPU",
                        "update the driver, check CUDA_VISIBLE_DEVICES, or take torch for an older CUDA")  # fmt: skip
        else:
            yield Check("gpu", OK, f"none; {build} computes on the CPU")
        return
    built_for = torch.cuda.get_arch_list()
    for number in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(number)
        free = torch.cuda.mem_get_info(number)[0]
        detail = (
            f"{number}: {p.name}, {p.total_memory / 1e9:.0f} GB ({free / 1e9:.0f} GB free), sm_{p.major}{p.minor}, "
            f"bfloat16 {'yes' if p.major >= 8 else 'slow or no'}; {build}"
        )
        if free < 0.8 * p.total_memory:
            yield Check("gpu", WARNING, detail, "another program uses this GPU's memory; see nvidia-smi")
        elif built_for and not any(int(a.split("_")[-1].rstrip("af")) // 10 == p.major for a in built_for):
            yield Check("gpu", WARNING, f"{detail} is built for {', '.join(built_for)}", "install a build for this GPU")
        else:
            yield Check("gpu", OK, detail)


def kernels() -> Check:
    """Which implementation of the inner step ``auto`` takes here."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        return Check("kernels", OK, "backend=auto takes fused on a CPU; Triton needs a GPU")
    try:
        implementation("glu_ttt", "triton", torch.empty(0, device=device), 32)
    except ValueError as error:
        return Check(
            "kernels", WARNING, f"backend=auto takes fused here: {error}", "python tools/selftest.py says more"
        )
    return Check("kernels", OK, "backend=auto takes Triton; python tools/selftest.py tests it")
