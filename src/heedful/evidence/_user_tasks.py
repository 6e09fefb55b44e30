"""A user's own task, named ``package.module:function`` on the command line."""

import hashlib
import importlib
import inspect
import os
import sys
from pathlib import Path

from heedful.errors import InputError
from heedful.evidence._study import Study, Task

_EXAMPLE = """\
    # my_tasks.py
    def build(*, split, seed):
        \"\"\"split is "validation" while settings are chosen and "test" afterwards.\"\"\"
        return MyTask(...)"""


def load_task(reference: str, study: Study) -> Study:
    """``study`` on the user's task alone.

    Parameters
    ----------
    reference : str
        ``package.module:function``; the module is looked for on the Python path and in the current folder. The function
        is called as ``function(split="validation" | "test", seed=int)`` and returns what the study's protocol asks for.
        A function attribute ``data`` (a mapping of names to checksums) makes changed data another trial.
    study : Study
        The study to run on it. The task is built once, to check its form before any work starts.

    Raises
    ------
    InputError
        If it cannot be imported or has the wrong form; the message shows the right one.
    """
    module_name, _, function_name = reference.partition(":")
    if not module_name or not function_name.isidentifier():
        raise InputError(f"A task is named package.module:function; got {reference!r}.{_right_form(study)}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        build = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"The task {reference!r} cannot be imported: {error}.{_right_form(study)}") from error
    parameters = inspect.signature(build).parameters if callable(build) else {}
    if not {"split", "seed"} <= set(parameters):
        raise InputError(f"The task {reference!r} must be a function of split and seed.{_right_form(study)}")
    chosen = study.with_task(reference, Task(build, data=dict(getattr(build, "data", {})) or _source_digest(build)))
    chosen.build_task(reference, split="validation", seed=0)
    return chosen


def _source_digest(build) -> dict[str, str]:
    file = inspect.getsourcefile(build)
    return {"source": hashlib.sha256(Path(file).read_bytes()).hexdigest()} if file else {}


def _right_form(study: Study) -> str:
    shape = "" if study.protocol is None else f"\n\nwhere MyTask follows\n\n{inspect.getsource(study.protocol)}"
    return f" The right form:\n\n{_EXAMPLE}{shape}"
