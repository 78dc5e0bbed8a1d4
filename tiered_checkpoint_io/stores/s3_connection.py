"""The connection to S3: boto3's client, and the credentials that it was made with.

boto3 looks for credentials when a client is made, and renews only credentials with a known time of expiry. A file, a
profile or a program with new credentials is read again only here, and only once credentials were refused: to read them
before each request would take megabytes of memory a time, and a process that gives credentials may be slow.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import boto3
import botocore
import botocore.config
import botocore.configprovider
import botocore.exceptions
import botocore.loaders
import botocore.session

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.errors import StoreError

#: AWS's service models that botocore has read, by its search path: a client that finds one is ten times as fast.
_models: dict[str | None, botocore.loaders.Loader] = {}


def configured_endpoint(profile: str | None) -> str | None:
    """Returns the endpoint that the environment or profile names for S3, as boto3 finds it; None for AWS's own."""
    session = botocore.session.Session(profile=profile)
    try:
        if session.get_config_variable("ignore_configured_endpoint_urls"):
            return None
        found = botocore.configprovider.ConfiguredEndpointProvider(
            full_config=session.full_config, scoped_config=session.get_scoped_config(), client_name="s3"
        ).provide()
    except botocore.exceptions.BotoCoreError:
        # For example, the profile is missing: opening the store raises this error. Until then, saves are for the server
        # that the environment names.
        found = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return str(found) if found else None


class Connection:
    """A client of boto3, which is replaced if its credentials are refused and there are others.

    Attributes:
        client: The client. One that was replaced may still be used, with the credentials that it has.
    """

    def __init__(
        self,
        url: str,
        *,
        clock: Clock,
        config: botocore.config.Config,
        on_send: Callable[..., None],
        endpoint_url: str | None,
        region: str | None,
        profile: str | None,
        credentials: Mapping[str, str] | None,
    ) -> None:
        """Makes a client; sends no request.

        Args:
            url: ``s3://bucket/prefix``, for errors.
            clock: With the time between two looks for other credentials.
            config: Config of the client.
            on_send: Called as boto3's event ``before-send.s3`` is.
            endpoint_url: See :class:`S3Client`, as all that follows.
            region: As above.
            profile: As above.
            credentials: As above; these are never looked for again.

        Raises:
            StoreError: There can be no client with these.
        """
        self._url, self._clock, self._config, self._on_send = url, clock, config, on_send
        self._endpoint_url, self._region, self._profile = endpoint_url, region, profile
        self._given = dict(credentials or {})
        self._renewing = threading.Lock()
        self._looked_at = -clock.timing.credentials_again_s + clock.monotonic()
        no_client = "no S3 client can be made"
        try:
            # Checked first: boto3's errors quote the endpoint, with all that is in it.
            _refuse_secrets(endpoint_url or configured_endpoint(profile) or "")
            self.client = self._client_of(self._session())
        except botocore.exceptions.CredentialRetrievalError as error:
            # The error quotes a program's output, which may be credentials: so no traceback shows the error, either.
            raise StoreError(
                f"{no_client}: {type(error).__name__} from {error.kwargs.get('provider')}",
                operation="connect",
                key=url,
                hint="see what gives the credentials, such as credential_process of the profile",
                reason="config",
            ) from None
        # OSError: the program that gives credentials can't be run, for one.
        except (botocore.exceptions.BotoCoreError, ValueError, OSError) as error:
            raise StoreError(
                f"{no_client}: {error}",
                operation="connect",
                key=url,
                hint="check profile, region and endpoint_url, AWS_ENDPOINT_URL_S3 and AWS_ENDPOINT_URL",
                reason="config",
            ) from error

    def refresh(self, client: Any) -> None:
        """Has a client get new credentials if its present ones are about to expire.

        Raises:
            StoreError: No credentials, for a reason for which botocore has no error of its own.
            BotoCoreError, ClientError: Errors of botocore.
        """
        try:
            _keys(_credentials_of(client))
        except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError):
            raise
        except Exception as error:
            # A program whose output has expired, or is no JSON; a file with a token that is not there: botocore passes
            # on all its errors.
            raise StoreError(
                f"credentials could not be renewed: {error}",
                operation="connect",
                key=self._url,
                hint="see the program or file that gives them; they are asked for again at the next request",
                reason="access",
            ) from error

    def renewed(self, refused: Any) -> bool:
        """Returns True if ``client`` now has other credentials than ``refused``, a client that the server refused.

        New ones are looked for at most every ``credentials_again_s``; without any, all stays as it is. Thread-safe.
        """
        with self._renewing:
            if self.client is not refused:
                return True
            now = self._clock.monotonic()
            if self._given or now - self._looked_at < self._clock.timing.credentials_again_s:
                return False
            self._looked_at = now
            try:
                session = self._session()
                found = _keys(session.get_credentials())
                if found is None or found == _keys_of(refused):
                    return False
                client = self._client_of(session)
            except Exception:
                # Half written, or not to be had just now: the refusal counts.
                return False
            self.client = client
        # Requests of other threads that are under way end all the same.
        refused.close()
        return True

    def close(self) -> None:
        self.client.close()

    def _session(self) -> boto3.session.Session:
        core = botocore.session.Session()
        session = boto3.session.Session(
            botocore_session=core, profile_name=self._profile, region_name=self._region, **self._given
        )
        path = core.get_config_variable("data_path")
        core.register_component("data_loader", _models.setdefault(path, botocore.loaders.create_loader(path)))
        return session

    def _client_of(self, session: boto3.session.Session) -> Any:
        # A server other than AWS has no regions, but a signature names one.
        region = session.region_name or ("us-east-1" if self._endpoint_url else None)
        client = session.client("s3", endpoint_url=self._endpoint_url, config=self._config, region_name=region)
        # Counted when they are sent, so that redirects to another region are counted too.
        client.meta.events.register("before-send.s3", self._on_send)
        _be_patient(client, self._config.read_timeout)
        return client


def _refuse_secrets(endpoint: str) -> None:
    if "@" in endpoint or "?" in endpoint:
        raise ValueError("the endpoint holds a user name, a password or a query; credentials go elsewhere")


def _be_patient(client: Any, read_s: float) -> None:
    """Has a client's connections wait as long for a server that stops reading as for one that stops sending.

    urllib3 sends with the timeout for connecting, on a new socket and on one that is used again, and boto3 has no
    setting for it. With a release of boto3 that lacks these attributes it stays so.
    """
    pools = getattr(getattr(getattr(client, "_endpoint", None), "http_session", None), "_pool_classes_by_scheme", {})
    for scheme, pool in pools.items():

        class Patient(pool.ConnectionCls):  # type: ignore[misc, name-defined]
            def connect(self) -> None:
                super().connect()
                self.sock.settimeout(read_s)

            def request(self, *args: Any, **options: Any) -> None:
                if self.sock is not None:
                    # urllib3 puts this on the socket, and sets it again before it connects or waits for an answer.
                    self.timeout = read_s
                super().request(*args, **options)

        pools[scheme] = type(pool.__name__, (pool,), {"ConnectionCls": Patient})


def _keys(credentials: Any) -> Any:
    """Returns the keys that sign requests, to be compared; None if there are no credentials."""
    return None if credentials is None else credentials.get_frozen_credentials()


def _credentials_of(client: Any) -> Any:
    """Returns a client's credentials, which it may renew; None if the release of botocore has no access to them."""
    ask = getattr(client, "_get_credentials", None)
    return None if ask is None else ask()


def _keys_of(client: Any) -> Any:
    """Returns the keys that a client signs with; None without credentials, or if they can't be renewed."""
    try:
        return _keys(_credentials_of(client))
    except Exception:
        return None
