"""Convert a downloaded official checkpoint: ``python tools/convert.py IN.pth OUT.safetensors``."""

from __future__ import annotations

import argparse
import sys

from vit3.models.official import OFFICIAL_NAMES, convert


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert an official ViT³ checkpoint to safetensors with our names.")
    parser.add_argument("source", metavar="IN.pth", help="the authors' file; none of its pickled code is run")
    parser.add_argument("target", metavar="OUT.safetensors")
    parser.add_argument("--model", choices=OFFICIAL_NAMES, help="default: the model whose tensors fit best")
    parser.add_argument("--ema", action="store_true", help="take the moving average instead of the raw weights")
    options = parser.parse_args()
    try:
        report = convert(options.source, options.target, options.model, ema=options.ema)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{options.target}: {report}")


if __name__ == "__main__":
    main()
