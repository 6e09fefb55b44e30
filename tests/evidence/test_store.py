import dataclasses
import multiprocessing
import sqlite3
import threading

import pandas as pd
import pytest

from heedful.errors import FileFormatError
from heedful.evidence import Store
from heedful.evidence._trial import Result
from tests.evidence.test_trial import TRIAL

DONE = Result("done", metrics={"score": 0.1 + 0.2}, costs={"seconds": 1.5}, curves={"loss": [(0.0, 1.0)]})
FAILED = Result("failed", "ValueError: no", "Traceback")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trials.sqlite"


def test_a_trial_is_claimed_once_and_comes_back_exactly(path):
    with Store(path) as store:
        assert store.record(TRIAL) is None
        assert store.claim(TRIAL) == "mine"
        assert store.record(TRIAL) is None
        store.finish(TRIAL, DONE)
        assert store.claim(TRIAL) == "ended"
    with Store(path) as store:
        record = store.record(TRIAL)
    assert record.metrics == {"score": 0.1 + 0.2}
    assert record.settings == {"shift": 2.0}
    assert record.curves == {"loss": [(0.0, 1.0)]}
    assert (record.key, record.status, record.seed, record.split) == (TRIAL.key, "done", 3, "test")


def test_a_claim_of_a_living_process_is_respected_and_that_of_a_dead_one_is_not(path):
    with Store(path) as mine, Store(path) as other:
        assert mine.claim(TRIAL) == "mine"
        assert other.claim(TRIAL) == "busy"
        other._db.execute(
            "UPDATE trials SET pid_started = pid_started - 100"
        )  # the number now belongs to another process
        assert other.claim(TRIAL) == "mine"


def test_a_row_started_on_another_machine_was_copied_and_is_run_again(path):
    with Store(path) as store:
        store.claim(TRIAL)
        store._db.execute("UPDATE trials SET host = 'elsewhere'")
        assert store.claim(TRIAL) == "mine"


def test_two_processes_never_get_the_same_trial(path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        claims = pool.map(_claim_many, [path, path], chunksize=1)
    assert sorted(claims[0] + claims[1]) == list(range(200))


def _claim_many(path):
    with Store(path) as store:
        trials = [dataclasses.replace(TRIAL, seed=seed) for seed in range(200)]
        mine = [trial for trial in trials if store.claim(trial) == "mine"]
        for trial in mine:
            store.finish(trial, DONE)
        return [trial.seed for trial in mine]


def test_a_new_store_may_be_opened_by_several_at_once(tmp_path):
    opened, together = [], threading.Barrier(3)

    def open_it(path):
        together.wait()
        with Store(path):
            opened.append(path)

    for i in range(30):  # Without the lock about every tenth file fails.
        threads = [threading.Thread(target=open_it, args=(tmp_path / f"{i}.sqlite",)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(opened) == 90


def test_fresh_runs_everything_again_once_and_deletes_nothing(path):
    with Store(path) as store:
        store.claim(TRIAL)
        store.finish(TRIAL, DONE)
    with Store(path, fresh=True) as store:
        assert store.record(TRIAL) is None
        assert store.claim(TRIAL) == "mine"
        store.finish(TRIAL, dataclasses.replace(DONE, metrics={"score": 9.0}))
        assert store.claim(TRIAL) == "ended"
        assert len(store.to_frame()) == 2
    with Store(path) as store:
        assert store.record(TRIAL).metrics == {"score": 9.0}


def test_retry_runs_failed_trials_again_and_no_others(path):
    other = dataclasses.replace(TRIAL, seed=4)
    with Store(path) as store:
        for trial, result in ((TRIAL, FAILED), (other, DONE)):
            store.claim(trial)
            store.finish(trial, result)
        assert store.claim(TRIAL) == "ended"
    with Store(path, retry=True) as store:
        assert store.claim(TRIAL) == "mine"
        assert store.claim(other) == "ended"


def test_collect_adds_what_ended_elsewhere_and_keeps_what_is_here(tmp_path, path):
    here, there, unfinished = (dataclasses.replace(TRIAL, seed=seed) for seed in (1, 2, 3))
    with Store(tmp_path / "other.sqlite") as other:
        for trial in (here, there):
            other.claim(trial)
            other.finish(trial, dataclasses.replace(DONE, metrics={"score": 7.0}))
        other.claim(unfinished)
    with Store(path) as store:
        store.claim(here)
        store.finish(here, DONE)
        assert store.collect(tmp_path / "other.sqlite") == 1
        assert store.collect(tmp_path / "other.sqlite") == 0
        assert store.record(here).metrics == DONE.metrics
        assert store.record(there).metrics == {"score": 7.0}
        assert store.claim(unfinished) == "mine"


def test_export_is_a_parquet_file_of_all_attempts(tmp_path, path):
    with Store(path) as store:
        store.claim(TRIAL)
        store.finish(TRIAL, FAILED)
        store.export(tmp_path / "trials.parquet")
    frame = pd.read_parquet(tmp_path / "trials.parquet")
    assert frame.loc[0, ["task", "status", "reason"]].tolist() == ["small", "failed", "ValueError: no"]


def test_what_is_no_store_is_refused_and_left_alone(tmp_path):
    wrong = tmp_path / "notes.txt"
    wrong.write_text("these are notes, " * 100)
    with pytest.raises(FileFormatError, match=r"notes\.txt is not a store of trials"):
        Store(wrong)
    assert wrong.read_text().startswith("these are notes")
    with pytest.raises(FileNotFoundError, match=r"the folder .* does not exist"):
        Store(tmp_path / "nowhere" / "x.sqlite")
    with Store(tmp_path / "a.sqlite") as store:
        with pytest.raises(FileFormatError, match="is not a store of trials"):
            store.collect(wrong)
        with pytest.raises(FileNotFoundError, match="name the store of trials to collect"):
            store.collect(tmp_path / "b.sqlite")


def test_a_store_of_a_later_format_is_refused(path):
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(FileFormatError, match="has format 99; this heedful knows 1"):
        Store(path)


def test_two_stores_with_fresh_share_what_either_runs_after_both_were_opened(path):
    with Store(path) as store:
        store.claim(TRIAL)
        store.finish(TRIAL, FAILED)
    for option in ("fresh", "retry"):
        with Store(path, **{option: True}) as one, Store(path, **{option: True}) as other:
            assert one.claim(TRIAL) == "mine"
            one.finish(TRIAL, FAILED)
            assert other.claim(TRIAL) == "ended"
            assert one.record(TRIAL) == other.record(TRIAL) is not None


def test_fresh_does_not_take_collected_trials_for_its_own(tmp_path, path):
    with Store(tmp_path / "other.sqlite") as other:
        other.claim(TRIAL)
        other.finish(TRIAL, DONE)
    with Store(path, fresh=True) as store:
        store.collect(tmp_path / "other.sqlite")
        assert store.claim(TRIAL) == "mine"


def test_what_is_released_may_be_claimed_again_though_the_process_lives(path):
    with Store(path) as store, Store(path) as other:
        store.claim(TRIAL)
        store.release()
        assert other.claim(TRIAL) == "mine"


def test_the_database_of_another_program_is_refused_and_left_as_it_is(path):
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE trials (trial_id INTEGER)")  # as Optuna has one
    db.commit()
    db.close()
    before = path.read_bytes()
    with pytest.raises(FileFormatError, match="is not a store of trials but another program's"):
        Store(path)
    assert path.read_bytes() == before


def test_a_damaged_store_a_folder_and_a_full_disk_are_told_apart(tmp_path, path):
    with pytest.raises(IsADirectoryError, match="is a folder"):
        Store(tmp_path)
    with Store(path) as store:
        store._db.execute("PRAGMA max_page_count = 8")  # no page can be added, as on a full disk
        store.claim(TRIAL)
        with pytest.raises(OSError, match=r"cannot be used: database or disk is full\. Make it writable, free space"):
            store.finish(TRIAL, dataclasses.replace(DONE, log="x" * 100_000))
        assert store.record(TRIAL) is None
    damaged = bytearray(path.read_bytes())
    damaged[4096:] = b"\xff" * (len(damaged) - 4096)
    path.write_bytes(damaged)
    with pytest.raises(FileFormatError, match="is not a store of trials"), Store(path) as store:
        store.claim(TRIAL)
