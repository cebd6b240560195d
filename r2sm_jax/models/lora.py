"""Low-rank adaptation (LoRA, Hu et al., arXiv 2106.09685) of dense layers whose weights stay as they were published."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from r2sm_jax.models.layers import Buffer, Linear, freeze


class LoRALinear(Linear):
    """A frozen dense layer plus `alpha / rank` times a trained product of two thin matrices; 0 at the start.

    Its kernel and bias keep their names, so key tables and checkpoints see an ordinary dense layer.
    """

    def __init__(
        self, in_dim: int, out_dim: int, *, rank: int, alpha: float, dtype: DTypeLike, rngs: nnx.Rngs,
        use_bias: bool = True,
    ):  # fmt: skip
        super().__init__(in_dim, out_dim, use_bias=use_bias, dtype=dtype, rngs=rngs)
        freeze(self)
        self.scale = alpha / rank
        self.lora_in = nnx.Param(nnx.initializers.he_uniform()(rngs.params(), (in_dim, rank)))
        self.lora_out = nnx.Param(jnp.zeros((rank, out_dim)))

    def __call__(self, inputs: Float[Array, "... in"]) -> Float[Array, "... out"]:
        x, down, up = self.promote_dtype((inputs, self.lora_in[...], self.lora_out[...]), dtype=self.dtype)
        return super().__call__(inputs) + (x @ down) @ up * self.scale

    def merge(self) -> Linear:
        """The ordinary frozen layer that computes the same."""
        sizes = self.in_features, self.out_features
        layer: Any = Linear(*sizes, use_bias=self.use_bias, dtype=self.dtype, rngs=nnx.Rngs(0))
        change = self.lora_in[...] @ self.lora_out[...] * self.scale
        layer.kernel = Buffer(self.kernel[...] + change)
        layer.bias = Buffer(self.bias[...]) if self.bias is not None else None
        return layer


def merge_all(module: nnx.Module) -> None:
    """Merges every LoRA layer within a module, in place."""
    for _, part in list(nnx.iter_graph(module)):
        if isinstance(part, nnx.Module):
            for name, value in list(vars(part).items()):
                if isinstance(value, LoRALinear):
                    setattr(part, name, value.merge())


def projection(
    in_dim: int, out_dim: int, *, rank: int, alpha: float, dtype: DTypeLike, rngs: nnx.Rngs
) -> Linear | LoRALinear:
    """A dense layer, with LoRA where `rank` is not 0."""
    if rank:
        return LoRALinear(in_dim, out_dim, rank=rank, alpha=alpha, dtype=dtype, rngs=rngs)
    return Linear(in_dim, out_dim, dtype=dtype, rngs=rngs)
