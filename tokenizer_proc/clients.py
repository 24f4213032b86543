"""All sockets that clients connect to, as if they were one.

The one in the run's directory belongs to this user, whose word is taken for everything. So does the one of
`--sdk-listen ipc://`. Over TCP a client is whom its key says, and nobody without one.
"""

import os
from collections.abc import Callable

import msgspec

from config.schema import ChildSpec
from config.sdk_listen import parse_sdk_listen
from config.tenants import namespace_of
from ipc.channels import AsyncRouter, BindError
from ipc.codec import Decoder
from ipc.control import StartError
from ipc.curve import ServerKeys
from ipc.key_files import read_allowed_keys, read_key_file
from ipc.messages import ClientReport, Generate, ToClient, ToTokenizer
from ipc.zap import Authenticator

Router = AsyncRouter[ToTokenizer]


class Clients:
    """Calls `on_message(peer, message)` and `on_lost(peer)`; a peer's name is its own among all sockets."""

    def __init__(
        self,
        spec: ChildSpec,
        on_message: Callable[[bytes, ToTokenizer], None],
        on_lost: Callable[[bytes], None],
    ) -> None:
        """StartError when a socket or its keys cannot be had."""
        self._incarnation = spec.incarnation
        self._on_message = on_message
        self._on_lost = on_lost
        self._authenticator: Authenticator | None = None
        self._routers = [self._open(0, spec.endpoints.clients[spec.index])]
        sdk = spec.config.sdk
        if not sdk.sdk_listen:
            return
        listen = parse_sdk_listen(sdk.sdk_listen)
        keys = None
        try:
            if sdk.sdk_keys:
                keys = ServerKeys(read_key_file(sdk.sdk_server_key), read_allowed_keys(sdk.sdk_keys))
                self._authenticator = Authenticator(keys.allowed)
            before = os.umask(0o177)  # a socket on this machine is for this user only
            try:
                self._routers.append(self._open(1, listen.address(spec.index), remote=not listen.path, keys=keys))
            finally:
                os.umask(before)
        except (ValueError, BindError) as error:  # the launcher has found them good, but that was before
            raise StartError(f"--sdk-listen, --sdk-keys: {error}") from None

    def _open(self, number: int, endpoint: str, *, remote: bool = False, keys: ServerKeys | None = None) -> Router:
        prefix = bytes((number,))

        def take(peer: bytes, message: ToTokenizer) -> None:
            if remote and isinstance(message, ClientReport):
                return  # what a stranger says of itself is no evidence of what holds this engine back
            if remote and isinstance(message, Generate):
                tenant = router.user_of(peer)
                namespace = namespace_of(tenant, message.namespace)
                message = msgspec.structs.replace(message, tenant=tenant, namespace=namespace)
            self._on_message(prefix + peer, message)

        decoder: Decoder[ToTokenizer] = Decoder(ToTokenizer)
        router = AsyncRouter(
            endpoint,
            decoder,
            self._incarnation,
            take,
            lambda peer: self._on_lost(prefix + peer),
            remote=remote,
            keys=keys,
        )
        return router

    def start(self) -> None:
        """Begin to receive; needs a running loop."""
        if self._authenticator is not None:
            self._authenticator.start()
        for router in self._routers:
            router.start()

    def send(self, peer: bytes, message: ToClient) -> bool:
        """As `AsyncRouter.send`."""
        return self._routers[peer[0]].send(peer[1:], message)

    def close(self) -> None:
        for router in self._routers:
            router.close()
        if self._authenticator is not None:
            self._authenticator.close()
