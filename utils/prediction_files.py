"""Prediction rows as files: CSV, JSON, or JSON lines."""

import csv
import io
import json
from pathlib import Path

from data.files import whole_file
from utils.errors import UserError

COLUMNS = ("path", "class", "probability", "accepted", "error")


def write_rows(rows: list[dict], path: str) -> None:
    """Writes the rows in the format that the name's ending says, whole or not at all.

    Raises:
        UserError: the file cannot be written.
    """
    text = {".csv": _as_csv, ".json": _as_json, ".jsonl": _as_json_lines}[Path(path).suffix.lower()](rows)
    try:
        with whole_file(path, newline="") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): choose another --output") from None


def _as_csv(rows: list[dict]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _as_json(rows: list[dict]) -> str:
    return json.dumps(rows, indent=2, ensure_ascii=False) + "\n"


def _as_json_lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
