"""The mixture of experts that a model asks for: Qwen3-MoE's and DeepSeek-V3's."""

from __future__ import annotations

import msgspec

from shared.models.fields import Fields


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """Router and experts, the same in every sparse layer; see native/kernels/experts.h for the routing."""

    count: int
    per_token: int
    intermediate: int
    """Of one expert."""
    shared_intermediate: int
    """Of the expert that every token takes, besides; 0: none."""
    sparse: list[bool]
    """For each layer, multi-token prediction layers among them, whether it has experts or one dense feed-forward."""
    sigmoid: bool
    """Scores: sigmoid, with a correction bias; otherwise softmax."""
    normalise: bool
    scale: float
    groups: int
    top_groups: int


def read_qwen_experts(raw: Fields, layers: int) -> Experts:
    count = raw.positive("num_local_experts" if raw.has("num_local_experts") else "num_experts", 128)
    step, dense = raw.positive("decoder_sparse_step", 1), raw.ids("mlp_only_layers")
    experts = Experts(
        count=count,
        per_token=raw.positive("num_experts_per_tok", 8),
        intermediate=raw.positive("moe_intermediate_size", 768),
        shared_intermediate=0,
        sparse=[layer not in dense and (layer + 1) % step == 0 for layer in range(layers)],
        sigmoid=False,
        normalise=raw.flag("norm_topk_prob"),
        scale=1.0,
        groups=1,
        top_groups=1,
    )
    _check(experts, raw)
    return experts


def read_deepseek_experts(raw: Fields, layers: int) -> Experts:
    raw.one_of("scoring_func", "sigmoid", "sigmoid")
    raw.one_of("topk_method", "noaux_tc", "noaux_tc")
    raw.one_of("moe_layer_freq", 1, 1)
    dense = raw.count("first_k_dense_replace", 3)
    intermediate = raw.positive("moe_intermediate_size", 2048)
    experts = Experts(
        count=raw.positive("n_routed_experts", 256),
        per_token=raw.positive("num_experts_per_tok", 8),
        intermediate=intermediate,
        shared_intermediate=intermediate * raw.count("n_shared_experts", 1),
        sparse=[layer >= dense for layer in range(layers)],
        sigmoid=True,
        normalise=raw.flag("norm_topk_prob", default=True),
        scale=raw.number("routed_scaling_factor", 2.5),
        groups=raw.positive("n_group", 8),
        top_groups=raw.positive("topk_group", 4),
    )
    _check(experts, raw)
    return experts


def _check(experts: Experts, raw: Fields) -> None:
    if experts.count % experts.groups:
        raise raw.refuse("n_group", experts.groups, f"a divisor of the {experts.count} experts")
    if experts.top_groups > experts.groups:
        raise raw.refuse("topk_group", experts.top_groups, f"at most n_group={experts.groups}")
    most = experts.count // experts.groups * experts.top_groups
    if experts.per_token > most:
        raise raw.refuse("num_experts_per_tok", experts.per_token, f"at most {most}, those in the chosen groups")
