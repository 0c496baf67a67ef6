"""The job's models as their papers write them, where the defaults depart from that."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...nn import GRM, FuXi
from ..job import Job


class PublishedJob(Job):
    """The job with FuXi-alpha's root mean square norm, or the norm of equation 3 of MTGRBoost in GRM."""

    def _model(self) -> torch.nn.Module:
        model = super()._model()
        if isinstance(model, FuXi):
            return FuXi(replace(model.config, norm="rms"))
        assert isinstance(model, GRM)
        return GRM(replace(model.config, norm_product=True))
