"""How numbers of things and lists of names are put into sentences."""

from collections import Counter

from data.images import extension_hint, printable

SHOWN = 10  # names in one message


def count_of(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def names_of(names: list[str], shown: int = SHOWN) -> str:
    listed = ", ".join(printable(name) for name in names[:shown])
    return listed if len(names) <= shown else f"{listed}, ... ({len(names)} in all)"


def by_extension(counts: Counter) -> str:
    pieces = []
    for extension, count in sorted(counts.items()):
        hint = extension_hint(extension)
        name = printable(extension) if extension else "without an extension"
        pieces.append(f"{count} {name}{f' ({hint})' if hint else ''}")
    return ", ".join(pieces)
