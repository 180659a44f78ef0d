"""The report: numbers worked out by hand, refusals in one line, and the page in a real browser."""

import json
import math
import re
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from splitcast.base.config import Config, leaves, with_values
from splitcast.base.errors import SplitcastError
from splitcast.cli.main import main, parse
from splitcast.cli.options import TrainOptions
from splitcast.data.batches import participants
from splitcast.run.loop import train
from splitcast.run.records import RoundRecord, RunFolder
from splitcast.studies.compare import rows
from splitcast.studies.curves import COLOURS, looks
from splitcast.studies.report import write_report
from splitcast.studies.report.clients import breakdown, held_up
from splitcast.studies.report.document import (
    bytes_per_kind,
    clean,
    columns,
    document,
    measured,
    segments,
    train_command,
)
from splitcast.studies.report.page import render
from splitcast.studies.report.runs import Run, read_runs

GA, GB, SFL = (COLOURS[look.colour] for look in looks(["sfl-ga", "sfl-gb", "sfl"]))
TINY = with_values(Config(), arch="cnn-small", rounds=6, batch=4, clients=4, eval_every=2)


def record(t, **values):
    made = RoundRecord(
        round=t,
        cut=1,
        clients=2,
        loss=2.0 / t,
        up_bytes=3_000_000,
        down_bytes=1_000_000,
        kinds={"up.smashed": 3_000_000, "down.gradient": 1_000_000},
        drift=0.5,
        latency_s=1.5,
        slowest_client=1,
        slowest_part="uplink",
    )
    return replace(made, **values)


def write_run(path, config=TINY, records=(), summary=None):
    folder = RunFolder(path)
    folder.create(config)
    for each in records:
        folder.append(each)
    if summary is not None:
        folder.finish(summary)
    return path


# ---- data


def test_columns_are_sums_from_the_start_and_leave_out_what_never_occurs():
    found = columns([record(1), record(2, test_accuracy=0.25, latency_s=2.0), record(3)])
    assert found["rounds"] == [1, 2, 3]
    assert found["mb"] == [4.0, 8.0, 12.0]
    assert found["seconds"] == [1.5, 3.5, 5.0]
    assert found["round_s"] == [1.5, 2.0, 1.5]
    assert found["round_mb"] == [4.0, 4.0, 4.0]
    assert found["test_accuracy"] == [None, 0.25, None]
    assert not {"gamma", "rank", "dropped", "test_loss"} & set(found)


def test_rounds_on_real_sites_show_what_was_measured():
    first = record(1, drift=None, wall_s={"upload": 1.0, "server": 0.5}, failures={"site-2": "timeout"})
    second = record(2, wall_s={"upload": 2.0, "server": 0.5})
    assert columns([first, second])["wall_s"] == [1.5, 2.5]
    assert columns([first, second])["drift"] == [None, 0.5]
    assert measured([first, second]) == {"parts_s": {"upload": 1.5, "server": 0.5}, "failures": 1}
    assert measured([record(1)]) is None and "wall_s" not in columns([record(1)])
    assert "drift" not in columns([first])


def test_segments_are_stretches_of_one_cut():
    records = [record(t, cut=cut) for t, cut in enumerate([2, 2, 1, 2], start=1)]
    assert segments(records) == [
        {"cut": 2, "first": 0, "last": 1},
        {"cut": 1, "first": 2, "last": 2},
        {"cut": 2, "first": 3, "last": 3},
    ]


def test_bytes_per_kind_add_up_uplink_first():
    kinds = [{"down.gradient": 1, "up.smashed": 2}, {"up.smashed": 3, "up.labels": 4}]
    found = bytes_per_kind([record(t, kinds=kind) for t, kind in enumerate(kinds, start=1)])
    assert list(found.items()) == [("up.labels", 4), ("up.smashed", 5), ("down.gradient", 1)]


def test_who_held_rounds_up():
    blamed = [(1, "uplink"), (1, "server"), (1, "uplink"), (0, "compute")]
    records = [record(t, slowest_client=n, slowest_part=part) for t, (n, part) in enumerate(blamed, start=1)]
    assert held_up(records) == {0: (1, "compute"), 1: (3, "uplink")}


@pytest.mark.parametrize(
    "values",
    [
        {"scheme": "sfl-ga", "policy": "random"},
        {"scheme": "sfl", "local_steps": 2, "momentum": 0.5, "policy": "random", "participation": 0.5},
        {"scheme": "sfl-gb", "drop": 0.3, "sync_every": 2},
        {"scheme": "fl", "dropout": 0.3},
        {"scheme": "sl", "participation": 0.5},
        {"scheme": "psl", "allocation": "equal", "cut": 2},
    ],
)
def test_the_time_of_every_client_adds_up_to_the_recorded_latency(values):
    config = with_values(TINY, **values)
    records = train(config).rounds
    found = breakdown(config, records)
    assert found.mismatch < 1e-9
    mean = sum(r.latency_s for r in records) / len(records)
    for n in range(config.data.clients):
        assert sum(seconds[n] for seconds in found.parts_s.values()) == pytest.approx(mean)
        median, p95 = found.busy_s[n] or (0.0, 0.0)
        assert 0 <= median <= p95 and 0 <= found.air_j[n] <= found.joules[n]
    spent = sum(r.metrics["energy_j"] for r in records) / len(records)
    assert sum(found.joules) == pytest.approx(spent)
    assert sum(found.air_j) == pytest.approx(sum(r.metrics["energy_air_j"] for r in records) / len(records))
    assert any(found.parts_s["absent"]) == (min(r.clients for r in records) < config.data.clients)


def test_quantiles_of_a_client_are_of_the_rounds_it_takes_part_in():
    """One of two in every round: alone in the cell, a client is busy as long as the round."""
    config = with_values(TINY, clients=2, participation=0.5, rounds=6)
    records = train(config).rounds
    who = [int(participants(config.train, 2, t)[0]) for t in range(1, 7)]
    assert len(set(who)) == 2
    for n, found in enumerate(breakdown(config, records).busy_s):
        seconds = [r.latency_s for r, client in zip(records, who, strict=True) if client == n]
        assert found == pytest.approx(np.quantile(seconds, (0.5, 0.95)).tolist())


def test_the_table_has_outage_joules_and_memory(tmp_path):
    """Seconds 1.5, 2 and 1.5 with a deadline of 1.8; means over two seeds."""
    for seed, joules in ((0, 2.0), (1, 4.0)):
        records = [record(t, latency_s=s, metrics={"energy_j": joules}) for t, s in ((1, 1.5), (2, 2.0), (3, 1.5))]
        summary = {"client_memory_mb": 7.5}
        write_run(tmp_path / f"{seed}", with_values(TINY, seed=seed, deadline_s=1.8), records=records, summary=summary)
    (both,) = document(read_runs([tmp_path]))["runs"]
    assert (both["outage"], both["joules"], both["memory_mb"]) == (pytest.approx(1 / 3), 9.0, 7.5)
    (tmp_path / "1" / "summary.json").unlink()
    (one,) = document(read_runs([tmp_path / "1"]))["runs"]
    assert (one["outage"], one["joules"], one["memory_mb"]) == (pytest.approx(1 / 3), 12.0, None)


def test_rounds_that_the_configuration_does_not_give_are_not_broken_down():
    records = train(TINY).rounds
    slower = [replace(r, latency_s=1.25 * r.latency_s) for r in records]
    with pytest.raises(SplitcastError, match="differ by 20 %"):
        breakdown(TINY, slower)
    with pytest.raises(SplitcastError, match="cannot be cut at 9"):
        breakdown(TINY, [replace(records[0], cut=9)])


def test_a_run_whose_latency_is_not_known_is_still_shown(tmp_path):
    write_run(tmp_path / "own", records=[record(1), record(2)])
    (run,) = document(read_runs([tmp_path]))["runs"]
    assert "parts_s" not in run["clients"] and "differ" in run["clients"]["missing"]
    assert run["clients"]["held_up"] == {"1": {"rounds": 2, "part": "uplink"}}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"scheme": "sfl-gb", "lr": 1e-5, "gamma": (0.1, 0.2, 0.3, 0.4), "charge_migration": False},
        {
            "distance_m": (10.0, 20.5),
            "clients": 2,
            "trace": "a file.csv",
            "policy": "fixed:2",
            "noise_dbm_per_hz": -170.0,
        },
        {"client_power_dbm": (-3.0, 25.0), "sync_every": 0, "bandwidth_hz": 1e7, "dtype": "float64"},
    ],
)
def test_the_command_gives_the_same_configuration(values):
    config = with_values(Config(), **values)
    program, command, *words = shlex.split(train_command(config))
    assert (program, command) == ("splitcast", "train")
    assert parse(TrainOptions, "train", words).settings == config


def test_the_document_is_strict_json_whatever_the_numbers(tmp_path):
    unrecordable = [record(1, drift=math.inf, test_loss=math.nan)]
    found = document([Run("run", tmp_path / "run", TINY, unrecordable, gamma=(), summary=None)])
    assert found["runs"][0]["columns"]["drift"] == [None]
    json.dumps(found, allow_nan=False)
    assert clean((1, True, "x", 1e-9)) == [1, True, "x", 1e-9]


def test_names_data_and_script_stay_text(tmp_path):
    name = "<img src=x onerror=alert(1)>&"
    write_run(tmp_path / name, records=[record(1)])
    content = document(read_runs([tmp_path / name]))
    page = render(content | {"extra": "</script><script>alert(1)</script><!--"})
    assert name not in page and "<script>alert" not in page
    embedded = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    assert embedded and json.loads(embedded[1])["extra"].startswith("</script>")
    assert page.lower().count("</script>") == 3


def test_the_page_names_no_address_it_could_ask(tmp_path):
    write_run(tmp_path / "run", records=[record(1)])
    page = write_report([tmp_path / "run"]).read_text(encoding="utf-8")
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", page)
    assert "default-src 'none'" in page
    assert "sourceMappingURL" not in page


def test_the_chart_library_is_the_one_it_says_it_is():
    from hashlib import sha256
    from importlib.resources import files

    vendor = files("splitcast.studies.report") / "assets" / "vendor"
    digest = sha256((vendor / "echarts.common.min.js").read_bytes()).hexdigest()
    assert digest in (vendor / "README.md").read_text(encoding="utf-8")
    assert "Apache License" in (vendor / "LICENSE").read_text(encoding="utf-8")
    assert "Apache Software Foundation" in (vendor / "NOTICE").read_text(encoding="utf-8")


# ---- which runs, and where the page goes


def test_folders_of_runs_and_single_runs_mix_and_keep_apart(tmp_path, capsys):
    for path in ("a/sfl", "a/psl", "b/sfl"):
        write_run(tmp_path / path, records=[record(1)])
    (tmp_path / "a" / "notes").mkdir()
    assert [run.name for run in read_runs([tmp_path / "a"])] == ["psl", "sfl"]
    both = read_runs([tmp_path / "a", tmp_path / "b" / "sfl", tmp_path / "a" / "sfl"])
    assert [run.name for run in both] == ["a/psl", "a/sfl", "b/sfl"]
    main(["report", str(tmp_path / "a"), str(tmp_path / "b")])
    assert capsys.readouterr().out.strip() == f"report: {tmp_path / 'a' / 'report.html'}"
    main(["report", str(tmp_path / "b"), "--out", str(tmp_path / "new" / "page.html")])
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["page.html"]


def test_old_records_without_optional_fields_are_read(tmp_path):
    path = write_run(tmp_path / "old", records=[record(1)])
    line = json.loads((path / "rounds.jsonl").read_text())
    for field in ("chain", "metrics", "wall_s", "failures", "test_loss", "test_accuracy"):
        del line[field]
    (path / "run.json").unlink()
    (path / "rounds.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.warns(UserWarning, match="old is of an older version"):
        found = document(read_runs([path]))
    assert found["target"] is None and found["runs"][0]["value"] is None
    (path / "rounds.jsonl").write_text(json.dumps(line | {"rank": 8, "dropped_energy": 0.25, "gamma": None}) + "\n")
    with pytest.warns(UserWarning, match="rank, dropped_energy and gamma are read as metrics"):
        known = document(read_runs([path]))["runs"][0]["columns"]
    assert (known["rank"], known["dropped"]) == ([8], [0.25]) and "gamma" not in known


def test_an_unfinished_run_shows_its_last_test(tmp_path):
    write_run(tmp_path / "run", records=[record(1, test_accuracy=0.5), record(2, test_accuracy=0.4), record(3)])
    with (tmp_path / "run" / "rounds.jsonl").open("a") as file:
        file.write('{"round": 4, "cu')  # stopped in the middle of a line
    (run,) = document(read_runs([tmp_path]))["runs"]
    assert (run["finished"], run["value"], run["best"]) == (False, 0.4, 0.5)
    assert run["columns"]["rounds"] == [1, 2, 3]


def refused(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        main(["report", *map(str, args)])
    captured = capsys.readouterr()
    assert (stop.value.code, captured.out) == (2, "")
    (line,) = captured.err.strip().splitlines()
    return line


OWN_ARCH = """
from pathlib import Path

from splitcast.model.cnn import small_cnn

Path(__file__).with_name("imported").touch()


def build(input_shape, classes):
    return small_cnn(input_shape, classes)
"""


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """A file that is there once the module has been imported."""
    (tmp_path / "antigravity_like_module.py").write_text(OWN_ARCH)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "imported"
    sys.modules.pop("antigravity_like_module", None)


def test_modules_that_a_run_names_are_imported_for_who_trusts_it(tmp_path, capsys, imported):
    trained = train(TINY).rounds
    run = write_run(tmp_path / "run", with_values(TINY, arch="antigravity_like_module:build"), trained)

    def shown(*flags):
        main(["report", str(run), *flags])
        capsys.readouterr()
        page = (run / "report.html").read_text(encoding="utf-8")
        embedded = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
        return json.loads(embedded[1])["runs"][0]["clients"]

    clients = shown()
    assert "'antigravity_like_module:build' may not be imported" in clients["missing"] and "parts_s" not in clients
    assert not imported.exists()
    clients = shown("--trust")
    assert imported.exists() and len(clients["parts_s"]["uplink"]) == TINY.data.clients


@pytest.mark.parametrize("key", [name for name, value in leaves(Config()).items() if isinstance(value, str)])
def test_a_report_imports_nothing_whatever_a_run_names(tmp_path, imported, key):
    run = write_run(tmp_path / "run", with_values(TINY, **{key: "antigravity_like_module:build"}), [record(1)])
    write_report([run])
    assert not imported.exists()


def test_a_summary_of_anybodys_is_shown(tmp_path):
    run = write_run(tmp_path / "run", records=[record(1)], summary={"versions": ["torch"], "wall_seconds": 1.0})
    assert document(read_runs([run]))["runs"][0]["versions"] == {}


def test_bad_input_is_one_line(tmp_path, capsys):
    assert "name a run folder" in refused(capsys)
    assert "not a folder" in refused(capsys, tmp_path / "absent")
    assert "not a run folder and holds none" in refused(capsys, tmp_path)
    begun = write_run(tmp_path / "begun")
    assert not (begun / "rounds.jsonl").exists() and "no finished round" in refused(capsys, begun)
    (begun / "rounds.jsonl").touch()
    assert "no finished round" in refused(capsys, begun)
    (begun / "rounds.jsonl").write_text("{}\n")
    assert "line 1 is not a round" in refused(capsys, begun)
    for bad in ({"round": "one"}, {"kinds": None}, {"latency_s": "fast"}):
        (begun / "rounds.jsonl").unlink()
        RunFolder(begun).append(record(1))
        with (begun / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(vars(record(2)) | bad) + "\n")
        assert f"line 2 has a bad {next(iter(bad))}" in refused(capsys, begun)
    (begun / "rounds.jsonl").write_bytes(b"\xff\xfe\n")
    assert "damaged" in refused(capsys, begun)
    good = write_run(tmp_path / "good", records=[record(1)])
    assert "is a folder" in refused(capsys, good, "--out", tmp_path)
    assert "cannot write" in refused(capsys, good, "--out", good / "config.toml" / "page.html")
    for text in ('{"rounds": 1', "[]"):
        (good / "summary.json").write_text(text)
        assert "damaged" in refused(capsys, good)
    (good / "summary.json").unlink()
    (good / "config.toml").write_text("[train]\nspeed = 1\n")
    assert "'speed'" in refused(capsys, good)
    assert not list(tmp_path.rglob("report.html"))


# ---- the page in a browser

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--window-size=1280,900"),
    *("--disable-background-networking", "--disable-component-update", "--disable-quic", "--disable-sync"),
    "--force-prefers-reduced-motion",
)
CHARTS = ("learning", "cost", "cuts", "bytes", "clients", "drift", "gamma")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Three runs: one with a name that tries to be HTML, one whose cut moves, one stopped early."""
    folder = tmp_path_factory.mktemp("runs")
    train(TINY, folder / "a <b>&amp;")
    train(with_values(TINY, scheme="sfl-gb"), folder / "gb")
    train(with_values(TINY, scheme="sfl", policy="random", participation=0.5), folder / "moving")
    (folder / "moving" / "summary.json").unlink()
    return write_report([folder])


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    if not CHROMIUM or not DRIVER:
        pytest.skip("no chromium and chromedriver here (Debian: chromium, chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


class Browser:
    """The page, opened afresh."""

    def __init__(self, driver, page, *, width=1280, dark=False):
        self.driver = driver
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        driver.get("about:blank")
        for log in ("browser", "performance"):  # what was before is none of this page's business
            driver.get_log(log)
        driver.get(page.as_uri())

    def js(self, script, *args):
        return self.driver.execute_script(f"return {script}", *args)

    def find(self, css):
        return self.driver.find_element("css selector", css)

    def all(self, css):
        return self.driver.find_elements("css selector", css)

    def texts(self, chart):
        return self.js(f"[...document.querySelectorAll('[data-chart={chart}] svg text')].map((t) => t.textContent)")

    def lines(self, chart):
        """Colours of the runs that are drawn as lines in a chart."""
        script = f"[...document.querySelectorAll('[data-chart={chart}] svg path')].map((p) => p.getAttribute('stroke'))"
        return {colour.upper() for colour in self.js(script) if colour} & set(COLOURS)

    def rows(self, css):
        return self.js(
            f"[...document.querySelectorAll('{css} tr')].map((r) => [...r.children].map((c) => c.innerText))"
        )


@pytest.fixture
def browser(chromium, page):
    made = Browser(chromium, page)
    yield made
    complaints = [entry for entry in chromium.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    assert complaints == []
    events = [json.loads(entry["message"])["message"] for entry in chromium.get_log("performance")]
    requests = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    asked = [r["request"]["url"] for r in requests]
    assert page.as_uri() in asked
    assert [url for url in asked if url != page.as_uri() and not url.startswith("data:")] == []


def test_every_chart_draws(browser):
    for name in CHARTS:
        shapes = browser.js(f"document.querySelectorAll('[data-chart={name}] svg path').length")
        assert shapes > 5, name
        box = browser.find(f"[data-chart={name}] svg").size
        assert box["width"] > 300 and box["height"] > 100
        assert len(browser.find(f"[data-chart={name}] [role=img]").get_attribute("aria-label")) > 20
    assert browser.lines("learning") == {GA, GB, SFL}
    assert browser.lines("gamma") == {GB}  # nobody else measures it
    assert len(browser.all("#cards .card")) == 5
    assert "not taking part" not in browser.find("[data-chart=clients]").text


def test_runs_toggle_by_mouse_and_by_keyboard(browser):
    from selenium.webdriver.common.keys import Keys

    second = "#runs button:nth-child(2)"
    assert browser.find(second).get_attribute("aria-pressed") == "true"
    browser.find(second).click()
    assert browser.find(second).get_attribute("aria-pressed") == "false"
    assert browser.lines("learning") == {GA, SFL}
    assert "gb" not in browser.texts("bytes")
    assert [row[0].split()[0] for row in browser.rows("#table tbody")] == ["a", "movingunfinished"]
    browser.driver.switch_to.active_element.send_keys(Keys.SPACE)  # the focus stays on the button
    assert browser.find(second).get_attribute("aria-pressed") == "true"
    assert browser.lines("learning") == {GA, GB, SFL}


def test_the_horizontal_axis_switches(browser):
    assert "communication rounds" in browser.texts("learning")
    for key, words in (("mb", "data on the air so far (MB)"), ("seconds", "simulated time so far (s)")):
        button = browser.find(f"#x [data-value={key}]")
        button.click()
        assert button.get_attribute("aria-pressed") == "true"
        for chart in ("learning", "cost", "cuts", "drift", "gamma"):
            assert words in browser.texts(chart) and "communication rounds" not in browser.texts(chart)
    assert len(browser.all("#x [aria-pressed=true]")) == 1


def test_what_a_chart_shows_switches(browser):
    browser.find("[data-chart=learning] [data-value=loss]").click()
    assert "training loss" in browser.texts("learning")
    browser.find("[data-chart=bytes] [data-value=share]").click()
    assert "share of the data on the air (%)" in browser.texts("bytes")
    browser.find("[data-chart=clients] [data-value=joules]").click()
    assert "energy per round (J)" in browser.texts("clients")
    assert browser.find("[data-chart=clients] .legend").text.split() == ["computing", "sending"]
    browser.find("[data-chart=clients] [data-value=seconds]").click()
    browser.find("[data-chart=clients] [data-value='2']").click()
    assert "not taking part" in browser.find("[data-chart=clients] .legend").text
    browser.find("#logy").click()
    assert browser.find("#logy").get_attribute("aria-pressed") == "true"


def test_hovering_tells_the_numbers(browser):
    from selenium.webdriver import ActionChains

    plot = browser.find("[data-chart=learning] svg")
    browser.js("arguments[0].scrollIntoView({block: 'center'})", plot)
    ActionChains(browser.driver).move_to_element_with_offset(plot, 150, 0).perform()
    shown = browser.js("[...document.querySelectorAll('.tip')].map((t) => t.innerText).join()")
    assert "round 4" in shown and "a <b>&amp;" in shown and "%" in shown


def test_the_target_gives_the_numbers_of_compare(browser, page):
    runs = {path.name: [RunFolder(path).rounds()] for path in sorted(page.parent.iterdir()) if path.is_dir()}
    target, table = rows(runs)
    assert float(browser.find("#target").get_attribute("value")) == pytest.approx(100 * target)

    def shown():
        return [row[6] for row in browser.rows("#table tbody")]

    def expected(table):
        return ["never" if r.rounds_to_target is None else str(r.rounds_to_target) for r in table]

    assert shown() == expected(table)
    browser.js("(arguments[0].value = 99.5, arguments[0].dispatchEvent(new Event('input')))", browser.find("#target"))
    assert shown() == expected(rows(runs, 0.995)[1]) == ["never"] * 3


def test_tables_stand_in_for_the_charts(browser):
    for name in CHARTS:
        browser.find(f"[data-chart={name}] summary").click()
    browser.js("new Promise((done) => setTimeout(done, 100))")
    for name in CHARTS:
        assert len(browser.rows(f"[data-chart={name}] details tbody")) >= 3, name
    assert len(browser.rows("[data-chart=clients] details tbody")) == TINY.data.clients
    assert len(browser.rows("[data-chart=drift] details tbody")) == 3 * TINY.train.rounds


def test_everything_is_reached_by_the_tab_key(browser):
    from selenium.webdriver.common.keys import Keys

    wanted = browser.js(
        "[...document.querySelectorAll('button, input, summary')].filter((e) => e.offsetParent && !e.disabled).length"
    )
    seen = set()
    for _ in range(3 * wanted):
        browser.driver.switch_to.active_element.send_keys(Keys.TAB)
        focused = browser.driver.switch_to.active_element
        if focused.tag_name in ("button", "input", "summary"):
            seen.add(focused.id)
        elif focused.tag_name == "body":
            break
    assert len(seen) == wanted


@pytest.mark.parametrize("dark", [False, True])
def test_the_theme_follows_the_system_and_the_button(chromium, page, dark):
    browser = Browser(chromium, page, dark=dark)

    def brightness():
        return sum(map(int, re.findall(r"\d+", browser.js("getComputedStyle(document.body).backgroundColor"))[:3]))

    def is_dark():
        return browser.find("#theme").get_attribute("aria-pressed") == "true", brightness() < 200

    assert is_dark() == (dark, dark)
    browser.find("#theme").click()
    assert is_dark() == (not dark, not dark)


@pytest.mark.parametrize("width", [390, 820, 1280])
def test_nothing_sticks_out(chromium, page, width):
    browser = Browser(chromium, page, width=width)
    assert browser.js("document.documentElement.scrollWidth") <= width
    for name in CHARTS:
        outside = browser.js(
            f"(([svg]) => [...svg.querySelectorAll('text')].filter((t) => {{ const a = t.getBoundingClientRect(), "
            f"b = svg.getBoundingClientRect(); return a.left < b.left - 1 || a.right > b.right + 1; }})"
            f".map((t) => t.textContent))(document.querySelectorAll('[data-chart={name}] svg'))"
        )
        assert outside == [], name


def test_runs_without_a_round_are_left_out_with_a_word(page, tmp_path):
    train(TINY, tmp_path / "begun")
    RunFolder(tmp_path / "unborn").create(TINY)
    with pytest.warns(UserWarning, match="unborn has no finished round"):
        assert [run.name for run in read_runs([tmp_path, tmp_path / "begun" / ".." / "begun"])] == ["begun"]
    with pytest.raises(SplitcastError, match="no finished round"):
        read_runs([tmp_path / "unborn"])


def test_what_a_run_lacks_or_adds_does_no_harm(chromium, page, tmp_path):
    content = document(read_runs([page.parent]))
    for run in content["runs"]:
        for name in [name for name in run["columns"] if name.startswith("test_")]:
            del run["columns"][name]
        for name in ("drift", "gamma", "rank", "dropped"):
            run["columns"].pop(name, None)
        run |= {"value": None, "best": None, "measured": {"parts_s": {"upload": 1.25}, "failures": 2}}
        run["columns"]["wall_s"] = run["columns"]["round_s"]
    bare = tmp_path / "bare.html"
    bare.write_text(render(content | {"target": None}), encoding="utf-8")
    browser = Browser(chromium, bare)
    assert [entry for entry in chromium.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert "None of these runs measured it" in browser.find("[data-chart=drift]").text
    assert "upload 1.25 s; sites failed 2 times" in browser.find("[data-chart=clients]").text
    browser.find("[data-chart=cost] [data-value=wall_s]").click()
    assert "measured time of the round (s)" in browser.texts("cost")
    assert browser.lines("learning") == {GA, GB, SFL}


def test_long_names_are_shortened_to_where_they_differ(chromium, page, tmp_path):
    content = document(read_runs([page.parent]))
    for run, name in zip(content["runs"], ("sfl", "sfl-ga", "sfl-gb"), strict=True):
        run["name"] = f"mnist-{name}-cut1-seed0-0123456789"
    named = tmp_path / "named.html"
    named.write_text(render(content), encoding="utf-8")
    browser = Browser(chromium, named, width=390)
    for shown in (browser.texts("bytes"), browser.texts("cuts")):
        assert {"sfl-cut1-s…", "sfl-ga-cut…", "sfl-gb-cut…"} <= set(shown)


def test_names_and_state_are_shown_as_text(browser):
    assert [chip.text for chip in browser.all("#runs button")] == ["a <b>&amp;", "gb", "moving"]
    assert "unfinished" in browser.find("#table").text
    assert "splitcast train --clients 4 --arch cnn-small --scheme sfl-gb" in browser.find("#again").text
    assert "unfinished, 6 of 6 rounds" in browser.find("#config").text
    assert Path(browser.driver.current_url).name == "report.html"


OWN_PARTS = """
from pathlib import Path

from splitcast.schemes.schemes import Sfl
from splitcast.training.measure import Measure
from splitcast.training.task import Classification

Path(__file__).with_name("imported").touch()


class Scheme(Sfl):
    def step(self, clients, server, link, batch):
        super().step(clients, server, link, batch)


class Stubborn(Sfl):
    \"""Looks at values, which a plan does not have.\"""

    def step(self, clients, server, link, batch):
        float(batch.x.whole().sum())
        super().step(clients, server, link, batch)


class Delay(Classification):
    headline = Measure("delay", "min", lower=True)

    def metrics(self, output, target):
        return {**super().metrics(output, target), "delay": float(len(target) * 1.5)}
"""


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_of_own_parts_is_shown_and_with_trust_all_of_it(tmp_path, capsys, monkeypatch, finished):
    """Without importing anything, a report has the task's headline, from the summary or, of a run that still goes on,
    from what was measured."""
    (tmp_path / "my_parts.py").write_text(OWN_PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    run = tmp_path / "run"
    train(with_values(TINY, scheme="my_parts:Scheme", task="my_parts:Delay"), run)
    if not finished:
        (run / "summary.json").unlink()
    sys.modules.pop("my_parts")
    (tmp_path / "imported").unlink()

    def shown(*flags):
        main(["report", str(run), *flags])
        assert capsys.readouterr().err == ""
        page = (run / "report.html").read_text(encoding="utf-8")
        return json.loads(re.search(r'id="data">(.*?)</script>', page, flags=re.DOTALL)[1])

    plain = shown()
    assert not (tmp_path / "imported").exists()
    assert "may not be imported" in plain["runs"][0]["clients"]["missing"]
    assert "--trust" in plain["runs"][0]["clients"]["missing"]
    trusted = shown("--trust")
    assert (tmp_path / "imported").exists()
    assert len(trusted["runs"][0]["clients"]["parts_s"]["uplink"]) == TINY.data.clients
    assert trusted["measures"]["test_delay"]["unit"] == "min" and trusted["measures"]["test_delay"]["lower"]
    assert trusted["runs"][0]["value"] == 1.5 and trusted["headline"] == "test_delay"
    if finished:
        assert (plain["headline"], plain["measures"]) == (trusted["headline"], trusted["measures"])
    else:
        assert plain["headline"] == "test_accuracy" and plain["runs"][0]["columns"]["test_delay"][-1] == 1.5
    sys.modules.pop("my_parts", None)


def test_a_scheme_that_cannot_be_planned_is_shown_all_the_same(tmp_path, capsys, monkeypatch):
    (tmp_path / "my_parts.py").write_text(OWN_PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    trained = train(TINY).rounds
    run = write_run(tmp_path / "run", with_values(TINY, scheme="my_parts:Stubborn"), trained)
    main(["report", str(run), "--trust"])
    (found,) = document(read_runs([run]))["runs"]
    assert "cannot be planned: RuntimeError" in found["clients"]["missing"] and "\n" not in found["clients"]["missing"]
    sys.modules.pop("my_parts", None)


def test_runs_judged_by_an_error_are_shown_by_it(chromium, tmp_path):
    """Perplexities: the lowest is the best, a target is reached from above, and there is no per cent."""
    config = with_values(TINY, task="next-token")
    for name, values in {"a": [9.0, 4.0, 2.84], "b": [9.0, 2.0, 5.0]}.items():
        tests = [{"test_perplexity": value, "test_accuracy": 0.5, "clients_worst": 2 * value} for value in values]
        write_run(tmp_path / name, config, [record(t, metrics=found) for t, found in enumerate(tests, start=1)])
    browser = Browser(chromium, write_report([tmp_path]))
    assert "test perplexity" in browser.texts("learning") and "lowest perplexity" in browser.find("#cards").text
    assert "target perplexity" in browser.find("main").text and "%" not in browser.find("#table").text
    assert float(browser.find("#target").get_attribute("value")) == 2.9
    assert browser.rows("#table thead")[0][6] == "rounds to 2.9 perplexity"
    assert [row[1:3] + row[6:7] for row in browser.rows("#table tbody")] == [["2.84", "2.84", "3"], ["5", "2", "2"]]
    browser.js("(arguments[0].value = 2.5, arguments[0].dispatchEvent(new Event('input')))", browser.find("#target"))
    assert [row[6] for row in browser.rows("#table tbody")] == ["never", "2"]
    browser.find("[data-chart=learning] [data-value=clients_worst]").click()
    assert "worst client's perplexity" in browser.texts("learning")
    assert [entry for entry in chromium.get_log("browser") if entry["level"] == "SEVERE"] == []


ATTACKED = {
    "cut": 1,
    "codec": "fp32",
    "samples": 2,
    "rows": [
        {"attack": name, "steps": steps, "knows_half": known, "possible": possible, "mse": 0.1, "psnr": 9.0}
        | {"ssim": ssim, "features": 1.0, "recognised": 0.5}
        for name, steps, known, possible, ssim in (
            ("floor", 0, False, True, 0.06),
            ("network", 9, True, False, 0.9),
            ("<i>", 9, False, True, 0.2),
        )
    ],
    "labels": {},
}


def test_attacks_on_a_run_are_shown_with_their_picture(chromium, tmp_path):
    import torch

    from splitcast.studies.privacy.figure import save_grid

    run = write_run(tmp_path / "a", records=[record(1, test_accuracy=0.1)])
    (run / "attack.json").write_text(json.dumps(ATTACKED))
    save_grid({"original": torch.rand(2, 1, 8, 8), "network": torch.rand(2, 1, 8, 8)}, run / "attack.png")
    browser = Browser(chromium, write_report([run]), width=390)
    assert browser.rows("#leaks tbody") == [
        ["floor", "", "0.060", "9.0", "0.1", "50 %"],
        ["network", "(if known)", "0.900", "9.0", "0.1", "50 %"],
        ["<i>", "unknown", "0.200", "9.0", "0.1", "50 %"],
    ]
    assert browser.js("document.querySelector('#leaks img').naturalWidth") > 100
    assert browser.js("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b'{"rows": 3, "cut": 1, "codec": "fp32", "samples": 2}',
        json.dumps(ATTACKED | {"rows": [ATTACKED["rows"][0] | {"ssim": "nan"}]}).encode(),
        json.dumps(ATTACKED | {"cut": 1e999}).encode(),
        b" " * 2_000_000,
    ],
)
def test_findings_of_anybodys_that_are_none_are_left_out(tmp_path, content):
    run = write_run(tmp_path / "a", records=[record(1)])
    (run / "attack.json").write_bytes(content)
    assert document(read_runs([run]))["runs"][0]["attacked"] is None


def test_a_picture_that_is_none_is_left_out(tmp_path):
    run = write_run(tmp_path / "a", records=[record(1)])
    (run / "attack.json").write_text(json.dumps(ATTACKED))
    for content in (b"<svg onload=alert(1)>", b"\x89PNG\r\n\x1a\n" + bytes(5_000_000)):
        (run / "attack.png").write_bytes(content)
        assert document(read_runs([run]))["runs"][0]["attacked"]["picture"] == ""
