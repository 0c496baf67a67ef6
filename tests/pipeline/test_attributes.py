"""Promise: what a call keeps in an attribute, a class, a function or a global is seen and put back."""

import sys
import threading
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from functools import lru_cache, partial
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from tritonrec.pipeline.attributes import MOST_VALUES, Attributes, _is_installed

OF_ALL = {}


class Slotted:
    __slots__ = "value"


class Frozen:
    def __setattr__(self, name, value):
        raise AttributeError(name)


def in_a_default(value, kept=[]):  # noqa: B006
    kept.append(value)
    return kept


def in_a_keyword(value, *, kept=[]):  # noqa: B006
    kept.append(value)


def in_a_function(value):
    in_a_function.kept = value


def in_a_global(value):
    OF_ALL["value"] = value


def in_a_closure():
    box = []
    return SimpleNamespace(put=lambda value: box.append(value), read=lambda: [*box])


class Keeper(torch.nn.Module):
    """Holds `kept`, which a call changes by `change`."""

    of_the_class = 0
    default = staticmethod(in_a_default)
    function = staticmethod(in_a_function)

    def __init__(self, kept=None, change=None):
        super().__init__()
        self.kept, self.change = kept, change
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.register_buffer("none", None)

    def forward(self, value):
        self.change(self, value)

    def names(self, value):
        in_a_global(value)


def item(module, value):
    module.kept["value"] = value


def attribute(module, value):
    object.__setattr__(module.kept, "value", value)


def local(module, value):
    module.kept.value = value


def a_class(name):
    """A way that sets an attribute of the class."""
    return None, lambda m, value: setattr(type(m), name, value), lambda m: getattr(type(m), name, None)


# What holds a value, what a call does, and how to read it.
WAYS = {
    "ordered": (OrderedDict, item, lambda m: dict(m.kept)),
    "default": (lambda: defaultdict(int), item, lambda m: dict(m.kept)),
    "counter": (lambda: Counter(value=2), item, lambda m: dict(m.kept)),
    "user dict": (UserDict, item, lambda m: dict(m.kept.data)),
    "set": (lambda: {5}, lambda m, value: m.kept.add(value), lambda m: set(m.kept)),
    "nested": (
        lambda: [{"a": deque([1])}], lambda m, value: m.kept[0]["a"].append(value),
        lambda m: [*m.kept[0]["a"]],
    ),
    "slots": (Slotted, attribute, lambda m: getattr(m.kept, "value", None)),
    "frozen": (Frozen, attribute, lambda m: dict(vars(m.kept))),
    "objects": (
        lambda: SimpleNamespace(of=SimpleNamespace()), lambda m, value: setattr(m.kept.of, "value", value),
        lambda m: dict(vars(m.kept.of)),
    ),
    "local to a thread": (threading.local, local, lambda m: dict(vars(m.kept))),
    "tensor": (lambda: torch.zeros(3), lambda m, value: m.kept.fill_(7), lambda m: m.kept.tolist()),
    "array": (lambda: np.zeros(3), lambda m, value: m.kept.fill(7), lambda m: m.kept.tolist()),
    "module in a list": (
        lambda: [torch.nn.Identity()], lambda m, value: setattr(m.kept[0], "value", value),
        lambda m: hasattr(m.kept[0], "value"),
    ),
    "closure": (in_a_closure, lambda m, value: m.kept.put(value), lambda m: m.kept.read()),
    "partial": (
        lambda: partial(dict), lambda m, value: m.kept.keywords.update(value=value),
        lambda m: dict(m.kept.keywords),
    ),
    "lru_cache": (
        lambda: lru_cache(lambda value: object()), lambda m, value: m.kept(value),
        lambda m: m.kept.cache_info().currsize,
    ),
    "class": a_class("of_the_class"),
    "new in the class": a_class("late"),
    "default argument": (None, lambda m, value: m.default(value), lambda m: [*in_a_default.__defaults__[0]]),
    "default of a keyword": (
        lambda: in_a_keyword, lambda m, value: m.kept(value), lambda m: [*m.kept.__kwdefaults__["kept"]],
    ),
    "function": (None, lambda m, value: m.function(value), lambda m: dict(vars(in_a_function))),
    "global": (None, lambda m, value: m.names(value), lambda m: dict(OF_ALL)),
    "parameter's attribute": (
        None, lambda m, value: setattr(m.weight, "value", value), lambda m: dict(vars(m.weight)),
    ),
    "new buffer": (
        None, lambda m, value: m.register_buffer("late", torch.ones(2)), lambda m: [*dict(m.named_buffers())],
    ),
    "buffer that was None": (None, lambda m, value: setattr(m, "none", torch.ones(2)), lambda m: m.none),
    "new module": (
        None, lambda m, value: setattr(m, "late", torch.nn.Identity()), lambda m: [*dict(m.named_modules())],
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_what_a_call_keeps_is_seen_and_put_back(way):
    make, change, read = WAYS[way]
    module = torch.nn.Sequential(Keeper(make and make(), change))
    attributes, before = Attributes(module), read(module[0])
    module("value")
    assert read(module[0]) != before  # the call has kept something
    attributes.put_back()
    assert read(module[0]) == before and attributes.blamed.module == "0"
    module("value")
    attributes.put_back_changed()
    assert read(module[0]) == before


def test_what_a_long_way_reaches_first_is_followed_from_the_short_one():
    box = SimpleNamespace(of=[])
    module = torch.nn.Sequential(Keeper([[box]]), Keeper(box, lambda m, value: m.kept.of.append(value)))
    attributes = Attributes(module)
    module[1]("value")
    attributes.put_back()
    assert attributes.blamed.module == "1" and box.of == []


def test_what_a_call_reads_is_no_state():
    made = Keeper({"a": [torch.ones(2), np.ones(2)]}, lambda module, value: module.kept["a"][0] + 1)
    attributes = Attributes(made)
    made("value")
    attributes.put_back()
    assert attributes.blamed is None


def test_what_others_change_meanwhile_stays():
    class Source:
        step = 0

        def __next__(self):
            self.step += 1

    for kept in (Source(), torch.zeros(MOST_VALUES + 1), torch.Generator()):
        attributes = Attributes(Keeper(kept))
        if isinstance(kept, Source):
            next(kept)
        attributes.put_back()
        assert attributes.blamed is None and getattr(kept, "step", 1) == 1


COUNT, losses, WARM = 0, [], False


class Counts(torch.nn.Module):
    """Its names are those of globals; one of these it counts up."""

    def __init__(self):
        super().__init__()
        self.losses = [1.0]

    def forward(self, add):
        def counted():
            global COUNT
            COUNT += add

        counted()
        return 0.0 if WARM else self.losses[0]


@pytest.mark.parametrize("add", [0, 1])
def test_a_global_that_only_the_caller_sets_stays_and_one_that_the_model_sets_is_seen(add, monkeypatch):
    """A loop beside the training sets names of its own: `losses` is an attribute there, `WARM` only read."""
    here = sys.modules[__name__]
    for name, value in (("COUNT", 3), ("losses", [5.0]), ("WARM", False)):
        monkeypatch.setattr(here, name, value)
    model = Counts()
    attributes = Attributes(model)
    model(add)
    later = [6.0]
    here.losses, here.WARM = later, True
    attributes.put_back()
    assert here.losses is later and here.WARM and here.COUNT == 3
    assert bool(attributes.blamed) == bool(add)


class Registry(OrderedDict):
    """As packages of models have it: what is read is made anew."""

    def __getitem__(self, name):
        return super().__getitem__(name)()


def test_a_mapping_that_makes_what_is_read_is_no_state_and_keeps_its_own():
    registry = Registry(act=torch.nn.SiLU)
    model = Keeper(registry, lambda m, value: m.kept["act"](value))
    attributes = Attributes(model)
    model(torch.ones(2))
    attributes.put_back()
    assert attributes.blamed is None and OrderedDict.__getitem__(registry, "act") is torch.nn.SiLU


@pytest.mark.parametrize(("folder", "seen"), [("site-packages", False), ("work", True)])
def test_caches_of_installed_packages_are_their_own(folder, seen, monkeypatch):
    helpers = ModuleType("tritonrec_test_helpers")
    helpers.__file__ = f"/somewhere/{folder}/helpers.py"
    monkeypatch.setitem(sys.modules, helpers.__name__, helpers)
    _is_installed.cache_clear()
    recipe = "@functools.lru_cache\ndef recipe(size): return size"
    exec(f"import functools\n{recipe}\ndef use(size): return recipe(size)\n", vars(helpers))
    model = Keeper(helpers.use, lambda m, value: m.kept(len(value)))
    attributes = Attributes(model)
    model(torch.ones(3))
    attributes.put_back()
    assert (attributes.blamed is not None) == seen
    _is_installed.cache_clear()
