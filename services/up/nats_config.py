"""The broker's configuration: a user for each role, who may do what the role needs and nothing else. Pure."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from shared.subjects import Service, rights

ROLES: tuple[Service, ...] = get_args(Service)


def new_passwords() -> dict[Service, str]:
    return {role: secrets.token_urlsafe(24) for role in ROLES}


def nats_config(
    listen: str, passwords: Mapping[Service, str], *, certificate: Path | None = None, extra: Sequence[str] = ()
) -> str:
    """`listen`: address:port. `certificate`: PEM with the broker's certificate and key; None: no TLS. `extra`: whole lines."""
    tls = [] if certificate is None else [f"tls {{ {_files(certificate)}, min_version: '1.3' }}"]
    users = [_user(role, passwords[role]) for role in ROLES]
    return "\n".join(
        [
            f"listen: {json.dumps(listen)}",
            "max_payload: 8MB",
            "write_deadline: 5s",
            *extra,
            *tls,
            "authorization { users: [",
            *users,
            "] }",
            "",
        ]
    )


def _files(certificate: Path) -> str:
    return f"cert_file: {json.dumps(str(certificate))}, key_file: {json.dumps(str(certificate))}"


def _user(role: Service, password: str) -> str:
    allowed = rights(role)
    publish, subscribe = json.dumps(allowed.publish), json.dumps(allowed.subscribe)
    permissions = f"{{ publish: {publish}, subscribe: {subscribe}, allow_responses: {{ max: 1, expires: '30s' }} }}"
    return f"  {{ user: {role}, password: {json.dumps(password)}, permissions: {permissions} }}"
