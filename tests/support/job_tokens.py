"""Verifiers of job tokens that are asked again while the keys of an issuer are being read."""

from __future__ import annotations

import time

from nodepool.access import oidc
from nodepool.access.identity import Denied, Identity


class Verifiers(oidc.Verifiers):
    """Asked again while keys are being read."""

    def identify(self, token: str) -> Identity:
        return patient(super(), token)


def patient(verifiers: oidc.Verifiers, token: str) -> Identity:
    deadline = time.monotonic() + 30
    while True:
        try:
            return verifiers.identify(token)
        except Denied as error:
            if error.code != "busy" or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
