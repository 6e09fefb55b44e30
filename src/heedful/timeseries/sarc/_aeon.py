"""``SARCClassifier`` in the protocol of aeon; imported by ``to_aeon`` alone, so that aeon stays optional."""

from aeon.classification.base import BaseClassifier
from sklearn.base import clone

from heedful.timeseries.sarc.classifier import SARCClassifier


class SARCAeonClassifier(BaseClassifier):
    """A ``SARCClassifier`` for aeon's tools.

    Parameters
    ----------
    classifier : SARCClassifier, optional
        Its settings; it stays unfitted. Default ``SARCClassifier()``.

    Attributes
    ----------
    classifier_ : SARCClassifier
        The fitted one.
    """

    _tags = {  # noqa: RUF012  (aeon's protocol)
        "X_inner_type": ["np-list", "numpy3D"],
        "capability:multivariate": True,
        "capability:unequal_length": True,
        "algorithm_type": "feature",
    }

    def __init__(self, classifier=None):
        self.classifier = classifier
        super().__init__()

    def _fit(self, X, y):
        self.classifier_ = (SARCClassifier() if self.classifier is None else clone(self.classifier)).fit(X, y)
        return self

    def _predict(self, X):
        return self.classifier_.predict(X)

    def _predict_proba(self, X):
        return self.classifier_.predict_proba(X)

    @classmethod
    def _get_test_params(cls, parameter_set="default"):
        return {"classifier": SARCClassifier(4, extend_to=10, random_state=0)}
