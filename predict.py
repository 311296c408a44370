"""Names what is in images, with a model that was trained here.

    python predict.py photo.jpg                             the newest run's best model
    python predict.py photos/ more/*.jpg --output found.csv
    python predict.py photo.jpg --weights runs/.../best.pth --top-k 3

One line per image. Exit code 0: every image was classified; 1: some were not, and are named; 2: a usage error.
"""

import sys
from pathlib import Path

from data.images import printable
from data.listing import images_below
from utils.distributed_utils import choose_device
from utils.errors import UserError, run_script
from utils.options import parse_prediction_options
from utils.prediction_files import write_rows
from utils.predictor import load_predictor
from utils.run import newest_checkpoint


def main() -> None:
    args = parse_prediction_options(__doc__)
    predictor = load_predictor(args.weights or newest_checkpoint(), choose_device(args.device))
    rows, failed = [], 0
    for row in predictor.rows(expand(args.paths), args.top_k):
        rows.append(row)
        failed += "error" in row
        print(line(row), file=sys.stderr if "error" in row else sys.stdout, flush=True)
    if args.output:
        write_rows(rows, args.output)
    if failed:
        print(f"{failed} of {len(rows)} inputs could not be classified", file=sys.stderr)
        sys.exit(1)


def expand(paths: list[str]) -> list[str]:
    """Files as they are, folders as the images below them. Raises UserError for an address or an empty folder."""
    files = []
    for path in paths:
        if "://" in path:
            raise UserError(f"{path} is an address, not a file: download it first")
        found = images_below(path) if Path(path).is_dir() else [path]
        if not found:
            raise UserError(f"no images in the folder {path}")
        files += found
    return files


def line(row: dict) -> str:
    """`photo.jpg: daisy 0.9731`, with --top-k the others after it."""
    if "error" in row:
        return f"error: {row['error']}"
    answers = ", ".join(f"{printable(best['class'])} {best['probability']:.4f}" for best in row["top"])
    return f"{printable(row['path'])}: {answers}"


if __name__ == "__main__":
    run_script(main)
