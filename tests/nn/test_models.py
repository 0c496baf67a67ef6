"""Every model: a sample's bits depend on that sample alone, and exact sums on no split of the batch.

A model's module has `make` (model, the arguments of a batch), `select` (those of some samples), `run`, and
`of_samples`, what some samples have of a run's results; its own tests hold it against its formula.
"""

import pytest
import test_dlrm as dlrm
import test_fuxi as fuxi
import test_grm as grm
import test_mmoe as mmoe
import torch
from speeds import slow_except

MODULES = {"dlrm": dlrm, "fuxi": fuxi, "grm": grm, "mmoe": mmoe}
MODELS = {f"{name} {case}": (module, case) for name, module in MODULES.items() for case in module.CASES}
QUICK = [name for name in MODELS if not name.startswith("grm")] + ["grm full", "grm deep"]
SUMMED = [name for name in MODELS if name not in ("grm bare", "grm deep", "mmoe 1", "mmoe 5")]


@pytest.mark.parametrize("name", slow_except(QUICK, MODELS))
@pytest.mark.parametrize("exactly", [False, True])
def test_a_sample_keeps_its_bits_in_any_batch(accumulate, name, exactly):
    module, case = MODELS[name]
    model, whole = module.make(case)
    if exactly:
        accumulate(model)
    found = module.run(model, *whole)
    assert found[0].unique().numel() == module.DISTINCT
    for samples in module.SUBSETS:
        part = module.select(*whole, samples)
        own = module.of_samples(part, module.run(model, *part), [*range(len(samples))])
        for one, other in zip(own, module.of_samples(whole, found, samples), strict=True):
            assert torch.equal(one, other), samples


@pytest.mark.parametrize("name", SUMMED)
@pytest.mark.parametrize("alone", [False, True])
def test_exact_sums_do_not_depend_on_the_split(same_sums, name, alone):
    module, case = MODELS[name]
    model, whole = module.make(case)
    split = [[sample] for part in module.SPLIT for sample in part] if alone else module.SPLIT
    same_sums(model, module.run, whole, [module.select(*whole, samples) for samples in split])


EMPTY = [(name, lengths) for name, module in MODULES.items() for lengths in module.EMPTY]


@pytest.mark.parametrize("exactly", [False, True])
@pytest.mark.parametrize(("name", "lengths"), EMPTY, ids=str)
def test_without_tokens_there_are_no_losses_and_no_gradients(accumulate, name, lengths, exactly):
    module = MODULES[name]
    for case in module.CASES:
        model, whole = module.make(case, lengths)
        sums = accumulate(model) if exactly else {}
        found = module.run(model, *whole)
        samples = [*range(len(lengths))]
        assert len(found[0]) == len(samples) * (name in ("fuxi", "grm"))
        assert not any(each.any() for each in (*module.of_samples(whole, found, samples), *sums.values()))
