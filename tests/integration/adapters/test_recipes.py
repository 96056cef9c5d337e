"""Pages of the manual, run as they are written, with the real programs where they can be had."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess

import pytest
import yaml

from nodepool.client import Pool
from nodepool.lease import ssh
from nodepool.lease.record import of_nodes
from nodepool.zk.records import Node
from tests.conftest import wait_for
from tests.integration.adapters.conftest import Shell
from tests.support import manual
from tests.support.ci_programs import program

PLAYBOOK = """
- hosts: small-noble
  gather_facts: false
  tasks:
    - copy: {content: "node {{ nodepool_id }}", dest: "/tmp/{{ marker }}-{{ inventory_hostname }}"}
"""


def test_commands_of_the_page_on_ansible(shell: Shell, tmp_path: pathlib.Path) -> None:
    (tmp_path / "work" / "site.yaml").write_text(
        PLAYBOOK.replace("/tmp/{{ marker }}", f"{tmp_path}/made")
    )
    text = "set -eu\n" + "\n".join(manual.commands("ansible"))
    done = shell(text, {"ANSIBLE_NOCOLOR": "1"}, path=str(pathlib.Path(program("ansible")).parent))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("SUCCESS") == 2 and done.stdout.count("changed=1") == 2
    assert {path.read_text().split()[0] for path in tmp_path.glob("made-n?")} == {"node"}


def test_inventory_lets_ansible_refuse_a_host_with_another_key(
    shell: Shell, tmp_path: pathlib.Path
) -> None:
    lease, inventory, ping, _playbook, returned = manual.commands("ansible")
    other = "ssh-keygen -q -t ed25519 -N '' -f other; key=$(ssh-keygen -yf other | cut -d' ' -f2)"
    forged = 'sed -i "s| AAAA.*| $key|" ~/.cache/nodepool/leases/*/known_hosts'
    text = f"set -u\n{lease}\n{inventory}\n{other}\n{forged}\n{ping}\ns=$?\n{returned}\nexit $s"
    done = shell(text, path=str(pathlib.Path(program("ansible")).parent))
    assert done.returncode != 0
    assert "Host key verification failed" in done.stdout + done.stderr


def test_templates_in_the_data_of_nodes_do_not_run_in_ansible(tmp_path: pathlib.Path) -> None:
    def node(number: int, **changes: object) -> Node:
        made = Node(f"{number:010}")
        made.type, made.interface_ip, made.connection_port, made.username = (
            ["small", "n1"],
            f"192.0.2.{number}",
            22,
            "root",
        )
        for name, value in changes.items():
            setattr(made, name, value)
        return made

    template = f"{{{{ lookup('pipe', 'touch {tmp_path}/ran') }}}}"
    nodes = [
        node(1),
        node(2),
        node(3, username=template),
        node(4, interface_ip=template),
        node(5, python_path=template),
    ]
    lease = of_nodes("200-0000000001", nodes)
    (tmp_path / "i.json").write_text(json.dumps(ssh.inventory(lease, str(tmp_path))))
    (tmp_path / "p.yaml").write_text(
        "- {hosts: all, gather_facts: false, connection: local, tasks: [{debug: {var: "
        "ansible_user}}]}"
    )
    folder = pathlib.Path(program("ansible")).parent
    argv = [folder / "ansible-playbook", "-i", tmp_path / "i.json", tmp_path / "p.yaml"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 and "n1 " in done.stdout and "n3" not in done.stdout, (
        done.stdout + done.stderr
    )
    assert not (tmp_path / "ran").exists()
    for name, address in (("n1", "192.0.2.1"), ("n2", "192.0.2.2")):
        shown = subprocess.run(
            [folder / "ansible-inventory", "-i", tmp_path / "i.json", "--host", name],
            capture_output=True,
            text=True,
            timeout=200,
            check=True,
        )
        assert (
            json.loads(shown.stdout)["ansible_host"] == address and "same name" not in shown.stderr
        )
    assert ssh.inventory(lease)["label-n1"] == {"hosts": ["n1", "n2"]}


def test_commands_of_the_page_on_tmt(shell: Shell, tmp_path: pathlib.Path) -> None:
    work = tmp_path / "work"
    (work / ".fmf").mkdir()
    (work / ".fmf" / "version").write_text("1\n")
    test = f"{{name: check, test: 'echo $TMT_TEST_NAME > {tmp_path}/made'}}"
    (work / "plan.fmf").write_text(
        f"discover: {{how: shell, tests: [{test}]}}\nexecute: {{how: tmt}}\n"
    )
    variables = {
        "TMT_SCRIPTS_DIR": str(tmp_path / "scripts"),
        "TMT_WORKDIR_ROOT": str(tmp_path / "tmt"),
    }
    text = "set -eu\n" + "\n".join(manual.commands("tmt"))
    done = shell(text, variables, path=str(pathlib.Path(program("tmt")).parent))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "made").read_text().strip() == "/check", done.stderr


def jenkins_scripts() -> list[str]:
    """Return the scripts in the order in which a pipeline runs them."""
    return re.findall(r"sh '''\n(.*?)'''", manual.block("jenkins", "groovy"), re.DOTALL)


@pytest.mark.parametrize(("check", "status"), [("test -e wanted && touch done", 0), ("exit 9", 2)])
def test_scripts_of_the_page_on_jenkins(
    shell: Shell, pool: Pool, home: pathlib.Path, check: str, status: int
) -> None:
    variables = {
        "BUILD_TAG": "jenkins-site-12",
        "BUILD_URL": "https://jenkins.example.org/job/site/12/",
    }
    assert shell(f"printf 'check:\\n\\t{check}\\n' > Makefile; touch wanted").returncode == 0
    lease, run, last = jenkins_scripts()
    done = shell(lease, variables)
    assert done.returncode == 0, done.stderr
    assert [(one.state, one.purpose) for one in pool.leases()] == [("held", variables["BUILD_URL"])]
    # A step that is repeated gets the same node.
    assert shell(lease, variables).returncode == 0 and len(pool.leases()) == 1
    assert shell(run, variables).returncode == status
    assert (home / "work" / "done").exists() == (status == 0)
    assert not (home / "work" / ".lease.json").exists()
    assert shell(last, variables).returncode == 0
    assert shell("rm .lease.json").returncode == 0 and shell(last, variables).returncode == 0


def test_script_of_the_page_on_jenkins_withdraws_its_request_when_it_is_aborted(
    shell: Shell, pool: Pool
) -> None:
    variables = {"BUILD_TAG": "t", "BUILD_URL": "u"}
    waits = "until grep -q 'position 1 in the queue' said || ! kill -0 $!; do sleep 0.1; done"
    with pool.lease("small-noble", "small-noble", for_="1h"):
        # Jenkins sends SIGTERM to all processes of the step.
        step = (
            f"set -m\ntouch said\n({jenkins_scripts()[0]}) 2>said &\n{waits}\nkill -TERM -- "
            "-$!; wait $!"
        )
        done = shell(f"{step}; status=$?; cat said >&2; exit $status", variables)
        assert done.returncode > 128 and "position 1 in the queue" in done.stderr, done
        wait_for(lambda: len(pool.leases()) == 1, 20, "only ours")


@pytest.mark.parametrize(
    ("label", "check", "status"),
    [("small-noble", "touch done", 0), ("small-noble", "exit 9", 2), ("", "", 0)],
)
def test_hooks_of_the_page_on_buildkite(
    shell: Shell, pool: Pool, home: pathlib.Path, label: str, check: str, status: int
) -> None:
    before, after = manual.block("buildkite", "bash"), manual.block("buildkite", "bash", 1)
    [step] = yaml.safe_load(manual.block("buildkite", "yaml"))["steps"]
    assert step["env"] == {"NODEPOOL_LABEL": "small-noble"}
    variables = {
        "BUILDKITE_JOB_ID": "0190",
        "BUILDKITE_BUILD_URL": "https://buildkite.com/acme/site/builds/12",
    }
    assert (
        shell(
            f"printf 'check:\\n\\t{check}\\n' > Makefile\ncat > before <<'END'\n{before}END\n"
        ).returncode
        == 0
    )
    command = step["command"] if label else 'test -z "${NODEPOOL_LEASE:-}"'
    # The agent sources the first hook and keeps the variables; what follows runs even if the
    # command failed.
    done = shell(
        f"export NODEPOOL_LABEL={label}\n. ./before\nset +e\n({command})\ns=$?\n({after})\nexit $s",
        variables,
    )
    assert done.returncode == status, done.stderr
    assert (home / "work" / "done").exists() == (check == "touch done")
