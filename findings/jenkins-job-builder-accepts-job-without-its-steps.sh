#!/bin/sh
# jenkins-job-builder 6.5.0 (PyPI): it refuses unknown elements at the top of a file, unknown types of steps, and wrong values of
# options, and names the line. A job with "builder:" (the element that defines a macro) instead of "builders:" is accepted
# without a message, also by "jenkins-jobs test": in Jenkins, the job runs no step, and each of its builds passes.
# Misspelled options are accepted, too: with "timout: 120", builds are ended after 3 minutes, the default.
# Seen: "jobs: 1, steps 0; builders: 0, steps 1; unknown step: 1; builder: 0, steps 0, messages 0; timout: 0, minutes 3, messages
# 0" (on one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check jenkins-job-builder==6.5.0
cd "$work"
mkdir home
export HOME="$work/home" XDG_CACHE_HOME="$work/home"
# The status of "jenkins-jobs test" for the job in the file "jobs.yaml", with the job for Jenkins in the file "xml".
convert() {
    status=0
    "$work/venv/bin/jenkins-jobs" test jobs.yaml >xml 2>log || status=$?
    echo "$status"
}
steps() {
    grep -c '<hudson.tasks.Shell>' xml || :
}
# How many messages there are, except those of each run.
messages() {
    grep -vcE '^INFO:|jenkins_jobs[.]ini, not found|[(]Deprecated[)]' log || :
}
printf -- '- jobs:\n    name: unit\n    builders:\n      - shell: make test\n' >jobs.yaml
seen="jobs: $(convert), steps $(steps)"
printf -- '- job:\n    name: unit\n    builders:\n      - shell: make test\n' >jobs.yaml
seen="$seen; builders: $(convert), steps $(steps)"
sed -i 's/shell:/shel:/' jobs.yaml
seen="$seen; unknown step: $(convert)"
sed -i 's/shel:/shell:/; s/builders:/builder:/' jobs.yaml
seen="$seen; builder: $(convert), steps $(steps), messages $(messages)"
printf -- '- job:\n    name: unit\n    wrappers:\n      - timeout:\n          timout: 120\n' >jobs.yaml
seen="$seen; timout: $(convert), minutes $(sed -n 's,.*<timeoutMinutes>\(.*\)</timeoutMinutes>.*,\1,p' xml), messages $(messages)"
echo "$seen"
first='jobs: 1, steps 0; builders: 0, steps 1; unknown step: 1; builder: 0, steps 0, messages 0'
[ "$seen" = "$first; timout: 0, minutes 3, messages 0" ]
