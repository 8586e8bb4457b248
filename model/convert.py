"""Build an encoder from a trained torch.nn.TransformerEncoder."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from causal_encoder.errors import ConfigError
from causal_encoder.model.config import EncoderConfig
from causal_encoder.model.encoder import Block, CausalEncoder

_PARTS: dict[str, type[nn.Module]] = {
    "self_attn": nn.MultiheadAttention,
    "self_attn.out_proj": nn.modules.linear.NonDynamicallyQuantizableLinear,
    "linear1": nn.Linear,
    "linear2": nn.Linear,
    "norm1": nn.LayerNorm,
    "norm2": nn.LayerNorm,
}


def from_torch_encoder(
    encoder: nn.TransformerEncoder,
    embedding: nn.Embedding,
    *,
    position: str,
    position_table: Tensor | None = None,
    max_len: int | None = None,
) -> CausalEncoder:
    """Copy the weights of a trained PyTorch model that was run with a causal mask.

    The result computes what `encoder(embedding(ids) + positions, mask=M)` computes with
    the square subsequent mask M. (With nn.GELU("tanh") torch's own inference fast path takes
    the exact gelu instead; the result here computes what was trained.) If the model
    multiplies its embedding by sqrt(d_model), as the 2017 paper does, multiply
    `embedding.weight` first.

    Args:
        encoder: stack of torch.nn.TransformerEncoderLayer; batch_first does not matter.
        embedding: (V, D), the token embedding.
        position: the scheme that was trained with, see EncoderConfig.position.
        position_table: (L, D), the trained table; needed for the learned schemes only.
        max_len: L for the other schemes, 2048 if not given.

    Returns:
        A CausalEncoder in eval mode with float32 copies of the weights, on CPU.

    Raises:
        ConfigError: a part has no counterpart here, or shapes do not fit.
    """
    config = _config_of(encoder, embedding, position, position_table, max_len)
    model = CausalEncoder(config)
    with torch.no_grad():
        _copy("embedding.weight", embedding.weight, model.token_embedding.weight)
        _copy("position_table", position_table, model.positions.learned)
        for block, layer in zip(model.blocks, encoder.layers, strict=True):
            assert isinstance(block, Block)
            assert isinstance(layer, nn.TransformerEncoderLayer)
            _copy_layer(layer, block)
        if encoder.norm is not None:
            _copy_module("encoder.norm", encoder.norm, model.final_norm)
    return model.eval()


def _require(part: nn.Module, kind: type[nn.Module], name: str) -> None:
    """Exactly this type, unhooked: a subclass or a hook may compute something else."""
    if type(part) is not kind:
        raise ConfigError(f"{name} is {type(part).__name__}, expected torch.nn.{kind.__name__}")
    if part._forward_hooks or part._forward_pre_hooks:
        raise ConfigError(f"{name} has forward hooks, which have no counterpart; remove them")
    if any(parameter.is_meta for parameter in part.parameters(recurse=False)):
        raise ConfigError(f"{name} has no weights yet (meta device); load them first")


def _config_of(
    encoder: nn.TransformerEncoder,
    embedding: nn.Embedding,
    position: str,
    position_table: Tensor | None,
    max_len: int | None,
) -> EncoderConfig:
    _require(encoder, nn.TransformerEncoder, "encoder")
    _require(embedding, nn.Embedding, "embedding")
    if embedding.max_norm is not None:
        raise ConfigError(
            f"the embedding has max_norm {embedding.max_norm}, which rescales rows when they are "
            "read; apply it to the weight once and set max_norm to None"
        )
    settings = _stack_settings(encoder)
    settings["vocab_size"] = embedding.num_embeddings
    settings["position"] = position
    if position_table is not None:
        if not isinstance(position_table, Tensor):
            raise ConfigError(
                f"position_table is {type(position_table).__name__}, expected a tensor; of an "
                "embedding pass its weight"
            )
        if position_table.dim() != 2:
            shape = tuple(position_table.shape)
            raise ConfigError(f"position_table has shape {shape}, expected (max_len, d_model)")
        if max_len not in (None, len(position_table)):
            raise ConfigError(
                f"max_len is {max_len} but position_table has {len(position_table)} rows; "
                "leave max_len out"
            )
        settings["max_len"] = len(position_table)
    elif max_len is not None:
        settings["max_len"] = max_len
    config = EncoderConfig.from_dict(settings)
    if config.has_learned != (position_table is not None):
        needed = "needs" if config.has_learned else "takes no"
        raise ConfigError(f"position {position!r} {needed} position_table")
    return config


def _stack_settings(encoder: nn.TransformerEncoder) -> dict[str, object]:
    if len(encoder.layers) == 0:
        raise ConfigError("the encoder has 0 layers, at least 1 is needed")
    settings = []
    for index, layer in enumerate(encoder.layers):
        _require(layer, nn.TransformerEncoderLayer, f"layer {index}")
        assert isinstance(layer, nn.TransformerEncoderLayer)
        settings.append(_layer_settings(layer))
    if any(other != settings[0] for other in settings):
        raise ConfigError("the layers differ in their settings; all must be alike")
    first, norm = settings[0], encoder.norm
    if norm is not None:
        _require(norm, nn.LayerNorm, "encoder.norm")
        assert isinstance(norm, nn.LayerNorm)
    if norm is not None and norm.eps != first["layer_norm_eps"]:
        raise ConfigError(
            f"encoder.norm has eps {norm.eps}, its layers {first['layer_norm_eps']}; "
            "all must be equal"
        )
    return first | {"num_layers": len(settings), "final_norm": norm is not None}


def _layer_settings(layer: nn.TransformerEncoderLayer) -> dict[str, object]:
    for name, kind in _PARTS.items():
        _require(layer.get_submodule(name), kind, name)
    if layer.self_attn.add_zero_attn or layer.self_attn.bias_k is not None:
        raise ConfigError("self_attn has add_zero_attn or add_bias_kv, which have no counterpart")
    if layer.norm1.eps != layer.norm2.eps:
        raise ConfigError(f"layer norms have eps {layer.norm1.eps} and {layer.norm2.eps}")
    return {
        "d_model": layer.self_attn.embed_dim,
        "num_heads": layer.self_attn.num_heads,
        "d_ff": layer.linear1.out_features,
        "activation": _activation_name(layer.activation),
        "norm": "pre" if layer.norm_first else "post",
        "dropout": float(layer.dropout.p),
        "layer_norm_eps": layer.norm1.eps,
        "bias": layer.linear1.bias is not None,
    }


def _activation_name(activation: object) -> str:
    if activation in (F.relu, torch.relu) or type(activation) is nn.ReLU:
        return "relu"
    if type(activation) is nn.GELU:
        return "gelu" if activation.approximate == "none" else "gelu_tanh"
    if activation is F.gelu:
        return "gelu"
    name = getattr(activation, "__name__", type(activation).__name__)
    raise ConfigError(f"activation {name} has no counterpart, expected relu, gelu or tanh gelu")


def _copy_layer(layer: nn.TransformerEncoderLayer, block: Block) -> None:
    attention = layer.self_attn
    _copy("self_attn.in_proj_weight", attention.in_proj_weight, block.attention.qkv.weight)
    _copy("self_attn.in_proj_bias", attention.in_proj_bias, block.attention.qkv.bias)
    _copy_module("self_attn.out_proj", attention.out_proj, block.attention.out)
    _copy_module("linear1", layer.linear1, block.feed_forward.up)
    _copy_module("linear2", layer.linear2, block.feed_forward.down)
    _copy_module("norm1", layer.norm1, block.attention_norm)
    _copy_module("norm2", layer.norm2, block.feed_forward_norm)


def _copy_module(name: str, source: nn.Module, target: nn.Module) -> None:
    _copy(f"{name}.weight", getattr(source, "weight", None), target.get_parameter("weight"))
    _copy(f"{name}.bias", getattr(source, "bias", None), getattr(target, "bias", None))


def _copy(name: str, source: Tensor | None, target: Tensor | None) -> None:
    if source is None and target is None:
        return
    if source is None or target is None or source.shape != target.shape:
        found = None if source is None else tuple(source.shape)
        expected = None if target is None else tuple(target.shape)
        raise ConfigError(f"{name} has shape {found}, expected {expected}")
    target.copy_(source)
