"""Numbers of system calls: (x86_64, aarch64); None where a machine has no such call. Data for :mod:`seccomp`."""

from __future__ import annotations

Calls = dict[str, tuple[int | None, int | None]]

#: What programs of jobs need, by what it is for. Whatever is not here is refused.
ALLOWED: dict[str, Calls] = {
    # Files and memory of programs; what may be opened is for the tree and the rights of files to say.
    "files": {
        "read": (0, 63), "write": (1, 64), "open": (2, None), "close": (3, 57), "stat": (4, None), "fstat": (5, 80),
        "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291), "lseek": (8, 62), "mmap": (9, 222),
        "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216), "msync": (26, 227), "mincore": (27, 232),
        "madvise": (28, 233), "brk": (12, 214), "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66),
        "preadv": (295, 69), "pwritev": (296, 70), "preadv2": (327, 286), "pwritev2": (328, 287), "access": (21, None),
        "faccessat": (269, 48), "faccessat2": (439, 439), "pipe": (22, None), "pipe2": (293, 59), "dup": (32, 23),
        "dup2": (33, None), "dup3": (292, 24), "fcntl": (72, 25), "flock": (73, 32), "fsync": (74, 82), "fdatasync": (75, 83),
        "syncfs": (306, 267), "sync_file_range": (277, 84), "truncate": (76, 45), "ftruncate": (77, 46),
        "fallocate": (285, 47), "fadvise64": (221, 223), "readahead": (187, 213), "getdents": (78, None), "getdents64": (217, 61),
        "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "rename": (82, None), "renameat": (264, 38),
        "renameat2": (316, 276), "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "creat": (85, None),
        "link": (86, None), "linkat": (265, 37), "unlink": (87, None), "unlinkat": (263, 35), "symlink": (88, None),
        "symlinkat": (266, 36), "readlink": (89, None), "readlinkat": (267, 78), "chmod": (90, None), "fchmod": (91, 52),
        "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None), "fchown": (93, 55), "lchown": (94, None),
        "fchownat": (260, 54), "umask": (95, 166), "mknod": (133, None), "mknodat": (259, 33), "utime": (132, None),
        "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88), "statfs": (137, 43), "fstatfs": (138, 44),
        "openat": (257, 56), "openat2": (437, 437), "close_range": (436, 436), "sendfile": (40, 71), "splice": (275, 76),
        "tee": (276, 77), "vmsplice": (278, 75), "copy_file_range": (326, 285), "setxattr": (188, 5), "lsetxattr": (189, 6),
        "fsetxattr": (190, 7), "getxattr": (191, 8), "lgetxattr": (192, 9), "fgetxattr": (193, 10), "listxattr": (194, 11),
        "llistxattr": (195, 12), "flistxattr": (196, 13), "removexattr": (197, 14), "lremovexattr": (198, 15),
        "fremovexattr": (199, 16), "setxattrat": (463, 463), "getxattrat": (464, 464), "listxattrat": (465, 465),
        "removexattrat": (466, 466), "name_to_handle_at": (303, 264), "memfd_create": (319, 279), "cachestat": (451, 451),
        "chroot": (161, 51), "ioctl": (16, 29),
    },
    # Waiting for events.
    "waiting": {
        "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create": (213, None),
        "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22),
        "epoll_pwait2": (441, 441), "eventfd": (284, None), "eventfd2": (290, 19), "signalfd": (282, None),
        "signalfd4": (289, 74), "timerfd_create": (283, 85), "timerfd_settime": (286, 86), "timerfd_gettime": (287, 87),
        "inotify_init": (253, None), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27), "inotify_rm_watch": (255, 28),
    },
    # Sockets, whose kinds are checked below; addresses are those of the sliver's own network.
    "network": {
        "connect": (42, 203), "accept": (43, 202), "accept4": (288, 242), "sendto": (44, 206), "recvfrom": (45, 207),
        "sendmsg": (46, 211), "recvmsg": (47, 212), "sendmmsg": (307, 269), "recvmmsg": (299, 243), "shutdown": (48, 210),
        "bind": (49, 200), "listen": (50, 201), "getsockname": (51, 204), "getpeername": (52, 205), "setsockopt": (54, 208),
        "getsockopt": (55, 209), "socket": (41, 198), "socketpair": (53, 199),
    },
    # Processes; new namespaces are checked below. ptrace and the like reach processes of the same user inside.
    "processes": {
        "clone": (56, 220), "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
        "exit": (60, 93), "exit_group": (231, 94), "wait4": (61, 260), "waitid": (247, 95), "kill": (62, 129),
        "tkill": (200, 130), "tgkill": (234, 131), "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178),
        "getpgrp": (111, None), "getpgid": (121, 155), "setpgid": (109, 154), "getsid": (124, 156), "setsid": (112, 157),
        "set_tid_address": (218, 96), "prctl": (157, 167), "arch_prctl": (158, None), "personality": (135, 92),
        "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "process_madvise": (440, 440), "process_mrelease": (448, 448),
        "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "unshare": (272, 97),
        "rseq": (334, 293), "membarrier": (324, 283), "seccomp": (317, 277),
        "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446),
    },
    # Users and groups, with CAP_SETUID and CAP_SETGID: sudo, su, sshd.
    "identity": {
        "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getresuid": (118, 148),
        "getresgid": (120, 150), "getgroups": (115, 158), "setuid": (105, 146), "setgid": (106, 144), "setreuid": (113, 145),
        "setregid": (114, 143), "setresuid": (117, 147), "setresgid": (119, 149), "setgroups": (116, 159), "setfsuid": (122, 151),
        "setfsgid": (123, 152), "capget": (125, 90), "capset": (126, 91),
    },
    # Signals.
    "signals": {
        "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
        "rt_sigtimedwait": (128, 137), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
        "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "pause": (34, None), "alarm": (37, None),
        "restart_syscall": (219, 128),
    },
    # Clocks are read, never set; timers.
    "time": {
        "gettimeofday": (96, 169), "time": (201, None), "clock_gettime": (228, 113), "clock_getres": (229, 114),
        "clock_nanosleep": (230, 115), "nanosleep": (35, 101), "getitimer": (36, 102), "setitimer": (38, 103),
        "timer_create": (222, 107), "timer_settime": (223, 110), "timer_gettime": (224, 108), "timer_getoverrun": (225, 109),
        "timer_delete": (226, 111), "times": (100, 153),
    },
    # Threads and their priorities, as far as limits let them.
    "threads": {
        "futex": (202, 98), "futex_waitv": (449, 449), "futex_wake": (454, 454), "futex_wait": (455, 455),
        "futex_requeue": (456, 456), "set_robust_list": (273, 99), "get_robust_list": (274, 100), "sched_yield": (24, 124),
        "sched_setparam": (142, 118), "sched_getparam": (143, 121), "sched_setscheduler": (144, 119),
        "sched_getscheduler": (145, 120), "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126),
        "sched_rr_get_interval": (148, 127), "sched_setaffinity": (203, 122), "sched_getaffinity": (204, 123),
        "sched_setattr": (314, 274), "sched_getattr": (315, 275), "getcpu": (309, 168), "getpriority": (140, 141),
        "setpriority": (141, 140), "ioprio_set": (251, 30), "ioprio_get": (252, 31),
    },
    # Memory that stays, within RLIMIT_MEMLOCK.
    "memory": {
        "mlock": (149, 228), "mlock2": (325, 284), "munlock": (150, 229), "mlockall": (151, 230), "munlockall": (152, 231),
        "pkey_mprotect": (329, 288), "pkey_alloc": (330, 289), "pkey_free": (331, 290), "remap_file_pages": (216, 234),
        "map_shadow_stack": (453, 453), "mseal": (462, 462),
    },
    # System V and POSIX IPC, of the sliver's own namespace.
    "ipc": {
        "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "shmdt": (67, 197), "semget": (64, 190), "semop": (65, 193),
        "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
        "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181), "mq_timedsend": (242, 182),
        "mq_timedreceive": (243, 183), "mq_notify": (244, 184), "mq_getsetattr": (245, 185),
    },
    # Names and limits.
    "system": {
        "uname": (63, 160), "sysinfo": (99, 179), "getrlimit": (97, 163), "setrlimit": (160, 164), "prlimit64": (302, 261),
        "getrusage": (98, 165), "getrandom": (318, 278), "sethostname": (170, 161), "setdomainname": (171, 162),
    },
}
#: Answered with success, and nothing is done: it would write out all file systems of the host, and wait (syncfs is there).
WITHOUT_EFFECT: Calls = {"sync": (162, 81)}
#: Needed for namespaces and mounts inside; with CAP_SYS_ADMIN in the sliver only.
NAMESPACES: Calls = {
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "setns": (308, 268),
}
#: Mounts by descriptor, without which runtimes of containers do not work; others fall back to mount(2).
CONTAINERS: Calls = {
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442),
}
#: For debuggers that look into processes of other users.
DEBUG: Calls = {
    "kcmp": (312, 272), "pidfd_getfd": (438, 438),
}
#: Refused with EPERM, as by a kernel that finds the right missing; all others with ENOSYS, as by one that does not have them,
#: so that programs fall back to what is allowed (fsopen, clone3, io_uring, asynchronous I/O, memory policies, ...).
FORBIDDEN: Calls = {
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "create_module": (174, None), "init_module": (175, 105),
    "delete_module": (176, 106), "query_module": (178, None), "finit_module": (313, 273), "bpf": (321, 280),
    "perf_event_open": (298, 241), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "userfaultfd": (323, 282), "open_by_handle_at": (304, 265), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443), "settimeofday": (164, 170),
    "adjtimex": (159, 171), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "iopl": (172, None),
    "ioperm": (173, None), "modify_ldt": (154, None), "lookup_dcookie": (212, 18), "nfsservctl": (180, 42),
    "_sysctl": (156, None), "uselib": (134, None), "ustat": (136, None), "sysfs": (139, None), "syslog": (103, 116),
    "vhangup": (153, 58), "get_kernel_syms": (177, None), "fanotify_init": (300, 262), "fanotify_mark": (301, 263),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "setns": (308, 268), "move_pages": (279, 239),
    "migrate_pages": (256, 238),
}
