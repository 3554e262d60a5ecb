"""Package metadata. The tested environment stands in requirements.txt."""

from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
requirements = [
    line.split("#")[0].strip()
    for line in (here / "requirements.txt").read_text().splitlines()
    if line.split("#")[0].strip()
]

setup(
    name="vit3",
    version="0.1.0",
    description="Vision Test-Time Training (ViT³): models, training and the whole design space",
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    # tools/ and configs/ stay at the top of the tree and travel as vit3.tools and vit3.configs
    packages=[*find_packages(include=["vit3", "vit3.*"]), "vit3.tools", "vit3.configs"],
    package_dir={"vit3.tools": "tools", "vit3.configs": "configs"},
    package_data={"vit3": ["**/*.json", "**/*.md"], "vit3.configs": ["**/*.yaml", "*/*.py"]},
    install_requires=requirements,
    extras_require={
        # detection and segmentation through OpenMMLab (the maintained forks, under the same import names)
        "mm": [
            "onedl-mmengine>=0.10.12",
            "onedl-mmcv>=2.3.6",
            "onedl-mmdetection>=3.5.1",
            "onedl-mmsegmentation>=1.4.2",
            "pycocotools>=2.0.8",
        ],
        "det": ["pycocotools>=2.0.8"],  # detection by torchvision's detectors, without OpenMMLab
        "gen": ["diffusers>=0.35", "torch-fidelity>=0.4"],  # image generation
        "export": ["onnx>=1.18", "onnxscript>=0.5", "onnxruntime>=1.22"],  # format=onnx of tools/export.py
        # sweeps as jobs; they run with hydra-core 1.3 on Python 3.11
        "cluster": ["hydra-submitit-launcher>=1.2,<2"],  # hydra/launcher=slurm
        "joblib": ["hydra-joblib-launcher>=1.2,<2"],  # hydra/launcher=joblib: several cells at once on this machine
        "ray": ["hydra-ray-launcher>=1.2.2,<2"],  # hydra/launcher=ray
        "data": ["webdataset>=0.2.86", "datasets>=2.19"],  # shards read as a stream; Hugging Face data sets
        "tensorboard": ["tensorboard>=2.14"],
        "dev": [
            "pytest>=8",
            "pytest-xdist>=3.8",
            "ruff>=0.6",
            "hydra-submitit-launcher>=1.2,<2",
            "hydra-joblib-launcher>=1.2,<2",
            "tensorboard>=2.14",
            "webdataset>=0.2.86",
            "datasets>=2.19",
        ],
    },
    entry_points={
        "console_scripts": [
            "vit3-train=vit3.tools.train:main",
            "vit3-eval=vit3.tools.eval:main",
            "vit3-sample=vit3.tools.sample:main",
            "vit3-eval-generation=vit3.tools.eval_generation:main",
            "vit3-cache-latents=vit3.tools.cache_latents:main",
            "vit3-det=vit3.tools.det:main",
            "vit3-seg=vit3.tools.seg:main",
            "vit3-convert=vit3.tools.convert:main",
            "vit3-export=vit3.tools.export:main",
            "vit3-predict=vit3.tools.predict:main",
            "vit3-doctor=vit3.tools.doctor:main",
            "vit3-plan=vit3.tools.plan:main",
            "vit3-selftest=vit3.tools.selftest:main",
            "vit3-summarize=vit3.tools.summarize:main",
            "vit3-probe=vit3.tools.probe:main",
            "vit3-flops=vit3.tools.flops:main",
            "vit3-benchmark=vit3.tools.benchmark:main",
        ]
    },
)
