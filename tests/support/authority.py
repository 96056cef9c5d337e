"""Certificates for tests."""

from __future__ import annotations

import pathlib
import subprocess


class Authority:
    """A private certificate authority; everything made by openssl.

    :param plain: without the optional extensions of certificates, as by ``openssl req -x509``.
    """

    def __init__(self, folder: pathlib.Path, name: str = "ca", plain: bool = False) -> None:
        self.folder, self._plain = folder, plain
        self.cert, self.key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
        self._openssl(
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-keyout",
            self.key,
            "-out",
            self.cert,
            "-subj",
            f"/CN={name}",
            "-days",
            "2",
            *([] if plain else ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]),
        )

    @staticmethod
    def _openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)

    def issue(self, name: str, alternatives: str = "") -> tuple[str, str]:
        """Certificate and key of a subject."""
        cert, key, request = (str(self.folder / f"{name}.{end}") for end in ("pem", "key", "csr"))
        extensions = self.folder / f"{name}.ext"
        keys = "subjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"
        extensions.write_text(
            "basicConstraints=CA:FALSE\n"
            + ("" if self._plain else keys)
            + (f"subjectAltName={alternatives}\n" if alternatives else "")
        )
        self._openssl(
            "req",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-keyout",
            key,
            "-out",
            request,
            "-subj",
            f"/CN={name}",
        )
        self._openssl(
            "x509",
            "-req",
            "-in",
            request,
            "-CA",
            self.cert,
            "-CAkey",
            self.key,
            "-CAcreateserial",
            "-out",
            cert,
            "-days",
            "2",
            "-extfile",
            str(extensions),
        )
        return cert, key
