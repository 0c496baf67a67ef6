"""Promise: cached inference by a GPU's kernels, pages and all, has the bits of full recomputation by them.

`test_plugin.py` runs this file with ``--emulate``. `tests/serving/test_device_pages.py` has the same by
Triton's interpreter.
"""

import pytest
import torch
from trainer_parts import adam_trainer

from tritonrec import FeatureConfig
from tritonrec.data import NextItemLoader, load
from tritonrec.harness.emulator.driver import current
from tritonrec.kernels import dispatch
from tritonrec.nn import HSTU, HSTUConfig, SASRec, SASRecConfig
from tritonrec.ops import use_impl
from tritonrec.serving import Predictor, export
from tritonrec.serving.cached import CachedPredictor
from tritonrec.serving.device import DevicePredictor

pytestmark = pytest.mark.skipif(dispatch.emulated is None, reason="needs pytest --emulate")
LONGEST = 68  # more than a block of rows, whichever kernel
SIZES = {"dim": 8, "layers": 2, "heads": 1, "qk_dim": 4, "v_dim": 6, "max_seq_len": LONGEST}
PAGE_BYTES = 2 * 64 * (4 + 6) * 4


@pytest.mark.parametrize(
    ("kind", "config"),
    [(HSTU, HSTUConfig(**SIZES, relative_bias=True)), (SASRec, SASRecConfig(**SIZES))],
    ids=["hstu", "sasrec"],
)
def test_cached_scores_and_best_items_are_recomputed_ones(tmp_path, kind, config):
    torch.manual_seed(5)
    model = kind(config)
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(1.5).add_(torch.randn(each.shape, dtype=torch.float32) * 0.1)
    loader = NextItemLoader(load("zipf:users=20,items=30,median_length=20,seed=3"), 8, LONGEST, 3, 0)
    with use_impl("cpu"):  # emulated, the training takes minutes
        with adam_trainer(model, [FeatureConfig("item", 8)], lr=0.02) as trainer:
            trainer.step(loader.batch(0))
            trainer.save(tmp_path / "run")
        export(tmp_path / "run", tmp_path / "out", model)
    exact, draw = Predictor.load(tmp_path / "out"), torch.Generator().manual_seed(2)
    histories = [torch.randint(30, (n,), generator=draw) for n in (LONGEST, 3, 5)]
    times = [torch.randint(9**6, (len(each),), generator=draw).sort().values for each in histories]
    full = DevicePredictor(exact, "cpu")
    with use_impl("triton"):
        cached = CachedPredictor(full, kind(config), 2 * PAGE_BYTES, 3 * PAGE_BYTES)
        launches = current().launches
        for upto in (-2, None):
            for user, (items, when) in enumerate(zip(histories, times, strict=True)):
                cached.replace(user, items[:upto], when[:upto])
            for users in ([1], [0], [2, 1]):
                given = [histories[user][:upto] for user in users]
                asked = torch.cat([times[user][:upto] for user in users])
                got, want = cached.scores(users), full.scores(given, timestamps=asked)
                assert torch.equal(got, want), users
                got, want = cached.retrieve(users, 4), full.retrieve(given, 4, asked)
                assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert current().launches > launches
    stats = cached.stats()
    assert stats.evicted and stats.reused > LONGEST - 5 and stats.host_pages_used
