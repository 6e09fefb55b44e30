"""Settings are refused at the door."""

import pytest

from heedful.compress import QuantConfig
from heedful.errors import ParameterError
from tests.conformance.typechecks import as_users_have_it


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 1}, "bits must be an int >= 2 and <= 8; got 1"),
        ({"bits": 9}, "bits must be an int >= 2 and <= 8; got 9"),
        ({"bits": 3.0}, "bits must be an int >= 2 and <= 8; got 3.0"),
        ({"group_size": 0}, "group_size must be an int >= 1; got 0"),
        ({"group_size": -2}, "group_size must be an int >= 1; got -2"),
        ({"method": "awq"}, "method must be one of 'boa', 'gptq', 'rtn'; got 'awq'"),
        ({"grid": "max"}, "grid must be one of 'hessian', 'mse', 'minmax'; got 'max'"),
        ({"symmetric": 1}, "symmetric must be True or False; got 1"),
        ({"damping": -1}, "damping must be a number >= 0 and <= 1; got -1"),
        ({"damping": float("inf")}, "damping must be a number >= 0 and <= 1; got inf"),
        ({"rows_per_step": 0}, "rows_per_step must be an int >= 1; got 0"),
        ({"act_order": True}, "act_order must be one of 'off', 'rows', 'columns', 'both', 'auto'; got True"),
        ({"value_rows": "none"}, "value_rows must be one of 'out_proj', 'identity'; got 'none'"),
        ({"value_hessian": "full"}, "value_hessian must be one of 'per_head', 'shared'; got 'full'"),
        ({"exclude": "lm_head"}, r"exclude must be a sequence of names or patterns, such as .*; got 'lm_head'"),
        ({"exclude": None}, r"exclude must be a sequence of names or patterns, such as .*; got None"),
        ({"exclude": (1,)}, r"exclude must be a sequence of names or patterns, such as .*; got \(1,\)"),
        ({"group_size": 64, "act_order": "columns"}, "act_order='columns' and groups are incompatible"),
        ({"group_size": 64, "act_order": "both"}, "act_order='both' and groups are incompatible"),
    ],
)
def test_wrong_settings_say_what_is_needed(options, message):
    with as_users_have_it(), pytest.raises(ParameterError, match=message):
        QuantConfig(**options)


def test_orders_that_keep_groups_together_are_fine():
    for order in ("off", "rows", "auto"):
        assert QuantConfig(group_size=64, act_order=order).group_size == 64
