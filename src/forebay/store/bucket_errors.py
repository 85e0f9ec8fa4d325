"""Translate errors of the bucket client: into an error of forebay, or a retry."""

import re

from forebay.errors import StoreFull, StoreRefused
from forebay.store.base import Missing
from forebay.store.bucket_client import NOWHERE, TO_LOG_IN, VARIABLES, exceptions, first_line

REQUEST_ERRORS = (exceptions.BaseError, OSError, ValueError)  # of the client
_DENIED = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
_UNREACHED = {
    "kind: ConnectionRefused": "connection refused",
    "dns error": "its host name is not known",
    "kind: Timeout": "no connection in time",
    "kind: Connect": "no connection",
}
_STATUS = re.compile(r"status code: (\d{3})|status: (\d{3})")
_RETRIED = re.compile(r"after \d+ retries")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist|specified container does not exist")
_NO_ROOM = re.compile(r"QuotaExceeded|InsufficientStorage|EntityTooLarge|StorageFull|XMinioStorageFull")
_OTHER_REGION = re.compile(
    r"PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraint|configured region"
)
_REGION = re.compile(r"expecting '([a-z0-9-]{1,40})'|<Region>([a-z0-9-]{1,40})</Region>")
_NO_CREDENTIALS = re.compile(
    r"169\.254\.169\.254|/latest/api/token|/latest/meta-data|computeMetadata|metadata\.google\.internal"
    r"|metadata/identity|NoCredential|MissingCredential"
)
_NOT_ALLOWED = re.compile(r"AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|AuthenticationFailed|AuthorizationF")


def check_lasting(error: Exception, what: str, key: str, address: str) -> None:
    """Raise forebay's error for a lasting problem; return for one that a retry may fix."""
    if isinstance(error, FileNotFoundError) and not _is_no_bucket(error, what):
        raise Missing(key) from error
    if _NO_ROOM.search(str(error)) or status_of(error) == 507:
        raise StoreFull(
            f"'{address}' has no space for '{key}': {first_line(error)}", hint="free some space and try again"
        ) from error
    problem, advice = _setting_problem(error, what, address) or _service_problem(error, key) or ("", "")
    if problem:
        raise StoreRefused(f"'{address}' cannot be used as a store: {problem}", hint=advice) from error


def _is_no_bucket(error: Exception, what: str) -> bool:
    is_named = _NO_BUCKET.search(str(error)) is not None
    return is_named or (status_of(error) == 404 and what in ("list", "create", "write"))


def _setting_problem(error: Exception, what: str, address: str) -> tuple[str, str] | None:
    """A problem with the bucket, the endpoint or the credentials, with a hint."""
    text, status, (scheme, _, rest) = str(error), status_of(error), address.partition("://")
    variables = VARIABLES.get(scheme, "")
    if _is_no_bucket(error, what):
        kind = "container" if scheme == "az" else "bucket"
        return f"there is no {kind} '{rest.partition('/')[0]}'", "create it, or check the name and the endpoint"
    if NOWHERE.removeprefix("http://") + "," in text or status in (302, 303, 307, 308):
        advice = f"set the endpoint in {variables} to the host that serves the bucket"
        return "the server at its endpoint redirects to a host that you did not name", advice
    if _OTHER_REGION.search(text) or status == 301:
        named = _REGION.search(text)
        advice = f"set AWS_REGION={named[1] or named[2]}" if named else "set AWS_REGION to the region of the bucket"
        return "the bucket is in another region", advice
    if _NO_CREDENTIALS.search(text):
        return "no credentials were found", TO_LOG_IN[scheme]
    if _NOT_ALLOWED.search(text) or isinstance(error, _DENIED):
        action = "write to" if what in ("create", "write", "delete") else "read"
        advice = f"ask for that permission, or check {variables} in the environment"
        return f"the credentials do not allow to {action} it", advice
    return None


def _service_problem(error: Exception, key: str) -> tuple[str, str] | None:
    if "BadScheme" in str(error):
        return "its endpoint is not HTTPS", "set AWS_ALLOW_HTTP=true if you trust the network"
    if status_of(error) == 501 or isinstance(error, exceptions.NotSupportedError):
        advice = "use one that honors `If-None-Match: *`, or build into a folder and upload that with its own tool"
        return "the service does not support conditional writes", advice
    if isinstance(error, (exceptions.InvalidPathError, ValueError)):
        return f"the key {key[:80]!r} is not accepted", "keys are relative names with / between them"
    return None


def is_certain(error: Exception) -> bool:
    """True if "it exists" answers the only request that was sent, and not a conflict of two in flight."""
    return _RETRIED.search(str(error)) is None and status_of(error) in (None, 412)


def is_out_of_range(error: Exception) -> bool:
    return status_of(error) == 416 or "Wanted range starting at" in str(error)


def status_of(error: Exception) -> int | None:
    status = _STATUS.search(str(error))
    return int(status[1] or status[2]) if status else None


def unreached(error: Exception) -> str:
    """Why no connection was made; empty if one was."""
    return next((reason for sign, reason in _UNREACHED.items() if sign in str(error)), "")
