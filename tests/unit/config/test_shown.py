"""What people may see of a configuration."""

from __future__ import annotations

from typing import Any

from nodepool.config.shown import REDACTED, redacted


def test_redacted() -> None:
    given: dict[str, Any] = {
        "name": "p", "cloud": "c", "password": "s1", "api-key": "s2", "nested": [{"client-secret": {"value": "s3"}, "az": "a"}],
        "userdata": "s4", "auth": {"user": "s5"}, "token": ["s6"], "shared-credentials-file": "s7", "custom-data": "s8",
        "env-vars": {"ROOT_PW": "s9"}, "url": "https://me:s10@host/a@b", "urls": ["http://s11@[::1]:80", "http://host/x@y"],
        "ssh-keys": "public", "key-name": "zuul",
    }  # fmt: skip
    found = redacted(given)
    assert not any(f"s{number}" in str(found) for number in range(1, 12))
    assert found["password"] == REDACTED and found["nested"][0]["az"] == "a"
    assert (found["key-name"], found["ssh-keys"], found["cloud"]) == ("zuul", "public", "c")
    assert found["url"] == f"https://{REDACTED}@host/a@b" and found["urls"] == [f"http://{REDACTED}@[::1]:80", "http://host/x@y"]
