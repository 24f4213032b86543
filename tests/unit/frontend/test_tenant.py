"""Tenants and prefix-cache namespaces."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.tenants import namespace_of
from frontend.tenant import presented_key, tenant_of_key
from ipc.validation import validate_options

_names = st.text(max_size=40)


def tenant_of(authorization: str) -> str:
    return tenant_of_key(presented_key({"Authorization": authorization}))


def test_the_tenant_is_a_digest_of_the_key() -> None:
    assert tenant_of("Bearer sk-abc") == hashlib.sha256(b"sk-abc").hexdigest()[:16]
    assert tenant_of("bearer  sk-abc ") == tenant_of("Bearer sk-abc")
    assert tenant_of("Bearer sk-abd") != tenant_of("Bearer sk-abc")


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Bearer   ", "Basic abc", "sk-abc", "Bearersk-abc"])
def test_other_headers_stand_for_nobody(header: str) -> None:
    assert tenant_of(header) == ""


def test_anthropics_header_stands_for_the_same_tenant() -> None:
    assert presented_key({"x-api-key": " sk-abc "}) == presented_key({"Authorization": "Bearer sk-abc"}) == "sk-abc"
    assert presented_key({"x-api-key": "sk-1", "Authorization": "Basic abc"}) == "sk-1"
    assert tenant_of_key(presented_key({})) == ""


def test_a_key_of_any_bytes_has_a_tenant() -> None:
    assert len(tenant_of("Bearer " + b"\xff\xfe".decode(errors="surrogateescape"))) == 16


@given(_names, _names, _names, _names)
def test_namespaces_differ_unless_both_parts_are_equal(key: str, salt: str, other_key: str, other_salt: str) -> None:
    tenants = tenant_of(f"Bearer {key}"), tenant_of(f"Bearer {other_key}")
    namespaces = namespace_of(tenants[0], salt), namespace_of(tenants[1], other_salt)
    same = tenants[0] == tenants[1] and salt == other_salt
    assert (namespaces[0] == namespaces[1]) == same


@given(st.text(max_size=256), st.text(min_size=1, max_size=2000))
def test_whatever_the_client_sends_fits_the_bounds(salt: str, key: str) -> None:
    tenant = tenant_of(f"Bearer {key}")
    validate_options(tenant=tenant, namespace=namespace_of(tenant, salt))


def test_without_key_and_salt_all_share_one_namespace() -> None:
    assert namespace_of("", "") == ""


def test_the_longest_name_of_a_key_leaves_room_for_a_salt() -> None:
    validate_options(tenant="n" * 64, namespace=namespace_of("n" * 64, "salt"))
