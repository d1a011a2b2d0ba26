"""The C interface of cpu/samewise.h in ctypes; the comments are there. Pointers are addresses as integers."""

import ctypes
from ctypes import POINTER, c_double, c_float, c_int32, c_void_p

import numpy as np


class KVCacheStruct(ctypes.Structure):
    """SwKvCache."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("type", c_int32),
        ("block_size", c_int32),
        ("kv_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
    )


class StepStruct(ctypes.Structure):
    """SwStep."""

    _fields_ = (
        ("num_tokens", c_int32),
        ("num_choices", c_int32),
        ("table_width", c_int32),
        ("first_token", c_void_p),
        ("positions", c_void_p),
        ("block_of", c_void_p),
        ("offset_of", c_void_p),
        ("block_table", c_void_p),
        ("path_start", c_void_p),
        ("path_first", c_void_p),
        ("path_places", c_void_p),
    )


class AttentionStruct(ctypes.Structure):
    """SwAttention."""

    _fields_ = (("heads", c_int32), ("window", c_int32), ("scale", c_float), ("softcap", c_float))


class WeightStruct(ctypes.Structure):
    """SwWeight."""

    _fields_ = (
        ("kind", c_int32),
        ("outputs", c_int32),
        ("inputs", c_int32),
        ("packed", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
    )


class ExpertsStruct(ctypes.Structure):
    """SwExperts."""

    _fields_ = (
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("activation", c_int32),
        ("scoring", c_int32),
        ("normalised", c_int32),
        ("gates_mlp", c_int32),
        ("scale", c_float),
        ("router", c_void_p),
        ("choice_bias", c_void_p),
        ("gate_up", c_void_p),
        ("down", c_void_p),
    )


class DecoderLayerStruct(ctypes.Structure):
    """SwDecoderLayer."""

    _fields_ = (
        ("hidden", c_int32),
        ("intermediate", c_int32),
        ("rotary_dim", c_int32),
        ("activation", c_int32),
        ("norm_eps", c_float),
        ("residual_scale", c_float),
        ("attention", AttentionStruct),
        ("cache", KVCacheStruct),
        ("qkv", WeightStruct),
        ("attention_output", WeightStruct),
        ("gate_up", WeightStruct),
        ("down", WeightStruct),
        ("attention_norm", c_void_p),
        ("attention_post_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("mlp_post_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("experts", c_void_p),
    )


class RotaryStruct(ctypes.Structure):
    """SwRotary."""

    _fields_ = (("cos", c_void_p), ("sin", c_void_p))


class ModelStruct(ctypes.Structure):
    """SwModel."""

    _fields_ = (
        ("hidden", c_int32),
        ("num_layers", c_int32),
        ("embedding_scale", c_float),
        ("norm_eps", c_float),
        ("logits_scale", c_float),
        ("logits_softcap", c_float),
        ("embedding", c_void_p),
        ("layers", POINTER(POINTER(DecoderLayerStruct))),
        ("rotaries", POINTER(POINTER(RotaryStruct))),
        ("norm", c_void_p),
        ("head", WeightStruct),
    )


class PassStruct(ctypes.Structure):
    """SwPass."""

    _fields_ = (
        ("num_logits", c_int32),
        ("tokens", c_void_p),
        ("logits_index", c_void_p),
        ("logits", c_void_p),
        ("entering", c_void_p),
        ("last", c_void_p),
    )


PICK = np.dtype([("row", np.int64), ("key", np.uint64), ("temperature", np.float64), ("mask", np.uint64)])
"""SwPick, for arrays of them."""


class HydraHeadStruct(ctypes.Structure):
    """SwHydraHead."""

    _fields_ = (
        ("linear", WeightStruct),
        ("res_connection", WeightStruct),
        ("layers", POINTER(WeightStruct)),
        ("logits", WeightStruct),
    )


class HydraStruct(ctypes.Structure):
    """SwHydra."""

    _fields_ = (
        ("hidden", c_int32),
        ("num_features", c_int32),
        ("depth", c_int32),
        ("num_layers", c_int32),
        ("heads", POINTER(HydraHeadStruct)),
        ("draft_ids", c_void_p),
        ("feature_scale", c_void_p),
    )


DRAFT_CHOICE = np.dtype(
    [
        ("row", np.int64),
        ("token", np.int32),
        ("max_nodes", np.int32),
        ("temperature", np.float64),
        ("seed", np.uint64),
        ("choice", np.int64),
        ("position", np.int64),
    ]
)
"""SwDraftChoice, for arrays of them."""


class DraftStruct(ctypes.Structure):
    """SwDraft."""

    _fields_ = (
        ("num_choices", c_int32),
        ("width", c_int32),
        ("max_depth", c_int32),
        ("branches", c_int32),
        ("front", c_int32),
        ("candidates", c_int32),
        ("least", c_double),
        ("followed", c_double),
        ("embedding_scale", c_float),
        ("embedding", c_void_p),
        ("features", c_void_p),
        ("choices", c_void_p),
        ("num_nodes", c_void_p),
        ("tokens", c_void_p),
        ("parents", c_void_p),
        ("confidence", c_void_p),
    )


class TruncationStruct(ctypes.Structure):
    """SwTruncation."""

    _fields_ = (("kind", c_int32), ("value", c_double))


class MoveStruct(ctypes.Structure):
    """SwMove."""

    _fields_ = (("from_block", c_int32), ("from_offset", c_int32), ("to_block", c_int32), ("to_offset", c_int32))
