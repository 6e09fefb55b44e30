"""Every error and warning a user of heedful can meet.

Each class is also of the builtin (or scikit-learn) kind that the ecosystem expects, so that existing ``except`` clauses
keep working. Messages say what was given, what is needed and what to do.
"""

from typing import TYPE_CHECKING, Any


class HeedfulError(Exception):
    """Base of all errors raised by heedful on purpose."""


class ParameterError(HeedfulError, ValueError, TypeError):
    """A setting is outside of what the object or function accepts."""


class InputError(HeedfulError, ValueError):
    """Data have a shape, type or content that the method cannot take."""


class ClosureError(HeedfulError, RuntimeError):
    """An optimizer's closure is missing, or does not do what a closure must do."""


class ConvergenceError(HeedfulError, RuntimeError):
    """A solver stopped without a usable answer."""


class UnsupportedModelError(HeedfulError, TypeError):
    """The model has a layer or layout that the method does not know."""


class FileFormatError(HeedfulError, ValueError):
    """A file is not what it should be, is damaged, or would need unpickling."""


class MissingExtraError(HeedfulError, ImportError):
    """A package of one of heedful's extras is not installed."""


class DataUnavailableError(HeedfulError, OSError):
    """None of the ways to obtain a data set worked."""


class HeedfulWarning(UserWarning):
    """Base of all warnings issued by heedful."""


if TYPE_CHECKING:
    from sklearn.exceptions import NotFittedError as _SklearnNotFittedError

    class NotFittedError(HeedfulError, _SklearnNotFittedError):
        """Something was asked of an object that has not been fitted."""


def __getattr__(name: str) -> Any:
    # Made on first use: its scikit-learn base costs half a second to import, which `heedful --help` must not pay.
    if name != "NotFittedError":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sklearn.exceptions import NotFittedError as SklearnNotFittedError

    doc = "Something was asked of an object that has not been fitted."
    made = type(name, (HeedfulError, SklearnNotFittedError), {"__doc__": doc, "__module__": __name__})
    return globals().setdefault(name, made)
