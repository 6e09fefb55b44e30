"""Every trial ever run, in one SQLite file.

Only coordinators write to it, never workers. A coordinator first claims a trial (a row ``started`` with its host and
process), then records how it ended. A row whose process is gone was interrupted, and its trial may be claimed again. The
write-ahead log lets several coordinators of one machine share a file.
"""

import contextlib
import json
import os
import platform
import sqlite3
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import pandas as pd
import platformdirs
import psutil
from filelock import FileLock

from heedful._files import write_atomic
from heedful._machine import fingerprint
from heedful.errors import FileFormatError
from heedful.evidence._result import TrialRecord
from heedful.evidence._trial import Result, Trial

_FORMAT = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS trials (
    key TEXT NOT NULL, attempt INTEGER NOT NULL, run TEXT NOT NULL,
    study TEXT NOT NULL, task TEXT NOT NULL, arm TEXT NOT NULL, settings TEXT NOT NULL, seed INTEGER NOT NULL,
    split TEXT NOT NULL, spend TEXT NOT NULL, threads INTEGER NOT NULL, code TEXT NOT NULL, data TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('started', 'done', 'failed')),
    host TEXT NOT NULL, pid INTEGER NOT NULL, pid_started REAL NOT NULL, started TEXT NOT NULL, ended TEXT,
    reason TEXT NOT NULL DEFAULT '', log TEXT NOT NULL DEFAULT '', metrics TEXT NOT NULL DEFAULT '{}',
    costs TEXT NOT NULL DEFAULT '{}', curves TEXT NOT NULL DEFAULT '{}', machine TEXT NOT NULL,
    PRIMARY KEY (key, attempt)
) STRICT
"""


def default_path() -> Path:
    """``$HEEDFUL_STORE``, else a file in the user's data directory."""
    if chosen := os.environ.get("HEEDFUL_STORE"):
        return Path(chosen).expanduser()
    return platformdirs.user_data_path("heedful", ensure_exists=True) / "studies.sqlite"


class Store:
    """The trials in one SQLite file.

    Parameters
    ----------
    path : path, optional
        Created if missing; default ``default_path``.
    fresh : bool
        Trials that ended before this object was made count as not run. Nothing is deleted: they stay as earlier attempts.
    retry : bool
        The same for trials that failed, only.
    """

    def __init__(self, path: str | os.PathLike | None = None, *, fresh: bool = False, retry: bool = False):
        self.path = Path(path) if path is not None else default_path()
        self.fresh, self.retry = fresh, retry
        self._run = uuid.uuid4().hex
        self._machine = json.dumps(fingerprint(), sort_keys=True)
        self._me = psutil.Process()
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"{self.path}: the folder {self.path.parent} does not exist. Create it first.")
        if self.path.is_dir():
            raise IsADirectoryError(f"{self.path} is a folder. Name a file in it.")
        with self._explained():
            self._db = sqlite3.connect(self.path, timeout=60, isolation_level=None)
            self._db.row_factory = sqlite3.Row
            try:
                with FileLock(f"{self.path}-lock"):  # SQLite does not wait where the journal of a new file changes.
                    self._open()
            except BaseException:
                self._db.close()
                raise

    def _open(self) -> None:
        """Make an empty file a store; change nothing in a file that is something else."""
        with self._transaction():
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            tables = {row["name"] for row in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if version > _FORMAT:
                raise FileFormatError(
                    f"{self.path} has format {version}; this heedful knows {_FORMAT}. Update heedful."
                )
            if tables if version == 0 else "trials" not in tables:
                raise FileFormatError(f"{self.path} is not a store of trials but another program's. Name another file.")
            self._db.execute(_SCHEMA)
            self._db.execute(f"PRAGMA user_version = {_FORMAT}")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._newest = self._last_row()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *exception) -> None:
        self._db.close()

    def claim(self, trial: Trial) -> Literal["mine", "busy", "ended"]:
        """Try to become the one who runs ``trial``.

        Returns
        -------
        {"mine", "busy", "ended"}
            "mine": a row ``started`` was written and the caller must run it. "busy": a living process is at it. "ended":
            its outcome is there.
        """
        with self._explained(), self._transaction():
            last = self._db.execute(
                "SELECT rowid, * FROM trials WHERE key = ? ORDER BY attempt DESC LIMIT 1", (trial.key,)
            ).fetchone()
            if last is not None and last["status"] == "started" and self._alive(last):
                return "busy"
            if last is not None and last["status"] != "started" and self._counts(last):
                return "ended"
            self._db.execute(
                "INSERT INTO trials (key, attempt, run, study, task, arm, settings, seed, split, spend, threads, code, data,"
                " status, host, pid, pid_started, started, machine)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'started', ?, ?, ?, ?, ?)",
                (
                    trial.key,
                    1 if last is None else last["attempt"] + 1,
                    self._run,
                    trial.study,
                    trial.task,
                    trial.arm,
                    json.dumps(trial.settings),
                    trial.seed,
                    trial.split,
                    json.dumps(trial.spend),
                    trial.threads,
                    trial.code,
                    json.dumps(trial.data),
                    platform.node(),
                    self._me.pid,
                    self._me.create_time(),
                    _now(),
                    self._machine,
                ),
            )
            return "mine"

    def finish(self, trial: Trial, result: Result) -> None:
        """Record how a claimed trial ended."""
        with self._explained():
            self._db.execute(
                "UPDATE trials SET status = ?, reason = ?, log = ?, metrics = ?, costs = ?, curves = ?, ended = ?"
                " WHERE key = ? AND run = ? AND status = 'started'",
                (
                    result.status,
                    _storable(result.reason),
                    _storable(result.log),
                    json.dumps(result.metrics),
                    json.dumps(result.costs),
                    json.dumps(result.curves),
                    _now(),
                    trial.key,
                    self._run,
                ),
            )

    def release(self) -> None:
        """Give up what this object claimed and did not finish, so that it may be claimed again while this process lives."""
        with self._explained():
            self._db.execute(
                "UPDATE trials SET pid_started = 0 WHERE run = ? AND status = 'started'",
                (self._run,),
            )

    def record(self, trial: Trial) -> TrialRecord | None:
        """The last attempt of ``trial`` that ended, or None."""
        with self._explained():
            row = self._db.execute(
                "SELECT rowid, * FROM trials WHERE key = ? AND status != 'started' ORDER BY attempt DESC LIMIT 1",
                (trial.key,),
            ).fetchone()
        if row is None or not self._counts(row):
            return None
        loaded = {name: json.loads(row[name]) for name in ("settings", "metrics", "costs", "curves", "machine")}
        loaded["curves"] = {name: [tuple(point) for point in points] for name, points in loaded["curves"].items()}
        plain = (
            "key",
            "study",
            "task",
            "arm",
            "seed",
            "split",
            "status",
            "reason",
            "log",
            "threads",
            "code",
            "started",
        )
        return TrialRecord(**{name: row[name] for name in plain}, **loaded)

    def codes(self, study: str) -> dict[str, int]:
        """Code versions under which trials of ``study`` ended, with their number."""
        rows = self._db.execute(
            "SELECT code, count(*) FROM trials WHERE study = ? AND status != 'started' GROUP BY code", (study,)
        )
        return dict(tuple(row) for row in rows)

    def collect(self, other: str | os.PathLike) -> int:
        """Add the trials that ended in another store and not in this one; return how many."""
        if not Path(other).is_file():
            raise FileNotFoundError(f"{other} does not exist: name the store of trials to collect.")
        columns = [row["name"] for row in self._db.execute("PRAGMA table_info(trials)")]
        copied = ", ".join(name for name in columns if name != "attempt")
        try:
            self._db.execute("ATTACH DATABASE ? AS other", (f"{other}",))
            try:
                with self._transaction():
                    added = self._db.execute(
                        f"INSERT INTO main.trials (attempt, {copied})"
                        " SELECT 1 + coalesce((SELECT max(attempt) FROM main.trials mine WHERE mine.key = theirs.key), 0),"
                        f" {copied} FROM other.trials theirs WHERE status != 'started' AND attempt ="
                        " (SELECT max(attempt) FROM other.trials t WHERE t.key = theirs.key AND t.status != 'started')"
                        " AND NOT EXISTS"
                        " (SELECT 1 FROM main.trials mine WHERE mine.key = theirs.key AND mine.status != 'started')"
                    ).rowcount
                    self._newest = self._last_row()
                    return added
            finally:
                self._db.execute("DETACH DATABASE other")
        except sqlite3.DatabaseError as error:
            raise FileFormatError(f"{other} is not a store of trials ({error}).") from error

    def to_frame(self) -> pd.DataFrame:
        """All attempts, one row each, in the order they were started; JSON columns stay text."""
        return pd.read_sql_query("SELECT * FROM trials ORDER BY started, key, attempt", self._db)

    def export(self, path: str | os.PathLike) -> None:
        """Write all attempts to a Parquet file, atomically."""
        with write_atomic(path) as temporary:
            self.to_frame().to_parquet(temporary, index=False)

    def _counts(self, row: sqlite3.Row) -> bool:
        """Whether an ended row stands, or is to be run again by this run; one begun after this object was made stands."""
        new = row["run"] == self._run or row["rowid"] > self._newest
        return new or not (self.fresh or (self.retry and row["status"] == "failed"))

    def _last_row(self) -> int:
        return self._db.execute("SELECT coalesce(max(rowid), 0) FROM trials").fetchone()[0]

    def _alive(self, row: sqlite3.Row) -> bool:
        if row["host"] != platform.node():
            return False  # A write-ahead log is never shared between machines: the row came with a copied file.
        with contextlib.suppress(psutil.Error):
            return abs(psutil.Process(row["pid"]).create_time() - row["pid_started"]) < 1
        return False

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # A full disk may have ended it already.
                self._db.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn SQLite's errors into those that say which file it is and what to do."""
        try:
            yield
        except sqlite3.OperationalError as error:  # the system's: no right to write, no space, no answer
            raise OSError(
                f"The store of trials {self.path} cannot be used: {error}. Make it writable, free space, or name another file."
            ) from error
        except sqlite3.DatabaseError as error:
            raise FileFormatError(f"{self.path} is not a store of trials ({error}). Name another file.") from error


def _storable(text: str) -> str:
    """Text without the halves of characters that file names and foreign bytes leave behind and SQLite refuses."""
    return text.encode("utf-8", "replace").decode()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
