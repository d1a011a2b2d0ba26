"""Certificates that clients trust."""

# Short: it reads files, and openai_answers.py does no I/O.

import os
import ssl

UNTRUSTED = "its certificate is not trusted; set the variable SSL_CERT_FILE to the PEM file of the certificate to trust"
"""The error if `untrusted`."""


def trusted_certificates() -> ssl.SSLContext | bool:
    """The value of `verify` for httpx: the certificates in the file that SSL_CERT_FILE names, or the usual ones.

    Clients here ignore the environment because of its proxies, and httpx would ignore this variable with them.
    """
    file = os.environ.get("SSL_CERT_FILE")
    return ssl.create_default_context(cafile=file) if file else True


def untrusted(error: Exception) -> bool:
    """Whether a connection failed because the server's certificate is not trusted."""
    return "CERTIFICATE_VERIFY_FAILED" in str(error)
