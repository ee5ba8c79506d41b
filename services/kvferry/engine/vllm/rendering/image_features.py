"""Features of a prompt's image as bytes, between the renderer and the engine."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldConfig,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
)
from vllm.v1.serial_utils import CUSTOM_TYPE_RAW_VIEW, MsgpackDecoder, MsgpackEncoder

from kvferry.errors import InvalidRequest
from kvferry.util.grpc_options import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

# The bytes are those of vLLM's serializer, which makes nothing but tensors of them. They are checked before vLLM reads
# them: a gateway's bytes must not end an engine.

MAX_FEATURES_BYTES = MAX_MESSAGE_BYTES  # of one image, encoded; all of a prompt go to a worker in one message
MAX_TENSORS = 16
_MAX_NAME_CHARS = 64
_MAX_DIMENSIONS = 8
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)
}
# A whole range of int64, as masks are, travels in one byte each.
_NARROWED, _NARROW = torch.int64, torch.uint8
_LARGEST_NARROW = 255


class _Field(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    kind: str
    values: dict[str, Any]


class _Tensor(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data: msgspec.msgpack.Ext


class _Element(msgspec.Struct, forbid_unknown_fields=True):
    data: _Tensor
    field: _Field


_decoder = msgspec.msgpack.Decoder(dict[str, _Element])


def encode_features(item: MultiModalKwargsItem) -> bytes:
    """Return the same bytes for the same image in every prompt.

    Raises InvalidRequest for features over MAX_FEATURES_BYTES, ValueError for those of an unknown kind.
    """
    size = sum(_num_encoded(name, elem) for name, elem in item.items())
    if size > MAX_FEATURES_BYTES:
        raise InvalidRequest(f"an image takes {size} bytes for the model; {MAX_FEATURES_BYTES} is the limit")
    alone = MultiModalKwargsItem(
        {name: MultiModalFieldElem(data=_narrowed(item[name].data), field=_of_one(item[name])) for name in sorted(item)}
    )
    (encoded,) = MsgpackEncoder(size_threshold=sys.maxsize).encode(alone)
    return bytes(encoded)


def _num_encoded(name: str, elem: MultiModalFieldElem) -> int:
    if not isinstance(elem.data, torch.Tensor) or elem.data.dtype in (_NARROW, None):
        raise ValueError(f"the processor's {name} is no tensor of a known kind")
    return int(_narrowed(elem.data).nbytes)


def _narrowed(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == _NARROWED and tensor.dim() and tensor.numel():
        least, most = torch.aminmax(tensor)
        if least >= 0 and most <= _LARGEST_NARROW:
            return tensor.to(_NARROW)
    return tensor.contiguous()


def _of_one(elem: MultiModalFieldElem) -> Any:
    # vLLM's field names the sizes of the prompt's other images too.
    field = elem.field
    if isinstance(field, MultiModalBatchedField):
        return field
    if isinstance(field, MultiModalFlatField) and field.dim == 0:
        size = int(elem.data.shape[0])
        return MultiModalFieldConfig.flat("", [slice(0, size)], keep_on_cpu=field.keep_on_cpu).field
    raise ValueError(f"the processor's fields of kind {type(field).__name__} are not known")


def decode_features(encoded: bytes) -> MultiModalKwargsItem:
    """Raises InvalidRequest for bytes that `encode_features` did not make."""
    if len(encoded) > MAX_FEATURES_BYTES:
        raise InvalidRequest(f"features of an image have {len(encoded)} bytes; {MAX_FEATURES_BYTES} is the limit")
    try:
        elements = _decoder.decode(encoded)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"features of an image cannot be read: {error}") from None
    if not 0 < len(elements) <= MAX_TENSORS:
        raise InvalidRequest(f"features of an image have {len(elements)} tensors; 1 to {MAX_TENSORS} are allowed")
    for name, element in elements.items():
        if problem := _problem(name, element):
            raise InvalidRequest(f"features of an image cannot be used: {name[:_MAX_NAME_CHARS]!r} {problem}")
    item: MultiModalKwargsItem = MsgpackDecoder(MultiModalKwargsItem, share_mem=False).decode(encoded)
    for elem in item.values():
        if elem.data.dtype == _NARROW:
            elem.data = elem.data.to(_NARROWED)
    return item


def _problem(name: str, element: _Element) -> str:
    tensor, field = element.data, element.field
    dtype = _DTYPES.get(tensor.dtype)
    if len(name) > _MAX_NAME_CHARS:
        return f"is a name of {len(name)} characters; {_MAX_NAME_CHARS} is the limit"
    if dtype is None:
        return f"has type {tensor.dtype[:_MAX_NAME_CHARS]!r}"
    if len(tensor.shape) > _MAX_DIMENSIONS or any(not 0 < size <= MAX_FEATURES_BYTES for size in tensor.shape):
        return f"has a shape of {len(tensor.shape)} dimensions that no image has"
    needed, found = math.prod(tensor.shape) * dtype.itemsize, memoryview(tensor.data.data).nbytes
    if tensor.data.code != CUSTOM_TYPE_RAW_VIEW or found != needed:
        return f"has {found} bytes, and its shape {needed}"
    check = _FIELDS.get(field.kind)
    if check is None or not check(field.values, tensor.shape):
        return f"is a field of kind {field.kind[:_MAX_NAME_CHARS]!r} that no image has"
    return ""


def _is_batched(values: Mapping[str, Any], shape: list[int]) -> bool:
    return values.keys() == {"keep_on_cpu"} and isinstance(values["keep_on_cpu"], bool)


def _is_flat(values: Mapping[str, Any], shape: list[int]) -> bool:
    return (
        values.keys() == {"keep_on_cpu", "slices", "dim"}
        and isinstance(values["keep_on_cpu"], bool)
        and values["dim"] == 0
        and bool(shape)
        and values["slices"] == [[0, shape[0], None]]
    )


_FIELDS: Mapping[str, Callable[[Mapping[str, Any], list[int]], bool]] = {"batched": _is_batched, "flat": _is_flat}
