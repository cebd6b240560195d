"""The page of `demo.py` as it is served: over HTTP, and in a real browser at two widths."""

import json
import re
import shutil
import socket
import threading
import urllib.error
import urllib.request
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image
from test_demo import drawn

from r2sm_jax.inference import web_answers as answers, web_page as demo

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
JSON = {"Content-Type": "application/json"}
SECRET = "only the server may read this"


# Over HTTP.


@pytest.fixture(scope="module")
def server(tiny_run, tmp_path_factory):
    """The page's address; uploads are limited to 1 MB."""
    pytest.importorskip("gradio", reason="the page needs gradio: pip install '.[demo]'")
    patch, asked = pytest.MonkeyPatch(), answers.ask
    patch.setattr(
        answers, "ask", lambda *arguments: drawn(asked(*arguments))
    )  # four steps of training draw nothing
    folder = tmp_path_factory.mktemp("served")
    page = demo.launch(demo.DemoConfig(str(tiny_run), port=0, max_upload_mb=1), folder, block=False)
    yield f"http://127.0.0.1:{page.server_port}"
    page.close()
    patch.undo()


def status(url: str, data: bytes | None = None, headers: dict | None = None) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data, headers or {}), timeout=30
        ) as answer:
            return answer.status, answer.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode("utf-8", "replace")


def upload(server: str, name: str, content: bytes) -> tuple[int, str]:
    head = (
        f'--x\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'.encode()
    )
    body = head + content + b"\r\n--x--\r\n"
    return status(
        f"{server}/gradio_api/upload", body, {"Content-Type": "multipart/form-data; boundary=x"}
    )


def test_only_loopback_listens(server):
    table = Path("/proc/net/tcp")
    if not table.exists():
        pytest.skip("who listens is read from /proc, which is Linux")
    rows = [line.split() for line in table.read_text().splitlines()[1:]]
    port = f"{int(server.rsplit(':', 1)[1]):04X}"
    listening = {
        row[1].split(":")[0] for row in rows if row[1].endswith(f":{port}") and row[3] == "0A"
    }
    assert listening == {"0100007F"}


def test_an_address_of_ipv6_is_printed_as_urls_have_it(
    server, tiny_run, tmp_path, capsys, monkeypatch
):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no ::1")
    monkeypatch.setattr(demo.Predictor, "warm_up", lambda self: None)
    monkeypatch.setenv("GRADIO_TEMP_DIR", "")  # set by the launch, and put back
    page = demo.launch(demo.DemoConfig(str(tiny_run), host="::1", port=0), tmp_path, block=False)
    try:
        (address,) = capsys.readouterr().out.split()
        assert address.startswith("http://[::1]:") and status(address)[0] == 200
    finally:
        page.close()


def test_only_files_of_the_temporary_folder_are_served(server, tmp_path, tiny_run):
    code, answer = upload(server, "note.txt", b"mine")
    (uploaded,) = json.loads(answer)
    assert code == 200 and status(f"{server}/gradio_api/file={uploaded}") == (200, "mine")
    (tmp_path / "secret.txt").write_text(SECRET)
    assert status(f"{server}/gradio_api/file={tmp_path / 'secret.txt'}")[0] == 403
    for file in (
        tmp_path / "secret.txt",
        tiny_run / "config.json",
        "/etc/passwd",
        Path(__file__),
        "pyproject.toml",
    ):
        for path in (f"file={file}", f"file=../{file}", f"file/{file}"):
            code, text = status(f"{server}/gradio_api/{path}")
            assert code in (403, 404) and SECRET not in text, (path, code)


@pytest.fixture
def elsewhere(monkeypatch):
    """A server that counts as public, and the requests that it gets."""
    import safehttpx

    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(SECRET.encode())

        do_HEAD = do_GET

    monkeypatch.setattr(safehttpx, "is_public_ip", lambda ip: True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}/photo.png", asked
    server.shutdown()
    server.server_close()


def test_no_address_that_a_request_names_is_fetched(server, elsewhere):
    """Neither as a file to serve nor in the place of an uploaded one."""
    address, asked = elsewhere
    for path in (
        f"file=http://{address}",
        f"file/http://{address}",
        f"file=http:%2F%2F{address}",
        f"proxy=http://{address}",
    ):
        code, text = status(f"{server}/gradio_api/{path}")
        assert code in (403, 404) and SECRET not in text, (path, code)
    _, config = status(f"{server}/config")
    for event in json.loads(config)["dependencies"]:
        if not event["backend_fn"]:
            continue
        file = {"path": f"http://{address}", "meta": {"_type": "gradio.FileData"}}
        body = {
            "data": [file] * len(event["inputs"]),
            "fn_index": event["id"],
            "session_hash": "visitor",
        }
        code, _ = status(f"{server}/gradio_api/queue/join", json.dumps(body).encode(), JSON)
        assert code == 200
        with urllib.request.urlopen(
            f"{server}/gradio_api/queue/data?session_hash=visitor", timeout=60
        ) as messages:
            for line in messages:
                if b"process_completed" in line or b"close_stream" in line:
                    break
    assert asked == []


@pytest.mark.parametrize(
    "body",
    [
        '{"data": NaN, "fn_index": []}',
        '{"data": 1, "fn_index": "\\ud800"}',
        '{"data": [], "fn_index": 99, "session_hash": "nobody"}',
    ],
)
def test_a_body_that_no_page_sends_is_refused(server, body):
    code, answer = status(
        f"{server}/gradio_api/queue/join", body.encode(), {"Content-Type": "application/json"}
    )
    assert code == 422 and "This page cannot read the request." in answer


def test_no_function_of_the_page_is_offered_as_an_api(server):
    code, offered = status(f"{server}/gradio_api/info")
    assert code == 200 and json.loads(offered) == {"named_endpoints": {}, "unnamed_endpoints": {}}


def test_uploads_are_limited(server):
    assert upload(server, "small.png", b"x" * 1000)[0] == 200
    assert upload(server, "large.png", b"x" * 1_200_000)[0] == 413


def test_the_page_names_no_other_host_to_load_from(server):
    _, page = status(server)
    loaded = re.findall(
        r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(?:https?:)?//([^/"]+)', page
    )
    assert loaded == [], loaded
    assert "fonts.googleapis" not in page


# In a browser.


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="the browser is driven by playwright: .[browser]"
    )
    if not BROWSER:
        pytest.skip("there is no chromium here: apt-get install chromium")
    with sync_api.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(params=list(WIDTHS))
def page(request, browser, server):
    """The page at one width. At the end nothing was asked of another host, no script failed, nothing sticks out."""
    width, height = WIDTHS[request.param]
    opened = browser.new_page(viewport={"width": width, "height": height})
    opened.set_default_timeout(60_000)
    elsewhere, failed = [], []
    opened.on(
        "request",
        lambda r: (
            elsewhere.append(r.url) if not r.url.startswith((server, "data:", "blob:")) else 0
        ),
    )
    opened.on("pageerror", lambda error: failed.append(str(error)))
    opened.goto(server)
    opened.wait_for_selector("#ask")
    yield opened
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    assert not elsewhere and not failed, (elsewhere, failed)
    opened.close()


def verdict(page) -> str:
    page.wait_for_selector("#decision .verdict strong")
    return page.inner_text("#decision .verdict strong")


def stage(page, other_than: str = "") -> str:
    """The address of the picture that is shown, once it is another one."""
    page.wait_for_function(
        "old => { const i = document.querySelector('#stage img'); return i && i.src !== old && i.complete }",
        arg=other_than,
    )
    return page.get_attribute("#stage img", "src")


def choose_example(page, number: int = 1) -> str:
    page.click(f"#examples .thumbnail >> nth={number}")
    page.wait_for_selector(".sentence:visible")
    return stage(page)


def test_an_example_is_asked_and_its_masks_are_looked_at_and_taken_away(page, tmp_path):
    before = choose_example(page)
    page.click(".sentence >> nth=1")
    said = verdict(page)
    assert said in ("Modal", "Amodal")
    assert page.input_value("#query textarea").startswith("the complete shape of the ")
    picture = stage(page, before)
    assert page.is_checked(f"#shown input[value={said.lower()}]")
    shown = {picture}
    for name in ("Occluded", "Modal", "Amodal"):
        page.get_by_label(name, exact=True).check()
        picture = stage(page, picture)
        shown.add(picture)
        assert f"The {name.lower()} mask of " in page.get_attribute("#stage img", "alt")
    assert len(shown) == 3
    page.get_by_label("2 · 0.90").check()
    stage(page, picture)
    assert re.search(r"instances?.*480 × 480 px.*ms", page.inner_text("#facts"), re.S)
    with page.expect_download() as download:
        page.click("#zip")
    download.value.save_as(tmp_path / "masks.zip")
    with page.expect_download() as download:
        page.click("#json")
    download.value.save_as(tmp_path / "prediction.json")
    record = json.loads((tmp_path / "prediction.json").read_text())
    with zipfile.ZipFile(tmp_path / "masks.zip") as files:
        assert json.loads(files.read("prediction.json")) == record
    assert record["mask_type"] == said.lower() and record["size"] == [480, 480]
    assert f"{record['amodal_probability']:.3f}" in page.inner_text("#decision .ends")


def test_the_keyboard_is_enough(page):
    """Tab to an example, Enter, a sentence, Enter, the threshold by arrow keys: the decision turns over."""
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.innerText") == "Example 1":
            break
    page.keyboard.press("Enter")
    before = stage(page)
    page.focus("#query textarea")
    page.keyboard.type("the red mug")
    page.keyboard.press("Enter")
    first = verdict(page)
    stage(page, before)
    page.focus("#threshold input[type=range]")
    page.keyboard.press("End" if first == "Amodal" else "Home")
    page.wait_for_function(
        f"document.querySelector('#decision .verdict strong').innerText !== '{first}'"
    )
    assert {first, verdict(page)} == {"Modal", "Amodal"}


def test_errors_are_said_on_the_page_and_the_next_question_is_answered(page, tmp_path):
    def alert() -> str:
        page.wait_for_selector("#decision [role=alert]")
        return page.inner_text("#decision [role=alert]")

    page.click("#ask")
    assert "no image yet" in alert()
    (tmp_path / "fake.png").write_text("no image")
    page.set_input_files("#upload input[type=file]", tmp_path / "fake.png")
    page.wait_for_function("document.querySelector('#decision').innerText.includes('fake.png')")
    assert page.locator("#stage").is_hidden()
    assert "not an image" in alert() and str(tmp_path) not in alert() and "/" not in alert()
    page.reload()
    page.wait_for_selector("#ask")
    photo = tmp_path / "photo.png"
    Image.fromarray(answers.make_examples()[0][0][:300, :400]).save(photo)
    page.set_input_files("#upload input[type=file]", photo)
    before = stage(page)
    page.click("#ask")
    assert "query is empty" in alert()
    page.fill("#query textarea", "<b>the mug</b> " + "very " * 10_000 + "old")
    page.click("#ask")
    assert verdict(page) in ("Modal", "Amodal")
    stage(page, before)
    assert (
        "Too long" in page.inner_text("#decision")
        and page.locator("#decision .words b").count() == 0
    )


def test_everything_has_a_name_for_those_who_do_not_see_it(page):
    choose_example(page)
    page.click(".sentence >> nth=0")
    verdict(page)
    unnamed = page.evaluate("""() => [...document.querySelectorAll('button, input, textarea, a')]
        .filter(e => e.offsetParent && e.type !== 'file' && !(e.innerText.trim() || e.ariaLabel || e.title ||
                     e.querySelector('img[alt]:not([alt=""])') || 
                     [...(e.labels || [])].some(l => l.innerText.trim())))
        .map(e => e.outerHTML.slice(0, 120))""")
    assert unnamed == []
    assert page.get_attribute("#decision .decision", "aria-live") == "polite"
