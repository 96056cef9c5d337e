#!/bin/sh
# ansible-core 2.19.14 (PyPI): the keyword `timeout` of a task only ends Ansible's own waiting. The task fails with "Timed
# out after 2 second(s)", and `ignore_errors`, `rescue` or `retries` proceed, but the module and its command run on, also
# with the connection `local`. A repeated task thus runs beside the first one. `async` with the same number of seconds, whose
# purpose is another one, ends the command as well.
# Seen: "timeout: failed, command continues; async: failed, command killed".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check ansible-core==2.19.14
cat >"$work/play.yaml" <<'END'
- hosts: all
  gather_facts: false
  vars:
    ansible_connection: local
    ansible_python_interpreter: "{{ ansible_playbook_python }}"
  tasks:
    - name: timeout
      ansible.builtin.shell: echo > timeout.begun; sleep 5; echo > timeout.ended
      args:
        chdir: "{{ work }}"
      timeout: 3
      ignore_errors: true
      register: by_timeout
    - name: async
      ansible.builtin.shell: echo > async.begun; sleep 5; echo > async.ended
      args:
        chdir: "{{ work }}"
      async: 3
      poll: 1
      ignore_errors: true
      register: by_async
    - name: wait for what continues
      ansible.builtin.command: sleep 8
    - name: result
      ansible.builtin.copy:
        dest: "{{ work }}/failed"
        content: "{{ by_timeout is failed }} {{ by_async is failed }}\n"
END
export ANSIBLE_LOCAL_TEMP="$work/local" ANSIBLE_REMOTE_TEMP="$work/remote" ANSIBLE_ASYNC_DIR="$work/async" HOME="$work"
"$work/venv/bin/ansible-playbook" -i 'host,' -e "work=$work" "$work/play.yaml" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
grep -q 'Timed out after 3 second' "$work/log"
grep -qx 'True True' "$work/failed"
seen=
for name in timeout async; do
    [ -e "$work/$name.begun" ]
    seen="$seen${seen:+; }$name: failed, command $([ -e "$work/$name.ended" ] && echo continues || echo killed)"
done
echo "$seen"
[ "$seen" = 'timeout: failed, command continues; async: failed, command killed' ]
