"""Base of all sections: TLS settings, and messages of faults."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


class Section(BaseModel):
    # Built at the first use: most processes use `ClusterConfig` alone, which has all sections in its own validator.
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), defer_build=True)


def absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError("expected an absolute path: every process of a node must find the same one")
    return path


AbsolutePath = Annotated[Path, AfterValidator(absolute)]


class MutualTlsConfig(Section):
    """Mutual TLS: each side shows `cert_file` and accepts certificates of `ca_file`. Set all three files or none."""

    cert_file: Path | None = None
    key_file: Path | None = None
    ca_file: Path | None = None

    @property
    def enabled(self) -> bool:
        return self.cert_file is not None

    @model_validator(mode="after")
    def _all_or_none(self) -> Self:
        files = {"cert_file": self.cert_file, "key_file": self.key_file, "ca_file": self.ca_file}
        missing = [name for name, file in files.items() if file is None]
        if missing and len(missing) < len(files):
            raise ValueError(f"cert_file, key_file and ca_file go together; missing: {', '.join(missing)}")
        return self


class TlsConfig(MutualTlsConfig):
    """Mutual TLS of members: all three files, or none."""

    server_name: str = ""  # the name every worker's certificate carries; empty: the address that is dialled

    @model_validator(mode="after")
    def _name_needs_files(self) -> Self:
        if self.server_name and not self.enabled:
            raise ValueError("server_name needs cert_file, key_file and ca_file")
        return self


class ServerTlsConfig(Section):
    """TLS of client-facing listeners. With `client_ca_file`, clients must show a certificate that it signed."""

    cert_file: Path | None = None
    key_file: Path | None = None
    client_ca_file: Path | None = None

    @property
    def enabled(self) -> bool:
        return self.cert_file is not None

    @model_validator(mode="after")
    def _pairs(self) -> ServerTlsConfig:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together")
        if self.client_ca_file is not None and self.cert_file is None:
            raise ValueError("client_ca_file needs cert_file and key_file: clients show certificates over TLS only")
        return self


_TYPE_TO_WORDS = {
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping of settings",
}


def key_of(path: Sequence[str | int]) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")


_OF_BOTH_ROLES = "engines of both roles have that of the section `engine`"

# Settings of earlier states: patterns of their keys, and what holds in their places.
PATTERN_TO_RULE = {
    "*engine.unproven": "arguments need no permission, and engine.proof decides which pages are transferred",
    "*engine.transfer_lease_s": "the limit is kvferry.engine.vllm.start.arguments.TRANSFER_LEASE_S",
    "*gateway.max_connections": "the limit is kvferry.gateway.http.connection_limits.MAX_CONNECTIONS",
    "*gateway.images.cache_mib": "the limit is kvferry.gateway.lifecycle.IMAGE_CACHE_BYTES",
    "*gateway.max_pending_body_bytes": "the limit is kvferry.gateway.admission.MAX_PENDING_BODY_BYTES",
    "*gateway.max_prompt_tokens": "the limit is kvferry.gateway.admission.MAX_PENDING_PROMPT_TOKENS",
    "*tier.io_threads": "the limit is kvferry_keeper.volumes.volume_io.NUM_IO_THREADS",
    "*tier.queue_mib": "the limit is kvferry_keeper.volumes.volume_set.MAX_QUEUED_WRITE_BYTES",
    "*.engine.enforce_eager": _OF_BOTH_ROLES,
    "*.engine.gpu_memory_utilization": _OF_BOTH_ROLES,
    "*.engine.kv_cache_gib": _OF_BOTH_ROLES,
    "*.engine.threads": _OF_BOTH_ROLES,
    "pools.*.kv_cache_dtype": "engines of all pools have that of `engine`",
    "*model.hf_overrides.max_position_embeddings": "it is factor x original_max_position_embeddings",
    "*model.hf_overrides.rope_parameters.rope_theta": "it is that of the model's config.json",
    "*model.hf_overrides.rope_parameters.rope_type": "it is yarn",
    "*model.trust_remote_code": "code of a model's folder is never run: no architecture that is served needs any",
}


def explain(fault: ErrorDetails, key: str, root: type[BaseModel]) -> str:
    """Describe one fault in one line: key, value, what is allowed. The fault's path begins at `root`."""
    path, value = fault["loc"], fault["input"]
    match fault["type"]:
        case "extra_forbidden" if rule := next((r for p, r in PATTERN_TO_RULE.items() if fnmatchcase(key, p)), ""):
            return f"{key}: no longer a setting (value {value!r}): {rule}"
        case "extra_forbidden":
            allowed = _keys_beside(path, root)
            # vLLM takes all its arguments at the top: here `max_model_len` stands in `model`.
            sections = {name: getattr(each.annotation, "model_fields", ()) for name, each in root.model_fields.items()}
            deeper = [f"{name}.{path[0]}" for name in sections if len(path) == 1 and path[0] in sections[name]]
            close = deeper or difflib.get_close_matches(str(path[-1]), allowed, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            return f"{key}: unknown key (value {value!r}){hint} Allowed here: {', '.join(allowed)}"
        case "value_error":
            message = str(fault["ctx"]["error"])
            # A validator of a list or a mapping names the entry that is wrong; the whole value would only repeat it.
            return f"{key}: {message}" if isinstance(value, dict | list) else f"{key}: {message}, not {value!r}"
        case "string_type" if isinstance(value, bool | int | float):
            # Floats are not written as they were: 12e4 is 120000.0.
            sample = "" if isinstance(value, float) else f", as in {key}='\"{value}\"'"
            message = f"expected a text: quote it{sample}"
        case type_ if type_ in _TYPE_TO_WORDS:
            message = f"expected {_TYPE_TO_WORDS[type_]}"
        case _:
            message = fault["msg"]
    return f"{key}: {message}" if isinstance(value, dict) else f"{key}: {message}, not {value!r}"


def _keys_beside(path: Sequence[str | int], root: type[BaseModel]) -> list[str]:
    section = root
    is_in_mapping = False
    for part in path[:-1]:
        if is_in_mapping or isinstance(part, int):
            is_in_mapping = False
            continue  # an entry of the list or mapping before it
        annotation: Any = section.model_fields[part].annotation
        if get_origin(annotation) is tuple:
            annotation = get_args(annotation)[0]
        elif get_origin(annotation) is dict:
            is_in_mapping, annotation = True, get_args(annotation)[1]
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        section = annotation
    return sorted(section.model_fields)
