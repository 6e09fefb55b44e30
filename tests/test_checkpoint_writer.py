import errno
import json
import os
import shutil
import signal
import stat
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heedful._checkpoints import CheckpointWriter, TensorInfo, _writer, open_checkpoint
from heedful.errors import InputError, ParameterError
from tests.conformance.distributed import in_new_process
from tests.conformance.files import count_lines, exit_code, run_until_line
from tests.test_checkpoints import any_info, random_tensor, same_bits, sparse_file

one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
STATE = {f"layer.{i}.weight": torch.full((10, 10), float(i)) for i in range(6)}  # 400 bytes each
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def plan_of(state):
    return {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}


def write(out, state=STATE, *, config=None, files=None, **options):
    with CheckpointWriter(out, plan_of(state), **{"key": "key", "shard_size": 800, **options}) as writer:
        for name in writer.pending:
            writer.add(name, state[name])
        return writer.finish(config=config, files=files)


def start(out, state=STATE, *, n=3, **options):
    """Add ``n`` tensors, of which two fill a shard, and end there."""
    with CheckpointWriter(out, plan_of(state), **{"key": "key", "shard_size": 800, **options}) as writer:
        for name in writer.pending[:n]:
            writer.add(name, state[name])


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- what is written


@settings(one_folder, max_examples=50)
@given(
    infos=st.dictionaries(
        st.text(min_size=1).filter(lambda n: n != "__metadata__" and "\0" not in n), any_info, min_size=1, max_size=8
    ),
    shard_size=st.integers(1, 300),
)
def test_any_tensors_are_written_as_the_reference_reads_them(tmp_path, infos, shard_size):
    state = {name: random_tensor(info, i) for i, (name, info) in enumerate(infos.items())}
    out = write(tmp_path / "out", state, shard_size=shard_size, overwrite=True)
    found, sizes = {}, []
    for path in sorted(out.glob("*.safetensors")):
        part = safetensors.torch.load_file(path)
        sizes.append((len(part), sum(tensor.nbytes for tensor in part.values())))
        found |= part
        with safetensors.safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
    assert found.keys() == state.keys()
    assert all(same_bits(found[name], state[name]) for name in state)
    assert all(size <= shard_size or n - sum(info.nbytes == 0 for info in infos.values()) <= 1 for n, size in sizes)
    for path in out.glob("*.safetensors"):  # aligned, so that nothing has to be copied to be read
        raw = path.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:start]).items():
            assert name == "__metadata__" or (start + entry["data_offsets"][0]) % infos[name].dtype.itemsize == 0
    if len(sizes) > 1:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
        assert index["weight_map"].keys() == state.keys()


def test_files_are_named_as_hugging_face_names_them(tmp_path):
    out = write(tmp_path / "out", config={"model_type": "tiny"}, files={"README.md": "# Tiny\n"})
    assert out == tmp_path / "out"
    assert sorted(os.listdir(out)) == ["README.md", "config.json", *SHARDS, "model.safetensors.index.json"]
    assert json.loads((out / "config.json").read_text()) == {"model_type": "tiny"}
    assert (out / "README.md").read_text() == "# Tiny\n"
    assert sorted(os.listdir(write(tmp_path / "one", shard_size="5GB"))) == ["model.safetensors"]
    assert sorted(os.listdir(tmp_path)) == ["one", "out"]  # and nothing beside them


def test_files_are_copied_through_links_and_into_folders(tmp_path):
    (tmp_path / "blob").write_bytes(b"\0\1")
    (tmp_path / "tokenizer.model").symlink_to("blob")
    out = write(
        tmp_path / "out",
        files={"tokenizer.model": tmp_path / "tokenizer.model", "additional_chat_templates/tool.jinja": "{{ x }}"},
    )
    assert not (out / "tokenizer.model").is_symlink()
    assert (out / "tokenizer.model").read_bytes() == b"\0\1"
    assert (out / "additional_chat_templates/tool.jinja").read_text() == "{{ x }}"


@pytest.mark.parametrize(
    ("size", "n_shards"), [(400, 6), ("800", 3), ("0.8 KB", None), ("1KB", 3), ("1 kb", 3), ("1MB", 1), (10**12, 1)]
)
def test_shard_size_is_decimal(tmp_path, size, n_shards):
    if n_shards is None:
        with pytest.raises(
            ParameterError, match=r'^shard_size must be a number of bytes >= 1, or text such as "5GB"; got'
        ):
            write(tmp_path / "out", shard_size=size)
    else:
        assert len(list(write(tmp_path / "out", shard_size=size).glob("*.safetensors"))) == n_shards


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_it_with_strict_keys_and_equal_logits(tmp_path, tied, shard_size, dtype):
    import transformers  # here: the processes that are killed below need not wait for it

    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(tmp_path / "model")

    def load(folder):
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, output_loading_info=True, dtype=dtype
        )
        assert not any(info.values()), info
        return loaded

    model, tokens = load(tmp_path / "model"), torch.arange(50)[None]
    for given_as in (tmp_path / "model", model.state_dict()):
        source = open_checkpoint(given_as)
        assert ("lm_head.weight" in source) == (not tied)
        state = {name: source.get(name) for name in source}
        out = write(tmp_path / "out", state, config=config.to_dict(), shard_size=shard_size, overwrite=True)
        assert torch.equal(load(out)(tokens).logits, model(tokens).logits)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="resident memory is let go of on Linux only")
def test_the_memory_of_a_copy_is_that_of_a_tensor_whatever_the_model(tmp_path):
    info = TensorInfo((2**21,), torch.float32)  # 8 MiB
    peaks = {}
    for n in (4, 24):
        sparse_file(tmp_path / f"{n}.safetensors", {str(i): info for i in range(n)})
        peaks[n] = in_new_process(copy_and_measure, tmp_path / f"{n}.safetensors", tmp_path / f"out-{n}")
        assert open_checkpoint(tmp_path / f"out-{n}").names == tuple(map(str, range(n)))
    assert info.nbytes <= peaks[4] < 4 * info.nbytes
    assert abs(peaks[24] - peaks[4]) < info.nbytes


def copy_and_measure(path, out):
    """Most resident memory in bytes, above what the process has before it begins."""
    write(out.with_name("warm-up"), overwrite=True)
    process, source = psutil.Process(), open_checkpoint(path)
    before, most = process.memory_info().rss, 0
    with CheckpointWriter(out, {name: source.info(name) for name in source}, key="", shard_size="64MB") as writer:
        for name in writer.pending:
            tensor = source.get(name)
            writer.add(name, tensor)
            most = max(most, process.memory_info().rss - before)
        writer.finish()
    return most


# --- interrupted runs


def test_an_interrupted_run_goes_on_after_its_complete_shards(tmp_path):
    write(tmp_path / "whole", config={"a": 1})
    start(tmp_path / "out", n=3)
    assert not (tmp_path / "out").exists()
    kept = tmp_path / ".out.partial/checkpoint"
    before = (kept / SHARDS[0]).stat()
    assert os.listdir(kept) == [SHARDS[0]]
    with CheckpointWriter(tmp_path / "out", plan_of(STATE), key="key", shard_size=800) as writer:
        assert writer.pending == tuple(STATE)[2:]
    write(tmp_path / "out", config={"a": 1})
    after = (tmp_path / "out" / SHARDS[0]).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert sorted(os.listdir(tmp_path)) == ["out", "whole"]


def test_a_run_that_ends_before_its_first_shard_leaves_nothing(tmp_path):
    start(tmp_path / "out", n=1)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "other",
    [
        {"key": "other"},
        {"shard_size": 1200},
        {"state": {**STATE, "more": torch.ones(1)}},
        {
            "state": {name.replace("layer", "other"): tensor for name, tensor in STATE.items()}
        },  # shards of the same size
    ],
    ids=["key", "shard_size", "plan", "names"],
)
def test_what_another_run_left_is_thrown_away(tmp_path, other):
    other = {"key": "key", "shard_size": 800, "state": STATE, **other}
    state = other.pop("state")
    start(tmp_path / "out")
    with CheckpointWriter(tmp_path / "out", plan_of(state), **other) as writer:
        assert writer.pending == tuple(state)
    write(tmp_path / "out", state, **other)
    write(tmp_path / "whole", state, **other)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    "damage",
    [lambda content: content[:-1], lambda content: content + b"\0", lambda content: b""],
    ids=["shorter", "longer", "empty"],
)
def test_a_shard_of_another_size_is_written_again(tmp_path, damage):
    write(tmp_path / "whole")
    start(tmp_path / "out", n=4)
    path = tmp_path / ".out.partial/checkpoint" / SHARDS[1]
    path.write_bytes(damage(path.read_bytes()))
    write(tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_run_that_ended_in_its_last_step_leaves_none_of_its_files(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "rename", lambda source, target: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(tmp_path / "out", files={"old.txt": "old", "folder/old.txt": "old"})
    monkeypatch.undo()
    assert sorted(contents(write(tmp_path / "out"))) == [*SHARDS, "model.safetensors.index.json"]
    assert [path.name for path in (tmp_path / "out").iterdir() if path.is_dir()] == []


def write_new(place):
    write(place / "out", config={"new": True}, files={"README.md": "new"}, overwrite=True)


@pytest.mark.parametrize("there", [False, True], ids=["new", "overwrite"])
def test_whenever_it_is_killed_nothing_looks_complete_and_the_next_run_ends_with_the_same_bytes(tmp_path, there):
    for name in ("whole", "lines"):
        (tmp_path / name).mkdir()
    write_new(tmp_path / "whole")
    expected = contents(tmp_path / "whole/out")
    lines = count_lines(tmp_path / "count", write_new, tmp_path / "lines")
    # The last lines are where the folders change their names.
    for n in sorted({*range(1, lines, max(1, lines // 5)), *range(lines - 150, lines, 30)}):
        place = tmp_path / str(n)
        place.mkdir()
        if there:
            write(place / "out", {"old": torch.zeros(3)})
        assert exit_code(run_until_line, n, write_new, place) == -signal.SIGKILL
        if (place / "out").exists():
            found = contents(place / "out")
            assert found.keys() == ({"model.safetensors"} if there and found != expected else expected.keys())
        else:
            assert not there or (place / ".out.partial/replaced/model.safetensors").exists(), "the old one is lost"
        write_new(place)
        assert contents(place / "out") == expected
        assert os.listdir(place) == ["out"]


@pytest.mark.parametrize("after", [1, 2])
def test_an_end_between_the_two_renames_loses_nothing(tmp_path, monkeypatch, after):
    """Whatever is written next, even with another key: the old one is back, or the new one is there."""
    write(tmp_path / "out", {"old": torch.zeros(3)})
    rename, calls = os.rename, []

    def renamed(source, target):
        calls.append(target)
        if len(calls) > after:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: calls and 1 / 0)  # the process is gone
    with pytest.raises((KeyboardInterrupt, ZeroDivisionError)):
        write(tmp_path / "out", overwrite=True)
    monkeypatch.undo()
    with pytest.raises(FileExistsError, match=r"out exists\. Choose another name, or say overwrite\."):
        write(tmp_path / "out", key="other")
    assert (
        list(contents(tmp_path / "out")) == ["model.safetensors"]
        if after == 1
        else SHARDS[0] in contents(tmp_path / "out")
    )


# --- places


def test_what_is_there_is_refused_or_replaced(tmp_path):
    out = tmp_path / "out"
    write(out)
    before = contents(out)
    with pytest.raises(FileExistsError, match=r"out exists\. Choose another name, or say overwrite\."):
        write(out, {"w": torch.ones(1)})
    assert contents(out) == before
    out.chmod(0o700)
    write(out, {"w": torch.ones(1)}, overwrite=True)
    assert list(contents(out)) == ["model.safetensors"]
    assert stat.S_IMODE(out.stat().st_mode) == 0o700  # a private folder stays private
    assert os.listdir(tmp_path) == ["out"]


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "out").mkdir()
    assert len(os.listdir(write(tmp_path / "out"))) == 4


def test_a_folder_that_is_no_checkpoint_is_never_replaced(tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters/mother.txt").write_text("Dear")
    with pytest.raises(
        FileExistsError, match=r"is a folder without a checkpoint, and only checkpoints are overwritten"
    ):
        write(tmp_path / "letters", overwrite=True)
    write(tmp_path / "run")
    (tmp_path / "run/checkpoint-500").mkdir()
    before = contents(tmp_path)
    with pytest.raises(
        FileExistsError, match=r"run holds the folder checkpoint-500, and only checkpoints are overwritten"
    ):
        write(tmp_path / "run", overwrite=True)
    with pytest.raises(NotADirectoryError, match=r"mother\.txt is a file\. Name a folder\."):
        write(tmp_path / "letters/mother.txt", overwrite=True)
    assert contents(tmp_path) == before
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        write(tmp_path / "nowhere/out")


def test_what_comes_while_it_is_written_is_not_replaced(tmp_path):
    with CheckpointWriter(tmp_path / "out", plan_of(STATE), key="") as writer:
        for name in writer.pending:
            writer.add(name, STATE[name])
        (tmp_path / "out").mkdir()
        (tmp_path / "out/mine").touch()
        with pytest.raises(FileExistsError, match="out exists"):
            writer.finish()
    assert list(contents(tmp_path / "out")) == ["mine"]


def test_a_link_stays_and_what_it_points_to_is_written(tmp_path):
    (tmp_path / "link").symlink_to("target")
    assert write(tmp_path / "link") == tmp_path / "target"
    assert (tmp_path / "link").is_symlink()


def test_pieces_are_kept_in_work_dir(tmp_path):
    start(tmp_path / "out", work_dir=tmp_path / "a/b")
    assert os.listdir(tmp_path) == ["a"]
    with CheckpointWriter(
        tmp_path / "out", plan_of(STATE), key="key", shard_size=800, work_dir=tmp_path / "a/b"
    ) as writer:
        assert writer.pending == tuple(STATE)[2:]
    write(tmp_path / "out", work_dir=tmp_path / "a/b")
    assert os.listdir(tmp_path / "a/b") == []


def test_work_dir_on_another_file_system_is_refused(tmp_path):
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("this machine has no second file system at /dev/shm")
    with pytest.raises(ParameterError, match=r"work_dir /dev/shm is on another file system than .*out"):
        write(tmp_path / "out", work_dir=elsewhere)


def test_a_mount_point_is_refused_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "out")
    with pytest.raises(ParameterError, match=r"out is a mount point, .*\. Name a folder inside of it\."):
        write(tmp_path / "out")


@pytest.mark.parametrize("out", ["", ".", "../here"])
def test_the_current_folder_is_refused_since_it_would_be_gone(tmp_path, monkeypatch, out):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ParameterError, match=r"here is the current folder, .*\. Name a folder inside of it\."):
        write(out)


def test_permissions_follow_the_umask(tmp_path):
    for umask in (0o027, 0o002):
        previous = os.umask(umask)
        try:
            out = write(tmp_path / f"{umask:o}", config={}, files={"a": "b"})
            with CheckpointWriter(tmp_path / "x", plan_of(STATE), key=""):
                assert stat.S_IMODE((tmp_path / ".x.partial").stat().st_mode) == 0o700
        finally:
            os.umask(previous)
        assert stat.S_IMODE(out.stat().st_mode) == 0o777 & ~umask
        assert {stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()} == {0o666 & ~umask}


def test_of_two_writers_one_wins_and_the_other_is_told(tmp_path):
    with CheckpointWriter(tmp_path / "out", plan_of(STATE), key="key", shard_size=800) as writer:
        writer.add(writer.pending[0], STATE[writer.pending[0]])
        for attempt in (lambda: write(tmp_path / "out"), lambda: in_new_process(write, tmp_path / "out")):
            with pytest.raises(Exception, match=r"out is being written by another process\. Wait until it ends, or"):
                attempt()
        for name in writer.pending:
            writer.add(name, STATE[name])
        writer.finish()
    write(tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


# --- no room


def test_a_full_disk_leaves_nothing_at_out_and_says_what_to_do(tmp_path, monkeypatch):
    write(tmp_path / "whole")
    real, calls = _writer._write, []

    def full(file, content):
        calls.append(file)
        if len(calls) == 5:  # head and two tensors, head, and then
            file.write(bytes(content)[:100])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file, content)

    monkeypatch.setattr(_writer, "_write", full)
    message = (
        r"the disk is full: .*out needs 1,984 more bytes\. What is complete is kept\. Free some space and run the same"
    )
    with pytest.raises(OSError, match=message) as caught:
        write(tmp_path / "out")
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert sorted(path.name for path in (tmp_path / ".out.partial").rglob("*.safetensors")) == SHARDS[:1]
    assert not (tmp_path / "out").exists()
    write(tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_disk_that_is_full_at_the_end_is_said_too(tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "card").touch()
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(
        OSError, match=r"the disk is full: .*out needs a little more for what stands beside the weights"
    ):
        write(tmp_path / "out", files={"README.md": tmp_path / "card"})
    monkeypatch.undo()
    with CheckpointWriter(tmp_path / "out", plan_of(STATE), key="key", shard_size=800) as writer:
        assert writer.pending == ()


def test_too_little_room_is_noticed_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1000, 0, 1000))
    with pytest.raises(
        OSError, match=r"out needs 2,976 more bytes, and the disk has 1,000\. Free some space"
    ) as caught:
        write(tmp_path / "out")
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == []


# --- wrong use


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "layer.1.weight",
            torch.ones(10, 10),
            r"^the next tensor of .*out is layer\.0\.weight; got layer\.1\.weight\. Add",
        ),
        ("absent", torch.ones(10, 10), r"is layer\.0\.weight; got absent"),
        (
            "layer.0.weight",
            torch.ones(10, 9),
            r"^layer\.0\.weight was planned as float32 of shape \(10, 10\); got float32 of shape \(10, 9\)\.$",
        ),
        ("layer.0.weight", torch.ones(10, 10).half(), r"got float16 of shape \(10, 10\)"),
    ],
)
def test_other_tensors_than_the_next_of_the_plan_are_refused(tmp_path, name, tensor, message):
    with CheckpointWriter(tmp_path / "out", plan_of(STATE), key="") as writer:
        with pytest.raises(InputError, match=message):
            writer.add(name, tensor)
        with pytest.raises(InputError, match=r"still lacks 6 tensors, the first layer\.0\.weight"):
            writer.finish()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({}, "a checkpoint needs at least one tensor"),
        ({"": TensorInfo((1,), torch.float32)}, "cannot hold a tensor called ''"),
        ({"__metadata__": TensorInfo((1,), torch.float32)}, "cannot hold a tensor called '__metadata__'"),
        ({"a\0": TensorInfo((1,), torch.float32)}, "cannot hold a tensor called"),
        (
            {"a": TensorInfo((1,), torch.complex128)},
            r"a has dtype torch\.complex128, which a safetensors file cannot hold",
        ),
    ],
)
def test_plans_that_the_format_cannot_hold_are_refused_before_anything_is_written(tmp_path, plan, message):
    with pytest.raises(InputError, match=message):
        CheckpointWriter(tmp_path / "out", plan, key="")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "name",
    [
        *("../x", "/x", "a/../../x", ""),
        *("..\\x", "\\x", "C:\\x", "C:x"),  # on Windows these lead out of the folder
        *("model.safetensors", "./model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"),
    ],
)
def test_files_outside_of_the_folder_or_in_the_place_of_weights_are_refused(tmp_path, name):
    with pytest.raises(ParameterError, match=r"files cannot hold .*: name files in the folder that are no weights"):
        write(tmp_path / "out", files={name: "x"})
    assert not (tmp_path / "out").exists()


def test_tensors_of_any_layout_are_written(tmp_path):
    state = {"a": torch.arange(12.0).reshape(3, 4).T, "b": torch.arange(5)[::2], "c": torch.ones(1).expand(4)}
    state["d"] = torch.nn.Parameter(torch.ones(2))
    source = open_checkpoint(write(tmp_path / "out", state))
    assert all(torch.equal(source.get(name), state[name]) for name in state)
