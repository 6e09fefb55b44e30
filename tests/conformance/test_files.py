import json

import numpy as np
import pytest

from heedful._files import load_arrays, save_arrays, write_atomic
from heedful.errors import FileFormatError
from tests.conformance import cases
from tests.conformance.files import CHECKS, FileRow


def save_arrays_row(path, value):
    save_arrays(path, *value)


def load_arrays_row(path):
    arrays, meta = load_arrays(path)
    meta.pop("format")
    return arrays, meta


def old_arrays():
    return {"a": np.arange(6.0).reshape(2, 3)}, {"which": "old"}


def new_arrays():
    return {"a": np.arange(20_000.0), "flag": np.array(True)}, {"which": "new"}


def same_arrays(left, right):
    return (
        left[1] == right[1]
        and left[0].keys() == right[0].keys()
        and all(np.array_equal(left[0][name], right[0][name]) for name in left[0])
    )


def write_json(path, value):
    with write_atomic(path) as temporary:
        temporary.write_text(json.dumps(value))


def read_json(path):
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise FileFormatError(f"{path} is no JSON: {error}") from error


def old_text():
    return ["old"]


def new_text():
    return ["new"] * 20_000


def equal(left, right):
    return left == right


ROWS = (
    FileRow("arrays", ".safetensors", save_arrays_row, load_arrays_row, old_arrays, new_arrays, same_arrays),
    FileRow("write_atomic", ".json", write_json, read_json, old_text, new_text, equal),
)


@pytest.mark.parametrize(("check", "row"), cases(ROWS, CHECKS))
def test_file(check, row, tmp_path):
    check(row, tmp_path)
