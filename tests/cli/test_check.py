"""`attnscale check`, by what it prints and how it exits."""

import html
import json
import re
import signal
import subprocess
import sys
import time

import pytest

from attnscale.diagnose import CODES, SEVERITIES
from tests.checking.broken import EVIL
from tests.cli.running import in_a_process, run
from tests.processes import started

BROKEN = "tests.checking.broken:"


def check(*arguments):
    """Run `attnscale check …` in this process: status, stdout, stderr."""
    result = run("check", *arguments)
    return result.returncode, result.stdout, result.stderr


def test_without_a_model_the_bundled_one_is_checked_and_fine():
    result = in_a_process("check")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    rows = [line.split() for line in lines if re.match(r"\d ", line)]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert {row[3] for row in rows} == {"0.177"}  # 1/√32
    assert lines[-1].startswith("Fine: 4 attention layers of a trained model; scores spread by")


def test_an_unscaled_layer_is_an_error_with_its_cause_and_what_to_do():
    status, out, err = check(f"{BROKEN}unscaled")
    text = " ".join(out.split())
    assert status == 1
    assert err == ""
    assert "error unscaled layers.*, * = 0, 2" in text
    assert "Multiply q·k by 1/√d_k = 0.213" in text
    rows = {line.split()[0]: line.split() for line in out.splitlines() if re.match(r"\d ", line)}
    assert [rows[index][-1] for index in "012"] == ["unscaled", "healthy", "unscaled"]
    assert [float(rows[index][3]) for index in "012"] == [1.0, 0.213, 1.0]
    spread, expected = (float(cell) for cell in rows["1"][1:3])
    assert spread == pytest.approx(expected, rel=0.15)  # random q and k are independent
    assert float(rows["0"][1]) == pytest.approx(float(rows["0"][2]) * 22**0.5, rel=0.15)
    assert text.split("Not fine: ")[1].startswith("in 2 of 3 layers, the scores reach the softmax")


@pytest.mark.parametrize(
    "arguments", [[], [f"{BROKEN}unscaled"], [f"{BROKEN}evil"], ["--what-if", "blocks.0.attention"], ["--help"]]
)
def test_everything_fits_80_columns_without_colour_in_a_pipe(arguments):
    _, out, _ = check(*arguments)
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b[" not in out


def test_nan_weights_are_a_finding():
    status, out, _ = check(f"{BROKEN}not_a_number", "--json")
    assert status == 1
    assert json.loads(out)["layers"]["layers.1"]["verdict"] == "non_finite"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([f"{BROKEN}fails"], r"Could not run .*broken:fails on the inputs it came with: RuntimeError, .* \(broken.py"),
        ([f"{BROKEN}too_large"], "Out of memory: could not run"),
        ([f"{BROKEN}nothing"], "Could not make the model"),
        (["nowhere/at/all"], ".*: no such file or folder."),
        (["--rows", "0"], "Invalid value for '--rows': .*; run 'attnscale check --help'"),
        (["--length", "1"], "Expected --length from 2 to 1,048,576, got 1."),
        (["--device", "tpu"], "Expected a device that this machine has"),
        (["--text", "nowhere.txt"], "Could not read nowhere.txt"),
        (["--html", "."], "Expected a file to write, got the folder .."),
        (["--html", f"{__file__}/report.html"], f"Could not write {__file__}/report.html: {__file__} is not a folder."),
        ([""], "Expected a model, got an empty name"),
        (["--what-if", "layer.9"], "No layer 'layer.9' was seen. Expected one of: blocks.0.attention"),
    ],
)
def test_bad_input_ends_with_status_two_and_one_sentence(arguments, sentence):
    status, out, err = check(*arguments)
    assert status == 2
    assert out == ""
    assert re.match(rf"attnscale: {sentence}", err)
    assert len(err.splitlines()) == 1


def test_json_has_every_layer_with_the_numbers_of_the_table_and_every_finding():
    status, out, err = check(f"{BROKEN}unscaled", "--json", "--rows", 11, "--what-if", "layers.1")
    found = json.loads(out)
    assert (status, err) == (1, "")
    assert list(found) == [
        "model", "input", "device", "rows", "notes", "conclusion", "trained", "worst", "findings",
        "unchecked", "unjudged", "forward_passes", "layers", "what_if",
    ]  # fmt: skip
    assert (found["rows"], found["worst"], found["trained"]) == (11, "error", False)
    assert list(found["layers"]) == ["layers.0", "layers.1", "layers.2"]
    layer = found["layers"]["layers.1"]
    numbers = {"spread", "spread_expected", "scale_applied", "entropy_ratio", "top1", "saturated", "jacobian_trace"}
    assert all(isinstance(layer[name], float) for name in numbers)
    assert layer["scale_applied"] == pytest.approx(22**-0.5, rel=1e-4)
    assert layer["stats"]["heads"] == 2
    assert len(layer["stats"]["entropy"]) == 2
    for finding in found["findings"]:
        assert list(finding) == ["layer", "head", "code", "severity", "message", "measured", "expected", "advice"]
        assert finding["code"] in CODES
        assert finding["severity"] in SEVERITIES
    assert {row["name"] for row in found["what_if"]["rows"]} >= {"current", "calibrated", "softcap:30", "clip:100"}


def test_text_length_and_random_init_choose_input_and_weights(tmp_path):
    (tmp_path / "text.txt").write_text("Why is it √d_k? " * 9, encoding="utf-8")
    _, out, _ = check("--text", tmp_path / "text.txt", "--length", 31, "--json")
    assert json.loads(out)["input"] == "31 bytes of the text"
    assert json.loads(check("--random-init", "--json")[1])["trained"] is False
    (tmp_path / "text.txt").write_bytes(b"\xff\xfe\x00")
    status, _, err = check("--text", tmp_path / "text.txt")
    assert status == 2
    assert "Expected UTF-8 text" in err


@pytest.fixture
def page(tmp_path):
    def write(name):
        path = tmp_path / "new" / f"{name}.html"
        check(f"{BROKEN}{name}", "--html", path)
        assert [file.name for file in path.parent.iterdir()] == [path.name]  # nothing half-written beside it
        return path.read_text(encoding="utf-8")

    return write


def test_a_report_is_one_file_that_says_what_the_terminal_says(page):
    written = page("unscaled")
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', written)[1])
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    assert not re.search(r"<(link|img|iframe)|\bsrc=|url\(|@import|href=\"[^#]", written.split("<script")[0])
    _, out, _ = check(f"{BROKEN}unscaled")
    assert " ".join(out[out.index("Not fine") :].split()) in html.unescape(written)
    for title in ("What matters", "Layer by layer", "Head by head", "The layer under other scales"):
        assert f"<h2>{title}</h2>" in written


def test_a_name_that_is_code_is_shown_as_text(page):
    written = page("evil")
    assert EVIL not in written
    assert html.escape(EVIL, quote=False) in written.replace("&#34;", '"').replace("&#39;", "'")
    assert written.count("<script") == 2
    island = re.search(r'<script type="application/json" id="data">(.*?)</script>', written, re.DOTALL)[1]
    assert EVIL in json.loads(island)["head-map"][0]["rows"][0]  # test_report_pages.py sees it drawn
    assert EVIL in check(f"{BROKEN}evil")[1]
    _, out, _ = check(f"{BROKEN}coloured")
    assert "\x1b" not in out
    assert "red[bold]" in out


def test_templates_and_transformers_load_only_when_used():
    code = """
import sys
from attnscale.cli import main
sys.argv = ["attnscale", "check", "--rows", "8", "--length", "32"]
try:
    main()
except SystemExit:
    pass
print([name for name in ("transformers", "jinja2") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", check=True)
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no SIGINT to one child")
def test_an_interrupt_ends_with_130_and_leaves_the_old_report(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time\ndef make():\n    print('ready', flush=True)\n    time.sleep(60)\n", encoding="utf-8"
    )
    (tmp_path / "report.html").write_text("old", encoding="utf-8")
    command = [sys.executable, "-m", "attnscale", "check", "slow:make", "--html", "report.html"]
    with started(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == "old"
    assert {file.name for file in tmp_path.iterdir()} - {"__pycache__"} == {"slow.py", "report.html"}


def test_a_hugging_face_configuration_is_checked_at_random_initialisation(tmp_path):
    config = dict(model_type="gpt2", vocab_size=103, n_embd=44, n_layer=2, n_head=2, n_positions=61)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    status, out, err = check(tmp_path / "config.json", "--json")
    found = json.loads(out)
    assert status == 0
    assert err == "attnscale: No tokenizer could be read, so the tokens are random.\n"
    assert [layer["scale_applied"] for layer in found["layers"].values()] == pytest.approx([22**-0.5] * 2, rel=1e-3)
    assert found["worst"] != "error"


def test_a_model_without_readable_attention_says_so_in_text_json_and_a_page(tmp_path):
    status, out, err = check(f"{BROKEN}linear", "--html", tmp_path / "report.html")
    assert status == 2
    assert err.splitlines() == [
        f"attnscale: The report is in {tmp_path / 'report.html'}.",
        "attnscale: No attention layer was checked, so the exit status is 2.",
    ]
    assert "Modules named after attention in which none ran: 0." in out
    assert out.splitlines()[-1] == "No attention could be read, so nothing was judged."
    found = json.loads(check(f"{BROKEN}linear", "--json")[1])
    assert found["layers"] == {}
    assert found["conclusion"] == "No attention could be read, so nothing was judged."
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert all(sentence in page for sentence in found["unchecked"])
    assert "No fused attention kernel ran, and no softmax." in check(f"{BROKEN}without_attention")[1]
