from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_ERROR: FinishReason

class Downward(_message.Message):
    __slots__ = ("hello", "submit", "cancel", "ack", "release", "want_snapshot", "reserve", "quarantined", "elsewhere", "quarantine_known")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    WANT_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_KNOWN_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    submit: Submit
    cancel: Cancel
    ack: Ack
    release: Release
    want_snapshot: WantSnapshot
    reserve: Reserve
    quarantined: Quarantined
    elsewhere: Elsewhere
    quarantine_known: QuarantineKnown
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., want_snapshot: _Optional[_Union[WantSnapshot, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., quarantined: _Optional[_Union[Quarantined, _Mapping]] = ..., elsewhere: _Optional[_Union[Elsewhere, _Mapping]] = ..., quarantine_known: _Optional[_Union[QuarantineKnown, _Mapping]] = ...) -> None: ...

class Upward(_message.Message):
    __slots__ = ("welcome", "step", "residency", "quarantined", "quarantine_known")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_KNOWN_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    step: Step
    residency: Residency
    quarantined: Quarantined
    quarantine_known: QuarantineKnown
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., residency: _Optional[_Union[Residency, _Mapping]] = ..., quarantined: _Optional[_Union[Quarantined, _Mapping]] = ..., quarantine_known: _Optional[_Union[QuarantineKnown, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("gateway_id", "version", "protocol", "cluster", "model")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    version: str
    protocol: Protocol
    cluster: str
    model: Model
    def __init__(self, gateway_id: _Optional[str] = ..., version: _Optional[str] = ..., protocol: _Optional[_Union[Protocol, _Mapping]] = ..., cluster: _Optional[str] = ..., model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("served_name", "tokenizer", "weights", "overrides")
    SERVED_NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    OVERRIDES_FIELD_NUMBER: _ClassVar[int]
    served_name: str
    tokenizer: str
    weights: str
    overrides: str
    def __init__(self, served_name: _Optional[str] = ..., tokenizer: _Optional[str] = ..., weights: _Optional[str] = ..., overrides: _Optional[str] = ...) -> None: ...

class Protocol(_message.Message):
    __slots__ = ("oldest", "newest", "features")
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    oldest: int
    newest: int
    features: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, oldest: _Optional[int] = ..., newest: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("worker_id", "version", "role", "engine_id", "model", "max_model_len", "block_size", "page_bytes", "load", "protocol", "cluster", "served", "refusal", "pool", "adapters")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    version: str
    role: str
    engine_id: str
    model: str
    max_model_len: int
    block_size: int
    page_bytes: int
    load: Load
    protocol: Protocol
    cluster: str
    served: Model
    refusal: str
    pool: str
    adapters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_id: _Optional[str] = ..., version: _Optional[str] = ..., role: _Optional[str] = ..., engine_id: _Optional[str] = ..., model: _Optional[str] = ..., max_model_len: _Optional[int] = ..., block_size: _Optional[int] = ..., page_bytes: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., protocol: _Optional[_Union[Protocol, _Mapping]] = ..., cluster: _Optional[str] = ..., served: _Optional[_Union[Model, _Mapping]] = ..., refusal: _Optional[str] = ..., pool: _Optional[str] = ..., adapters: _Optional[_Iterable[str]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Submit(_message.Message):
    __slots__ = ("number", "request_id", "prompt_token_ids", "sampling", "keep_for_transfer", "transfer_params", "cache_salt", "continued", "parse", "tier", "traceparent", "tracestate", "timeout_ms", "suspect", "resumed", "turn", "preemptible", "pool", "adapter", "images")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    KEEP_FOR_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_PARAMS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    CONTINUED_FIELD_NUMBER: _ClassVar[int]
    PARSE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIBLE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    number: int
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    keep_for_transfer: bool
    transfer_params: bytes
    cache_salt: str
    continued: Continued
    parse: Parse
    tier: Tier
    traceparent: str
    tracestate: str
    timeout_ms: int
    suspect: bool
    resumed: bool
    turn: Turn
    preemptible: bool
    pool: str
    adapter: str
    images: _containers.RepeatedCompositeFieldContainer[PromptImage]
    def __init__(self, number: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., keep_for_transfer: _Optional[bool] = ..., transfer_params: _Optional[bytes] = ..., cache_salt: _Optional[str] = ..., continued: _Optional[_Union[Continued, _Mapping]] = ..., parse: _Optional[_Union[Parse, _Mapping]] = ..., tier: _Optional[_Union[Tier, _Mapping]] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ..., timeout_ms: _Optional[int] = ..., suspect: _Optional[bool] = ..., resumed: _Optional[bool] = ..., turn: _Optional[_Union[Turn, _Mapping]] = ..., preemptible: _Optional[bool] = ..., pool: _Optional[str] = ..., adapter: _Optional[str] = ..., images: _Optional[_Iterable[_Union[PromptImage, _Mapping]]] = ...) -> None: ...

class PromptImage(_message.Message):
    __slots__ = ("digest", "offset", "num_tokens", "features")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    digest: str
    offset: int
    num_tokens: int
    features: bytes
    def __init__(self, digest: _Optional[str] = ..., offset: _Optional[int] = ..., num_tokens: _Optional[int] = ..., features: _Optional[bytes] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("tenant", "share", "missing_tokens")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    MISSING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    share: float
    missing_tokens: int
    def __init__(self, tenant: _Optional[str] = ..., share: _Optional[float] = ..., missing_tokens: _Optional[int] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("number", "resumed", "turn", "pool")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    number: int
    resumed: bool
    turn: Turn
    pool: str
    def __init__(self, number: _Optional[int] = ..., resumed: _Optional[bool] = ..., turn: _Optional[_Union[Turn, _Mapping]] = ..., pool: _Optional[str] = ...) -> None: ...

class Quarantined(_message.Message):
    __slots__ = ("requests", "number")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[QuarantinedRequest]
    number: int
    def __init__(self, requests: _Optional[_Iterable[_Union[QuarantinedRequest, _Mapping]]] = ..., number: _Optional[int] = ...) -> None: ...

class QuarantineKnown(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class QuarantinedRequest(_message.Message):
    __slots__ = ("digest", "left_ms")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    left_ms: int
    def __init__(self, digest: _Optional[bytes] = ..., left_ms: _Optional[int] = ...) -> None: ...

class Tier(_message.Message):
    __slots__ = ("tenant", "epoch", "volumes", "no_load", "wanted_s")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VOLUMES_FIELD_NUMBER: _ClassVar[int]
    NO_LOAD_FIELD_NUMBER: _ClassVar[int]
    WANTED_S_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    epoch: int
    volumes: _containers.RepeatedCompositeFieldContainer[VolumePages]
    no_load: bool
    wanted_s: float
    def __init__(self, tenant: _Optional[str] = ..., epoch: _Optional[int] = ..., volumes: _Optional[_Iterable[_Union[VolumePages, _Mapping]]] = ..., no_load: _Optional[bool] = ..., wanted_s: _Optional[float] = ...) -> None: ...

class VolumePages(_message.Message):
    __slots__ = ("volume_id", "num_pages")
    VOLUME_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    volume_id: str
    num_pages: int
    def __init__(self, volume_id: _Optional[str] = ..., num_pages: _Optional[int] = ...) -> None: ...

class Parse(_message.Message):
    __slots__ = ("request", "num_tokens_before")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    request: bytes
    num_tokens_before: int
    def __init__(self, request: _Optional[bytes] = ..., num_tokens_before: _Optional[int] = ...) -> None: ...

class Continued(_message.Message):
    __slots__ = ("num_tokens", "num_chars", "sizes")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHARS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    num_chars: int
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_tokens: _Optional[int] = ..., num_chars: _Optional[int] = ..., sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("num_messages", "num_bytes")
    NUM_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_messages: int
    num_bytes: int
    def __init__(self, num_messages: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("transfer_params",)
    TRANSFER_PARAMS_FIELD_NUMBER: _ClassVar[int]
    transfer_params: bytes
    def __init__(self, transfer_params: _Optional[bytes] = ...) -> None: ...

class WantSnapshot(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Residency(_message.Message):
    __slots__ = ("sequence", "snapshot", "part", "num_parts", "cleared", "stored", "removed")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    snapshot: bool
    part: int
    num_parts: int
    cleared: bool
    stored: _containers.RepeatedCompositeFieldContainer[TierKeys]
    removed: _containers.RepeatedCompositeFieldContainer[TierKeys]
    def __init__(self, sequence: _Optional[int] = ..., snapshot: _Optional[bool] = ..., part: _Optional[int] = ..., num_parts: _Optional[int] = ..., cleared: _Optional[bool] = ..., stored: _Optional[_Iterable[_Union[TierKeys, _Mapping]]] = ..., removed: _Optional[_Iterable[_Union[TierKeys, _Mapping]]] = ...) -> None: ...

class TierKeys(_message.Message):
    __slots__ = ("tier", "keys")
    TIER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    tier: str
    keys: bytes
    def __init__(self, tier: _Optional[str] = ..., keys: _Optional[bytes] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "logprobs", "logit_bias", "allowed_token_ids", "bad_words", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "structured_outputs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPACES_BETWEEN_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    structured_outputs: str
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[str]] = ..., include_stop_str_in_output: _Optional[bool] = ..., skip_special_tokens: _Optional[bool] = ..., spaces_between_special_tokens: _Optional[bool] = ..., structured_outputs: _Optional[str] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("numbers", "num_tokens", "token_ids", "texts", "logprobs", "finished", "load", "deltas", "reserved", "sources")
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    logprobs: _containers.RepeatedCompositeFieldContainer[StepLogprobs]
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    load: Load
    deltas: _containers.RepeatedCompositeFieldContainer[StepDelta]
    reserved: _containers.RepeatedScalarFieldContainer[int]
    sources: _containers.RepeatedCompositeFieldContainer[StepSources]
    def __init__(self, numbers: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., texts: _Optional[_Iterable[str]] = ..., logprobs: _Optional[_Iterable[_Union[StepLogprobs, _Mapping]]] = ..., finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., deltas: _Optional[_Iterable[_Union[StepDelta, _Mapping]]] = ..., reserved: _Optional[_Iterable[int]] = ..., sources: _Optional[_Iterable[_Union[StepSources, _Mapping]]] = ...) -> None: ...

class StepSources(_message.Message):
    __slots__ = ("number", "sources")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    number: int
    sources: PromptSources
    def __init__(self, number: _Optional[int] = ..., sources: _Optional[_Union[PromptSources, _Mapping]] = ...) -> None: ...

class StepDelta(_message.Message):
    __slots__ = ("index", "delta")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    index: int
    delta: bytes
    def __init__(self, index: _Optional[int] = ..., delta: _Optional[bytes] = ...) -> None: ...

class StepLogprobs(_message.Message):
    __slots__ = ("index", "positions")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    index: int
    positions: _containers.RepeatedCompositeFieldContainer[PositionLogprobs]
    def __init__(self, index: _Optional[int] = ..., positions: _Optional[_Iterable[_Union[PositionLogprobs, _Mapping]]] = ...) -> None: ...

class PositionLogprobs(_message.Message):
    __slots__ = ("top",)
    TOP_FIELD_NUMBER: _ClassVar[int]
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "text", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    text: str
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., text: _Optional[str] = ..., logprob: _Optional[float] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("number", "reason", "stop_text", "stop_token_id", "sources", "transfer_params", "failure", "cached", "durations")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TEXT_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_PARAMS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    DURATIONS_FIELD_NUMBER: _ClassVar[int]
    number: int
    reason: FinishReason
    stop_text: str
    stop_token_id: int
    sources: PromptSources
    transfer_params: bytes
    failure: Failure
    cached: CachedTokens
    durations: Durations
    def __init__(self, number: _Optional[int] = ..., reason: _Optional[_Union[FinishReason, str]] = ..., stop_text: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., sources: _Optional[_Union[PromptSources, _Mapping]] = ..., transfer_params: _Optional[bytes] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., cached: _Optional[_Union[CachedTokens, _Mapping]] = ..., durations: _Optional[_Union[Durations, _Mapping]] = ...) -> None: ...

class Durations(_message.Message):
    __slots__ = ("queue_ms", "prefill_ms", "kv_transfer_ms", "load_ms", "prefill_share", "kv_transfer_share")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    LOAD_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SHARE_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_SHARE_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    prefill_ms: float
    kv_transfer_ms: float
    load_ms: float
    prefill_share: float
    kv_transfer_share: float
    def __init__(self, queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., kv_transfer_ms: _Optional[float] = ..., load_ms: _Optional[float] = ..., prefill_share: _Optional[float] = ..., kv_transfer_share: _Optional[float] = ...) -> None: ...

class PromptSources(_message.Message):
    __slots__ = ("local_compute", "local_cache_hit", "external_kv_transfer")
    LOCAL_COMPUTE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_CACHE_HIT_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_KV_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    local_compute: int
    local_cache_hit: int
    external_kv_transfer: int
    def __init__(self, local_compute: _Optional[int] = ..., local_cache_hit: _Optional[int] = ..., external_kv_transfer: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "message", "retry_after_s", "blameless")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    BLAMELESS_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    retry_after_s: int
    blameless: bool
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[int] = ..., blameless: _Optional[bool] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_pages_used", "num_pages", "draining", "prompt_tokens", "transferred_bytes", "num_generated_tokens", "num_steps", "cached_tokens", "full", "queued_prompt_tokens", "backlogs", "other_backlogs", "loaded_adapters", "num_prompts", "served")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERRED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BACKLOGS_FIELD_NUMBER: _ClassVar[int]
    OTHER_BACKLOGS_FIELD_NUMBER: _ClassVar[int]
    LOADED_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_pages_used: int
    num_pages: int
    draining: bool
    prompt_tokens: PromptSources
    transferred_bytes: int
    num_generated_tokens: int
    num_steps: int
    cached_tokens: CachedTokens
    full: bool
    queued_prompt_tokens: int
    backlogs: _containers.RepeatedCompositeFieldContainer[TenantBacklog]
    other_backlogs: _containers.RepeatedCompositeFieldContainer[BacklogBucket]
    loaded_adapters: _containers.RepeatedScalarFieldContainer[str]
    num_prompts: int
    served: _containers.RepeatedCompositeFieldContainer[TenantWork]
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_pages_used: _Optional[int] = ..., num_pages: _Optional[int] = ..., draining: _Optional[bool] = ..., prompt_tokens: _Optional[_Union[PromptSources, _Mapping]] = ..., transferred_bytes: _Optional[int] = ..., num_generated_tokens: _Optional[int] = ..., num_steps: _Optional[int] = ..., cached_tokens: _Optional[_Union[CachedTokens, _Mapping]] = ..., full: _Optional[bool] = ..., queued_prompt_tokens: _Optional[int] = ..., backlogs: _Optional[_Iterable[_Union[TenantBacklog, _Mapping]]] = ..., other_backlogs: _Optional[_Iterable[_Union[BacklogBucket, _Mapping]]] = ..., loaded_adapters: _Optional[_Iterable[str]] = ..., num_prompts: _Optional[int] = ..., served: _Optional[_Iterable[_Union[TenantWork, _Mapping]]] = ...) -> None: ...

class TenantWork(_message.Message):
    __slots__ = ("tenant", "ms", "num_requests", "num_tokens", "num_running")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    ms: float
    num_requests: int
    num_tokens: int
    num_running: int
    def __init__(self, tenant: _Optional[str] = ..., ms: _Optional[float] = ..., num_requests: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_running: _Optional[int] = ...) -> None: ...

class Elsewhere(_message.Message):
    __slots__ = ("served", "num_workers")
    SERVED_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    served: _containers.RepeatedCompositeFieldContainer[TenantWork]
    num_workers: int
    def __init__(self, served: _Optional[_Iterable[_Union[TenantWork, _Mapping]]] = ..., num_workers: _Optional[int] = ...) -> None: ...

class TenantBacklog(_message.Message):
    __slots__ = ("tenant", "ms", "share")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MS_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    ms: float
    share: float
    def __init__(self, tenant: _Optional[str] = ..., ms: _Optional[float] = ..., share: _Optional[float] = ...) -> None: ...

class BacklogBucket(_message.Message):
    __slots__ = ("exponent", "ms", "share")
    EXPONENT_FIELD_NUMBER: _ClassVar[int]
    MS_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    exponent: int
    ms: float
    share: float
    def __init__(self, exponent: _Optional[int] = ..., ms: _Optional[float] = ..., share: _Optional[float] = ...) -> None: ...

class CachedTokens(_message.Message):
    __slots__ = ("device", "cpu", "volume", "kv_transfer")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CPU_FIELD_NUMBER: _ClassVar[int]
    VOLUME_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    device: int
    cpu: int
    volume: int
    kv_transfer: int
    def __init__(self, device: _Optional[int] = ..., cpu: _Optional[int] = ..., volume: _Optional[int] = ..., kv_transfer: _Optional[int] = ...) -> None: ...
