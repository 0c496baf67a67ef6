"""Promise: settings of a dataclass, and of those inside it, are read and replaced by the names of options."""

import pytest

from tritonrec.pipeline import ExchangeConfig, LossScaling, WindowConfig
from tritonrec.settings import values_by_option, with_values


def test_options_name_the_settings_of_all_records():
    window = WindowConfig(
        3, exchange=ExchangeConfig(sums="packed", sharing="each", precision="bf16", taper=0.5)
    )
    found = values_by_option(window)
    assert (found["exchange_sums"], found["exchanges"], found["exchange_precision"]) == (
        "packed",
        "each",
        "bf16",
    )
    assert (found["taper"], found["micro_batches"], found["precision"]) == (0.5, 3, "float32")
    assert (
        found["init_scale"] == 2.0**16 and not {"exchange", "loss_scaling", "sums", "sharing"} & found.keys()
    )
    assert with_values(WindowConfig(), found) == window


def test_other_values_stay():
    window = WindowConfig(3, "window", exchange=ExchangeConfig(first_use=True), seed=5)
    got = with_values(window, {"exchanges": "once", "micro_batches": 2})
    assert got == WindowConfig(2, "window", exchange=ExchangeConfig(first_use=True, sharing="once"), seed=5)
    assert window.micro_batches == 3
    scaling = LossScaling(2.0**4)
    assert with_values(window, {"loss_scaling": scaling, "taper": 0.5}).loss_scaling == scaling


@pytest.mark.parametrize("name", ["sharing", "sums", "first"])
def test_an_unknown_name_is_an_error(name):
    with pytest.raises(TypeError, match=f"WindowConfig has no {name}"):
        with_values(WindowConfig(), {name: 1, "taper": 0.5})


def test_ranges_are_checked_together():
    with pytest.raises(ValueError, match="first_use sends a key once"):
        with_values(WindowConfig(exchange=ExchangeConfig(first_use=True)), {"dedup": "lookup"})
    got = with_values(
        WindowConfig(exchange=ExchangeConfig(first_use=True)), {"dedup": "lookup", "first_use": False}
    )
    assert got.exchange == ExchangeConfig("lookup")
