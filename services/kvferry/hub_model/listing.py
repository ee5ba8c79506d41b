"""The files of a model, as the hub lists them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from kvferry.engine.vllm.weights import MANIFEST
from kvferry.errors import ConfigError, UnavailableError
from kvferry.hub_model.marker import MARKER, MAX_FILES

_OWN_FILES = (MARKER, MANIFEST)
MAX_RETRY_AFTER_S = 300  # that is waited for at most, whatever the hub asks for
_MAX_PATH_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class HubFile:
    path: str  # below the model's folder
    size_bytes: int
    sha256: str = ""  # of large files
    git_sha1: str = ""  # of the others: git's blob id

    def new_digest(self) -> Any:
        """Return a hash object for the file's bytes."""
        if self.sha256:
            return hashlib.sha256()
        # https://git-scm.com/book/en/v2/Git-Internals-Git-Objects, Object Storage
        return hashlib.sha1(f"blob {self.size_bytes}\0".encode(), usedforsecurity=False)

    @property
    def digest(self) -> str:
        """Hexadecimal."""
        return self.sha256 or self.git_sha1


@dataclass(frozen=True, slots=True)
class Listing:
    commit: str
    files: tuple[HubFile, ...]

    def key(self, model: str) -> str:
        # Of all that decides the bytes: a tree begun for one listing is of no use to another.
        lines = [model, self.commit, *(f"{file.path}\0{file.size_bytes}\0{file.digest}" for file in self.files)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def list_model(model: str, revision: str, *, endpoint: str, token: str, timeout_s: float) -> Listing:
    """Raises ConfigError where another try is in vain, UnavailableError elsewhere."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RevisionNotFoundError

    try:
        info = HfApi(endpoint=endpoint).model_info(
            model, revision=revision, files_metadata=True, token=token or False, timeout=timeout_s
        )
    except HFValidationError:
        raise ConfigError(f"{model!r} is not the name of a model on the hub: owner/name") from None
    except RevisionNotFoundError:
        raise ConfigError(f"{model} has no revision {revision!r} at {endpoint}") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        raise refusal(status, f"{model} at {endpoint}", has_token=bool(token), headers=error.response.headers) from None
    except Exception as error:
        # The HTTP library of huggingface_hub is not one of ours; each version raises errors of its own.
        raise UnavailableError(f"{endpoint} does not answer: {type(error).__name__}") from None
    commit = str(info.sha or "")
    if not re.fullmatch(r"[0-9a-f]{6,64}", commit):
        raise ConfigError(f"{endpoint} names no commit for {model} at {revision}: it is no hub")
    return Listing(commit, checked(model, info.siblings or ()))


def refusal(
    status: int, what: str, *, has_token: bool, headers: Mapping[str, str] | None = None
) -> ConfigError | UnavailableError:
    """Return the error for an HTTP status."""
    if status in (401, 403, 404):
        said = {401: "401 Unauthorized", 403: "403 Forbidden", 404: "404 Not Found"}[status]
        why = (
            "the token in HF_TOKEN is not accepted, or its owner has no access to it"
            if has_token
            else "it may be private or gated, and no token was given (HF_TOKEN)"
        )
        return ConfigError(f"the hub answers {said} for {what}: {why}, or there is no model of that name")
    if 400 <= status < 500 and status not in (408, 429):
        return ConfigError(f"the hub answers {status} for {what}")
    # In seconds, as the hub sends it; a date counts as none.
    again = (headers or {}).get("retry-after", "")
    again_s = min(int(again), MAX_RETRY_AFTER_S) if re.fullmatch(r"[0-9]{1,9}", again) else None
    return UnavailableError(f"the hub answers {status} for {what}", retry_after_s=again_s)


def checked(model: str, siblings: Sequence[Any]) -> tuple[HubFile, ...]:
    """Raises ConfigError for an answer with files that cannot be verified or stored."""
    if not siblings:
        raise ConfigError(f"{model} has no files")
    if len(siblings) > MAX_FILES:
        raise ConfigError(f"{model} has {len(siblings)} files; at most {MAX_FILES} are downloaded")
    files = [_checked_file(model, each) for each in siblings]
    if len({file.path for file in files}) != len(files):
        raise ConfigError(f"the hub lists a file of {model} twice")
    return tuple(sorted(files, key=lambda file: (file.size_bytes, file.path)))


def _checked_file(model: str, sibling: Any) -> HubFile:
    path, size = sibling.rfilename, sibling.size
    parts = PurePosixPath(path).parts if isinstance(path, str) and path.isprintable() else ()
    is_inside = (
        parts and path == "/".join(parts) and not path.startswith("/") and ".." not in parts and "\0" not in path
    )
    if not is_inside or len(path) > _MAX_PATH_CHARACTERS or path in _OWN_FILES:
        raise ConfigError(f"the hub lists a file of {model} that cannot be one of a folder: {str(path)[:200]!r}")
    sha256 = sibling.lfs.sha256 if sibling.lfs is not None else ""
    git_sha1 = "" if sha256 else sibling.blob_id or ""
    # A hash becomes part of a file's name.
    is_hash = re.fullmatch(r"[0-9a-f]{64}" if sha256 else r"[0-9a-f]{40}", str(sha256 or git_sha1))
    if type(size) is not int or size < 0 or is_hash is None:
        raise ConfigError(f"the hub says no size or no hash of {path[:200]!r} of {model}: it cannot be verified")
    return HubFile(path, size, sha256, git_sha1)
