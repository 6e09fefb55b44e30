"""The type checks of the test run, switched off where they stand between an object and a tool that looks inside it."""

import contextlib
from collections.abc import Iterator

import jaxtyping


@contextlib.contextmanager
def as_users_have_it() -> Iterator[None]:
    """No type checks inside the block.

    scikit-learn's checks pass wrong types on purpose, to see the errors that the estimator itself raises.
    """
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)
