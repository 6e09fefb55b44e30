import json
import os
import struct
import types
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from heedful._checkpoints import TensorInfo, _safetensors, open_checkpoint
from heedful._checkpoints._safetensors import DTYPES
from heedful.errors import FileFormatError, InputError
from tests.conformance.files import pickles

# What writes checkpoints is checked in test_checkpoint_writer.py, adapters in test_adapters.py.

one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
any_info = st.builds(
    TensorInfo, st.lists(st.integers(0, 4), max_size=4).map(tuple), st.sampled_from(sorted(DTYPES.values(), key=str))
)


def open_or_refuse(path):
    """The source, or None if a FileFormatError that names the file refuses it."""
    refusal = ""
    try:
        return open_checkpoint(path)
    except FileFormatError as error:
        refusal = str(error)
    assert str(path) in refusal
    return None


def random_tensor(info: TensorInfo, seed: int = 0) -> Tensor:
    """Any bytes: NaN, infinities and subnormal numbers among them; booleans are 0 and 1."""
    raw = torch.randint(0, 256, (info.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    if info.dtype is torch.bool:
        raw %= 2
    return raw.view(info.dtype).view(info.shape) if info.nbytes else torch.empty(info.shape, dtype=info.dtype)


def same_bits(left: Tensor, right: Tensor) -> bool:
    def as_bytes(tensor):
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8)

    return (left.dtype, left.shape) == (right.dtype, right.shape) and torch.equal(as_bytes(left), as_bytes(right))


def assert_holds(source, tensors):
    assert set(source.names) == tensors.keys() == set(source)
    assert len(source) == len(tensors)
    for name, tensor in tensors.items():
        assert name in source
        assert source.info(name) == (tuple(tensor.shape), tensor.dtype)
        assert same_bits(source.get(name), tensor), name


def small_state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(7, 3, generator=generator).to(torch.bfloat16),
        "layer.0.weight": torch.randn(4, 3, generator=generator),
        "layer.0.bias": torch.randn(4, generator=generator).to(torch.float16),
        "position_ids": torch.arange(5),
    }


def sharded(folder, state, *, kind="safetensors"):
    """``state`` in two files and their index, as ``save_pretrained`` leaves it."""
    names = sorted(state)
    stem = "model" if kind == "safetensors" else "pytorch_model"
    homes = {name: f"{stem}-0000{1 + (i >= 2)}-of-00002.{kind}" for i, name in enumerate(names)}
    for home in set(homes.values()):
        part = {name: state[name] for name in names if homes[name] == home}
        safetensors.torch.save_file(part, folder / home) if kind == "safetensors" else torch.save(part, folder / home)
    (folder / f"{stem}.{kind}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    return homes


@one_folder
@given(infos=st.dictionaries(st.text(min_size=1).filter(lambda n: n != "__metadata__" and "\0" not in n), any_info))
def test_what_the_reference_writes_comes_back_bit_for_bit(tmp_path, infos):
    tensors = {name: random_tensor(info, i) for i, (name, info) in enumerate(infos.items())}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    assert_holds(open_checkpoint(tmp_path / "x.safetensors"), tensors)


def write_single(folder, state):
    safetensors.torch.save_file(state, folder / "model.safetensors")


def write_sharded(folder, state):
    sharded(folder, state)


def write_pickled(folder, state):
    torch.save(state, folder / "pytorch_model.bin")


def write_sharded_pickled(folder, state):
    sharded(folder, state, kind="bin")


def write_pickled_before_zip(folder, state):
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


LAYOUTS = [write_single, write_sharded, write_pickled, write_sharded_pickled, write_pickled_before_zip]


@pytest.mark.parametrize("write", LAYOUTS)
def test_every_layout_of_hugging_face_is_read(tmp_path, write):
    state = small_state()
    write(tmp_path, state)
    (tmp_path / "config.json").write_text('{"model_type": "tiny"}')
    with open_checkpoint(tmp_path) as source:
        assert_holds(source, state)
        assert source.folder == tmp_path
        assert source.origin == str(tmp_path)
        assert source.config == {"model_type": "tiny"}
        assert source.tied == {}
        assert source.quantization is None
        kept = source.get("embed.weight")
    assert same_bits(kept, state["embed.weight"])
    with pytest.raises(ValueError, match="has been closed"):
        source.get("embed.weight")


def test_one_file_is_read_without_a_folder(tmp_path):
    state = small_state()
    write_single(tmp_path, state)
    source = open_checkpoint(str(tmp_path / "model.safetensors"))
    assert_holds(source, state)
    assert (source.folder, source.config) == (None, None)


def test_a_folder_of_links_as_the_hub_caches_it_is_read(tmp_path):
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir(), folder.mkdir()
    homes = sharded(blobs, small_state())
    for name in [*set(homes.values()), "model.safetensors.index.json"]:
        (folder / name).symlink_to(Path("..") / "blobs" / name)
    assert_holds(open_checkpoint(folder), small_state())


def test_a_state_dict_is_not_copied():
    linear = torch.nn.Linear(3, 2)
    source = open_checkpoint(linear.state_dict(keep_vars=True))
    assert_holds(source, linear.state_dict())
    assert source.get("weight").data_ptr() == linear.weight.data_ptr()
    assert not source.get("weight").requires_grad


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w": torch.empty(2, device="meta")}, r"holds a tensor without plain values \(.*on meta\) as w"),
        ({"w": torch.eye(2).to_sparse()}, r"holds a tensor without plain values \(torch.sparse_coo"),
    ],
)
def test_a_state_dict_of_other_than_dense_tensors_is_refused(tensors, message):
    with pytest.raises(InputError, match=message):
        open_checkpoint(tensors)


def test_an_unknown_name_is_a_key_error():
    with pytest.raises(KeyError, match="the state dict has no tensor v"):
        open_checkpoint({"w": torch.ones(1)}).get("v")


# --- tied weights


@pytest.mark.parametrize("write", [write_pickled, write_sharded_pickled, write_pickled_before_zip, None])
def test_names_that_share_memory_are_one_tensor(tmp_path, write):
    embed = torch.randn(7, 3)
    state = {"a.weight": embed, "b.weight": embed, "c.weight": embed[:4], "d.weight": embed.T, "e": embed.clone()}
    if write is not None:
        write(tmp_path, state)
    source = open_checkpoint(state if write is None else tmp_path)
    assert source.tied == {"b.weight": "a.weight"}
    assert set(source.names) == {"a.weight", "c.weight", "d.weight", "e"}
    assert "b.weight" not in source
    assert torch.equal(source.get("d.weight"), embed.T)


@pytest.mark.parametrize(
    ("config", "change", "tied"),
    [
        ({"tie_word_embeddings": True}, False, {"lm_head.weight": "model.embed_tokens.weight"}),
        ({"tie_word_embeddings": True}, True, {}),  # it differs: whoever loads it takes it for a tensor of its own
        ({"tie_word_embeddings": False}, False, {}),
        ({}, False, {}),
    ],
)
def test_an_output_matrix_that_repeats_the_embedding_is_left_out_if_the_configuration_ties_it(
    tmp_path, config, change, tied
):
    embed = torch.randn(7, 3)
    embed[0, 0] = float("nan")
    head = embed.clone()
    head[6, 2] += change
    write_single(tmp_path, {"lm_head.weight": head, "model.embed_tokens.weight": embed, "other": torch.randn(7, 3)})
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = open_checkpoint(tmp_path)
    assert source.tied == tied
    assert ("lm_head.weight" in source) == (not tied)


@pytest.mark.parametrize(
    ("name", "dtype", "config", "said"),
    [
        ("layer.weight", torch.int8, {}, "layer.weight has dtype int8"),
        ("layer.qweight", torch.int32, {}, "layer.qweight has dtype int32"),
        ("layer.weight", torch.float8_e4m3fn, {}, "layer.weight has dtype float8_e4m3fn"),
        ("x", torch.bool, {"quantization_config": {"bits": 4}}, "config.json has a quantization_config"),
        ("position_ids", torch.int64, {"quantization_config": None}, None),
        ("mask", torch.bool, {}, None),
    ],
)
def test_quantized_weights_are_reported(tmp_path, name, dtype, config, said):
    write_single(tmp_path, {name: torch.zeros(2, 2).to(dtype)})
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(tmp_path).quantization == said


# --- memory


def sparse_file(path, infos):
    """A safetensors file of zeros that takes no room on the disk."""
    header, end = {}, 0
    for name, info in infos.items():
        header[name] = {"dtype": "F32", "shape": list(info.shape), "data_offsets": [end, end := end + info.nbytes]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def test_a_file_larger_than_the_memory_is_read_tensor_by_tensor(tmp_path):
    info = TensorInfo((2**20,), torch.float32)
    n = 2 * psutil.virtual_memory().total // info.nbytes
    sparse_file(tmp_path / "x.safetensors", {str(i): info for i in range(n)})
    source = open_checkpoint(tmp_path / "x.safetensors")
    assert source.get(str(n - 1)).sum() == 0


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="resident memory is let go of on Linux only")
def test_what_was_read_does_not_stay_in_memory(tmp_path):
    info = TensorInfo((2**22,), torch.float32)  # 16 MiB, 32 of them
    sparse_file(tmp_path / "model.safetensors", {str(i): info for i in range(32)})
    source, process = open_checkpoint(tmp_path), psutil.Process()
    before, most = process.memory_info().rss, 0
    for name in source:
        tensor = source.get(name)
        tensor.sum()
        most = max(most, process.memory_info().rss - before)
    assert most >= info.nbytes, "the memory of a tensor in use is not seen: the test proves nothing"
    assert most < 4 * info.nbytes  # two tensors at the change from one to the next, and what else the process needs


def test_the_file_never_changes_and_tensors_outlive_their_source(tmp_path):
    write_single(tmp_path, {"w": torch.arange(5000.0)})
    content = (tmp_path / "model.safetensors").read_bytes()
    source = open_checkpoint(tmp_path)
    tensor = source.get("w")
    tensor += 1  # not allowed, and yet harmless
    source.close()
    del source
    assert torch.equal(tensor, torch.arange(5000.0) + 1)
    assert (tmp_path / "model.safetensors").read_bytes() == content


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_the_file_never_changes_where_the_mapping_is_not_that_of_linux(tmp_path, monkeypatch, platform):
    monkeypatch.setattr(_safetensors, "sys", types.SimpleNamespace(platform=platform))
    write_single(tmp_path, state := small_state())
    content = (tmp_path / "model.safetensors").read_bytes()
    source = open_checkpoint(tmp_path)
    assert_holds(source, state)
    source.get("position_ids").zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == content


def test_tensors_that_the_file_does_not_align_can_be_computed_with(tmp_path):
    header = (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}'
    )
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\1" + struct.pack("<2f", 1, 2))
    tensor = open_checkpoint(tmp_path / "x.safetensors").get("b")
    assert tensor.data_ptr() % 4 == 0
    assert tensor.tolist() == [1, 2]


# --- damaged and hostile files


def with_header(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(1,), offsets=(0, 4), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


FOUR = b"\0" * 4
DAMAGED = {
    "empty": (b"", "its header would have 0 bytes, of the 0 in the file"),
    "no header": (b"\5\0\0", "its header would have 5 bytes, of the 3 in the file"),
    "header longer than the file": (with_header(b"{}", length=99), "its header would have 99 bytes, of the 10"),
    "absurd header": (with_header(b"{}", length=2**64 - 1), "its header would have 18446744073709551615 bytes"),
    "no JSON": (with_header(b"{]"), "its JSON cannot be read"),
    "no Unicode": (with_header(b'{"\xff":1}'), "its JSON cannot be read"),
    "UTF-16": (with_header('{"a":1}'.encode("utf-16")), "its JSON cannot be read"),
    "deep": (with_header(b'{"a":' + b"[" * 10**5), "its JSON cannot be read"),
    "long number": (with_header(b'{"a":' + b"9" * 10**4 + b"}"), "its JSON cannot be read"),
    "list": (with_header(b"[]"), "its JSON is no object"),
    "name twice": (
        with_header(f'{{"a":{json.dumps(entry())},"a":{json.dumps(entry())}}}'.encode(), FOUR),
        "a name occurs twice",
    ),
    "empty name": (with_header({"": entry()}, FOUR), "it holds a tensor with the name ''"),
    "NUL in a name": (with_header({"a\0b": entry()}, FOUR), r"it holds a tensor with the name 'a\\x00b'"),
    "half a letter": (with_header({"\ud800": entry()}, FOUR), r"it holds a tensor with the name '\\ud800'"),
    "unknown dtype": (with_header({"a": entry(dtype="F4")}, FOUR), "a has dtype F4, of which we know BOOL, U8"),
    "no entry": (with_header({"a": 3}, FOUR), "the entry of a is no dtype, shape and place that agree: 3"),
    "more in an entry": (with_header({"a": entry(more=1)}, FOUR), "the entry of a is no dtype"),
    "negative side": (with_header({"a": entry(shape=(-1,))}, FOUR), "the entry of a is no dtype"),
    "side true": (with_header({"a": entry(shape=(True,))}, FOUR), "the entry of a is no dtype"),
    "fractional side": (with_header({"a": entry(shape=(1.0,))}, FOUR), "the entry of a is no dtype"),
    "huge side": (with_header({"a": entry(shape=(2**62, 2**62))}, FOUR), "the entry of a is no dtype"),
    "no values but overflow": (
        with_header({"a": entry(shape=(0, 2**62, 2**62), offsets=(0, 0))}),
        "the entry of a is no dtype",
    ),
    "shape and place differ": (with_header({"a": entry(shape=(2,))}, FOUR), "the entry of a is no dtype"),
    "negative place": (with_header({"a": entry(offsets=(-4, 0))}, FOUR), "the entry of a is no dtype"),
    "backwards": (with_header({"a": entry(offsets=(4, 0))}, FOUR), "the entry of a is no dtype"),
    "out of range": (with_header({"a": entry(offsets=(4, 8))}, FOUR), "a starts at byte 4 of the data"),
    "overlap": (
        with_header({"a": entry(shape=(2,), offsets=(0, 8)), "b": entry(offsets=(4, 8))}, FOUR * 2),
        "b starts at byte 4 of the data, and what is before it ends at 8",
    ),
    "gap": (with_header({"a": entry(), "b": entry(offsets=(8, 12))}, FOUR * 3), "b starts at byte 8 of the data"),
    "truncated": (with_header({"a": entry()}, FOUR[:3]), "where its header announces"),
    "more at the end": (with_header({"a": entry()}, FOUR * 2), "where its header announces"),
}


@pytest.mark.parametrize(("content", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_files_are_refused_by_name(tmp_path, content, message):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    for source in (path, tmp_path):
        with pytest.raises(FileFormatError, match=rf"^{path} is not a readable checkpoint file: .*{message}"):
            open_checkpoint(source)


@st.composite
def mutations(draw, content):
    content = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content)))
        new = draw(
            st.binary(max_size=9) | st.sampled_from([b'"', b"-", b"99999999999999999999", b"null", b"[", b"{}", b"\\"])
        )
        content[at : at + draw(st.integers(0, 9))] = new
    return bytes(content[: draw(st.integers(0, len(content)))]) if draw(st.booleans()) else bytes(content)


VALID = safetensors.torch.save(small_state(), {"format": "pt"})


@settings(one_folder, max_examples=400)
@given(content=mutations(VALID))
@example(content=VALID)
def test_whatever_the_bytes_are_they_are_tensors_or_a_file_format_error(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    source = open_or_refuse(path) or {}
    total = sum(source.get(name).numel() * source.info(name).dtype.itemsize for name in source)
    assert total <= len(content)
    assert {name: source.get(name).shape for name in source} == {name: source.info(name).shape for name in source}


@settings(one_folder, max_examples=100)
@given(data=st.data())
def test_whatever_a_pickle_is_it_is_tensors_or_a_file_format_error(tmp_path, data):
    torch.save(small_state(), tmp_path / "valid.bin")
    path = tmp_path / "x.bin"
    path.write_bytes(data.draw(mutations((tmp_path / "valid.bin").read_bytes())))
    source = open_or_refuse(path) or {}
    for name in source:
        assert source.get(name).shape == source.info(name).shape


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_files_that_need_code_are_refused_and_the_code_is_not_run(tmp_path, name):
    for kind, content in pickles(tmp_path / "marker"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FileFormatError, match=name):
            open_checkpoint(tmp_path)
        assert not (tmp_path / "marker").exists(), kind


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(1)], "holds a list, where named tensors are needed"),
        ({"state_dict": {"w": torch.ones(1)}}, "holds a dict as state_dict, where named dense tensors are needed"),
        ({0: torch.ones(1)}, "holds the name 0, a int"),
    ],
)
def test_pickles_of_other_things_are_refused(tmp_path, content, message):
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(FileFormatError, match=message):
        open_checkpoint(tmp_path)


def test_a_pickle_that_was_read_for_long_is_mapped_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("heedful._checkpoints._open._HELD", 0)
    write_pickled(tmp_path, small_state())
    assert_holds(open_checkpoint(tmp_path), small_state())


@pytest.mark.parametrize(
    "home", ["../x.safetensors", "/etc/passwd", "..", ".", "", "a/b.safetensors", "a\\b", "C:b", "a\0b"]
)
def test_an_index_that_points_outside_of_its_folder_is_refused(tmp_path, home):
    folder = tmp_path / "model"
    folder.mkdir()
    safetensors.torch.save_file(small_state(), tmp_path / "x.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": home}}))
    with pytest.raises(
        FileFormatError, match=r"model\.safetensors\.index\.json points to .*, which is no file beside it"
    ):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "content", ["", "no JSON", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"w": 3}}']
)
def test_an_index_without_a_map_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(FileFormatError, match=r"model\.safetensors\.index\.json"):
        open_checkpoint(tmp_path)


def test_an_index_and_its_files_must_agree(tmp_path):
    homes = sharded(tmp_path, small_state())
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {**homes, "ghost": homes["embed.weight"]}}))
    with pytest.raises(FileFormatError, match="disagree about 1 tensors, the first 'ghost', which only the index has"):
        open_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {name: home for name, home in homes.items() if name != "position_ids"}}))
    with pytest.raises(FileFormatError, match="the first 'position_ids', which only the file has"):
        open_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {**homes, "ghost": "model-00003-of-00003.safetensors"}}))
    with pytest.raises(FileFormatError, match=r"model-00003-of-00003\.safetensors does not exist"):
        open_checkpoint(tmp_path)


def test_links_to_nothing_pipes_and_folders_are_refused_at_once(tmp_path):
    path = tmp_path / "model.safetensors"
    path.symlink_to("nowhere")
    with pytest.raises(FileFormatError, match=r"model\.safetensors does not exist, or links to what does not"):
        open_checkpoint(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(FileFormatError, match=r"model\.safetensors is not a regular file"):
        open_checkpoint(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(FileFormatError, match=r"model\.safetensors is not a regular file"):
        open_checkpoint(tmp_path)


def test_places_without_a_checkpoint_say_what_is_needed(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"absent does not exist\. Give a local file or folder; download a model"
    ):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(FileFormatError, match=r"holds no checkpoint\. It needs model\.safetensors, or"):
        open_checkpoint(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(
        InputError, match=r"is an adapter, which changes another model\. Give that as the base, or in a recipe"
    ):
        open_checkpoint(tmp_path)
