"""What a deletion and an audit hand back."""

import dataclasses

from heedful._results import Report


@dataclasses.dataclass(frozen=True)
class UnlearnReport(Report):
    """What one call of ``unlearn`` did. It goes to the caller; the model keeps nothing of it.

    Parameters
    ----------
    requested : int
        How many ids or samples were asked to go.
    removed : int
        How many stored samples went. The others were never stored, or had gone before.
    seconds : float
        Wall time of the call.
    touched : bool
        Whether the model changed, that is, whether anything was removed.
    """

    requested: int
    removed: int
    seconds: float
    touched: bool


@dataclasses.dataclass(frozen=True)
class AuditReport(Report):
    """Whether a model is what learning from its stored samples gives, and nothing else. True in an ``if`` when it passed.

    Parameters
    ----------
    passed : bool
        No findings. That is: all attributes equal those that are learned anew, bit for bit (in the mode "downdate"
        numbers may be off by 1e-9), and selection would keep every sample that is stored.
    bitwise : bool
        All attributes equal, bit for bit.
    max_deviation : float
        Largest difference of a stored number from the one learned anew; NaN where what differs is no number.
    digest : str
        ``state_digest()`` of the model.
    findings : tuple of str
        What is wrong, in sentences.
    """

    passed: bool
    bitwise: bool
    max_deviation: float
    digest: str
    findings: tuple[str, ...]

    def __bool__(self) -> bool:
        return self.passed
