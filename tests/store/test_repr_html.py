"""HTML that a notebook shows for an object: a small table, escaped; no server is asked."""

import html
import re
import subprocess
import sys

import numpy as np

import fastps

ONES = {"w": np.ones(3, np.float32)}


def rows(shown):
    """The caption and the rows of the table, which has no other markup."""
    assert set(re.findall(r"</?(\w+)", shown)) <= {"table", "caption", "tr", "th", "td"}
    (caption,) = re.findall(r"<caption>(.*?)</caption>", shown)
    cells = re.findall(r"<tr><th>(.*?)</th><td>(.*?)</td></tr>", shown)
    return html.unescape(caption), {name: html.unescape(value) for name, value in cells}


def test_of_stores_servers_and_connections():
    store = fastps.Store()
    store.register("w", ONES["w"], fastps.SGD())
    assert rows(store._repr_html_()) == ("fastps.Store", {"servers": "in process", "tensors": "1"})
    store.close()
    assert rows(store._repr_html_())[1]["state"] == "closed"
    server = fastps.serve(shards=2)
    addresses = server.addresses
    assert rows(server._repr_html_()) == ("fastps.Server", {"addresses": addresses, "shards": "2"})
    with fastps.connect(server, namespace="a") as ps:
        ps.register("w", ONES["w"], fastps.SGD())
        known = {"servers": addresses, "shards": "2", "tensors": "1", "namespace": "a"}
        assert rows(ps._repr_html_()) == ("fastps.ParameterServer", known)
    server.stop()
    assert rows(server._repr_html_())[1]["state"] == "stopped"


def test_of_workers_escaped():
    name = '<img src="x">&'
    with fastps.Store() as store:
        store.register(name, ONES["w"], fastps.SGD())
        worker = fastps.Worker(store, {name: ONES["w"]}, fastps.Bounded(staleness=2), name="<b>me</b>")
        worker.step({name: ONES["w"]})
        shown = worker._repr_html_()
        assert "<img" not in shown
        assert "<b>" not in shown
        known = {"name": "<b>me</b>", "mode": "Bounded(staleness=2)", "steps": "1", "tensors": f'"{name}"'}
        assert rows(shown) == ("fastps.Worker", known)
        worker.close()
        assert rows(worker._repr_html_())[1]["state"] == "closed"


def test_an_unpickled_client_stays_unconnected():
    """It connects when it is first used, and no server of its address exists any more."""
    code = (
        "import pickle, fastps\n"
        "with fastps.serve() as server, fastps.connect(server) as ps:\n"
        "    sent = pickle.dumps(ps)\n"
        "print(pickle.loads(sent)._repr_html_())"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert rows(ran.stdout)[1]["state"] == "not used yet"
