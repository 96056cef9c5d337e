"""Confinement and limits of slivers."""

from __future__ import annotations

from tests.world.mutation import Mutation

#: Modules.
_IN_SECCOMP = "nodepool.nodemanager.confinement.seccomp"
_IN_CGROUPS = "nodepool.nodemanager.limits.cgroups"
_IN_TREE = "nodepool.nodemanager.limits.cgroups.tree"
_IN_KILL = "nodepool.nodemanager.limits.cgroups.kill"
_IN_V2 = "nodepool.nodemanager.limits.cgroups.v2"
_IN_DAILY_BYTES = "nodepool.nodemanager.limits.daily_bytes"
_IN_DISKS = "nodepool.nodemanager.limits.disks"
_IN_FREE_SPACE = "nodepool.nodemanager.limits.free_space"
_IN_NETLINK = "nodepool.nodemanager.limits.netlink"
#: Files of tests.
_DISKS = "tests/integration/nodemanager/isolation/test_disks.py::"
_NETLINK = "tests/integration/nodemanager/isolation/test_netlink.py::"
_FILTER = "tests/unit/nodemanager/helper/test_rootfs.py::"
_ACCOUNTING = "tests/unit/nodemanager/limits/test_accounting.py::"
_CGROUPS = "tests/unit/nodemanager/limits/test_cgroups.py::"
_SPACE = "tests/unit/nodemanager/limits/test_free_space.py::"

GUARDS: dict[str, Mutation] = {
    # -- the system call filter of slivers
    "slivers-call-by-other-architectures": Mutation(
        _IN_SECCOMP,
        "_jump(_JEQ, _ARCHITECTURES[machine], 1, 0)",
        "_jump(_JEQ, _ARCHITECTURES[machine], 1, 1)",
        f"{_FILTER}test_only_listed_system_calls_are_allowed[x86_64]",
    ),
    "slivers-make-unlisted-calls": Mutation(
        _IN_SECCOMP,
        "    program.append(_refuse(errno.ENOSYS))\n",
        "    program.append(_statement(_RETURN, _ALLOW))\n",
        f"{_FILTER}test_only_listed_system_calls_are_allowed[x86_64]",
    ),
    "slivers-create-user-namespaces": Mutation(
        _IN_SECCOMP,
        'syscalls.CLONE_NEWUSER if "mount" in given else _NAMESPACES',
        '0 if "mount" in given else _NAMESPACES',
        f"{_FILTER}test_filter_of_arguments[x86_64]",
    ),
    "slivers-create-time-namespaces": Mutation(
        _IN_SECCOMP,
        'spaces if "mount" in given else spaces | _CLONE_NEWTIME',
        "spaces",
        f"{_FILTER}test_filter_of_arguments[x86_64]",
    ),
    "slivers-open-raw-sockets": Mutation(
        _IN_SECCOMP, "    if raw:\n", "    if True:\n", f"{_FILTER}test_filter_of_arguments[x86_64]"
    ),
    "slivers-open-packet-sockets": Mutation(
        _IN_SECCOMP,
        "(_PACKET,) if raw else ()",
        "(_PACKET,)",
        f"{_FILTER}test_filter_of_arguments[x86_64]",
    ),
    "slivers-administer-by-netlink": Mutation(
        _IN_SECCOMP,
        "_NETLINK_ADMINISTRATION if administer else ()",
        "_NETLINK_ADMINISTRATION",
        f"{_FILTER}test_filter_of_arguments[x86_64]",
    ),
    "slivers-attach-programs-to-sockets": Mutation(
        _IN_SECCOMP,
        '() if "tcpdump" in given else _ATTACH',
        "()",
        f"{_FILTER}test_filter_of_arguments[x86_64]",
    ),
    "slivers-type-into-terminals": Mutation(
        _IN_SECCOMP,
        "(0x5412, 0x541C, 0x5423)",
        "(0x541C, 0x5423)",
        f"{_FILTER}test_filter_of_arguments[x86_64]",
    ),
    "slivers-install-filters-by-prctl": Mutation(
        _IN_SECCOMP,
        "*_refuse_these((_SECCOMP_MODE_FILTER,), *pretended),",
        "*_refuse_these((_SECCOMP_MODE_FILTER,)),",
        f"{_FILTER}test_filter_of_arguments[x86_64]",
    ),
    "slivers-install-filters-by-seccomp": Mutation(
        _IN_SECCOMP,
        "*_refuse_these((_SECCOMP_SET_MODE_FILTER,), *no_filters)[:-1],",
        "*_refuse_these((_SECCOMP_SET_MODE_FILTER,))[:-1],",
        f"{_FILTER}test_filter_of_arguments[x86_64]",
    ),
    "slivers-answer-calls-of-others": Mutation(
        _IN_SECCOMP,
        "            *_none_of(_NEW_LISTENER, eperm),",
        "            allow,",
        f"{_FILTER}test_filter_of_arguments[x86_64]",
    ),
    "calls-need-no-privilege": Mutation(
        _IN_SECCOMP,
        "        if privilege in given:",
        "        if True:",
        f"{_FILTER}test_only_listed_system_calls_are_allowed[x86_64]",
    ),
    # -- limits of slivers
    "joining-processes-are-not-killed": Mutation(
        _IN_KILL,
        "        _signal(rest, groups)\n",
        "        pass\n",
        f"{_CGROUPS}test_process_that_the_kernel_did_not_kill_with_the_group_is_killed",
    ),
    "frozen-processes-are-not-killed": Mutation(
        _IN_KILL,
        "        thaw()\n",
        "        pass\n",
        f"{_CGROUPS}test_frozen_processes_are_thawed_so_that_they_end",
    ),
    "reused-process-ids-are-killed": Mutation(
        _IN_KILL,
        "if any(pid in processes(group) for _, group in groups):",
        "if True:",
        f"{_CGROUPS}test_process_that_has_the_id_of_one_that_ended_is_not_killed",
    ),
    "memory-limits-below-the-use-are-set": Mutation(
        _IN_V2,
        'if limit and (number(group / "memory.current") or 0) > value:',
        "if False:",
        f"{_CGROUPS}test_v2_memory_below_use_is_refused",
    ),
    "swap-has-no-limit": Mutation(
        _IN_V2,
        '        write(group / "memory.swap.max", 0 if limit else "max")',
        "        pass",
        f"{_CGROUPS}test_limits_are_written_to_the_cgroup",
    ),
    "slivers-that-cannot-be-frozen-stay-half-frozen": Mutation(
        _IN_V2,
        '            write(group / "cgroup.freeze", 0)\n',
        "            pass\n",
        f"{_CGROUPS}test_sliver_that_cannot_be_frozen_continues",
    ),
    "other-limits-change-before-memory": Mutation(
        _IN_CGROUPS,
        'sorted(self.tree.places, key=lambda each: "memory" not in each.controllers)',
        'sorted(self.tree.places, key=lambda each: "memory" in each.controllers)',
        f"{_CGROUPS}test_refused_memory_limit_changes_no_other_limit",
    ),
    "cores-of-refused-changes-stay-reserved": Mutation(
        _IN_CGROUPS,
        "                self._cores.put_back(name, before)",
        "                pass",
        f"{_CGROUPS}test_refused_memory_limit_changes_no_other_limit",
    ),
    "names-of-slivers-make-paths": Mutation(
        _IN_TREE,
        "        directory = check_name(name) + SUFFIX",
        "        directory = name + SUFFIX",
        f"{_CGROUPS}test_names_that_are_none_make_no_path[../x]",
    ),
    "removed-trees-are-not-created-again": Mutation(
        _IN_CGROUPS,
        " or not all(parent.is_dir() for place in self.tree.places"
        " for parent in self.tree.parents(place))",
        "",
        f"{_CGROUPS}test_tree_that_others_removed_is_created_again",
    ),
    "processes-that-start-during-a-move-stay": Mutation(
        _IN_TREE,
        "    while pids := processes(old):",
        "    if pids := processes(old):",
        f"{_CGROUPS}test_processes_that_start_during_a_move_are_moved_too",
    ),
    "moved-slivers-are-thawed": Mutation(
        _IN_TREE,
        "        files.freeze(new, True)",
        "        pass",
        f"{_CGROUPS}test_frozen_sliver_is_frozen_after_a_move",
    ),
    "all-cores-are-reserved": Mutation(
        "nodepool.nodemanager.limits.cores",
        "len(free) - 1:",
        "len(free):",
        f"{_CGROUPS}test_one_core_stays",
    ),
    "processes-of-the-host-count-its-own-sockets": Mutation(
        _IN_NETLINK,
        ("                return\n            directory"),
        ("                pass\n            directory"),
        f"{_NETLINK}test_sliver_with_too_many_sockets_is_stopped_and_the_host_is_never_checked",
    ),
    "netlink-sockets-have-no-limit": Mutation(
        _IN_NETLINK,
        "                if many:",
        "                if False:",
        f"{_NETLINK}test_sliver_with_too_many_sockets_is_stopped_and_the_host_is_never_checked",
    ),
    "clocks-that-are-set-back-prolong-periods": Mutation(
        _IN_DAILY_BYTES,
        "elif not 0 <= now - account.began < PERIOD:",
        "elif not now - account.began < PERIOD:",
        f"{_ACCOUNTING}test_a_clock_that_was_set_back_begins_a_new_period",
    ),
    "rspecs-exceed-the-limit-of-the-host": Mutation(
        _IN_DAILY_BYTES,
        "min(most, int(rspec[limit_kib]) * 1024 or most)",
        "int(rspec[limit_kib]) * 1024 or most",
        f"{_ACCOUNTING}test_the_lower_limit_of_rspec_and_host_counts",
    ),
    "new-slivers-begin-with-nothing-used": Mutation(
        _IN_DAILY_BYTES,
        "name in counters or 0 <= now - account.began < PERIOD",
        "name in counters",
        f"{_ACCOUNTING}test_deleting_and_making_again_does_not_reset",
    ),
    "disks-have-devices": Mutation(
        _IN_DISKS,
        "syscalls.MS_NOSUID | syscalls.MS_NODEV | _MS_NOATIME",
        "_MS_NOATIME",
        f"{_DISKS}test_devices_and_set_user_id_files_have_no_effect_on_the_disk",
    ),
    "images-in-use-are-mounted": Mutation(
        _IN_DISKS,
        "            _await_release(name, path)\n",
        "",
        f"{_DISKS}test_held_by_another_namespace[65536]",
    ),
    "quotas-below-the-use-are-set": Mutation(
        _IN_DISKS,
        "        if used > kib * KIB:",
        "        if False:",
        f"{_DISKS}test_smaller_limit_applies_immediately",
    ),
    "quotas-do-not-bind-root": Mutation(
        _IN_DISKS,
        "    control.write_text(str(surplus + reserve))",
        "    control.write_text(str(reserve))",
        f"{_DISKS}test_smaller_limit_applies_immediately",
    ),
    "links-in-place-of-images-are-followed": Mutation(
        _IN_DISKS,
        "held(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)) as descriptor",
        "held(os.open(path, os.O_RDWR | os.O_CLOEXEC)) as descriptor",
        f"{_DISKS}test_a_link_in_place_of_the_image_is_not_followed",
    ),
    "reserves-are-promised": Mutation(
        _IN_FREE_SPACE,
        "state.f_bavail * state.f_frsize - self.reserve()",
        "state.f_bavail * state.f_frsize",
        f"{_SPACE}test_reserve_of_the_host_is_not_promised",
    ),
    "ballast-is-kept": Mutation(
        _IN_FREE_SPACE,
        "                if give_up(directory):",
        "                if False:",
        f"{_SPACE}test_ballast_is_released_when_bytes_or_inodes_are_short[7340032-1000]",
    ),
    "refused-limits-with-swap-change-the-memory-limit": Mutation(
        "nodepool.nodemanager.limits.cgroups.v1",
        "                write(plain, previous)\n",
        "                pass\n",
        f"{_CGROUPS}test_v1_memory_limit_is_restored_when_that_with_swap_is_refused",
    ),
    "guarantees-use-the-reserve-of-the-host": Mutation(
        "nodepool.nodemanager.limits.cgroups.weights",
        "host = max(reserve, 10, rest",
        "host = max(10, rest",
        f"{_CGROUPS}test_reserve_of_the_host_holds_whatever_is_guaranteed",
    ),
    "ballast-takes-the-last-bytes": Mutation(
        _IN_FREE_SPACE,
        "size = min(BALLAST, has + state.f_bavail * state.f_frsize - 2 * LEAST)",
        "size = BALLAST",
        f"{_SPACE}test_ballast_leaves_space_for_others",
    ),
    "links-in-place-of-new-images-are-followed": Mutation(
        "nodepool.nodemanager.limits.disk_templates",
        "target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600",
        "target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600",
        f"{_DISKS}test_link_in_place_of_a_new_image_is_not_followed",
    ),
}
