#!/bin/sh
# APScheduler 3.11.3, croniter 7.0.0, cronsim 2.8 and pycron 3.3.0 (PyPI): of "0 3 1 * mon", which names a day of the month and
# a weekday, cron runs on the first day of the month and on each Monday, and so it is in croniter (used by Buildbot), cronsim
# and pycron. APScheduler (used by Zuul), also by from_crontab() for "a standard crontab expression", runs only on a Monday
# that is the first: the same line of a periodic pipeline is due once instead of 63 times in 2026, without a warning.
# Seen: "2026: croniter 63, cronsim 63, pycron 63, apscheduler 1".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check apscheduler==3.11.3 croniter==7.0.0 cronsim==2.8 \
    pycron==3.3.0
cat >"$work/run.py" <<'END'
import datetime

import pycron
from apscheduler.triggers.cron import CronTrigger
from croniter import croniter
from cronsim import CronSim

RULE = "0 3 1 * mon"
UTC = datetime.timezone.utc
DAYS = [datetime.datetime(2026, 1, 1, 3) + datetime.timedelta(days=number) for number in range(365)]
FIRST, LAST = DAYS[0] - datetime.timedelta(hours=1), DAYS[-1]


def iterated(dates):
    count = 0
    while next(dates) <= LAST:
        count += 1
    return count


def croniter_dates():
    dates = croniter(RULE, FIRST)
    while True:
        yield dates.get_next(datetime.datetime)


def apscheduler_dates():
    trigger, now = CronTrigger.from_crontab(RULE, timezone="UTC"), FIRST.replace(tzinfo=UTC)
    while True:
        date = trigger.get_next_fire_time(None, now)
        yield date.replace(tzinfo=None)
        now = date + datetime.timedelta(seconds=1)


print(
    f"2026: croniter {iterated(croniter_dates())}, cronsim {iterated(iter(CronSim(RULE, FIRST)))}, "
    f"pycron {sum(pycron.is_now(RULE, day) for day in DAYS)}, apscheduler {iterated(apscheduler_dates())}"
)
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
grep -qxF '2026: croniter 63, cronsim 63, pycron 63, apscheduler 1' "$work/seen"
