"""The first lines of a run: figures that are right, and a word for each option that changes nothing."""

import argparse

import pytest
import torch

import models
from utils.report import _idle_options, multiply_adds

CPU = torch.device("cpu")
NOTHING = {"syncBN": None, "eval_amp": False, "amp": None, "lr_scaling": "linear", "global_batch_size": None}


def test_multiply_adds_of_resnet18_are_those_of_the_paper():
    """1.8 billion (He et al. 2015, arXiv:1512.03385, table 1); exactly, counted by hand from its layers: see below."""
    stem, pixels = 64 * 3 * 7 * 7 * 112 * 112, 56 * 56
    first = 4 * 64 * 64 * 9 * pixels
    others = sum(
        (2 * width * width * 9 + 2 * width * width * 9 - width * width // 2 * 9 + width * width // 2) * size * size
        for width, size in ((128, 28), (256, 14), (512, 7))
    )
    expected = stem + first + others + 512 * 1000
    model = models.create_model("resnet18", 1000).train()
    assert multiply_adds(model, 224) == expected == 1_814_073_344
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"syncBN": True}, "--syncBN"),
        ({"eval_amp": True}, "--eval-amp"),
        ({"lr_scaling": "sqrt", "global_batch_size": 8}, "--lr-scaling"),
        ({"data_parallel": True}, "--data-parallel"),
        ({"find_unused_parameters": True}, "--find-unused-parameters"),
    ],
)
def test_an_option_that_changes_nothing_is_named(given, word):
    assert _idle_options(argparse.Namespace(**NOTHING), CPU) == []
    (sentence,) = _idle_options(argparse.Namespace(**(NOTHING | given)), CPU)
    assert sentence.startswith(f"{word} has no effect")
