"""The command lines: argparse groups, the values that an option left out takes, and the mistakes told in a sentence.

This module loads no torch, so that `--help` and a mistyped option are answered at once.
"""

import argparse
import difflib
import math
import shlex
from collections.abc import Sequence

from utils.errors import UserError

# What an option means when it is left out: on a user's own photos, and on the built-in digits. Digits are tiny, start
# from random weights, and a mirrored one is another shape.
DEFAULTS = {
    "model": ("resnet34", "resnet18"),
    "image_size": (None, 32),  # None: the size that the model was made for
    "epochs": (10, 5),
    "batch_size": (16, 32),
    "lr": (0.01, 0.02),
    "hflip": (0.5, 0.0),
    "crop_scale": (0.35, 0.7),
    "pretrained": (True, False),
}

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser for which dash and underscore are the same, and whose errors are UserError sentences."""

    def __init__(self, description: str, **kwargs):
        super().__init__(
            description=description,
            formatter_class=_HelpFormatter,
            usage="%(prog)s [options]" + (" [@FILE]" if kwargs.get("fromfile_prefix_chars") else ""),
            allow_abbrev=False,
            **kwargs,
        )

    def parse_known_args(self, args: Sequence[str] | None = None, namespace=None):
        import sys

        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([with_dashes(word) for word in words], namespace)

    def parse_args(self, args: Sequence[str] | None = None, namespace=None) -> argparse.Namespace:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(_unknown_option(unknown, self._option_string_actions))
        return parsed

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        """A line of a recipe file (`@FILE`), split as a shell would; `#` begins a comment."""
        try:
            return [with_dashes(word) for word in shlex.split(arg_line, comments=True)]
        except ValueError as error:  # an open quote
            self.error(f"a line of the options file cannot be read ({error}): {arg_line}")

    def error(self, message: str):
        raise UserError(f"{message}; {self.prog} --help lists the options")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30, width=110)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return (
            ", ".join(action.option_strings)
            if isinstance(action, Switch)
            else super()._format_action_invocation(action)
        )


class Switch(argparse.Action):
    """`--name` is on, `--no-name` is off, and `--name False` is off too, as people write it."""

    def __init__(self, option_strings, dest, default=None, help=None):
        names = [*option_strings, *(f"--no-{name[2:]}" for name in option_strings if name.startswith("--"))]
        super().__init__(names, dest, nargs="?", default=default, help=help, metavar="False")

    def __call__(self, parser, namespace, values, option_string=None):
        negated = option_string.startswith("--no-")
        word = "true" if values is None else values.lower()
        if word not in _TRUE + _FALSE or (negated and values is not None):
            parser.error(
                f"{option_string} {values}: write {self.option_strings[0]}, or --no-{self.option_strings[0][2:]}"
            )
        setattr(namespace, self.dest, (word in _TRUE) != negated)


def with_dashes(word: str) -> str:
    """`--data_path=a_b` as `--data-path=a_b`; anything but an option's name is left as it is."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _unknown_option(unknown: list[str], known) -> str:
    if not unknown[0].startswith("-"):
        return f"unexpected word {unknown[0]} (a data folder is given as --data-path {unknown[0]})"
    near = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1, cutoff=0.7)
    return f"unknown option {unknown[0]}" + (f", did you mean {near[0]}?" if near else "")


def _number(kind: type, low: float, high: float = float("inf"), open_low: bool = False):
    """An argparse type: a number from `low` (or above it) to `high`."""

    def parse(text: str):
        value = kind(text)
        if math.isinf(value) or not low <= value <= high or (open_low and value == low):
            bound = f"{'above' if open_low else 'at least'} {low}" + (f" and at most {high}" if high < 1e9 else "")
            raise argparse.ArgumentTypeError(f"{text} is not {bound}")
        return value

    parse.__name__ = "whole number" if kind is int else "number"
    return parse


_positive = _number(int, 1)
_share = _number(float, 0, 1)


def training_parser(description: str, distributed: bool) -> Parser:
    """The parser of both training scripts; `distributed` adds what only several processes need."""
    parser = Parser(description, fromfile_prefix_chars="@")
    _add_data(parser.add_argument_group("data"))
    _add_model(parser.add_argument_group("model"))
    _add_training(parser.add_argument_group("training"))
    _add_precision(parser.add_argument_group("precision"))
    _add_devices(parser.add_argument_group("devices and processes"), distributed)
    group = parser.add_argument_group("run")
    group.add_argument("--run-dir", default="runs", metavar="DIR", help="each run gets a new folder in it (runs)")
    group.add_argument(
        "--resume",
        nargs="?",
        const="newest",
        metavar="RUN",
        help="go on with a run: its folder or last.pth, or without a name the newest (a new run)",
    )
    group.add_argument(
        "--save-minutes", type=_number(float, 0, open_low=True), default=10.0, metavar="M", help="between saves (10)"
    )
    group.add_argument("--save-steps", type=_positive, metavar="N", help="save after every so many steps too (off)")
    group.add_argument(
        "--deterministic", action=Switch, default=False, help="only algorithms that repeat exactly, slower on GPU (off)"
    )
    group.add_argument(
        "--seed", type=_number(int, 0), default=0, metavar="N", help="of split, weights, order, augmentation (0)"
    )
    return parser


def _add_data(group) -> None:
    group.add_argument(
        "--data-path", metavar="DIR", help="a folder per class, or train/ and val/, or flowers (the built-in digits)"
    )
    group.add_argument("--num-classes", type=_positive, metavar="N", help="checked against the data (not checked)")
    group.add_argument(
        "--val-rate",
        type=_number(float, 0, 1, open_low=True),
        default=0.2,
        metavar="R",
        help="share of each class to validate on (0.2)",
    )
    group.add_argument("--image-size", type=_positive, metavar="PX", help=_default("image_size", "the model's own"))
    group.add_argument(
        "--crop-scale",
        type=_number(float, 0, 1, open_low=True),
        metavar="R",
        help=f"smallest area of a random crop, 1: none but the shape {_default('crop_scale')}",
    )
    group.add_argument("--hflip", type=_share, metavar="P", help=f"probability of mirroring {_default('hflip')}")
    group.add_argument(
        "--workers",
        type=_number(int, 0),
        metavar="N",
        help="per process, to load images (its share of the cores, at most 8)",
    )


def _add_model(group) -> None:
    group.add_argument("--model", metavar="NAME", help=f"resnet18 to resnet152, or any of timm {_default('model')}")
    group.add_argument("--pretrained", action=Switch, help="start from the hub's weights (on for your own photos)")
    group.add_argument("--weights", metavar="FILE", help="start from a .pth, .pt or .safetensors file (none)")
    group.add_argument("--freeze-layers", action=Switch, default=False, help="train the classifier alone (off)")


def _add_training(group) -> None:
    group.add_argument("--epochs", type=_positive, metavar="N", help=_default("epochs"))
    batch = group.add_mutually_exclusive_group()
    batch.add_argument(
        "--batch-size", type=_positive, metavar="N", help=f"images of one process {_default('batch_size')}"
    )
    batch.add_argument(
        "--global-batch-size", type=_positive, metavar="N", help="images of a step, all processes together (none)"
    )
    group.add_argument("--accumulate", type=_positive, default=1, metavar="N", help="batches that make one step (1)")
    group.add_argument(
        "--lr",
        type=_number(float, 0, 3.4e38, open_low=True),  # float32's range
        metavar="R",
        help=f"of one process's batch, or of the global batch where that is given {_default('lr')}",
    )
    group.add_argument("--lrf", type=_share, default=0.01, metavar="R", help="last learning rate over the first (0.01)")
    group.add_argument(
        "--lr-scaling",
        choices=("linear", "sqrt", "none"),
        default="linear",
        help="with processes x accumulation (linear)",
    )
    group.add_argument(
        "--warmup-steps", type=_number(int, 0), metavar="N", help="steps of rising learning rate (a tenth, at most 100)"
    )
    group.add_argument("--momentum", type=_share, default=0.9, metavar="M", help="of SGD, Nesterov's (0.9)")
    group.add_argument(
        "--weight-decay", type=_number(float, 0), default=1e-4, metavar="W", help="not on norms and biases (0.0001)"
    )
    group.add_argument("--label-smoothing", type=_share, default=0.1, metavar="S", help="in the training loss (0.1)")


def _add_precision(group) -> None:
    group.add_argument(
        "--amp", nargs="?", const="bf16", choices=("bf16", "fp16"), help="mixed precision in training (off)"
    )
    group.add_argument("--eval-amp", action=Switch, default=False, help="in validation too: faster, not exact (off)")
    group.add_argument("--float64", action=Switch, default=False, help="for checks of equality (off)")


def _add_devices(group, distributed: bool) -> None:
    group.add_argument("--device", default="auto", metavar="D", help="auto, cuda, mps or cpu (auto)")
    group.add_argument("--syncBN", "--syncbn", action=Switch, dest="syncBN", help="share BatchNorm's statistics (on)")
    if not distributed:
        group.add_argument("--data-parallel", action=Switch, default=False, help="nn.DataParallel over all GPUs (off)")
        return
    group.add_argument("--world-size", type=_positive, metavar="N", help="processes (one per visible GPU; on CPU 1)")
    group.add_argument(
        "--find-unused-parameters", action=Switch, default=False, help="for models that skip branches (off)"
    )
    group.add_argument(
        "--timeout",
        type=_number(float, 0, open_low=True),
        default=30.0,
        metavar="M",
        help="minutes to wait for a process (30)",
    )
    group.add_argument("--dist-url", default="env://", metavar="URL", help="where the processes meet (env://)")
    group.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)  # the environment says it better


def _default(name: str, own: str | None = None) -> str:
    photos, digits = DEFAULTS[name]
    return f"({own or photos}; {digits} on the digits)"


def parse_training_options(
    description: str, distributed: bool, arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """The training options with every default filled in. Raises UserError for options that exclude one another."""
    args = training_parser(description, distributed).parse_args(arguments)
    if args.weights and args.pretrained:
        raise UserError("--weights and --pretrained both say where to start from: leave one out")
    if args.amp and args.float64:
        raise UserError("--amp and --float64 exclude one another: leave one out")
    if args.weights:
        args.pretrained = False
    for name, choices in DEFAULTS.items():
        if getattr(args, name) is None and not (name == "batch_size" and args.global_batch_size):
            setattr(args, name, choices[args.data_path is None])
    return args


def given_options(distributed: bool, arguments: Sequence[str] | None = None) -> dict:
    """The training options that stand on the command line, with their values; none of the defaults."""
    parser, absent = training_parser("", distributed), object()
    blank = argparse.Namespace(**{action.dest: absent for action in parser._actions})
    return {name: value for name, value in vars(parser.parse_args(arguments, blank)).items() if value is not absent}


def parse_prediction_options(description: str, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of predict.py."""
    parser = Parser(description)
    parser.add_argument("paths", nargs="+", metavar="PATH", help="image files and folders")
    parser.add_argument("--weights", metavar="FILE", help="a checkpoint (best.pth of the newest run in runs/)")
    parser.add_argument("--top-k", type=_positive, default=1, metavar="K", help="how many classes to name (1)")
    parser.add_argument("--output", metavar="FILE", help="also write the rows to a .csv, .json or .jsonl file (none)")
    parser.add_argument("--device", default="auto", metavar="D", help="auto, cuda, mps or cpu (auto)")
    args = parser.parse_args(arguments)
    if args.output and not args.output.lower().endswith((".csv", ".json", ".jsonl")):
        parser.error(f"--output {args.output}: the name must end in .csv, .json or .jsonl")
    return args
