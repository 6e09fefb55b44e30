import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from heedful.cli import app
from heedful.compress import convert_to_diagonal, save_compressed
from heedful.errors import FileFormatError, InputError, ParameterError
from tests.merge.llamas import write_llama


def run(*arguments):
    command = ["inspect", *map(str, arguments), "--quiet"]
    return CliRunner().invoke(app, command, catch_exceptions=False, env={"COLUMNS": "160"})


def rows(*arguments):
    return {row["tensor"]: row for row in json.loads(run(*arguments, "--json").stdout)}


def test_every_tensor_is_shown_with_its_zeros_and_bytes(tmp_path):
    weight = torch.tensor([[0.0, 1.0, 0.0, 2.0]], dtype=torch.bfloat16)
    save_file({"0.weight": weight, "0.bias": torch.ones(3)}, tmp_path / "net.safetensors")
    found = rows(tmp_path / "net.safetensors")
    assert found["0.weight"] == {
        "tensor": "0.weight",
        "shape": [1, 4],
        "stored": "bfloat16",
        "bits": 16,
        "zeros": 0.5,
        "bytes": 8,
    }
    assert found["0.bias"]["bytes"] == 12
    assert "20 bytes" in run(tmp_path / "net.safetensors").stdout


def test_a_model_that_is_not_of_the_pattern_makes_the_command_fail(tmp_path):
    write_llama(tmp_path / "llama")
    done = run(tmp_path / "llama", "--pattern", "2:4")
    assert done.exit_code == 1
    assert "21 of the layers are not 2:4, such as model.layers.0." in done.stderr
    assert done.stdout.count(" NO") == 21


def test_a_pruned_model_is_of_its_pattern_whatever_embeddings_and_heads_are(tmp_path):
    write_llama(tmp_path / "llama")
    CliRunner().invoke(app, ["prune", str(tmp_path / "llama"), "-o", str(tmp_path / "out"), "--pattern", "2:4"])
    done = run(tmp_path / "out", "--pattern", "2:4")
    assert done.exit_code == 0
    assert done.stdout.count(" yes") == 21
    found = rows(tmp_path / "out", "--pattern", "2:4")
    assert found["model.embed_tokens.weight"]["conforms"] is None
    assert run(tmp_path / "out", "--pattern", "1:4").exit_code == 1
    assert run(tmp_path / "out", "--pattern", "1:4", "--exclude", "re:.*(q|k|v|o|gate|up)_proj").exit_code == 1
    with pytest.raises(InputError, match="no weights of linear layers, but those excluded"):
        run(tmp_path / "out", "--pattern", "1:4", "--exclude", "model.layers.*")


def test_the_parts_of_a_packed_weight_are_one_row(tmp_path):
    tensors = {
        "model.layers.0.up.weight_packed": torch.zeros(4, 1, dtype=torch.int32),
        "model.layers.0.up.weight_scale": torch.ones(4, 1, dtype=torch.bfloat16),
        "model.layers.0.up.weight_shape": torch.tensor([4, 8]),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    row = rows(tmp_path / "model.safetensors")["model.layers.0.up.weight"]
    assert row["shape"] == [4, 8]
    assert row["bytes"] == 16 + 8 + 16
    assert row["bits"] == 8 * 40 / 32
    assert row["zeros"] is None


def test_diagonals_are_counted_and_timed(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    save_compressed(convert_to_diagonal(net, sparsity=0.75), tmp_path / "net.safetensors")
    row = rows(tmp_path / "net.safetensors", "--time")["1.weight"]
    assert row["stored"] == "4 diagonals"
    assert row["shape"] == [16, 16]
    assert row["zeros"] == 0.75
    assert row["bytes"] == 4 * 16 * 4 + 4 * 8
    assert {"dense", "csr"} <= row["ms"].keys()
    assert all(ms > 0 for ms in row["ms"].values())
    assert rows(tmp_path / "net.safetensors", "--time")["0.weight"]["ms"].keys() == {"dense"}


def test_sparse_weights_are_timed_dense_and_by_rows(tmp_path):
    save_file({"0.weight": torch.eye(8)}, tmp_path / "net.safetensors")
    assert rows(tmp_path / "net.safetensors", "--time")["0.weight"]["ms"].keys() == {"dense", "csr"}


def test_what_is_no_pattern_or_no_checkpoint_is_refused(tmp_path):
    write_llama(tmp_path / "llama")
    with pytest.raises(ParameterError, match='a pattern reads n:m, such as "2:4"'):
        run(tmp_path / "llama", "--pattern", "24")
    (tmp_path / "bad.safetensors").write_bytes(b"nothing")
    with pytest.raises(FileFormatError):
        run(tmp_path / "bad.safetensors")
    with pytest.raises(FileNotFoundError):
        run(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("tensors", "meta", "says"),
    [
        ({"up.weight_packed": torch.zeros(2, 1, dtype=torch.int32)}, None, "has codes for up, but no weight_shape"),
        ({"a.values": torch.ones(1, 4)}, "{", "metadata that cannot be read"),
        ({"a.values": torch.ones(1, 4)}, '{"class": "diagonals"}', "does not say which layers are diagonal"),
        (
            {"a.values": torch.ones(1, 4)},
            '{"class": "diagonals", "layers": {"a": {}}}',
            "the shape or the offsets of a",
        ),
    ],
)
def test_files_that_contradict_themselves_are_refused(tmp_path, tensors, meta, says):
    save_file(tensors, tmp_path / "net.safetensors", metadata=None if meta is None else {"heedful": meta})
    with pytest.raises(FileFormatError, match=says):
        run(tmp_path / "net.safetensors")
