import dataclasses
import json
import logging
import threading
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch

import heedful
from heedful._results import Event, Report, logger, progress, report_progress, track


@dataclasses.dataclass(frozen=True)
class Plain:
    value: object


@dataclasses.dataclass(frozen=True)
class Finding(Report):
    value: object


@dataclasses.dataclass(frozen=True)
class Renamed(Report):
    value: object

    def to_dict(self):
        return {"renamed": self.value}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.arange(4.0).reshape(2, 2), [[0.0, 1.0], [2.0, 3.0]]),
        (np.array(1), 1),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (torch.ones(2, requires_grad=True), [1.0, 1.0]),
        (torch.tensor(2, dtype=torch.bfloat16), 2.0),
        ((1, (2.5, None)), [1, [2.5, None]]),
        ({1: "a", ("x", "y"): [np.int64(3)]}, {"1": "a", "('x', 'y')": [3]}),
        (MappingProxyType({"a": (1,)}), {"a": [1]}),
        (Path("a") / "b", str(Path("a", "b"))),
        (Plain(np.arange(2)), {"value": [0, 1]}),
        (Finding(Finding(np.float64(1))), {"value": {"value": 1.0}}),
        ([Renamed(1)], [{"renamed": 1}]),
        (np.array([Plain(1)], dtype=object), [{"value": 1}]),
    ],
)
def test_to_dict_holds_json_types_only(value, expected):
    found = Finding(value).to_dict()
    assert found == {"value": expected}
    assert json.loads(json.dumps(found)) == found
    assert type(found["value"]) is type(expected)


@pytest.mark.parametrize("value", [object(), {1, 2}, 1j, np.array(1j), Plain, b"bytes"])
def test_what_has_no_json_form_is_an_error_and_not_passed_on(value):
    with pytest.raises(TypeError, match="has no JSON form"):
        Finding([{"deep": value}]).to_dict()


def test_reports_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Finding(1).value = 2


def test_track_reports_each_item_when_it_is_done():
    events, seen = [], []
    with progress(events.append):
        seen.extend((item, len(events)) for item in track("ab", "letters"))
    assert seen == [("a", 0), ("b", 1)]
    assert events == [Event("letters", 1, 2), Event("letters", 2, 2)]


def test_track_takes_iterators_and_a_total():
    events = []
    with progress(events.append):
        assert list(track(iter("ab"), "unknown")) == ["a", "b"]
        assert list(track(iter("ab"), "told", total=2)) == ["a", "b"]
        assert list(track([], "nothing")) == []
    assert [event.total for event in events] == [None, None, 2, 2]


def test_without_a_sink_nothing_happens():
    report_progress(Event("phase", 1))
    assert list(track([1, 2], "phase")) == [1, 2]


def test_the_innermost_sink_hears_and_the_outer_one_is_put_back_even_after_an_error():
    outer, inner = [], []
    with progress(outer.append):
        with pytest.raises(ZeroDivisionError), progress(inner.append):  # noqa: PT012  (the block is the test)
            report_progress(Event("a", 1))
            raise ZeroDivisionError
        report_progress(Event("b", 1))
    report_progress(Event("c", 1))
    assert [event.phase for event in inner] == ["a"]
    assert [event.phase for event in outer] == ["b"]


def test_a_sink_belongs_to_its_thread():
    events = []
    with progress(events.append):
        other = threading.Thread(target=report_progress, args=(Event("elsewhere", 1),))
        other.start()
        other.join()
    assert events == []


def test_the_error_of_a_sink_reaches_the_caller():
    def stop(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), progress(stop):
        list(track([1], "phase"))


def test_the_public_door_is_the_same():
    assert heedful.progress is progress
    assert heedful.Event is Event
    assert logger is logging.getLogger("heedful")
