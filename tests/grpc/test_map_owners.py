"""`GetMap` names the owner of each shard: a generated stub, a real server, and moto in place of S3."""

from __future__ import annotations

import time
from pathlib import Path

from foreign_client import Stubs

import fastps
import grpc
from owners import Store, server, store

__all__ = ["store"]


def test_the_map_says_who_owns_each_shard(stubs: Stubs, store: Store, tmp_path: Path) -> None:
    ask = stubs.pb.GetMapRequest
    with server(tmp_path / "a", store.url) as one:
        one.until("listening on")
        with grpc.insecure_channel(one.address) as channel:
            control, end = stubs.rpc.ControlStub(channel), time.monotonic() + 60
            while not (owners := list(control.GetMap(ask(), timeout=20).owners)):
                assert time.monotonic() < end, "the record is read"
                time.sleep(0.1)
            assert [(owner.address, owner.term) for owner in owners] == [(one.address, 1)]
            assert not control.GetMap(ask(after="a"), timeout=20).owners
    with fastps.serve() as plain, grpc.insecure_channel(plain.addresses) as channel:
        for _ in range(2):
            assert not stubs.rpc.ControlStub(channel).GetMap(ask(), timeout=20).owners
