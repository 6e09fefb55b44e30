"""A saved learngene against what every file must be. Apart from other tests: processes that are killed import this module."""

import functools

import pytest
import torch

from heedful.merge.tal import TaskAwareLearngene
from tests.conformance import cases
from tests.conformance.files import CHECKS, FileRow

CONFIG = {"hidden": 16, "n_layers": 1, "n_heads": 2, "rank": 4, "max_side": 64}


@functools.cache
def old():
    return TaskAwareLearngene(CONFIG, teacher_weight=0.5, random_state=0)


@functools.cache
def new():
    return TaskAwareLearngene(CONFIG, random_state=1)


def save(path, gene):
    gene.save(path)


def same(left, right):
    one, other = left.hypernet.state_dict(), right.hypernet.state_dict()
    return left.teacher_weight == right.teacher_weight and all(torch.equal(one[name], other[name]) for name in one)


ROWS = (FileRow("learngene", ".safetensors", save, TaskAwareLearngene.load, old, new, same),)


@pytest.mark.slow  # a dozen processes
@pytest.mark.parametrize(("check", "row"), cases(ROWS, CHECKS))
def test_file(check, row, tmp_path):
    check(row, tmp_path)
