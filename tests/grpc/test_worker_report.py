"""Workers' reports in `Hello`: kept if they are short and finite, and never a reason to end a session."""

from __future__ import annotations

from foreign_client import ForeignClient, Message, Stubs

import fastps
from fastps.commands.cli import main


def test_a_report_is_shown_until_the_next_one(stubs: Stubs, server: fastps.Server) -> None:
    pb = stubs.pb
    with ForeignClient(stubs, server.address_list) as client:

        def hello(report: Message | None) -> None:
            own = {"client": client.client, "secret": client.secret, "name": "foreign"}
            client.call(0, "Hello", pb.HelloRequest(renew=True, protocol_minor=1, report=report, **own))

        def steps() -> int:
            return max(one.report.steps for one in client.call(0, "Stats", pb.StatsRequest()).sessions)

        hello(pb.WorkerReport(steps=3, name='a"b', loss=0.5))
        assert steps() == 3
        for wrong in (
            pb.WorkerReport(steps=9, host="x" * 10_240),
            pb.WorkerReport(steps=9, loss=float("nan")),
            pb.WorkerReport(steps=9, waited=2.0),
        ):
            hello(wrong)
            assert steps() == 3
        hello(None)
        assert steps() == 3
        with fastps.connect(server.addresses) as ps:
            [worker] = [one for one in ps.stats()["workers"] if one["report"]]
        assert (worker["name"], worker["report"]["loss"]) == ('a"b', 0.5)
        assert main(["status", server.addresses]) == 0
