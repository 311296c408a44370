"""Which image trains and which validates: exact counts, stable choices, and one sentence for each mistake."""

import csv
import os
import random
import shutil

import pytest

from data.errors import DataError
from data.split import Split, make_split, read_split, write_split


def fill(root, **classes: int) -> str:
    """Empty files are enough: a split looks at names only."""
    for name, count in classes.items():
        for index in range(count):
            touch(root, f"{name}/img_{index:03d}.jpg")
    return str(root)


def touch(root, *paths: str) -> str:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    return str(root)


def split_of(root, *, val_rate: float = 0.2, seed: int = 0, num_classes: int | None = None) -> Split:
    return make_split(str(root), val_rate=val_rate, seed=seed, num_classes=num_classes)


def mistake(root, **options) -> str:
    with pytest.raises(DataError) as caught:
        split_of(root, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def relative(split: Split, part: str) -> set[str]:
    return {os.path.relpath(path, split.root) for path, _ in getattr(split, part)}


def test_split_per_class(tmp_path):
    split = split_of(fill(tmp_path, red=12, green=12, blue=12))
    assert split.classes == ("blue", "green", "red")
    assert split.counts() == [("blue", 10, 2), ("green", 10, 2), ("red", 10, 2)]
    assert split.notes == ()
    assert split.root == str(tmp_path)
    assert split.train == sorted(split.train)
    every = relative(split, "train") | relative(split, "val")
    assert len(every) == 36
    assert all(split.classes[label] == path.split("/")[-2] for path, label in split.train + split.val)


@pytest.mark.parametrize(
    ("count", "rate", "val"), [(200, 0.2, 40), (5, 0.2, 1), (100, 0.29, 29), (10, 0.99, 9), (9, 0.2, 1)]
)
def test_validation_count(tmp_path, count, rate, val):
    assert split_of(fill(tmp_path, a=count, b=100), val_rate=rate).counts()[0] == ("a", count - val, val)


def test_at_least_one_image_trains(tmp_path):
    assert split_of(fill(tmp_path, a=1, b=100), val_rate=0.9999999999).counts() == [("a", 1, 0), ("b", 1, 99)]


def test_the_choice_is_fixed_for_all_time(tmp_path):
    split = split_of(fill(tmp_path, a=10, b=10), seed=7)
    assert relative(split, "val") == {"a/img_000.jpg", "a/img_008.jpg", "b/img_004.jpg", "b/img_006.jpg"}


def test_seed_decides_and_listing_order_and_place_do_not(tmp_path, monkeypatch):
    first = split_of(fill(tmp_path / "one", a=50, b=50))
    assert relative(first, "val") != relative(split_of(tmp_path / "one", seed=1), "val")
    shutil.copytree(tmp_path / "one", tmp_path / "two" / "deep")
    scandir = os.scandir

    class Shuffled:
        def __init__(self, path):
            self.entries = list(scandir(path))
            random.Random(str(path)).shuffle(self.entries)

        def __enter__(self):
            return iter(self.entries)

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(os, "scandir", Shuffled)
    second = split_of(tmp_path / "two" / "deep")
    assert [os.path.relpath(path, second.root) for path, _ in second.val] == sorted(relative(first, "val"))
    assert relative(second, "train") == relative(first, "train")


def test_a_relative_root_gives_the_same_split(tmp_path, monkeypatch):
    fill(tmp_path / "d", a=10, b=10)
    monkeypatch.chdir(tmp_path)
    assert split_of("d/") == split_of(tmp_path / "d")


def test_adding_images_moves_few_of_the_old(tmp_path):
    seeds = range(50)
    before = [split_of(fill(tmp_path, a=100, b=100), seed=seed) for seed in seeds]
    touch(tmp_path, *(f"a/new_{index}.jpg" for index in range(10)))
    moves = []
    for seed in seeds:
        after = split_of(tmp_path, seed=seed)
        assert after.counts() == [("a", 88, 22), ("b", 80, 20)]
        joined = relative(before[seed], "train") & relative(after, "val")
        left = relative(before[seed], "val") & relative(after, "train")
        assert not (joined and left)  # all in one direction: no more than the new ones force
        assert not any(path.startswith("b/") for path in joined | left)
        moves.append(len(joined | left))
    # The exact number of validation images forces |2 - k| moves where k new ones are drawn; a new shuffle makes 32.
    assert sum(moves) / len(moves) < 1.5
    assert max(moves) <= 4


def test_train_and_val_folders(tmp_path):
    fill(tmp_path / "train", a=3, b=2)
    fill(tmp_path / "val", a=1, b=2)
    split = split_of(tmp_path)
    assert split.counts() == [("a", 3, 1), ("b", 2, 2)]
    assert split.notes == ()
    assert split == split_of(tmp_path, val_rate=0.9, seed=3)
    fill(tmp_path / "test", a=1)
    touch(tmp_path, "loose.jpg")
    assert split_of(tmp_path).notes == (
        f"1 image directly in {tmp_path}, in no class folder: left out",
        "beside train and val, not used: test",
    )


def test_train_and_val_hold_different_classes(tmp_path):
    fill(tmp_path / "train", a=2, b=2, c=2)
    fill(tmp_path / "val", b=2, c=2, d=2)
    assert mistake(tmp_path).endswith("; only in train: a; only in val: d")


def test_empty_folders_in_train_and_val(tmp_path):
    fill(tmp_path / "train", a=2, b=2)
    fill(tmp_path / "val", a=2)
    (tmp_path / "val" / "b").mkdir()
    (tmp_path / "train" / "c").mkdir()
    (tmp_path / "val" / "e").mkdir()
    split = split_of(tmp_path)
    assert split.counts() == [("a", 2, 2), ("b", 2, 0)]
    assert split.notes == ("b: 0 validation images", "2 folders without images, left out of the classes: c, e")
    fill(tmp_path / "val", c=1)
    assert mistake(tmp_path).endswith("; only in val: c")
    shutil.rmtree(tmp_path / "val")
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "a").mkdir()
    (tmp_path / "val" / "b").mkdir()
    assert f"{tmp_path}/val: no images to validate with" in mistake(tmp_path)


def test_the_validation_folder_has_another_name(tmp_path):
    fill(tmp_path / "train", a=2, b=2)
    fill(tmp_path / "valid", a=2, b=2)
    assert mistake(tmp_path).startswith(f"{tmp_path}: no val folder, found: train, valid; expected is")


def test_a_class_may_be_called_train(tmp_path):
    assert split_of(fill(tmp_path, car=5, train=5)).counts() == [("car", 4, 1), ("train", 4, 1)]


def test_empty_class_is_named_and_moves_no_label(tmp_path):
    fill(tmp_path, blue=10, red=10)
    (tmp_path / "nothing_here").mkdir()
    split = split_of(tmp_path)
    assert split.classes == ("blue", "red")
    assert split.notes == ("1 folder without images, left out of the classes: nothing_here",)
    assert {label for path, label in split.train if "/red/" in path} == {1}


def test_small_classes(tmp_path):
    split = split_of(fill(tmp_path, blue=1, green=10, red=10))
    assert split.counts() == [("blue", 1, 0), ("green", 8, 2), ("red", 8, 2)]
    assert split.notes == ("blue: 0 validation images",)


def test_many_small_classes_make_few_notes(tmp_path):
    split = split_of(fill(tmp_path, big=10, **{f"c{index:02d}": 1 for index in range(30)}))
    assert len(split.notes) == 11
    assert split.notes[-1] == "20 more classes have 0 validation images"


def test_empty_validation_says_what_to_do_and_that_works(tmp_path):
    message = mistake(fill(tmp_path, blue=3, red=2))
    assert "the validation set is empty" in message
    assert message.endswith("add images, or type --val-rate 0.34")
    assert split_of(tmp_path, val_rate=0.34).counts() == [("blue", 2, 1), ("red", 2, 0)]
    assert mistake(fill(tmp_path / "ones", a=1, b=1)).endswith("add images")


def test_wrong_roots(tmp_path):
    touch(tmp_path, "file.jpg", "flat/1.jpg", "flat/2.jpg", "one/cat/1.jpg")
    (tmp_path / "empty").mkdir()
    assert mistake(tmp_path / "nosuch").startswith(f"{tmp_path}/nosuch: no such folder; expected is a folder per class")
    assert mistake(tmp_path / "file.jpg").startswith(f"{tmp_path}/file.jpg: is a file, not a folder; ")
    assert mistake(tmp_path / "empty").startswith(f"{tmp_path}/empty: found no folder and no image; ")
    assert mistake(tmp_path / "flat").startswith(f"{tmp_path}/flat: 2 images but no class folder; expected is")
    assert mistake(tmp_path / "one").startswith(f"{tmp_path}/one: only one class, cat, and a classifier needs two; ")
    fill(tmp_path / "extra" / "photos", blue=5, green=5, red=5)
    assert f"if its 3 folders are the classes, type --data-path {tmp_path}/extra/photos;" in mistake(tmp_path / "extra")
    touch(tmp_path, "heic/a/1.HEIC", "heic/b/2.txt")
    assert "found 2 folders without a readable image (left out: 1 .heic (the plugin pillow-heif reads it), 1 .txt)" in (
        mistake(tmp_path / "heic")
    )


@pytest.mark.parametrize("rate", [0, 1, -0.1, 20, float("nan")])
def test_validation_rate_out_of_range(tmp_path, rate):
    assert mistake(fill(tmp_path, a=5, b=5), val_rate=rate).startswith(f"--val-rate {rate} must lie between 0 and 1")


def test_wrong_number_of_classes(tmp_path):
    fill(tmp_path, a=5, b=5, c=5)
    assert mistake(tmp_path, num_classes=2) == (
        f"--num_classes 2, but {tmp_path} holds 3 classes: a, b, c; leave the option out or type --num_classes 3"
    )
    assert len(split_of(tmp_path, num_classes=3).classes) == 3


def test_nested_folders_belong_to_the_class(tmp_path):
    for name in ("a", "b", "c"):
        fill(tmp_path / name, **{"2019": 4, "2020/may": 4})
    fill(tmp_path, a=4, b=4, c=4)
    split = split_of(tmp_path)
    assert split.counts() == [("a", 10, 2), ("b", 10, 2), ("c", 10, 2)]
    assert split.notes == ("24 of 36 images lie in folders inside a class folder, and are used",)


def test_links_are_followed_once_and_loops_end(tmp_path):
    fill(tmp_path / "elsewhere", more=3)
    fill(tmp_path / "data", a=5, b=5)
    (tmp_path / "data" / "a" / "linked").symlink_to(tmp_path / "elsewhere" / "more")
    (tmp_path / "data" / "a" / "linked_again").symlink_to(tmp_path / "elsewhere" / "more")
    (tmp_path / "data" / "a" / "loop").symlink_to(tmp_path / "data" / "a")
    (tmp_path / "data" / "b" / "up").symlink_to(tmp_path)
    (tmp_path / "data" / "b" / "one.jpg").symlink_to(tmp_path / "elsewhere" / "more" / "img_000.jpg")
    (tmp_path / "data" / "b" / "broken.jpg").symlink_to("nothing")
    (tmp_path / "data" / "b" / "self.jpg").symlink_to("self.jpg")
    (tmp_path / "data" / "c").symlink_to(tmp_path / "elsewhere")
    split = split_of(tmp_path / "data")
    assert [train + val for _, train, val in split.counts()] == [8, 6, 3]
    assert split.notes == (
        "b/up links to a folder around all the data: not followed",
        "6 of 17 images lie in folders inside a class folder, and are used",
        "2 broken links or special files left out: b/broken.jpg, b/self.jpg",
        "c: 0 validation images",
    )


def test_litter_is_left_out_silently(tmp_path):
    fill(tmp_path, blue=8, red=8)
    litter = [
        ".ipynb_checkpoints",
        "__MACOSX",
        ".git",
        "@eaDir",
        "$RECYCLE.BIN",
        "System Volume Information",
        "lost+found",
    ]
    for name in litter:
        touch(tmp_path, f"{name}/x.jpg", f"red/{name}/x.jpg")
    touch(tmp_path, "red/._img_000.jpg", "red/.hidden.png", "red/Thumbs.db", "blue/desktop.ini", "blue/.DS_Store")
    (tmp_path / "red" / "folder.jpg").mkdir()
    split = split_of(tmp_path)
    assert split.counts() == [("blue", 7, 1), ("red", 7, 1)]
    assert split.notes == ()


def test_every_extension_that_pillow_reads(tmp_path):
    names = ["1.jpg", "2.JPG", "3.jpeg", "4.JPEG", "5.png", "6.PNG", "7.bmp", "8.webp", "9.tif", "10.tiff", "11.gif"]
    touch(tmp_path, *(f"{label}/{name}" for label in "ab" for name in names))
    touch(tmp_path, "a/x.HEIC", "a/notes.txt", "b/more.TXT", "b/plain", "b/film.mpg")
    split = split_of(tmp_path)
    assert [train + val for _, train, val in split.counts()] == [11, 11]
    assert split.notes == (
        "left out by extension: 1 without an extension, 1 .heic (the plugin pillow-heif reads it), 1 .mpg, 2 .txt",
    )


def test_numeric_names_keep_string_order(tmp_path):
    split = split_of(fill(tmp_path, **{str(number): 6 for number in range(12)}))
    assert split.classes == ("0", "1", "10", "11", "2", "3", "4", "5", "6", "7", "8", "9")


ODD = ["a,b", 'quo"te', "red fish", "绿色", "😀", "a\u0308", "new\nline", "not utf-8 \udcff\udce4", "null", "007"]


def test_written_list_comes_back(tmp_path):
    split = split_of(fill(tmp_path / "data", **dict.fromkeys(ODD, 5)))
    file = tmp_path / "split.csv"
    write_split(split, str(file))
    assert read_split(str(file)) == split
    assert os.listdir(tmp_path) == ["data", "split.csv"] or os.listdir(tmp_path) == ["split.csv", "data"]
    rows = list(csv.reader(file.read_text(encoding="utf-8").splitlines(keepends=True)))
    assert rows[0] == ["path", "label", "split"]
    assert len(rows) == 1 + 50
    assert {row[1] for row in rows[1:]} == {*ODD[:-3], r"not utf-8 \xff\xe4", "null", "007"}
    assert [row[2] for row in rows[1:]] == ["train"] * 40 + ["val"] * 10
    os.rename(tmp_path / "data", tmp_path / "moved")
    moved = read_split(str(file), str(tmp_path / "moved"))
    assert moved.val == [(path.replace("/data/", "/moved/"), label) for path, label in split.val]


def test_a_name_that_looks_escaped_stays(tmp_path):
    split = split_of(fill(tmp_path / "data", **{r"\xff": 5, "b": 5}))
    write_split(split, str(tmp_path / "split.csv"))
    assert read_split(str(tmp_path / "split.csv")) == split


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    split = split_of(fill(tmp_path / "data", a=5, b=5))
    (tmp_path / "split.csv").write_text("old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write_split(split, str(tmp_path / "split.csv"))
    assert (tmp_path / "split.csv").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["data", "split.csv"]


@pytest.mark.parametrize(
    "content", [None, "", "path,label\na,b\n", "path,label,split\na,b,dev\n", 'path,label,split\n"a']
)
def test_what_is_no_list_is_said(tmp_path, content):
    if content is not None:
        (tmp_path / "split.csv").write_text(content)
    with pytest.raises(DataError, match=r"split\.csv: "):
        read_split(str(tmp_path / "split.csv"))


def test_the_folder_is_not_changed(tmp_path):
    fill(tmp_path, a=5, b=5)
    before = {folder: (sorted(files), os.stat(folder).st_mtime_ns) for folder, _, files in os.walk(tmp_path)}
    split_of(tmp_path)
    assert before == {folder: (sorted(files), os.stat(folder).st_mtime_ns) for folder, _, files in os.walk(tmp_path)}
