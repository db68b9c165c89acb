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
        ("The arrays of which no entry is read.", True),
        ("Merges " + "a" * 110, True),
        ("Whether a row sees no key.", False),
        ("Gradient with respect to the sink, in which no key is repeated.", False),
    ],
)
def test_first_lines(sound, text, stops):
    def findings(name, others):
        lines = f'def {name}():\n    """{text}"""\n' + 'def _b():\n    """Returns 1."""\n' * others
        (sound / "kernels/_a.py").write_text(lines)
        return len(list(check_prose.stumbling_lines(sound)))

    assert findings("a", 40) == stops  # a public name
    assert findings("_a", 40) == 0  # one of forty-one private ones
    assert findings("_a", 20) == stops


def test_long_errors(sound):
    raising = "def a(x):\n    raise ValueError(f'{x}' '%s')\n"
    for length, count in ((197, 0), (198, 1)):
        (sound / "kernels/_a.py").write_text(raising % ("a" * length))
        assert len(list(check_prose.long_errors(sound))) == count


def test_old_phrase_is_found(sound):
    (sound / "CHANGELOG.md").write_text("the roll call\n")  # what was, may be told
    (sound / "kernels/_b.py").write_text("# the points\n# of rest\n")
    (sound / "README.md").write_text("keys spread over\nthe mesh\n")
    findings = sorted(check_prose.old_phrases(sound))
    assert [x.split(": ")[0] for x in findings] == ["README.md:1", "kernels/_b.py:1"]


@pytest.mark.parametrize(
    ("message", "count"),
    [
        ("kernels: address a number\n\nIt had none.", 0),
        ("Return two numbers", 1),
        ("Returns two numbers\n\nOne was not enough.", 1),
        ("The second number", 2),
        ("Return " + "a" * 66 + "\n\nOne was not enough.", 1),
    ],
)
def test_commits(sound, tmp_path_factory, message, count):
    def findings(root):
        return len(list(check_prose.commit_findings(root)))

    (sound / "kernels/_a.py").write_text("a = 2\n")
    commit(sound, message)
    assert findings(sound) == count
    assert findings(sound / "kernels") == 0  # what was unpacked inside of a repository
    # what is on the main branch is not looked at again, nor what a clone without history has not
    git(sound, "update-ref", "refs/remotes/origin/main", "HEAD")
    commit(sound, "Say nothing of the library")
    assert findings(sound) == 0
    clone = tmp_path_factory.mktemp("clone")
    assert findings(clone) == 0  # a tarball
    git(clone, "clone", "--quiet", "--depth", "1", f"file://{sound}", ".")
    assert findings(clone) == 0
