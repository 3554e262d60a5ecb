"""Pack an ImageFolder into WebDataset shards: ``python scripts/pack_shards.py ROOT OUT [--megabytes 200]``.

ROOT/{train,val}/CLASS/* becomes OUT/NAME-train-000000.tar, ..., OUT/NAME-val-000000.tar, ... and OUT/info.json, which
``data=wds data.root=OUT`` and timm's ``wds/`` data sets read. Stopped, it goes on with the same command.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from vit3.data import make_data, preflight
from vit3.data.pack import plan_packing, write_shards
from vit3.engine.progress import progress
from vit3.errors import UserError


def pack(args: argparse.Namespace) -> str:
    """Check the folder as training does, pack it, and return the line that says what was done."""
    data = make_data("folder", str(args.root), 3, "raise")
    preflight(data)  # decodes a sample of the images
    packing = plan_packing(
        {"train": data.train.reader.samples, "val": data.val.reader.samples},
        data.classes,
        args.out,
        name=args.name or args.root.resolve().name,
        images_per_shard=args.images,
        bytes_per_shard=None if args.images is not None else args.megabytes * 10**6,
        seed=args.seed,
    )
    with progress("shards", len(packing.shards), enabled=True) as advance:
        counts = write_shards(packing, advance)
    return (
        f"{counts['images']:,} images of {len(data.classes)} classes in {len(packing.shards)} shards, "
        f"{counts['bytes'] / 1e6:,.1f} MB ({counts['written']} written, {counts['kept']} were there): {args.out}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("root", type=Path, help="folder that holds train/CLASS/* and val/CLASS/*")
    parser.add_argument("out", type=Path, help="folder for the shards")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--images", type=int, help="images per shard")
    size.add_argument("--megabytes", type=int, default=200, help="size of a shard, 200 if nothing is said")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the images")
    parser.add_argument("--name", help="first part of the shards' names; the folder's name if not given")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        print(pack(parser.parse_args()))
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("error: stopped; the same command goes on with the shards that are missing", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
