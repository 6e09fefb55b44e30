"""Classify whole time series."""

from typing import TYPE_CHECKING

from heedful._lazy import attach

if TYPE_CHECKING:
    from heedful.timeseries.sarc import Periods as Periods
    from heedful.timeseries.sarc import ReservoirClassifier as ReservoirClassifier
    from heedful.timeseries.sarc import SARCClassifier as SARCClassifier
    from heedful.timeseries.sarc import SpectralReservoir as SpectralReservoir
    from heedful.timeseries.sarc import frequency_reservoir_states as frequency_reservoir_states
    from heedful.timeseries.sarc import prominent_periods as prominent_periods
    from heedful.timeseries.sarc import reservoir_readout as reservoir_readout

__getattr__, __dir__, __all__ = attach(
    "heedful.timeseries",
    {
        "sarc": [
            "SARCClassifier",
            "SpectralReservoir",
            "ReservoirClassifier",
            "Periods",
            "prominent_periods",
            "frequency_reservoir_states",
            "reservoir_readout",
        ],
    },
)
