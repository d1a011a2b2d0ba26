"""The certificate of a server that speaks HTTPS."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path


class CertificateError(Exception):
    """A certificate or its key cannot be used. The message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """PEM files of a certificate and its private key."""

    certificate: Path
    key: Path
    password: str | None = field(default=None, repr=False)

    def check(self) -> None:
        """Raise CertificateError unless both files can be read and belong together."""
        for setting, path in (("ssl_certfile", self.certificate), ("ssl_keyfile", self.key)):
            try:
                path.read_bytes()
            except OSError as error:
                raise CertificateError(f"{setting}: {path}: {error.strerror}") from None
        try:
            ssl.create_default_context(cafile=self.certificate)
        except ssl.SSLError:
            raise CertificateError(
                f"ssl_certfile: {self.certificate} is not a certificate in PEM format, which begins with "
                "-----BEGIN CERTIFICATE-----"
            ) from None
        try:
            # Without a password, OpenSSL would ask the terminal.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key, self.password or "")
        except ssl.SSLError as error:
            raise CertificateError(self._describe(error)) from None

    def _describe(self, error: ssl.SSLError) -> str:
        if error.reason == "KEY_VALUES_MISMATCH":
            return f"ssl_keyfile: {self.key} is the key of another certificate than {self.certificate}"
        if "ENCRYPTED" in self.key.read_text(errors="replace"):
            wrong = "needs ssl_keyfile_password" if self.password is None else "does not open with ssl_keyfile_password"
            return f"ssl_keyfile: {self.key} is encrypted and {wrong}"
        return f"ssl_keyfile: {self.key} is not a private key in PEM format ({error.reason or error})"

    def client_context(self) -> ssl.SSLContext:
        """A client's context that trusts this certificate and no other, under any name."""
        context = ssl.create_default_context(cafile=self.certificate)
        context.check_hostname = False  # the server asks itself by an address that the certificate need not name
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return context
