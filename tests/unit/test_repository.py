"""What the repository says about itself is true: links lead somewhere, settings and commands exist."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from pydantic_core import PydanticUndefined

from horde.errors import RETRYABLE, STATUS
from horde.settings import Settings

ROOT = Path(__file__).parents[2]
NOT_OURS = {".git", ".venv", "__pycache__", "build", "dist", "node_modules"}
ADR_PARTS = ("Context", "Drivers", "Options", "Outcome", "Consequences", "Confirmation")
# Written so that this file is not found by its own search: absolute paths of one machine, hosts of package indexes,
# and options that would choose an index over the one the machine's pip is set up for.
PRIVATE = re.compile(
    r"(?<![\w.])/(work|root|opt/(pypi|wheels))/"
    r"|py[p]i\.o[r]g|pythonhoste[d]|npm[j]s\.|--(extra-)?index-ur[l]|--find-link[s]"
)


def files() -> Iterator[Path]:
    """Every file of the repository, without what tools and builds leave behind."""
    folders = [ROOT]
    while folders:
        for entry in folders.pop().iterdir():
            if entry.name in NOT_OURS or entry.name.endswith(("_cache", ".egg-info")) or entry.name == ".hypothesis":
                continue
            if entry.is_dir():
                folders.append(entry)
            else:
                yield entry


def text_files() -> Iterator[tuple[Path, str]]:
    for path in files():
        try:
            yield path, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


DOCUMENTS = sorted(path for path in files() if path.suffix == ".md")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def code_blocks(document: Path, *languages: str) -> list[str]:
    """The fenced blocks in these languages, also those inside a list."""
    found = re.findall(r"^( *)```(\w*)\n(.*?)^\1```$", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for _, language, block in found if language in languages]


def shell_blocks(document: Path) -> list[str]:
    return code_blocks(document, "", "sh", "bash", "console")


def headings(document: Path) -> set[str]:
    """The anchors a Markdown page gets from its headings."""
    found = re.findall(r"^#+ (.*)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in found}


@pytest.mark.parametrize("document", DOCUMENTS, ids=names(DOCUMENTS))
def test_every_link_of_a_document_leads_somewhere(document: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        page = (document.parent / path).resolve() if path else document
        if not page.exists() or (anchor and anchor not in headings(page)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=names(DOCUMENTS))
def test_every_python_file_a_document_names_exists(document: Path) -> None:
    named = set(re.findall(r"`((?:tests|horde|worker|migrations|benchmarks)/[\w/]*(?:\.py)?)", document.read_text()))
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=names(DOCUMENTS))
def test_every_python_example_of_a_document_parses(document: Path) -> None:
    for block in code_blocks(document, "python"):
        ast.parse(block)


def test_every_decision_has_all_its_parts_and_is_listed() -> None:
    index = (ROOT / "docs/adr/README.md").read_text()
    decisions = sorted((ROOT / "docs/adr").glob("0*.md"))
    assert [int(path.name[:4]) for path in decisions] == list(range(1, len(decisions) + 1))
    for path in decisions:
        text = path.read_text()
        assert f"({path.name})" in index, path.name
        assert [part for part in ADR_PARTS if f"\n## {part}" not in text] == [], path.name
        assert re.search(r"^- Status: (proposed|accepted|superseded by \d{4})$", text, flags=re.MULTILINE), path.name


def test_every_setting_is_documented_with_its_default() -> None:
    page = (ROOT / "docs/reference/configuration.md").read_text()
    for name, field in Settings.model_fields.items():
        row = re.search(rf"^\| `HORDE_{name.upper()}` \| (.*?) \|", page, flags=re.MULTILINE)
        assert row, f"HORDE_{name.upper()} is missing"
        if field.default is None:
            assert row[1] == "none"
        elif field.default is not PydanticUndefined:
            assert row[1] == f"`{field.default}`"


def test_no_document_names_a_setting_that_nothing_reads() -> None:
    code = "\n".join(text for path, text in text_files() if path.suffix == ".py" and path != Path(__file__))
    compose = (ROOT / "docker-compose.yml").read_text()
    known = {f"HORDE_{name.upper()}" for name in Settings.model_fields} | set(re.findall(r"\$\{(HORDE_\w+):", compose))
    for path, text in text_files():
        if path.suffix in {".md", ".yml", ".Dockerfile"} or path == ROOT / ".ci/run":
            used = set(re.findall(r"\bHORDE_[A-Z_]*[A-Z]\b", text))
            # The worker builds its names from its options: `--api-key` is HORDE_WORKER_API_KEY.
            unread = {name for name in used - known if name not in code and not name.startswith("HORDE_WORKER_")}
            assert not unread, path


def commands_of_documents() -> Iterator[tuple[str, list[str]]]:
    """Every `horde ...` and `horde-worker ...` line of a shell example, and of the compose file."""
    for document in DOCUMENTS:
        # What is indented is a block as well; so is a list in a list, but no such line begins with a program's name.
        indented = re.findall(r"^ {4,}(\S*horde(?:-worker)? .*)$", document.read_text(), flags=re.MULTILINE)
        for block in [*shell_blocks(document), *indented]:
            for line in block.replace("\\\n", " ").splitlines():
                command = re.search(r"(?:^|\s|/)(horde(?:-worker)?) ([a-z].*)", line.split("  #")[0])
                if command and not line.lstrip().startswith("#"):
                    yield f"{document.name}: {line}", [command[1], *shlex.split(command[2])]
    for name, service in COMPOSE["services"].items():
        if name.startswith("worker"):
            yield f"docker-compose.yml: {name}", ["horde-worker", *service["command"]]


def test_the_commands_of_the_documents_exist_with_these_options() -> None:
    from horde.cli.main import horde
    from worker.cli import main as horde_worker

    seen = 0
    for where, (program, *words) in commands_of_documents():
        command: click.Command = horde if program == "horde" else horde_worker
        while isinstance(command, click.Group):
            assert words, where
            assert words[0] in command.commands, where
            command = command.commands[words.pop(0)]
        options = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        assert {word for word in words if word.startswith("--")} <= options, where
        seen += 1
    assert seen > 5


GUIDES = [path for path in DOCUMENTS if path.parent == ROOT or path.parent.name == "how-to"]


@pytest.mark.parametrize("document", GUIDES, ids=names(GUIDES))
def test_what_a_guide_says_to_type_is_found_without_an_activated_environment(document: Path) -> None:
    bare = [
        line
        for block in shell_blocks(document)
        for line in block.splitlines()
        if re.match(r"\s*(\w+=\S+ +)*(horde|horde-worker|pip|python)\s", line)
    ]
    assert bare == []
    # An indented block would escape the tests that read examples.
    assert not re.search(r"^ {4,}\S*(horde|horde-worker|pip|make) [a-z]", document.read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("document", GUIDES, ids=names(GUIDES))
def test_the_shell_examples_of_a_guide_are_complete(document: Path) -> None:
    for block in shell_blocks(document):
        checked = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, f"{block}\n{checked.stderr}"
        commands = "\n".join(line for line in block.splitlines() if not line.startswith("#"))
        used = set(re.findall(r"\$\{?([A-Z_]+)", commands)) - {"HOME"}
        assert used <= set(re.findall(r"\b([A-Z_]+)=", commands)), block
        assert not re.search(r"/[0-9a-f]{4,8}\.\.\.", commands), f"an id that nobody has: {block}"


def test_no_guide_puts_a_copy_of_the_repository_into_its_own_environment() -> None:
    for document in DOCUMENTS:
        for command in re.findall(r"^.*\bpip install\b.*$", "\n".join(shell_blocks(document)), flags=re.MULTILINE):
            if re.search(r"horde\b|['\" ]\.['\"\[\s]|['\" ]\.$", command.partition("pip install")[2]):
                assert re.search(r" (-e|--editable) ", command), f"{document.name}: {command}"
                assert not command.strip().startswith(".venv/"), f"{document.name}: {command}"


def test_the_front_page_can_be_read_in_a_terminal() -> None:
    long = [line for line in (ROOT / "README.md").read_text().splitlines() if len(line) > 160]
    assert long == []


def test_the_front_page_names_the_words_of_its_drawing_before_it() -> None:
    before = (ROOT / "README.md").read_text().split("```mermaid")[0].split("## How it goes")[1]
    assert [word for word in ("slot", "claim", "job", "lease", "settle") if f"**{word}" not in before] == []


def test_every_page_of_the_documents_is_reached_from_the_front_page() -> None:
    # The decisions have an index of their own.
    front = (ROOT / "README.md").read_text()
    pages = [str(path.relative_to(ROOT)) for path in DOCUMENTS if path.is_relative_to(ROOT / "docs")]
    assert [page for page in pages if not page.startswith("docs/adr/0") and f"({page})" not in front] == []


def test_the_scripts_are_shell_that_parses() -> None:
    scripts = [*(ROOT / "scripts").glob("*.sh"), ROOT / ".ci/run"]
    assert len(scripts) > 1
    for script in scripts:
        shell = "bash" if "bash" in script.read_text().splitlines()[0] else "sh"
        subprocess.run([shell, "-n", str(script)], check=True)


def test_the_documented_routes_are_those_of_the_broker() -> None:
    from horde.app import create_app

    # Nothing connects: an engine is lazy.
    app = create_app(Settings(database_url="postgresql://localhost/none", log_level="ERROR"))
    served = {
        (method, re.sub(r"<(?:\w+:)?(?:\w+_)?(\w+)>", r"{\1}", rule.rule.removeprefix("/api/v2/")))
        for rule in app.url_map.iter_rules()
        if rule.rule.startswith("/api/v2/")
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }
    table = (ROOT / "docs/reference/http-routes.md").read_text().split("\n## ")[0]
    documented = set()
    for methods, path in re.findall(r"^\| `([A-Z, ]+) ([\w/{}]+)` \|", table, flags=re.MULTILINE):
        documented |= {(method, path) for method in methods.split(", ")}
    assert documented == served


def test_the_error_codes_are_documented_as_they_are() -> None:
    page = (ROOT / "docs/reference/http-routes.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\d{3}) \| (yes|no) \|$", page, flags=re.MULTILINE)
    assert rows == [(code.value, str(status), "yes" if code in RETRYABLE else "no") for code, status in STATUS.items()]


def test_no_file_names_one_machine_or_a_package_index() -> None:
    found = [f"{path.relative_to(ROOT)}: {hit[0]}" for path, text in text_files() for hit in PRIVATE.finditer(text)]
    assert found == []


def test_the_compose_file_starts_each_service_after_what_it_needs() -> None:
    services = COMPOSE["services"]
    assert set(services) == {"postgres", "broker", "worker-cpu", "worker-gpu"}
    for name, service in services.items():
        for other, how in service.get("depends_on", {}).items():
            assert how == {"condition": "service_healthy"}, name
            assert "healthcheck" in services[other] or "\nHEALTHCHECK " in dockerfile(services[other]), other
    assert "postgres" in services["broker"]["depends_on"]
    assert all("broker" in services[worker]["depends_on"] for worker in ("worker-cpu", "worker-gpu"))


def test_a_plain_compose_up_starts_no_worker_and_the_gpu_is_asked_for_by_one_only() -> None:
    services = COMPOSE["services"]
    profiles = {name: service.get("profiles") for name, service in services.items()}
    assert profiles == {"postgres": None, "broker": None, "worker-cpu": ["cpu"], "worker-gpu": ["gpu"]}
    assert [name for name, service in services.items() if "deploy" in service] == ["worker-gpu"]


def test_every_image_has_a_version_and_every_volume_is_declared() -> None:
    bases = [service["image"] for service in COMPOSE["services"].values() if "image" in service]
    for path in (ROOT / "docker").glob("*.Dockerfile"):
        bases += re.findall(r"^FROM (\S+)", path.read_text(), flags=re.MULTILINE)
    assert len(bases) == 3
    assert all(re.search(r":\d", base) for base in bases)
    mounted = {
        volume.split(":")[0] for service in COMPOSE["services"].values() for volume in service.get("volumes", [])
    }
    assert mounted == set(COMPOSE["volumes"])


def test_what_a_dockerfile_copies_is_there_and_it_does_not_run_as_root() -> None:
    for service in COMPOSE["services"].values():
        if "build" in service:
            text = dockerfile(service)
            for sources in re.findall(r"^COPY (.*) \S+$", text, flags=re.MULTILINE):
                assert all((ROOT / source).exists() for source in sources.split()), sources
            assert re.search(r"^USER (?!root)\w+", text, flags=re.MULTILINE)


def dockerfile(service: dict[str, Any]) -> str:
    """The text a service is built from; empty for one that takes a ready image."""
    build = service.get("build")
    return (ROOT / build["context"] / build["dockerfile"]).read_text() if build else ""


def test_secrets_of_the_compose_file_come_from_outside() -> None:
    for service in COMPOSE["services"].values():
        for name, value in service.get("environment", {}).items():
            if re.search("PASSWORD|KEY|DATABASE_URL", name):
                assert "${" in value, name


def test_ci_runs_what_a_contributor_runs() -> None:
    ci = (ROOT / ".ci/run").read_text()
    assert re.findall(r"^part (make \w+)$", ci, flags=re.MULTILINE) == ["make lint", "make mutants", "make test"]
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


def test_every_target_of_the_makefile_is_explained() -> None:
    makefile = (ROOT / "Makefile").read_text()
    explained = set(re.findall(r"^([a-z-]+):.*## ", makefile, flags=re.MULTILINE))
    assert {"run", "test", "lint", "bench", "mutants", "help"} <= explained
