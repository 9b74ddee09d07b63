# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The Hub's client for publishing: it retries, turns errors into sentences, and keeps the token out of them."""

import json
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from huggingface_hub import HfApi, get_session, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError  # HTTPError: of httpx or httpx2, whichever the client has
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from ... import __version__
from ...checkpoint.names import CARD
from .contents import Contents


logger = logging.getLogger(__name__)

WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds to wait before each further try."""

LOG_IN = "Log in with `hf auth login`, or set HF_TOKEN, with a token from https://huggingface.co/settings/tokens"

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Client:
    """An `HfApi` with a token.

    Args:
        token: Access token; by default that of `hf auth login` or HF_TOKEN.
        endpoint: URL of the Hub, by default that of huggingface_hub.
        waits: Seconds to wait before each further try.

    Attributes:
        api: The client of huggingface_hub.

    Raises:
        ValueError: There is no token, or it has characters that no token has.
    """

    def __init__(self, token: str | None = None, *, endpoint: str | None = None, waits: Sequence[float] = WAITS):
        token = (token or get_token() or "").strip()
        if not token:
            raise ValueError(f"There is no token to publish with. {LOG_IN}.")
        if not (token.isascii() and token.isprintable()) or " " in token:
            # Sent, it would be an illegal header, which the HTTP library shows in its error.
            raise ValueError(f"The token holds a space, a line break or a letter that no token has. {LOG_IN}.")
        self.token = token
        self.waits = waits
        self.api = HfApi(endpoint=endpoint, token=token, library_name="normalign-llava", library_version=__version__)

    def retry(self, call: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        """`call(*args, **kwargs)`, repeated after each of the waits while the error is temporary."""
        for wait in self.waits:
            try:
                return call(*args, **kwargs)
            except Exception as error:
                if not is_temporary(error):
                    raise
                self.wait(wait, error)
        return call(*args, **kwargs)

    def wait(self, seconds: float, error: Exception) -> None:
        """Warns of `error`, and waits before the next try."""
        what = f"status {error.response.status_code}" if isinstance(error, HfHubHTTPError) else type(error).__name__
        logger.warning(f"The Hub failed ({what}). Trying again in {seconds:g} s.")
        time.sleep(seconds)

    @contextmanager
    def step(self, doing: str, stands: str = "") -> Iterator[None]:
        """Turns an error of the connection or of the Hub into a sentence.

        Args:
            doing: What is done in the block, as "creating user/name".
            stands: The state after a failure, and what to do.

        Raises:
            OSError: With the sentence.
        """
        try:
            yield
        except (HTTPError, RuntimeError, json.JSONDecodeError) as error:  # RuntimeError: of uploads, and hf_xet's
            raise OSError(f"{self._sentence(error, doing)} {stands}".strip()) from None

    @contextmanager
    def token_kept(self) -> Iterator[None]:
        """Keeps the token out of whatever error leaves the block, and out of its traceback.

        Raises:
            OSError, ValueError: In place of an error of the Hub, or of one that showed the token.
        """
        try:
            yield
        except HTTPError as error:
            raise OSError(self._hidden(self._sentence(error, "publishing"))) from None
        except Exception as error:
            if self.token not in "".join(traceback.format_exception(error)):
                raise
            kind = ValueError if isinstance(error, ValueError) else OSError
            raise kind(self._hidden(str(error))) from None

    def check_account(self, repo_id: str, create_pr: bool = False) -> None:
        """Checks that the token's account may publish as `repo_id`.

        Raises:
            ValueError: The token may only read, or the namespace is another's and no pull request is wanted.
            OSError: The Hub does not know the token, or cannot be reached.
        """
        with self.step("checking the token", "Nothing was sent."):
            account = self.retry(self.api.whoami)
        role = account.get("auth", {}).get("accessToken", {}).get("role")
        if role == "read":
            raise ValueError(
                f"The token of {account['name']} may only read. Make one with the role "
                '"write" at https://huggingface.co/settings/tokens, and log in with it: `hf auth login`.'
            )
        namespace = repo_id.split("/")[0]
        names = [account["name"], *(organisation["name"] for organisation in account.get("orgs", []))]
        if namespace.lower() not in [name.lower() for name in names] and not create_pr:
            raise ValueError(
                f"{repo_id} belongs to {namespace}, and the token to {account['name']}, who may publish as "
                f"{' or '.join(f'{name}/...' for name in names)}. Choose one of these; "
                f"to propose a change to {namespace}'s repository, use --create-pr of normalign publish."
            )

    def check_card(self, contents: Contents, kind: str = "model") -> None:
        """Checks `README.md` as the Hub will when it is committed, which is after the upload.

        Raises:
            ValueError: The Hub does not accept its metadata.
            OSError: The Hub cannot be asked.
        """

        def refused(card: str) -> list[str]:
            response = get_session().post(
                f"{self.api.endpoint}/api/validate-yaml",
                json={"content": card, "repoType": kind},
                headers=build_hf_headers(token=self.token),
            )
            if response.status_code != 400:
                hf_raise_for_status(response)
            return [error["message"] for error in response.json().get("errors", [])]

        for source in (content.source for content in contents.sent if content.path == CARD):
            card = source if isinstance(source, bytes) else source.read_bytes()
            with self.step("checking the card", "Nothing was sent."):
                errors = self.retry(refused, card.decode())
            if errors:
                raise ValueError(
                    f"The Hub does not accept the metadata of README.md: {'; '.join(errors)}. Fix its front matter."
                )

    def _sentence(self, error: Exception, doing: str) -> str:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, HTTPError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            return f"{doing.capitalize()} failed: {_ended(error)}"
        if not isinstance(cause, HfHubHTTPError):
            return f"The connection to {self.api.endpoint} failed while {doing}: {_ended(cause)} Is the network there?"
        status = cause.response.status_code
        said = _ended(cause.server_message or cause)
        if status == 401:
            return f"The Hub does not accept the token (401): it is mistyped, expired or revoked. {LOG_IN}."
        if status == 403:
            return f"The Hub does not allow {doing} with this token (403): {said}"
        if status == 429:
            return f"The Hub has had too many requests from this account (429) while {doing}. Wait some minutes."
        if status >= 500:
            return f"The Hub failed while {doing} ({status}), each time it was asked: {said}"
        return f"The Hub refused {doing} ({status}): {said}"

    def _hidden(self, text: str) -> str:
        return text.replace(self.token, "<token>")


def is_temporary(error: Exception) -> bool:
    """Whether to retry after `error`: of the connection or the server, or too many requests."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    return isinstance(error, (HTTPError, json.JSONDecodeError))  # JSONDecodeError: a proxy's error page


def _ended(said: object) -> str:
    text = " ".join(str(said).split())
    return text if text.endswith((".", "!", "?")) else f"{text}."
