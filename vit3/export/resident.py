"""One runtime in a process of its own: load a file, run it, say how much memory that took.

Run as a script by :mod:`vit3.export.runtimes`, so that nothing is resident that this runtime does not need: no PyTorch
under onnxruntime, no timm under AOTInductor. The same function opens what is timed.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def open_runner(runtime: str, file: str, x: Any, threads: int, build: dict) -> Callable[[], Any]:
    """A function of no arguments that runs one batch.

    Args:
        runtime: ``eager``, ``torch.compile``, ``AOTInductor`` or ``onnxruntime``.
        file: safetensors for the first two, a package (.pt2), or an ONNX file.
        x: images (B, C, H, W), float32, of NumPy.
        threads: of the CPU.
        build: ``name`` and ``kwargs`` of ``timm.create_model``, for the first two.
    """
    if runtime == "onnxruntime":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        # its threads wait for more work in a busy loop, which would slow down the contender whose turn is next
        options.add_session_config_entry("session.force_spinning_stop", "1")
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        inputs = {session.get_inputs()[0].name: x}
        return lambda: session.run(None, inputs)[0]

    import torch

    torch.set_num_threads(threads)
    images = torch.from_numpy(x)
    if runtime == "AOTInductor":
        model = torch._inductor.aoti_load_package(file)
    else:
        import timm
        from safetensors.torch import load_file

        import vit3  # noqa: F401  registers the models

        model = timm.create_model(build["name"], **build["kwargs"]).eval()
        model.load_state_dict(load_file(file))
        if runtime == "torch.compile":
            model = torch.compile(model, dynamic=False)

    def call():
        with torch.inference_mode():
            y = model(images)
        return y[0] if isinstance(y, (tuple, list)) else y

    return call


def peak_bytes() -> int:
    """Largest resident set of this process since its program started.

    Linux counts in ``ru_maxrss`` what the process that started this one had resident, so there the kernel's own mark of
    this program is read.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return 1024 * int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    """Arguments as one JSON object; writes the output and prints peak bytes and seconds to the first answer."""
    started = time.perf_counter()
    options = json.loads(sys.argv[1])
    import numpy as np

    call = open_runner(
        options["runtime"], options["file"], np.load(options["input"]), options["threads"], options["build"]
    )
    y = np.asarray(call())
    ready = time.perf_counter() - started
    for _ in range(options["calls"] - 1):
        call()
    np.save(options["output"], y)
    print(json.dumps(dict(peak_bytes=peak_bytes(), ready_s=ready)))


if __name__ == "__main__":
    main()
