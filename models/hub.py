"""Ready-made weights from the net: torchvision's files for our ResNets, and a short wait where there is no net."""

import contextlib
import http.client
import os
import pickle
import socket
import ssl
import sys
from collections.abc import Iterator
from urllib.error import HTTPError, URLError
from urllib.request import Request, getproxies, urlopen

import torch
from torch import Tensor

from .errors import ModelError

HUB_URL = "https://download.pytorch.org/models/"  # a mirror, or a test's own server, may stand here

# torchvision's IMAGENET1K_V1 files, 1000 classes; the eight hex digits are the start of the file's SHA-256. V1 for all
# five, because they were trained with one plain recipe and share one preprocessing (bilinear, shorter side 256, centre
# 224); the V2 files exist for 50, 101 and 152 only and want 232 pixels.
WEIGHT_FILES = {
    "resnet18": "resnet18-f37072fd.pth",
    "resnet34": "resnet34-b627a593.pth",
    "resnet50": "resnet50-0676ba61.pth",
    "resnet101": "resnet101-63fe2227.pth",
    "resnet152": "resnet152-394f9c45.pth",
}

SECONDS_TO_CONNECT = 5.0
NET_PACKAGES = {"huggingface_hub", "httpx", "httpx2", "httpcore", "requests", "urllib3"}
REMEDY = "give --weights FILE, or --no-pretrained to start from random weights"


def fetch_resnet(name: str) -> dict[str, Tensor]:
    """torchvision's official state dict of one of our ResNets, on the CPU; kept under TORCH_HOME once downloaded.

    Raises ModelError where the hub cannot be reached, or the file is damaged or more than plain tensors.
    """
    url = HUB_URL + WEIGHT_FILES[name]
    try:
        # torch.hub names the download on standard output, which belongs to results
        with hub_errors(name), socket_timeout(SECONDS_TO_CONNECT), contextlib.redirect_stdout(sys.stderr):
            return torch.hub.load_state_dict_from_url(
                url, map_location="cpu", weights_only=True, check_hash=True, progress=False
            )
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        kept = os.path.join(torch.hub.get_dir(), "checkpoints", WEIGHT_FILES[name])
        where, what = (kept, f"delete it, or {REMEDY}") if os.path.exists(kept) else (url, REMEDY)
        raise ModelError(f"{name}: the weight file {where} is damaged ({reason(error)}): {what}") from error


@contextlib.contextmanager
def hub_errors(name: str, remedy: str = REMEDY) -> Iterator[None]:
    """Turns every error of the net (URLError, HTTPError, timeouts, huggingface_hub's) into one ModelError sentence."""
    try:
        yield
    except Exception as error:
        # huggingface_hub changed its http library more than once, so its errors are known by their package
        package = type(error).__module__.partition(".")[0]
        if not isinstance(error, (OSError, http.client.HTTPException)) and package not in NET_PACKAGES:
            raise
        raise ModelError(f"{name}: its ready-made weights could not be fetched ({reason(error)}): {remedy}") from error


def reason(error: BaseException) -> str:
    """The short why of an error: one line, without a full stop."""
    if isinstance(error, HTTPError):
        return f"HTTP {error.code} {error.reason}"
    inner = error.reason if isinstance(error, URLError) else error
    words = getattr(inner, "strerror", None) or str(inner).partition("\n")[0].partition(". ")[0] or type(inner).__name__
    return " ".join(str(words).split())[:160].rstrip(".")


@contextlib.contextmanager
def socket_timeout(seconds: float) -> Iterator[None]:
    """torch.hub sets no timeout of its own: a firewall that swallows packets would hold a start for minutes."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


@contextlib.contextmanager
def short_wait() -> Iterator[None]:
    """Within it huggingface_hub answers from its cache at once where its server is out of reach.

    Left alone it retries each of two files six times, 47 s in all, measured. A proxy is left to huggingface_hub.
    """
    from huggingface_hub import constants

    offline = constants.HF_HUB_OFFLINE
    proxied = bool(getproxies().keys() - {"no"})
    why = None if offline or proxied else unreachable(constants.ENDPOINT)
    constants.HF_HUB_OFFLINE = offline or why is not None
    try:
        yield
    except OSError as error:
        if why is None:
            raise
        raise why from error  # "name or service not known" says more than "offline"
    finally:
        constants.HF_HUB_OFFLINE = offline


def unreachable(url: str) -> OSError | None:
    """The error that shows that a server does not answer; None for any answer at all, be it an HTTP error."""
    try:
        urlopen(Request(url, method="HEAD"), timeout=SECONDS_TO_CONNECT).close()
    except HTTPError:
        return None
    except OSError as error:
        answered = isinstance(getattr(error, "reason", None), ssl.SSLError)  # its certificates are another matter
        return None if answered else error
    except http.client.HTTPException:
        return None
    return None
