"""The live page: who may see it, that it grows by itself in a real browser, and that nobody else is asked."""

import http.client
import json
import socket
import subprocess
import sys
from urllib.parse import urlsplit

import pytest

from splitcast.base.config import with_values
from splitcast.base.errors import SplitcastError
from splitcast.base.files import writer
from splitcast.run.records import RunFolder
from splitcast.studies import watch
from splitcast.studies.watch import Live, serve
from test_report import TINY, chromium, record, write_run  # noqa: F401
from waiting import PATIENCE_S, wait_for


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(watch, "EVERY_S", 0.1)
    monkeypatch.setattr(watch, "SHARE", 100.0)


@pytest.fixture
def served(tmp_path, quick):
    """Serves a folder of runs; gives the folder, its state and the address."""
    servers = []

    def start(host="127.0.0.1", token="", **options):
        live = Live([tmp_path], **options)
        server, where = serve(live, host, 0, token)
        servers.append(server)
        return live, urlsplit(where)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def get(where, path, host=None, **headers):
    connection = http.client.HTTPConnection(host or where.hostname, where.port, timeout=PATIENCE_S)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content, dict(answer.getheaders())


def now(where):
    """Where the only run stands."""
    (state,) = json.loads(get(where, "/data.json")[1])["live"]["runs"]
    return state


def test_the_page_waits_for_a_first_round_and_then_shows_it(tmp_path, served):
    live, where = served()
    assert b"Nothing to show yet" in get(where, "/")[1] and get(where, "/data.json")[1] == b""
    run = RunFolder(write_run(tmp_path / "a", records=[record(1)]))
    assert live.wait(1, PATIENCE_S) > 1
    wait_for(lambda: get(where, "/data.json")[1])  # a look may come in the middle of the writing
    status, page, _ = get(where, "/")
    assert status == 200 and b"EventSource" in page and b"connect-src 'self'" in page
    shown = json.loads(get(where, "/data.json")[1])
    assert (
        shown["live"]["runs"][0] | {"name": "a", "round": 1, "rounds": 6, "state": "stopped"}
        == shown["live"]["runs"][0]
    )
    known = live.version
    with run.lock():
        run.append(record(2, failures={"site-1": "lost"}))
        assert live.wait(known, PATIENCE_S) > known
        wait_for(lambda: now(where)["round"] == 2)
        state = now(where)
        assert (state["state"], state["failures"]) == ("training", {"site-1": "lost"})
        assert state["rounds_per_s"] > 0 and state["left_s"] == pytest.approx(4 / state["rounds_per_s"], rel=1e-5)
    run.finish({"accuracy": 0.5})
    wait_for(lambda: now(where)["state"] == "finished")


def test_a_training_that_was_killed_is_stopped(tmp_path, served):
    run = write_run(tmp_path / "a", records=[record(1)])
    holds = "import sys, time; from pathlib import Path; from splitcast.base.files import lock_folder\n"
    holds += "with lock_folder(Path(sys.argv[1])): print(flush=True); time.sleep(600)"
    _, where = served()
    with subprocess.Popen([sys.executable, "-c", holds, str(run)], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        wait_for(lambda: now(where)["state"] == "training")
        process.kill()
        process.wait()
    assert (run / ".lock").is_file()
    wait_for(lambda: now(where)["state"] == "stopped")
    for nonsense in (b"", b"nobody", b"-1", b"99999999999999999999"):
        (run / ".lock").write_bytes(nonsense)
        assert writer(run) is None


def test_a_site_fails_until_everybody_took_part_again(tmp_path, served):
    """Also while it is left alone: nobody asks it then, so that it does not fail."""
    config = with_values(TINY, clients=2)
    run = RunFolder(write_run(tmp_path / "a", config, [record(1), record(2, clients=1, failures={"site-2": "lost"})]))
    run.append(record(3, clients=1))
    _, where = served(sites=lambda: [{"name": f"site-{n}", "connected": True, "days": 3} for n in (1, 2)])
    wait_for(lambda: get(where, "/data.json")[1])

    def troubles():
        return [site["trouble"] for site in json.loads(get(where, "/data.json")[1])["live"]["sites"]]

    assert now(where)["failures"] == {"site-2": "lost"} and troubles() == ["", "lost"]
    run.append(record(4, clients=2))
    wait_for(lambda: troubles() == ["", ""])


def test_only_this_machine_sees_it_without_a_token(tmp_path, served):
    write_run(tmp_path / "a", records=[record(1)])
    _, where = served()
    assert get(where, "/", Host=f"localhost:{where.port}")[0] == 200
    assert get(where, "/", Host="evil.example")[0] == 401  # a page elsewhere, through this machine's browser
    assert get(where, "/etc/passwd")[0] == 404 and get(where, "/../../etc/passwd")[0] == 404
    with pytest.raises(SplitcastError, match=r"host: 0\.0\.0\.0 can be reached from elsewhere"):
        serve(Live([tmp_path]), "0.0.0.0", 0, "")
    with pytest.raises(SplitcastError, match="port: cannot listen on"):
        serve(Live([tmp_path]), "127.0.0.1", where.port, "")


def test_a_visitor_from_elsewhere_needs_the_token(tmp_path, served):
    write_run(tmp_path / "a", records=[record(1)])
    _, where = served("0.0.0.0", token="secret")
    own = own_address()
    for path in ("/", "/data.json", "/events"):
        assert get(where, path, own)[0] == 401
        assert get(where, f"{path}?token=wrong", own)[0] == 401
    status, _, headers = get(where, "/?token=secret", own)
    assert status == 200 and "HttpOnly" in headers["Set-Cookie"]
    assert get(where, "/data.json", own, Cookie="splitcast=secret")[0] == 200


def own_address():
    """An address of this machine that is not its loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            found = probe.getsockname()[0]
        except OSError:
            found = socket.gethostbyname(socket.gethostname())
    if found.startswith("127."):
        pytest.skip("this machine has no address but its loopback")
    return found


def test_events_tell_when_there_is_something_new(tmp_path, served):
    run = RunFolder(write_run(tmp_path / "a", records=[record(1)]))
    _, where = served()
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=PATIENCE_S)
    connection.request("GET", "/events")
    answer = connection.getresponse()
    first = answer.readline()
    assert answer.readline() == b"\n" and first.startswith(b"data: ")
    run.append(record(2))
    second = answer.readline()
    assert int(second[6:]) > int(first[6:])
    connection.close()


def test_too_many_visitors_are_sent_away(tmp_path, served, monkeypatch):
    monkeypatch.setattr(watch, "VISITORS", 2)
    write_run(tmp_path / "a", records=[record(1)])
    _, where = served()
    listening = []
    for _ in range(2):
        connection = http.client.HTTPConnection(where.hostname, where.port, timeout=PATIENCE_S)
        connection.request("GET", "/events")
        assert connection.getresponse().status == 200
        listening.append(connection)
    assert get(where, "/events")[0] == 503
    for connection in listening:
        connection.close()


@pytest.mark.parametrize("width", [390, 820, 1280])
def test_a_curve_grows_in_a_browser_and_a_lost_site_turns_red(tmp_path, served, chromium, width):  # noqa: F811
    run = RunFolder(write_run(tmp_path / "a", records=[record(1, test_accuracy=0.1)]))
    sites = [{"name": "site-1", "connected": True, "days": 300}]
    _, where = served(sites=lambda: [dict(site) for site in sites])
    chromium.set_window_size(max(width, 500), 900)
    chromium.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    chromium.get_log("performance")
    chromium.get(where.geturl())
    js = chromium.execute_script
    js("window.same = true")
    colour = "return getComputedStyle(document.querySelector('#now .lost') || document.body).backgroundColor"
    before = js(colour)
    sites[0]["connected"] = False
    for t in range(2, 5):
        run.append(record(t, test_accuracy=0.1 * t))
    wait_for(lambda: "4 of 6" in js("return document.getElementById('now').textContent"))
    wait_for(lambda: js(colour) != before and js(colour) == "rgb(179, 38, 30)")
    assert js("return data.runs[0].columns.rounds.length") == 4
    assert js("return window.same") is True  # the page was not loaded again
    assert js("return document.documentElement.scrollWidth") <= width
    js("document.getElementById('theme').click()")
    assert js("return document.documentElement.dataset.theme") == "dark"
    asked = [json.loads(entry["message"])["message"] for entry in chromium.get_log("performance")]
    urls = [e["params"]["request"]["url"] for e in asked if e["method"] == "Network.requestWillBeSent"]
    assert urls and all(url.startswith((f"http://127.0.0.1:{where.port}/", "data:")) for url in urls)
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chromium.get("about:blank")


def test_the_keyboard_reaches_everything_and_keeps_its_place_when_news_come(tmp_path, served, chromium):  # noqa: F811
    from selenium.webdriver.common.keys import Keys

    run = RunFolder(write_run(tmp_path / "a", records=[record(t, test_accuracy=0.1 * t) for t in (1, 2)]))
    write_run(tmp_path / "b", records=[record(1, test_accuracy=0.1)])
    _, where = served()
    chromium.get(where.geturl())
    js = chromium.execute_script
    wait_for(lambda: js("return document.querySelectorAll('#runs button').length") == 2)
    shown = "[...document.querySelectorAll('button, input, summary')].filter((e) => e.offsetParent && !e.disabled)"
    wanted, seen = js(f"return {shown}.length"), set()
    for _ in range(3 * wanted):
        chromium.switch_to.active_element.send_keys(Keys.TAB)
        focused = chromium.switch_to.active_element
        if focused.tag_name == "body":
            break
        if focused.tag_name in ("button", "input", "summary"):
            seen.add(focused.id)
    assert len(seen) == wanted > 5
    js("document.querySelector('#runs button').focus()")
    chromium.switch_to.active_element.send_keys(Keys.SPACE)
    pressed = "return document.querySelector('#runs button').getAttribute('aria-pressed')"
    assert js(pressed) == "false"
    run.append(record(3, test_accuracy=0.3))
    wait_for(lambda: "3 of 6" in js("return document.getElementById('now').textContent"))
    assert js(pressed) == "false" and js("return document.activeElement === document.querySelector('#runs button')")
    chromium.get("about:blank")
