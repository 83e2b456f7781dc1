"""The command line: help, figures, and errors in one sentence."""

import os
import re
import subprocess
import sys
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from sinkformers.lab.cli.app import app
from tests.lab.fake_runs import write_run


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )


def command_line(*arguments, before="", after=""):
    """Return Python code that runs the console script on `arguments`; `after` runs once it has exited."""
    argv = ["sinkformers", *map(str, arguments)]
    return f"""
import sys
{before}
sys.argv = {argv!r}
from sinkformers.lab.cli import main
try:
    main()
finally:
    {after or "pass"}
"""


def test_the_version_is_the_installed_one():
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.output.strip() == f"sinkformers {version('sinkformers')}"


@pytest.mark.parametrize("arguments", [[], ["figure"]])
def test_the_command_without_arguments_prints_its_help(arguments):
    assert invoke(*arguments).output.strip() == invoke(*arguments, "--help").output.strip()


def test_the_help_lists_the_subcommands():
    assert "figure" in invoke("--help").output
    listing = invoke("figure", "--help").output
    assert re.search(r"^\W*attention ", listing, flags=re.MULTILINE)


def test_a_typo_is_answered_with_a_suggestion():
    result = invoke("figure", "atention", "--out", "x.png")
    assert result.exit_code == 2
    assert "No such command 'atention'" in result.stderr
    assert "attention" in result.stderr


def test_out_is_required():
    result = invoke("figure", "attention")
    assert result.exit_code == 2
    assert "--out" in result.stderr


def test_a_figure_and_its_folders_are_created(tmp_path):
    out = tmp_path / "not" / "yet" / "there.PNG"
    result = invoke("figure", "attention", "--out", out)
    assert result.exit_code == 0, result.output
    assert out.read_bytes().startswith(b"\x89PNG")
    assert str(out) in result.output


@pytest.mark.parametrize(
    ("name", "suffix", "magic", "says"),
    [
        ("flow", "png", b"\x89PNG", "Sinkhorn, W_V = −1: variance"),
        ("flow", "gif", b"GIF8", "Sinkhorn, W_V = +1: variance"),
        ("density", "png", b"\x89PNG", "Sinkhorn: ∫|ρ − ρ'| against ½Δρ"),
        ("energy", "svg", b"<?xml", "Sinkhorn, T: energy"),
        ("convergence", "png", b"\x89PNG", "Orders: Sinkhorn"),
    ],
)
def test_figures_of_the_theory(tmp_path, monkeypatch, name, suffix, magic, says):
    from sinkformers.lab.theory import cloud, equations, pictures, study

    run, densities, energies, convergence = cloud.run, equations.densities, pictures.energies, study.convergence
    monkeypatch.setattr(cloud, "run", lambda: run(n=12, frames=3))
    monkeypatch.setattr(equations, "densities", lambda **_: densities(n=21, eps=0.05, times=(0.0, 0.01)))
    monkeypatch.setattr(pictures, "energies", lambda: energies(n=7, frames=3))
    monkeypatch.setattr(study, "convergence", lambda: convergence(study.SMOKE))
    out = tmp_path / f"{name}.{suffix}"
    result = invoke("figure", name, "--out", out)
    assert result.exit_code == 0, result.output
    assert out.read_bytes().startswith(magic)
    assert says in result.output


def test_only_the_flow_can_be_animated(tmp_path):
    result = invoke("figure", "energy", "--out", tmp_path / "energy.gif")
    assert result.exit_code == 2
    assert "must end in .png, .svg, .pdf, which" in result.stderr


def test_figure1_prints_a_plain_table_into_a_pipe(tmp_path):
    result = run_python(command_line("run", "figure1", "--preset", "paper", "--out", tmp_path), COLUMNS="80")
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout
    assert "…" not in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if line.split()[:1] and line.split()[0].isdigit()]
    assert [row[0] for row in rows] == [str(key) for key in range(1, 11)]
    assert [row[1] for row in rows] == ["A"] * 5 + ["B"] * 5
    assert all(float(row[3]) < 0.01 for row in rows[:5])
    assert all(row[4] == "1.000000" for row in rows)


def test_figure1_prints_to_an_ascii_pipe(tmp_path):
    code = command_line("run", "figure1", "--preset", "paper", "--out", tmp_path)
    result = run_python(code, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert result.returncode == 0, result.stderr
    assert result.stdout.isascii()
    assert "SoftMax" in result.stdout


def a_folder(tmp_path):
    return tmp_path, "is a folder"


def an_unknown_suffix(tmp_path):
    return tmp_path / "figure.docx", "must end in .png, .svg, .pdf"


def no_suffix(tmp_path):
    return tmp_path / "figure", "must end in .png, .svg, .pdf"


def below_a_file(tmp_path):
    (tmp_path / "file").touch()
    return tmp_path / "file" / "figure.png", "is not a folder"


def far_below_a_file(tmp_path):
    (tmp_path / "file").touch()
    return tmp_path / "file" / "folder" / "figure.png", "Not a directory"


def a_broken_link(tmp_path):
    link = tmp_path / "figure.png"
    link.symlink_to(tmp_path / "gone" / "figure.png")
    return link, "No such file or directory"


@pytest.mark.parametrize(
    "case", [a_folder, an_unknown_suffix, no_suffix, below_a_file, far_below_a_file, a_broken_link]
)
def test_an_unusable_out_is_refused_in_one_sentence(tmp_path, case):
    out, reason = case(tmp_path)
    result = invoke("figure", "attention", "--out", out)
    assert result.exit_code == 2
    assert result.stderr.startswith("sinkformers: ")
    assert result.stderr.count("\n") == 1
    assert reason in result.stderr
    assert str(out) in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "figure5", "--preset", "smoke", "--out", "LONG"],
        ["run", "figure6", "--data", "LONG"],
        ["report", "LONG"],
        ["predict", "LONG"],
        ["figure", "attention", "--out", "LONG.png"],
        ["data", "status", "--data", "LONG"],
        ["data", "fetch", "mnist", "--data", "LONG"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_an_operating_system_error_is_one_sentence(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*(argument.replace("LONG", "a" * 5000) for argument in arguments))
    assert result.exit_code == 2
    assert re.fullmatch(r"sinkformers: cannot (use|write) .*: File name too long; .*\n", result.stderr)
    assert "Traceback" not in result.output


def test_a_page_to_fill_that_is_not_text_is_refused(tmp_path):
    write_run(tmp_path / "runs")
    (tmp_path / "page.md").write_bytes(b"caf\xe9")
    result = invoke("report", tmp_path / "runs", "--fill", tmp_path / "page.md")
    assert result.exit_code == 2
    assert result.stderr == (
        f"sinkformers: --fill: {tmp_path / 'page.md'} is not UTF-8 (unexpected end of data at byte 3); "
        "name a Markdown page in UTF-8.\n"
    )


def test_missing_matplotlib_is_refused_with_the_fix(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke("figure", "attention", "--out", tmp_path / "a.png")
    assert result.exit_code == 2
    assert (
        result.stderr == "sinkformers: figures need matplotlib; install it with pip install '.[cli]' in your clone.\n"
    )


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_missing_extra_is_one_sentence_and_no_traceback(missing):
    result = run_python(command_line("--help", before=f"sys.modules[{missing!r}] = None"))
    assert result.returncode == 1
    assert "pip install '.[cli]'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_doctor_is_a_subcommand(monkeypatch):
    """With the options and the exit code of `python -m sinkformers.doctor`."""
    asked = []
    monkeypatch.setattr("sinkformers.doctor.main", lambda arguments, program: asked.append((arguments, program)) or 1)
    done = invoke("doctor", "--bench", "--device", "cpu", "--json", "record.jsonl")
    assert done.exit_code == 1
    assert asked == [(["--bench", "--device", "cpu", "--json", "record.jsonl"], "sinkformers doctor")]
    assert invoke("doctor").exit_code == 1
    assert asked[-1][0] == []
