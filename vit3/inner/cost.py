"""What inner training costs, in multiply-adds."""

from __future__ import annotations

from vit3.inner.batches import batch_sizes
from vit3.inner.losses import Loss
from vit3.inner.models import InnerModel
from vit3.inner.optim import orthogonalise_cost
from vit3.inner.spec import InnerSpec


def training_cost(model: InnerModel, spec: InnerSpec, tokens: int) -> int:
    """Multiply-adds of training ``model`` on one image of so many tokens, all heads.

    Counted are products with and for the weights: the forward pass on the keys (without its last layer where the loss
    needs no prediction), the backward pass, and Muon's products. Mini-batches cost a pointwise model what one batch
    costs; a convolution sees the whole grid at every step. Source: reproduces the multiply-adds of tables 1, 2, 4, 6.
    """
    cost, steps = model.cost(), spec.epochs * len(batch_sizes(spec.batch, tokens))
    unneeded = 0 if Loss.of(spec, model.head_dim).needs_prediction else cost.output
    passes = spec.epochs if model.pointwise else steps
    total = passes * tokens * model.heads * (cost.predict - unneeded + cost.backward)
    if spec.optimizer == "muon":
        total += steps * model.heads * sum(orthogonalise_cost(*matrix) for matrix in model.matrices())
    return total
