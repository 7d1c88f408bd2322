# SPDX-License-Identifier: Apache-2.0
"""libweft through ctypes, with torch tensors as memory: just enough for bench/compare_torch.py.

The structs of include/weft are written down again here, so `Library` compares their sizes and offsets with
what the library says about itself (weft/ops.h) and raises where the two have drifted apart.

    lib = Library("build/libweft.so", threads=2)
    expand = Call(lib, "mhc_expand_fwd", u=u, x=Fresh((tokens, streams, channels), torch.bfloat16))
    (x,) = expand()     # a new x each time
"""

import ctypes
from ctypes import (
    POINTER,
    byref,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint64,
    c_void_p,
    pointer,
)
from typing import NamedTuple

import torch

MAX_DIMS = 4
BACKEND_CPU = 2
DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.float64: 4}
EPS_INSIDE, EPS_OUTSIDE = range(2)
SINKHORN_LOG, SINKHORN_SOFTMAX_EPS, SINKHORN_CLAMP, SINKHORN_ADD, SINKHORN_THRESHOLD = range(5)
APPLY_IN_OUT, APPLY_OUT_IN = range(2)
CONTRACT_MEAN, CONTRACT_SUM = range(2)


# ---- weft/weft.h -------------------------------------------------------------------------------------------


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("dtype", c_int),
        ("ndim", c_int32),
        ("shape", c_int64 * MAX_DIMS),
        ("stride", c_int64 * MAX_DIMS),
    ]


class Grad(ctypes.Structure):
    _fields_ = [("to", Tensor), ("add", c_int32)]


class Exec(ctypes.Structure):
    _fields_ = [
        ("backend", c_int),
        ("device", c_int32),
        ("threads", c_int32),
        ("isa", c_int),
        ("stream", c_void_p),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
        ("precision", c_int),
        ("vouched", c_int32),
    ]


# ---- weft/mhc.h, weft/norm.h -------------------------------------------------------------------------------


class Numerics(ctypes.Structure):
    _fields_ = [
        ("rms_eps", c_double),
        ("rms_eps_kind", c_int),
        ("pre_eps", c_double),
        ("post_mult", c_double),
        ("sinkhorn", c_int),
        ("sinkhorn_eps", c_double),
        ("sinkhorn_iters", c_int32),
        ("apply", c_int),
    ]


class Dropout(ctypes.Structure):
    _fields_ = [
        ("p", c_double),
        ("seed", c_uint64),
        ("site", c_uint64),
        ("step", POINTER(c_uint64)),
        ("token_base", c_int64),
        ("shared", c_int32),
    ]


# ---- weft/gdn.h --------------------------------------------------------------------------------------------


class GdnOptions(ctypes.Structure):
    _fields_ = [
        ("activation", c_int),
        ("l2norm", c_int32),
        ("l2_eps", c_double),
        ("q_scale", c_double),
        ("beta_scale", c_double),
        ("head_map", c_int),
        ("rounding", c_int),
        ("g_chunk", c_int32),
        ("g_log2", c_int32),
    ]


# Fields that are not tensors, by name; all other names are tensors, and those behind a bar are gradients.
SCALARS = {
    "numerics": Numerics,
    "dropout": Dropout,
    "eps": c_double,
    "sub_eps": c_double,
    "rms_eps": c_double,
    "rms_eps_kind": c_int,
    "pre_eps": c_double,
    "kind": c_int,
    "layers": c_void_p,
    "num_layers": c_int32,
    "options": GdnOptions,
    "scale": c_double,
    "head_map": c_int,
    "chunk": c_int32,
}

LAYER = "dropout sub_eps pre f bias post res sub_weight u v y"
ARGS = {
    "mhc_project_fwd": "x phi norm_weight h ms",
    "mhc_project_bwd": "x phi norm_weight d_h d_ms | d_x d_phi d_norm_weight",
    "mhc_scale_fwd": "numerics h ms alpha beta pre post logits",
    "mhc_scale_bwd": "numerics h ms alpha beta d_pre d_post d_logits | d_h d_ms d_alpha d_beta",
    "mhc_sinkhorn_fwd": "numerics logits res",
    "mhc_sinkhorn_bwd": "numerics logits d_res | d_logits",
    "mhc_coef_fwd": "numerics h ms alpha beta pre post res",
    "mhc_coef_bwd": "numerics h ms alpha beta d_pre d_post d_res | d_h d_ms d_alpha d_beta",
    "mhc_aggregate_fwd": "x pre u",
    "mhc_aggregate_bwd": "x pre d_u | d_x d_pre",
    "mhc_post_fwd": "numerics dropout x f bias post res y",
    "mhc_post_bwd": "numerics dropout x f bias post res d_y | d_x d_f d_bias d_post d_res",
    "mhc_expand_fwd": "u x",
    "mhc_expand_bwd": "d_x | d_u",
    "mhc_contract_fwd": "kind x u",
    "mhc_contract_bwd": "kind d_u | d_x",
    "mhc_head_fwd": "rms_eps rms_eps_kind pre_eps x phi norm_weight alpha beta u h ms",
    "mhc_head_bwd": "rms_eps rms_eps_kind pre_eps x phi norm_weight alpha beta h ms d_u"
    " | d_x d_phi d_norm_weight d_alpha d_beta",
    "mhc_pre_fwd": "numerics sub_eps x phi norm_weight alpha beta pre_in sub_weight h ms pre post res u v",
    "mhc_pre_bwd": "numerics sub_eps x phi norm_weight pre_in sub_weight alpha beta h ms"
    " d_u d_v d_pre d_post d_res | d_x d_phi d_norm_weight d_alpha d_beta d_pre_in d_sub_weight",
    "mhc_boundary_fwd": "numerics dropout sub_eps x f bias post res phi norm_weight alpha beta pre_in"
    " sub_weight y h ms pre_out post_out res_out u v",
    "mhc_boundary_bwd": "numerics dropout sub_eps x f bias post res y phi norm_weight pre_in sub_weight"
    " alpha beta h ms d_y d_u d_v d_pre_out d_post_out d_res_out"
    " | d_x d_f d_bias d_post d_res d_phi d_norm_weight d_alpha d_beta d_pre_in d_sub_weight",
    "mhc_replay_fwd": "numerics x layers num_layers",
    "rmsnorm_fwd": "eps u weight v",
    "rmsnorm_bwd": "eps u weight d_v | d_u d_weight",
    "gdn_pre_fwd": "options q k v z b a weight bias a_log dt_bias cu_seqlens state"
    " query key value gate beta g final_state",
    "gdn_pre_bwd": "options q k v b a weight bias a_log dt_bias cu_seqlens state"
    " d_query d_key d_value d_gate d_beta d_g d_final_state"
    " | d_q d_k d_v d_z d_b d_a d_weight d_bias d_a_log d_dt_bias d_state",
    "gdn_pre_step": "options q k v z b a weight bias a_log dt_bias cu_seqlens state_index state"
    " query key value gate beta g new_state",
    "gdn_rule_fwd": "scale head_map chunk query key value beta g cu_seqlens state o final_state",
    "gdn_rule_bwd": "scale head_map chunk query key value beta g cu_seqlens state d_o d_final_state"
    " | d_query d_key d_value d_beta d_g d_state",
}


def _struct(name, text, head=()):
    plain, _, grads = text.partition("|")
    fields = [(field, SCALARS.get(field, Tensor)) for field in plain.split()]
    return type(
        name, (ctypes.Structure,), {"_fields_": [*head, *fields, *((field, Grad) for field in grads.split())]}
    )


STRUCTS = {op: _struct(f"weft_{op}_args", text, [("struct_size", c_size_t)]) for op, text in ARGS.items()}
Layer = _struct("weft_mhc_replay_layer", LAYER)


# ---- weft/ops.h --------------------------------------------------------------------------------------------


class ArgInfo(ctypes.Structure):
    _fields_ = [
        ("name", c_char_p),
        ("offset", c_size_t),
        ("kind", c_int),
        ("type", c_int),
        ("optional", c_int32),
        ("ndim", c_int32),
        ("dim", c_int32 * MAX_DIMS),
        ("in_place", c_char_p),
    ]


class OpInfo(ctypes.Structure):
    _fields_ = [
        ("name", c_char_p),
        ("args_size", c_size_t),
        ("num_args", c_int32),
        ("args", POINTER(ArgInfo)),
    ]


ARG_GRAD = 2


def _compare(struct, info):
    """Raises where `struct` is not what the library calls `info`."""
    name = info.name.decode()
    if ctypes.sizeof(struct) != info.args_size:
        raise WeftError(
            f"{name}: the args struct has {ctypes.sizeof(struct)} bytes here, {info.args_size} in the library"
        )
    mine = {f: (getattr(struct, f).offset, t is Grad) for f, t in struct._fields_ if t in (Tensor, Grad)}
    theirs = {a.name.decode(): (a.offset, a.kind == ARG_GRAD) for a in info.args[: info.num_args]}
    for field in mine.keys() | theirs.keys():
        if mine.get(field) != theirs.get(field):
            raise WeftError(f"{name}.{field}: {mine.get(field)} here, {theirs.get(field)} in the library")


class WeftError(RuntimeError):
    """A status other than WEFT_OK, in the library's words; or a library that does not fit this module."""


class Library:
    def __init__(self, path, threads=0):
        self.c = c = ctypes.CDLL(str(path))
        self.threads = threads
        for name, result, *params in [
            ("weft_last_error", c_char_p),
            ("weft_version", c_char_p),
            ("weft_cpu_isa", c_int),
            ("weft_isa_name", c_char_p, c_int),
            ("weft_mhc_preset_find", c_int, c_char_p),
            ("weft_mhc_preset_name", c_char_p, c_int),
            ("weft_mhc_preset_numerics", c_int, c_int, POINTER(Numerics)),
            ("weft_op_count", c_int32),
            ("weft_op_at", POINTER(OpInfo), c_int32),
            ("weft_mhc_replay_layer_info", POINTER(OpInfo)),
            ("weft_op_call", c_int, POINTER(OpInfo), POINTER(Exec), c_void_p),
            ("weft_op_workspace", c_int, POINTER(OpInfo), POINTER(Exec), c_void_p, POINTER(c_size_t)),
        ]:
            function = getattr(c, name)
            function.restype, function.argtypes = result, params
        infos = [c.weft_op_at(i) for i in range(c.weft_op_count())]
        self.ops = {info.contents.name.decode(): info for info in infos}
        if self.ops.keys() != STRUCTS.keys():
            raise WeftError(f"operators that only one side has: {sorted(self.ops.keys() ^ STRUCTS.keys())}")
        for name, info in self.ops.items():
            _compare(STRUCTS[name], info.contents)
        _compare(Layer, c.weft_mhc_replay_layer_info().contents)

    def check(self, status):
        if status:
            raise WeftError(self.c.weft_last_error().decode())

    def describe(self):
        isa = self.c.weft_isa_name(self.c.weft_cpu_isa()).decode()
        return f"weft {self.c.weft_version().decode()} ({isa})"

    def numerics(self, preset):
        numerics, index = Numerics(), self.c.weft_mhc_preset_find(preset.encode())
        if self.c.weft_mhc_preset_name(index) is None:
            names = [self.c.weft_mhc_preset_name(i).decode() for i in range(index)]
            raise WeftError(f"no preset {preset!r}; there are {', '.join(names)}")
        self.check(self.c.weft_mhc_preset_numerics(index, byref(numerics)))
        return numerics


# ---- calls -------------------------------------------------------------------------------------------------


class Fresh(NamedTuple):
    """An output or gradient: a new dense tensor for every call."""

    shape: tuple
    dtype: torch.dtype

    @classmethod
    def like(cls, tensor):
        return cls(tuple(tensor.shape), tensor.dtype)


class Call:
    """One operator with its inputs bound and its workspace allocated. Calling it allocates the `Fresh`
    arguments, runs the operator and returns them in the order they were given in."""

    def __init__(self, lib, op, **values):
        self.lib, self.op, self.keep, self.fresh = lib, lib.ops[op], [values], []
        layers = values.pop("layers", None)
        args = STRUCTS[op](struct_size=ctypes.sizeof(STRUCTS[op]))
        self._bind(args, values)
        if layers is not None:
            array = (Layer * len(layers))()
            for layer, of_layer in zip(array, layers, strict=True):
                self._bind(layer, of_layer)
            args.layers, args.num_layers = ctypes.addressof(array), len(layers)
            self.keep += [array, layers]
        exec_ = Exec(backend=BACKEND_CPU, threads=lib.threads)
        self.args, self.exec = pointer(args), pointer(exec_)
        need = c_size_t()
        lib.check(lib.c.weft_op_workspace(self.op, self.exec, self.args, byref(need)))
        self.workspace = torch.empty(need.value, dtype=torch.uint8)
        exec_.workspace, exec_.workspace_bytes = self.workspace.data_ptr(), need.value

    def _bind(self, struct, values):
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                self._describe(struct, name, value.dtype, value.shape, value.stride()).data = value.data_ptr()
            elif isinstance(value, Fresh):
                stride = torch.empty(value.shape, device="meta").stride()
                self.fresh.append((self._describe(struct, name, value.dtype, value.shape, stride), *value))
            else:
                setattr(struct, name, value)

    @staticmethod
    def _describe(struct, name, dtype, shape, stride):
        field = getattr(struct, name)
        tensor = field.to if isinstance(field, Grad) else field
        tensor.dtype, tensor.ndim = DTYPES[dtype], len(shape)
        tensor.shape[: len(shape)], tensor.stride[: len(shape)] = tuple(shape), tuple(stride)
        return tensor

    def __call__(self):
        outputs = []
        for slot, shape, dtype in self.fresh:
            output = torch.empty(shape, dtype=dtype)
            slot.data = output.data_ptr()
            outputs.append(output)
        status = self.lib.c.weft_op_call(self.op, self.exec, self.args)
        if status:
            self.lib.check(status)
        return tuple(outputs)
