"""Which folders and images there are below a folder, and what was passed over there."""

import os
from collections import Counter
from dataclasses import dataclass, field

from data.errors import DataError
from data.images import printable, readable_extensions
from data.wording import by_extension, count_of, names_of

# What operating systems and programs leave behind; names that start with a dot are litter as well.
LITTER = {"__macosx", "@eadir", "$recycle.bin", "system volume information", "lost+found", "thumbs.db", "desktop.ini"}
LAYOUT = "expected is a folder per class (cat/1.jpg, dog/2.jpg), or train/ and val/ with a folder per class in each"

Classes = dict[str, list[str]]  # class name -> its images, relative to the root, sorted


@dataclass
class FolderReader:
    """Lists folders below `root` and counts what it leaves out. All paths are relative to `root`, with /."""

    root: str
    left_out: Counter = field(default_factory=Counter)  # by lower-case extension
    broken: list[str] = field(default_factory=list)  # links to nothing, sockets, pipes
    remarks: list[str] = field(default_factory=list)
    nested: int = 0
    images: int = 0

    def full(self, folder: str) -> str:
        return printable(os.path.normpath(os.path.join(self.root, folder)))

    def list_folder(self, folder: str) -> tuple[list[str], list[str]]:
        """The folders and the images directly in `folder`, each sorted by name."""
        folders, images = [], []
        try:
            with os.scandir(os.path.join(self.root, folder)) as entries:
                for entry in entries:
                    if not (entry.name.startswith(".") or entry.name.lower() in LITTER):
                        self._sort_in(entry, f"{folder}/{entry.name}" if folder else entry.name, folders, images)
        except OSError as error:
            raise DataError(f"{self.full(folder)}: {_folder_reason(error)}; {LAYOUT}") from error
        return sorted(folders), sorted(images)

    def _sort_in(self, entry: os.DirEntry, path: str, folders: list[str], images: list[str]) -> None:
        try:
            is_folder, is_file = entry.is_dir(), entry.is_file()  # both follow links
        except OSError:  # a link that leads back to itself
            is_folder = is_file = False
        extension = os.path.splitext(entry.name)[1].lower()
        if is_folder:
            folders.append(path)
        elif not is_file:
            self.broken.append(path)
        elif extension in readable_extensions():
            images.append(path)
        else:
            self.left_out[extension] += 1

    def list_top(self, folder: str) -> tuple[list[str], list[str]]:
        """`list_folder` of the folder that holds the class folders, with a remark about images in none of them."""
        folders, images = self.list_folder(folder)
        if folders and images:
            where = self.full(folder)
            self.remarks.append(f"{count_of(len(images), 'image')} directly in {where}, in no class folder: left out")
        return folders, images

    def list_tree(self, top: str) -> list[str]:
        """All images in and below `top`, sorted. Links are followed, each real folder is entered once."""
        real_root = os.path.realpath(self.root)
        seen, found, waiting = set(), [], [top]
        while waiting:
            folder = waiting.pop()
            real = os.path.realpath(os.path.join(self.root, folder))
            if os.path.commonpath([real, real_root]) == real:  # going on would take in the other classes
                self.remarks.append(f"{printable(folder)} links to a folder around all the data: not followed")
                continue
            if real in seen:
                continue
            seen.add(real)
            folders, images = self.list_folder(folder)
            waiting += reversed(folders)
            found += images
            self.nested += len(images) if folder != top else 0
        self.images += len(found)
        return sorted(found)

    def read_classes(self, folders: list[str], loose: list[str]) -> Classes:
        """The images of each class folder; `loose` only serves the message if there is no class folder."""
        if not folders and loose:
            where = self.full(os.path.dirname(loose[0]))
            raise DataError(f"{where}: {count_of(len(loose), 'image')} but no class folder; {LAYOUT}")
        return {os.path.basename(folder): self.list_tree(folder) for folder in folders}

    def note_unused(self, folders: list[str], parts: tuple[str, str]) -> None:
        unused = [folder for folder in folders if folder not in parts]
        if unused:
            self.remarks.append(f"beside {' and '.join(parts)}, not used: {names_of(unused)}")

    def notes(self) -> list[str]:
        notes = list(self.remarks)
        if self.nested:
            notes.append(f"{self.nested} of {self.images} images lie in folders inside a class folder, and are used")
        if self.left_out:
            notes.append(f"left out by extension: {by_extension(self.left_out)}")
        if self.broken:
            notes.append(
                f"{count_of(len(self.broken), 'broken link or special file', 'broken links or special files')} "
                f"left out: {names_of(sorted(self.broken))}"
            )
        return notes


def _folder_reason(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such folder"
    if isinstance(error, NotADirectoryError):
        return "is a file, not a folder"
    return (error.strerror or str(error)).lower()


def images_below(folder: str) -> list[str]:
    """The paths of all images in `folder` and the folders in it, sorted. Raises DataError if it cannot be listed."""
    parent, name = os.path.split(os.path.abspath(folder))
    return [os.path.join(folder, image[len(name) + 1 :]) for image in FolderReader(parent).list_tree(name)]
