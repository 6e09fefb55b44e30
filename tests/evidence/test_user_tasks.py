import pytest

from heedful.errors import InputError
from heedful.evidence import load_task, run_study
from tests.evidence import toys

RIGHT = """
import numpy as np

class Mine:
    def __init__(self, split, seed):
        self.split, self.numbers = split, np.full(100, float(seed))

def build(*, split, seed):
    return Mine(split, seed)

def too_little(seed):
    return Mine("test", seed)

def wrong(*, split, seed):
    return {"numbers": [1, 2]}
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in the current folder, under a name of its own for each test."""
    name = f"my_tasks_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(RIGHT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    return name


def test_a_study_runs_on_the_users_own_task_alone(module, tmp_path):
    study = load_task(f"{module}:build", toys.study())
    assert list(study.tasks) == [f"{module}:build"]
    result = run_study(study, engine="inline", store=tmp_path / "a.sqlite")
    assert [t.metrics["score"] for t in result.trials if t.arm == "plain"] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert {t.task for t in result.trials} == {f"{module}:build"}


def test_worker_processes_find_it_too(module, tmp_path):
    study = load_task(f"{module}:build", toys.study())
    result = run_study(study, engine="processes", workers=1, store=tmp_path / "a.sqlite")
    assert {t.status for t in result.trials} == {"done"}


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("tasks.py", "named package.module:function; got 'tasks.py'"),
        ("{module}:absent", "cannot be imported: module '{module}' has no attribute 'absent'"),
        ("no_such_module:build", "cannot be imported: No module named 'no_such_module'"),
        ("{module}:too_little", "must be a function of split and seed"),
        ("{module}:wrong", "must build an object with numbers, split; the dict it built lacks numbers, split"),
    ],
)
def test_a_task_of_the_wrong_form_gets_an_error_that_shows_the_right_one(module, reference, message):
    with pytest.raises(InputError) as caught:
        load_task(reference.format(module=module), toys.study())
    text = str(caught.value)
    assert message.format(module=module) in text
    assert "The right form:" in text
    assert "class Numbers(Protocol):" in text


def test_changed_source_of_the_task_is_another_trial(module, tmp_path):
    before = load_task(f"{module}:build", toys.study()).tasks[f"{module}:build"].data
    (tmp_path / f"{module}.py").write_text(RIGHT + "\n# changed\n")
    after = load_task(f"{module}:build", toys.study()).tasks[f"{module}:build"].data
    assert before != after


def test_a_task_may_be_a_partial_function_or_an_object_that_is_called(module, tmp_path):
    (tmp_path / f"{module}.py").write_text(
        RIGHT
        + "\nimport functools\npart = functools.partial(build)\n"
        + "class Maker:\n    def __call__(self, *, split, seed):\n        return build(split=split, seed=seed)\n"
        + "maker = Maker()\n"
    )
    sources = {str(load_task(f"{module}:{name}", toys.study()).tasks[f"{module}:{name}"].data) for name in FORMS}
    assert len(sources) == 1
    assert "source" in sources.pop()


FORMS = ("build", "part", "maker")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "def build(*, split, seed):\n    raise OSError('no such disk')",
            r"seed=0: OSError: no such disk \(.*, line 2\)",
        ),
        ("def build(*, split, seed):\n    raise SystemExit(0)", "seed=0: SystemExit: 0"),
        ("raise SystemExit(0)", "cannot be imported: SystemExit: 0"),
        ("x = = 1", "cannot be imported: SyntaxError"),
        ("def build(*, split, seed, path): ...", r"function of split and seed \(missing a required argument: 'path'\)"),
        ("def build(split, seed, /): ...", r"function of split and seed \('split' parameter is positional only"),
        ("def build(*, split, seed): ...\nbuild.data = 5", "must be a mapping of names to checksums; got 5"),
    ],
)
def test_whatever_a_users_module_does_is_told_with_its_place(module, tmp_path, text, message):
    (tmp_path / f"{module}.py").write_text(text)
    with pytest.raises(InputError, match=message):
        load_task(f"{module}:build", toys.study())
