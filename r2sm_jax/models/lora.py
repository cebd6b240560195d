"""Low-rank adaptation (LoRA, Hu et al., arXiv 2106.09685): one pass over a model that was built without it."""

from dataclasses import replace

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from r2sm_jax.config import ModelConfig
from r2sm_jax.models.layers import Linear, freeze

ATTENTION_PROJECTIONS = ("qkv", "query", "key", "value", "out")
"""Names of the dense layers of attention in the published image encoders."""


class LoRALinear(Linear):
    """A frozen dense layer plus `alpha / rank` times a trained product of two thin matrices, which is 0 at the start.

    Kernel and bias keep their names, so checkpoints and published files see an ordinary dense layer.
    """

    def __init__(self, layer: Linear, *, rank: int, alpha: float, rngs: nnx.Rngs):
        """The adapted `layer`, with its weights."""
        super().__init__(
            layer.in_features, layer.out_features, use_bias=layer.use_bias, dtype=layer.dtype,
            kernel_init=nnx.initializers.zeros_init(), rngs=rngs,
        )  # fmt: skip
        _set_weights(self, layer.kernel[...], layer.bias)
        self.scale = alpha / rank
        self.lora_in = nnx.Param(nnx.initializers.he_uniform()(rngs.params(), (self.in_features, rank)))
        self.lora_out = nnx.Param(jnp.zeros((rank, self.out_features)))

    def __call__(self, inputs: Float[Array, "... in"]) -> Float[Array, "... out"]:
        x, down, up = self.promote_dtype((inputs, self.lora_in[...], self.lora_out[...]), dtype=self.dtype)
        return super().__call__(inputs) + (x @ down) @ up * self.scale

    def merged(self) -> Linear:
        """The ordinary frozen layer that computes the same."""
        layer = Linear(self.in_features, self.out_features, use_bias=self.use_bias, dtype=self.dtype, rngs=nnx.Rngs(0))
        change = self.lora_in[...] @ self.lora_out[...] * self.scale
        _set_weights(layer, self.kernel[...] + change, self.bias)
        return layer


def _set_weights(layer: Linear, kernel: Float[Array, "in out"], bias: nnx.Variable | None) -> None:
    """Gives a new layer the weights of another, as constants."""
    layer.kernel[...] = kernel
    if layer.bias is not None and bias is not None:
        layer.bias[...] = bias[...]
    freeze(layer)


def add_lora(
    module: nnx.Module, *, rank: int, alpha: float, names: tuple[str, ...] = ATTENTION_PROJECTIONS, rngs: nnx.Rngs
) -> None:
    """Replaces every dense layer within a built module that has one of the `names` by a `LoRALinear`, in place."""
    for parent, name, layer in _linears(module):
        if name in names:
            setattr(parent, name, LoRALinear(layer, rank=rank, alpha=alpha, rngs=rngs))


def merge_lora(
    config: ModelConfig, graphdef: nnx.GraphDef, weights: nnx.State
) -> tuple[ModelConfig, nnx.GraphDef, nnx.State]:
    """The same model without LoRA, for export: each low-rank product is added to its frozen kernel.

    Returns a configuration, graph and weights that belong together; the ones that came in if there is no LoRA.
    """
    if not config.vision.lora_rank:
        return config, graphdef, weights
    model = nnx.merge(graphdef, weights)
    for parent, name, layer in _linears(model):
        if isinstance(layer, LoRALinear):
            setattr(parent, name, layer.merged())
    vision = replace(config.vision, lora_rank=0, frozen=config.vision.init is not None, name_frozen=True)
    return replace(config, vision=vision), *nnx.split(model)


def _linears(module: nnx.Module) -> list[tuple[nnx.Module, str, Linear]]:
    """Every dense layer that is an attribute of a module, with that module and its name there."""
    parts = [part for _, part in nnx.iter_graph(module) if isinstance(part, nnx.Module)]
    return [(part, name, value) for part in parts for name, value in vars(part).items() if isinstance(value, Linear)]
