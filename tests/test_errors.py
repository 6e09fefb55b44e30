import builtins
import inspect
import pickle

import pytest
from sklearn.exceptions import NotFittedError as SklearnNotFittedError

from heedful import errors

KINDS = {
    "ParameterError": (ValueError, TypeError),
    "InputError": (ValueError,),
    "ClosureError": (RuntimeError,),
    "ConvergenceError": (RuntimeError,),
    "UnsupportedModelError": (TypeError,),
    "FileFormatError": (ValueError,),
    "MissingExtraError": (ImportError,),
    "DataUnavailableError": (OSError,),
    "NotFittedError": (SklearnNotFittedError, ValueError, AttributeError),
}


@pytest.mark.parametrize(("name", "kinds"), KINDS.items())
def test_each_error_is_heedfuls_and_of_the_kind_that_the_ecosystem_catches(name, kinds):
    for kind in (errors.HeedfulError, *kinds):
        with pytest.raises(kind, match="what to do"):
            raise getattr(errors, name)("what to do")


def test_the_table_above_is_complete():
    defined = {name for name, value in inspect.getmembers(errors, inspect.isclass) if issubclass(value, Exception)}
    defined.add(errors.NotFittedError.__name__)  # made on first use
    assert defined - {"HeedfulError"} == KINDS.keys() | {"HeedfulWarning"}


def test_warnings_are_user_warnings_and_no_errors():
    assert issubclass(errors.HeedfulWarning, UserWarning)
    assert not issubclass(errors.HeedfulWarning, errors.HeedfulError)


def test_errors_survive_the_way_between_processes():
    """NotFittedError too, though it is made on first use."""
    for name in KINDS:
        error = pickle.loads(pickle.dumps(getattr(errors, name)("message")))
        assert type(error) is getattr(errors, name)
        assert error.args == ("message",)


def test_names_that_do_not_exist_are_attribute_errors():
    with pytest.raises(AttributeError, match=r"module 'heedful\.errors' has no attribute 'NoSuchError'"):
        errors.NoSuchError  # noqa: B018


def test_no_error_hides_a_builtin():
    assert not [name for name in KINDS if hasattr(builtins, name)]
