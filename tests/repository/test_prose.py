"""The checker of prose, which `make check` runs, sees each of its rules broken."""

import subprocess

import check_prose
import pytest

pytestmark = pytest.mark.structure


@pytest.fixture
def sound(tmp_path):
    """A repository of one public function, in one commit."""
    for folder in check_prose.FOLDERS:
        (tmp_path / folder).mkdir()
    (tmp_path / "kernels/__init__.py").write_text("from ._a import a as a\n")
    (tmp_path / "kernels/_a.py").write_text('def a():\n    """Returns a number."""\n')
    git(tmp_path, "init", "--quiet")
    commit(tmp_path, "Return a number")
    return tmp_path


def git(root, *arguments):
    who = ["-c", "user.name=a", "-c", "user.email=a"]
    subprocess.run(["git", *who, *arguments], cwd=root, check=True)


def commit(root, message):
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--allow-empty", "-m", message)


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("That of the sink.", True),
        ("What a kernel computes of a tile.", True),
        ("The arrays of which no entry is read.", True),
        ("Merges " + "a" * 110, True),
        ("Whether a row sees no key.", False),
        ("Gradient with respect to the sink, in which no key is repeated.", False),
    ],
)
def test_first_lines(sound, text, stops):
    file = sound / "kernels/_a.py"
    file.write_text(f'def a():\n    """{text}"""\n')
    assert len(list(check_prose.stumbling_lines(sound))) == stops  # a public name
    file.write_text(f'def _a():\n    """{text}"""\n' + 'def _b():\n    """Returns 1."""\n' * 40)
    assert not list(check_prose.stumbling_lines(sound))  # one of forty-one private ones
    file.write_text(f'def _a():\n    """{text}"""\n' + 'def _b():\n    """Returns 1."""\n' * 20)
    assert len(list(check_prose.stumbling_lines(sound))) == stops


def test_long_errors(sound):
    raising = "def a(x):\n    raise ValueError(f'{x}' '%s')\n"
    for length, count in ((197, 0), (198, 1)):
        (sound / "kernels/_a.py").write_text(raising % ("a" * length))
        assert len(list(check_prose.long_errors(sound))) == count


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("kernels/_b.py", '"""One. Raises nothing."""\n'),
        ("kernels/_b.py", "# the points\n# of rest\n"),
        ("docs/page.md", "keys spread over\nthe mesh\n"),
        ("tests/test_b.py", "# the roll call\n"),
    ],
)
def test_old_phrase_is_found(sound, where, text):
    (sound / where).parent.mkdir(exist_ok=True)
    (sound / where).write_text(text)
    (finding,) = check_prose.old_phrases(sound)
    assert finding.startswith(f"{where}:1: ")
    (sound / where).write_text("b = 1\n")
    (sound / "CHANGELOG.md").write_text(text)  # what was, may be told
    assert list(check_prose.old_phrases(sound)) == []


@pytest.mark.parametrize(
    ("message", "count"),
    [
        ("Return two numbers\n\nOne was not enough.", 0),
        ("kernels: address a number\n\nIt had none.", 0),
        ("Return two numbers", 1),
        ("Returns two numbers\n\nOne was not enough.", 1),
        ("The second number", 2),
        ("Return " + "a" * 66 + "\n\nOne was not enough.", 1),
    ],
)
def test_commits(sound, message, count):
    (sound / "kernels/_a.py").write_text("a = 2\n")
    commit(sound, message)
    assert len(list(check_prose.commit_findings(sound))) == count
    if count:  # what is on the main branch is not looked at again
        git(sound, "update-ref", "refs/remotes/origin/main", "HEAD")
        commit(sound, "Say nothing of the library")
        assert not list(check_prose.commit_findings(sound))


def test_commits_out_of_sight(sound, tmp_path_factory):
    """A tarball, or one that was unpacked inside of a repository; a clone without history."""
    commit(sound, "Returned")
    assert list(check_prose.commit_findings(sound))
    assert not list(check_prose.commit_findings(sound / "kernels"))
    clone, tarball = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("tarball")
    assert not list(check_prose.commit_findings(tarball))
    commit(sound, "Say nothing of the library")
    git(clone, "clone", "--quiet", "--depth", "1", f"file://{sound}", ".")
    assert not list(check_prose.commit_findings(clone))
