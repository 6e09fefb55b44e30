"""Classify time series by reservoirs that look back one full cycle.

An echo-state reservoir sees the step before, and its memory fades after a few more. SARC finds the prominent periods p of
the series themselves, in their spectrum, and gives each a reservoir that heeds the state one cycle ago,

    h_p(t) = tanh(x(t) W_in + h_p(t−1) W_s + h_p(t−p) W_c),

whose closed-form readout, which predicts the series from both states, is what a linear classifier sees.

SARC: Spectral-Aware Reservoir Computing for Fast and Accurate Time Series Classification, ICML 2025.
"""

from heedful._lazy import attach

__getattr__, __dir__, __all__ = attach(
    "heedful.timeseries.sarc",
    {
        "classifier": ["SARCClassifier"],
        "transformer": ["SpectralReservoir"],
        "baseline": ["ReservoirClassifier"],
        "periods": ["Periods", "prominent_periods"],
        "reservoir": ["frequency_reservoir_states", "reservoir_readout"],
    },
)
