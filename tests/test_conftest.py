import errno
import socket

import pytest

from tests.conftest import SEED, _choose_seed, pytest_report_header


@pytest.fixture
def environment(monkeypatch):
    for name in ("HEEDFUL_TEST_SEED", "CI", "GITHUB_SHA"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch.setenv


def test_the_seed_is_zero_on_a_desk_and_what_is_asked_for_anywhere(environment):
    assert _choose_seed() == 0
    environment("CI", "true")
    environment("HEEDFUL_TEST_SEED", "17")
    assert _choose_seed() == 17


def test_the_seed_rotates_in_ci_and_stays_the_same_within_a_run(environment):
    environment("CI", "true")
    seeds = set()
    for commit in ("aaa", "bbb", "ccc"):
        environment("GITHUB_SHA", commit)
        seeds.add(_choose_seed())
        assert _choose_seed() in seeds
    assert len(seeds) == 3
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_the_header_says_how_to_repeat_it(seed):
    assert seed == SEED
    assert f"HEEDFUL_TEST_SEED={SEED}" in pytest_report_header()


def test_there_is_no_network_but_this_machine():
    for host in ("192.0.2.1", "example.org"):  # the first belongs to nobody
        with socket.socket() as outside, pytest.raises(OSError, match="tests have no network") as caught:
            outside.connect((host, 80))
        assert caught.value.errno == errno.ENETUNREACH
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        pass
