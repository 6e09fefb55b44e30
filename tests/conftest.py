"""What every test stands on: one seed, one thread, no network."""

import datetime
import errno
import hashlib
import ipaddress
import os
import socket

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start; this one is told below

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
# No deadline: a shared machine is slow now and then, and that is no defect. Other examples each time, in CI too; the blob
# that a failure prints repeats it exactly.
settings.register_profile("heedful", deadline=None, derandomize=False, print_blob=True)
settings.load_profile("heedful")


def _choose_seed() -> int:
    """HEEDFUL_TEST_SEED if given; in CI one that changes with the day and the commit; else 0."""
    if given := os.environ.get("HEEDFUL_TEST_SEED"):
        return int(given)
    if not os.environ.get("CI"):
        return 0
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    name = today + os.environ.get("GITHUB_SHA", "")
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 2**31


SEED = _choose_seed()


def pytest_report_header() -> str:
    return f"seed: {SEED} (repeat with HEEDFUL_TEST_SEED={SEED})"


@pytest.fixture
def seed() -> int:
    """A test that takes it promises to pass whatever it is."""
    return SEED


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    """Refuse TCP connections that leave this machine, as a machine without network does."""
    connect = socket.socket.connect

    def guarded(self, address):
        internet = self.family in (socket.AF_INET, socket.AF_INET6) and self.type == socket.SOCK_STREAM
        if internet and not _local(address[0]):
            raise OSError(errno.ENETUNREACH, f"tests have no network, and one asked for {address[0]}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


def _local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host in ("localhost", socket.gethostname())
