#!/bin/sh
# GitPython 3.2.1, pygit2 1.21.0 and dulwich 1.2.21 (PyPI): a filter of .gitattributes (that of Git LFS, for example) and
# "text eol=crlf" apply to a file that git or dulwich adds. index.add() of GitPython applies neither of them, and that of
# pygit2 only the second, without a warning, even if the filter is "required": the large file itself is committed instead of
# its pointer, and git then shows the files as modified. In GitPython, repo.git.add() runs git, and applies both.
# Seen: "filter, line ends: git yes, yes; dulwich yes, yes; GitPython no, no; GitPython by repo.git yes, yes; pygit2 no, yes; modified
# after the commit: GitPython big.bin run.bat; pygit2 big.bin" (on one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check GitPython==3.2.1 pygit2==1.21.0 dulwich==1.2.21
mkdir "$work/home"
export HOME="$work/home" GIT_CONFIG_NOSYSTEM=1
git config --global user.name x
git config --global user.email x@example.org
git config --global filter.lfs.clean 'sed s/content/pointer/'
git config --global filter.lfs.smudge 'sed s/pointer/content/'
git config --global filter.lfs.required true
cat >"$work/run.py" <<'END'
import pathlib
import subprocess
import tempfile

import dulwich.porcelain
import git
import pygit2

NAMES = ["big.bin", "run.bat"]
MODIFIED = {}


def run(tree, *arguments):
    return subprocess.run(["git", *arguments], cwd=tree, check=True, capture_output=True, text=True).stdout


def by_pygit2(tree):
    index = pygit2.Repository(tree).index
    for name in NAMES:
        index.add(name)
    index.write()


def added(name, add):
    """Return whether the filter and the conversion of line ends were applied to what is added."""
    with tempfile.TemporaryDirectory() as tree:
        run(tree, "init", "--quiet")
        path = pathlib.Path(tree)
        (path / ".gitattributes").write_text("*.bin filter=lfs\n*.bat text eol=crlf\n")
        run(tree, "add", ".gitattributes")
        (path / "big.bin").write_text("content\n")
        (path / "run.bat").write_bytes(b"echo\r\n")
        add(tree)
        run(tree, "commit", "--quiet", "--message", "x")
        stored = [subprocess.run(["git", "show", f"HEAD:{each}"], cwd=tree, capture_output=True).stdout for each in NAMES]
        status = [line.split()[1] for line in run(tree, "status", "--short").splitlines()]
        if status:
            MODIFIED[name] = " ".join(sorted(status))
        applied = stored[0] == b"pointer\n", stored[1] == b"echo\n"
        return f"{name} {', '.join('yes' if each else 'no' for each in applied)}"


seen = [
    added("git", lambda tree: run(tree, "add", *NAMES)),
    added("dulwich", lambda tree: dulwich.porcelain.add(tree, [f"{tree}/{name}" for name in NAMES])),
    added("GitPython", lambda tree: git.Repo(tree).index.add(NAMES)),
    added("GitPython by repo.git", lambda tree: git.Repo(tree).git.add(*NAMES)),
    added("pygit2", by_pygit2),
]
modified = "; ".join(f"{name} {files}" for name, files in MODIFIED.items())
print(f"filter, line ends: {'; '.join(seen)}; modified after the commit: {modified}")
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
seen='filter, line ends: git yes, yes; dulwich yes, yes; GitPython no, no; GitPython by repo.git yes, yes; pygit2 no, yes'
grep -qxF "$seen; modified after the commit: GitPython big.bin run.bat; pygit2 big.bin" "$work/seen"
